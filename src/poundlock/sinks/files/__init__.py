"""Files, in directories that become visible by a manifest. It is Spark's own, so that Spark reads it.

- `sink.py`: options, checks at start-up, and the driver's half in outline.
- `writer.py`: the task's half.
- `branches.py`: what the directory holds of each branch.
- `types.py`: what a row becomes in a file, and which columns that takes.
- `rows.py`: rows split by partition and written in the file's format.
- `manifest.py`: the list of the files that count.
- `place.py`: the directory's spelling, and small files in it.
"""

from poundlock.sinks.files.manifest import committed

__all__ = ["committed"]
