"""Any other source: its DataFrame, and a declaration whether it can be replayed.

Spark does not know whether a source returns the same rows again for the same offsets. Poundlock treats
an unknown source as one that cannot be replayed, unless it is declared here.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from poundlock.core.model import checked_name
from poundlock.core.sparksql import quoted
from poundlock.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

DECLARED = "poundlock.declared"  # in the metadata of the frame's columns, which stays in the plan


def custom(frame_or_reader: Any, *, replayable: bool, name: str) -> DataFrame:
    """Declare a source of your own, and return it as a streaming frame.

    Args:
        frame_or_reader: A streaming DataFrame, or what `spark.readStream.format(...)` returned, with
            its options. A data source that you wrote in Python and registered works too.
        replayable: Whether the same offsets always give the same rows, also after a crash of the
            driver and of the source's own system. Only then can a pipeline promise exactly once.
        name: Its name in the guarantee table.
    """
    checked_name("source name", name)
    if not isinstance(replayable, bool):
        raise UsageError(f"replayable={replayable!r} of source {name}: say True or False")
    frame = frame_or_reader.load() if hasattr(frame_or_reader, "load") else frame_or_reader
    if not getattr(frame, "isStreaming", False):
        raise UsageError(f"source {name} is not a streaming frame: open it with spark.readStream")
    said = json.dumps({"name": name, "replayable": replayable})
    return frame.select(
        [
            frame[quoted(field.name)].alias(field.name, metadata=field.metadata | {DECLARED: said})
            for field in frame.schema.fields
        ]
    )


def read_declaration(text: str) -> tuple[str, bool]:
    """Return the name of a declared source, and whether it can be replayed."""
    said = json.loads(text)
    return said["name"], said["replayable"]
