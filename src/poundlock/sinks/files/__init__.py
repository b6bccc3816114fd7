"""Files, in directories that become visible by a manifest. It is Spark's own format."""

from poundlock.sinks.files.manifest import committed

__all__ = ["committed"]
