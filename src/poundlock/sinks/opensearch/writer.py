"""The task's half of the OpenSearch sink: rows are checked, then stored beside the log or sent.

Rules of this file: no Python call per row, except for bad rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from poundlock.core.model import Branch
from poundlock.core.naming import name_of
from poundlock.core.participant import PreparedBranch, Writer, tolerate_loss
from poundlock.errors import BadRow
from poundlock.sinks.rowstore import StoredWriter
from poundlock.sinks.text import not_utf8

if TYPE_CHECKING:
    from poundlock.sinks.opensearch.sink import OpenSearch

pc: Any = pyarrow.compute  # made at run time: no type checker knows what is in it

NOT_FINITE = "not_finite"  # the column that says whether a number of the row is NaN or infinite
BAD_KEY = "bad_key"  # the column that says whether a key of a map cannot be the name of a field
SHAPE = "shape_of."  # begins the names of the columns that say what variants hold

_LONGEST_ID = 512  # bytes; the server's own limit
# The default of http.max_content_length, less the line before the document. That line has the id, of
# which each byte may be written as six.
_LONGEST_DOCUMENT = (100 << 20) - (8 << 10)


class StoringWriter(StoredWriter):
    """Stores rows beside the log, and rejects ids that the branch already has."""

    def __init__(self, sink: OpenSearch, branch: Branch):
        super().__init__(sink.row_store, branch, sink.target())
        self._sink = sink
        self._hashes = sink.ids.write(str(name_of(branch))) if sink.unique_ids else None
        self._seen = pa.table({"id": pa.array([], pa.string()), "hash": pa.array([], pa.int64())})

    def write(self, rows: pa.RecordBatch) -> None:
        bad = bad_rows(rows, any_key=self._sink.takes_any_key, shapes=self._sink.refused_shapes)
        if self._hashes is not None:
            bad |= {row: it for row, it in repeated(rows, self._seen).items() if row not in bad}
        if bad:
            raise BadRow(
                f"{len(bad)} rows cannot be sent, the first because {bad[min(bad)]}",
                sink=self._sink.name,
                rows=bad,
            )
        super().write(
            rows.select(
                [
                    it
                    for it in rows.schema.names
                    if it not in (NOT_FINITE, BAD_KEY) and not it.startswith(SHAPE)
                ]
            )
        )
        if self._hashes is not None:
            mine = pa.Table.from_batches([rows.select(["id", "hash"])]).cast(self._seen.schema)
            self._seen = pa.concat_tables([self._seen, mine])
            self._hashes.write(rows.select(["hash"]))

    def prepare(self) -> PreparedBranch | None:
        prepared = super().prepare()
        if self._hashes is not None:
            self._hashes.finish()  # after the rows, because the sweep goes by the rows
        return prepared

    def abort(self) -> None:
        super().abort()
        if self._hashes is not None:
            self._hashes.abort()


class SendingWriter(Writer):
    """Sends rows as they come, without a decision. A replay sends them again."""

    def __init__(self, sink: OpenSearch, branch: Branch):
        self._sink, self._tolerant = sink, branch.tolerant
        self._sent = 0  # rows that were stored when others of the same `write` were refused

    def write(self, rows: pa.RecordBatch) -> None:
        if self._sent:
            # After a refusal the good rows of that `write` are given again. They are stored already.
            assert len(rows) == self._sent
            self._sent = 0
            return
        sink = self._sink
        bad = bad_rows(rows, any_key=sink.takes_any_key, shapes=sink.refused_shapes)
        known = bool(bad)  # before anything is sent
        if not known:
            with tolerate_loss(sink.name, sink.semantic):
                bad = {it.row: it.reason for it in sink.send_rows(rows, None)}
        if not bad:
            return
        error = BadRow(
            f"index {sink.index} refuses documents ({len(bad)} in all). The reason for the first: "
            f"{bad[min(bad)]}",
            sink=sink.name,
            rows=bad,
        )
        if self._tolerant:
            self._sent = 0 if known else len(rows) - len(bad)
            raise error
        with tolerate_loss(sink.name, sink.semantic):
            raise error
        good = [row for row in range(len(rows)) if row not in bad]
        if known and good:
            self.write(rows.take(pa.array(good)))

    def prepare(self) -> PreparedBranch | None:
        return None

    def abort(self) -> None:
        """Do nothing: the rows that were sent cannot be taken back."""


def bad_rows(
    rows: pa.RecordBatch, *, any_key: bool, shapes: Mapping[str, tuple[str, str]]
) -> dict[int, str]:
    """Return the rows that the server surely refuses, and why.

    `any_key`: the index does not make fields of the keys of maps. `shapes`: for the column with the
    shape of a variant, the variant's name, and the shape that its field refuses.
    """
    names = rows.schema.names
    sizes = np.asarray(pc.fill_null(pc.binary_length(rows.column("document")), 0))
    bad = {
        int(row): "the document is larger than 100 MiB, less some room for its id"
        for row in np.flatnonzero(sizes > _LONGEST_DOCUMENT)
    }
    if NOT_FINITE in names:
        reason = "a number in it is NaN or infinite, which JSON cannot express"
        bad |= {int(row): reason for row in np.flatnonzero(np.asarray(rows.column(NOT_FINITE)))}
    if BAD_KEY in names and not any_key:
        reason = "a key of a map in it is blank, in whole or at a dot"
        bad |= {int(row): reason for row in np.flatnonzero(np.asarray(rows.column(BAD_KEY)))}
    for word in shapes.keys() & set(names):
        variant, refused = shapes[word]
        same = pc.fill_null(pc.equal(rows.column(word), refused), False)
        reason = f"the variant {variant} holds an {refused}, which its field refuses"
        reason = reason.replace("an value", "a value")
        bad |= {int(row): reason for row in np.flatnonzero(np.asarray(same))}
    if "version" in names:
        versions = np.asarray(pc.fill_null(rows.column("version"), -1))
        bad |= {int(row): "the version is null or negative" for row in np.flatnonzero(versions < 0)}
    if "id" in names:
        ids = rows.column("id").cast(pa.large_binary())
        reason = "the id is not UTF-8"
        bad |= {int(row): reason for row in np.flatnonzero(not_utf8(ids))}
        lengths = pc.binary_length(ids)
        sizes = np.asarray(pc.fill_null(lengths, -1))
        reasons = {-1: "the id is null", 0: "the id is empty"}
        bad |= {
            int(row): reasons.get(int(sizes[row]), f"the id is longer than {_LONGEST_ID} bytes")
            for row in np.flatnonzero((sizes <= 0) | (sizes > _LONGEST_ID))
        }
    return bad


def repeated(rows: pa.RecordBatch, seen: pa.Table) -> dict[int, str]:
    """Return the rows with an id that an earlier row of the branch has. Hashes are compared first."""
    hashes = np.asarray(rows.column("hash"))
    if (
        len(np.unique(hashes)) == len(hashes)
        and not np.isin(hashes, np.asarray(seen["hash"])).any()
    ):
        return {}
    before = set(seen["id"].to_pylist())
    reason = (
        "another row of the batch has the same id, and chance would decide which one wins: name a "
        "version= column, or keep one row of each id (dropDuplicates, or an aggregate)"
    )
    bad: dict[int, str] = {}
    for row, text in enumerate(rows.column("id").to_pylist()):
        if text in before:
            bad[row] = reason
        before.add(text)
    return bad
