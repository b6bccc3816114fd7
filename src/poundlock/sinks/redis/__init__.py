"""Redis and Valkey.

- `sink.py`: options, checks at start-up, and the driver's half in outline.
- `writer.py`: the task's half. `pack.py` packs its rows for the scripts.
- `branches.py`: what the server holds of each branch; `stage.lua`, `move.lua`, `abort.lua`.
- `types.py`: what a row becomes in Redis, and which columns that takes.
- `client.py`: a connection, and the translation of its errors.
- `settings.py`: checks of the server's version and settings.
"""
