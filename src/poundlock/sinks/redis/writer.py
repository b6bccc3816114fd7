"""The task's half of the Redis sink: rows are checked, packed and staged.

The script in the server can unpack MessagePack. A chunk is one array with the values of its rows, row
after row, each a string or nil. Arrow joins headers and values column by column, so that no Python call
is made per row.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from poundlock.core.model import Branch, Fingerprint, Receipt
from poundlock.core.naming import name_of
from poundlock.core.participant import PreparedBranch, Semantic, Writer, tolerate_loss
from poundlock.errors import BadRow, PoundlockError, Rejected
from poundlock.sinks.redis.branches import own_witness
from poundlock.sinks.redis.types import Shape, reserved_keys

if TYPE_CHECKING:
    from poundlock.sinks.redis.sink import Redis

pc: Any = pyarrow.compute  # made at run time: no type checker knows what is in it
logger = logging.getLogger("poundlock")

_CHUNK_BYTES = 1 << 19  # few round trips, and no command that makes other clients wait
_HEADER_BYTES = 5  # before each value of a chunk, and before the chunk
_NIL = b"\xc0"
_STRING, _ARRAY = 0xDB, 0xDD  # each followed by four bytes of length, the most significant first


class RedisWriter(Writer):
    """One branch in a task.

    Below exactly-once no sweep looks for it. So it has a witness of its own, and expires.
    """

    def __init__(self, sink: Redis, branch: Branch):
        self._sink, self._name = sink, name_of(branch)
        self._began_at = time.time()
        self._shape: Shape | None = None
        self._columns: list[str] = []
        self._witness = ""
        self._rows = self._chunks = 0
        self._own: str | None = None
        if sink.semantic is not Semantic.EXACTLY_ONCE:
            self._own = own_witness(sink.shape.tag, str(self._name))

    def write(self, rows: pa.RecordBatch) -> None:
        shape = self._shape or self._begin(rows.schema)
        self._check_values(shape, rows)
        columns = [as_bytes(rows.column(name)) for name in self._columns]
        self._check_lengths(columns)
        mark = "?" if any(column.null_count for column in columns) else ""
        for count, chunk in chunks(columns, _CHUNK_BYTES):
            self._stage(count, chunk, mark)

    def _begin(self, schema: pa.Schema) -> Shape:
        shape = self._sink.shape
        floats = shape.adds and not pa.types.is_integer(schema.field("value").type)
        self._shape = shape = shape.complete(schema.names, floats=floats)
        values = [f".{name}" for name in shape.fields] or ["value"]
        self._columns = ["key"] * shape.keyed + values + ["order"] * shape.order
        return shape

    def _stage(self, count: int, chunk: bytes, mark: str) -> None:
        witness = self._sink.branches.stage(
            self._name, f"{self._chunks}{mark}:{count}", chunk, self._own
        )
        if self._witness not in ("", witness):
            raise Rejected(
                "the witness was deleted while rows were staged: someone emptied the database, or "
                "the server evicts keys. Set maxmemory-policy noeviction",
                sink=self._sink.name,
            )
        self._witness = witness
        self._rows += count
        self._chunks += 1

    def _check_values(self, shape: Shape, rows: pa.RecordBatch) -> None:
        """Reject rows that the script could not move."""
        bad: dict[int, str] = {}

        def reject(which: Any, reason: str) -> None:
            for index in np.flatnonzero(np.asarray(which)):
                bad.setdefault(int(index), reason)

        if shape.keyed:
            reject(rows.column("key").is_null(), "the key is null")
        if shape.many:
            reserved = reserved_keys(as_bytes(rows.column("key")), shape.prefix)
            reject(reserved, "the key is reserved for staged rows and witnesses")
        if shape.order:
            reject(rows.column("order").is_null(), "the column of order_by is null")
        if shape.adds or shape.kind == "list":
            value = rows.column("value")
            reject(value.is_null(), "the value is null")
            if pa.types.is_floating(value.type):
                finite = pc.fill_null(pc.is_finite(value), True)
                reject(pc.invert(finite), "the value is not a finite number")
        if shape.kind == "stream":
            empty = np.ones(len(rows), bool)
            for name in self._columns:
                empty &= np.asarray(rows.column(name).is_null())
            reject(empty, "every column is null")
        self._raise_bad(bad)

    def _check_lengths(self, columns: Sequence[pa.Array]) -> None:
        # A row is not split: all of it must fit into one value.
        lengths = [
            np.asarray(pc.fill_null(pc.binary_length(it), 0)) + _HEADER_BYTES for it in columns
        ]
        too_long = np.flatnonzero(np.add.reduce(lengths) + _HEADER_BYTES > self._sink.longest)
        reason = (
            f"the row is longer than the server's proto-max-bulk-len, {self._sink.longest} bytes"
        )
        self._raise_bad({int(row): reason for row in too_long})

    def _raise_bad(self, bad: Mapping[int, str]) -> None:
        if bad:
            raise BadRow(
                f"{len(bad)} rows cannot be written, the first because {bad[min(bad)]}",
                sink=self._sink.name,
                rows=bad,
            )

    def prepare(self) -> PreparedBranch | None:
        assert self._shape is not None
        sink, id_ = self._sink, str(self._name)
        handle = {"shape": self._shape.to_json(), "witness": self._witness, "chunks": self._chunks}
        if self._own is None:
            return PreparedBranch(id_, handle, began_at=self._began_at, expires_at=None)
        receipt = Receipt(sink.name, id_, 0, Fingerprint(self._rows), handle)
        with tolerate_loss(sink.name, sink.semantic):
            (answer,) = sink.branches.move([receipt], self._own)
            if answer != "committed":
                raise Rejected(f"the rows were not written: {answer}", sink=sink.name)
            self.abort()  # only the witness is left, and it need not be deleted
        return None

    def abort(self) -> None:
        try:
            if self._own:
                self._sink.branches.drop_own(str(self._name), self._own)
            elif self._chunks:
                self._sink.branches.abort([str(self._name)])
        except PoundlockError as error:
            left = "expires within a day" if self._own else "is left to the sweep"
            logger.warning("sink %s: %s %s: %s", self._sink.name, self._name, left, error)


def as_bytes(column: pa.Array) -> pa.Array:
    """Return the column as bytes: text in UTF-8, numbers and booleans as text, binary unchanged."""
    kind = column.type
    if pa.types.is_large_binary(kind):
        return column
    if pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return column.cast(pa.large_binary())
    return column.cast(pa.large_string()).cast(pa.large_binary())


def chunks(columns: Sequence[pa.Array], limit: int) -> Iterator[tuple[int, bytes]]:
    """Pack rows, given as columns of bytes, into chunks of about `limit` bytes.

    Yield each chunk's number of rows, and the chunk.
    """
    parts = [part for column in columns for part in _with_headers(column)]
    rows = pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.large_binary()))
    if isinstance(rows, pa.ChunkedArray):
        rows = rows.combine_chunks()
    ends = np.frombuffer(rows.buffers()[1], np.int64)[rows.offset : rows.offset + len(rows) + 1]
    body = memoryview(rows.buffers()[2])
    first = 0
    while first < len(rows):
        # As many rows as fit, and at least one.
        last = int(np.searchsorted(ends, ends[first] + limit, side="right")) - 1
        last = min(max(last, first + 1), len(rows))
        head = bytes([_ARRAY]) + ((last - first) * len(columns)).to_bytes(4, "big")
        yield last - first, head + bytes(body[ends[first] : ends[last]])
        first = last


def _with_headers(column: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return the header of each value, and the value. A null is only a header."""
    lengths = pc.fill_null(pc.binary_length(column), 0)
    heads = np.empty((len(column), _HEADER_BYTES), np.uint8)
    heads[:, 0] = _STRING
    heads[:, 1:] = np.asarray(lengths).astype(">u4").view(np.uint8).reshape(-1, 4)
    fixed = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(_HEADER_BYTES), len(column), [None, pa.py_buffer(heads.tobytes())]
    )
    headers = fixed.cast(pa.large_binary())
    if column.null_count:
        headers = pc.if_else(column.is_valid(), headers, pa.scalar(_NIL, pa.large_binary()))
        column = pc.fill_null(column, pa.scalar(b"", pa.large_binary()))
    return headers, column
