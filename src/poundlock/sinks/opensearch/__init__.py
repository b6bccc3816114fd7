"""OpenSearch and Elasticsearch.

- `sink.py`: options, checks at start-up, and the driver's half.
- `writer.py`: the task's half, and the rows that no server accepts.
- `bulk.py`: bulk requests, and how they are sent.
- `types.py`: what a row becomes in a document, and whether that fits a mapping.
- `client.py`: a connection, and the translation of its errors.
- `settings.py`: checks of an index's name, aliases and settings.

Between prepare and commit, `sinks/rowstore.py` stores the branches.
"""
