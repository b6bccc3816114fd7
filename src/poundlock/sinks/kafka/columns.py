"""Arrow columns as librdkafka needs them: addresses, lengths and numbers."""

from __future__ import annotations

import ctypes as c
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from poundlock.errors import BadRow, UsageError
from poundlock.sinks.kafka import librdkafka

Spans = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]

# What empty values point at. A null pointer would make them nulls.
_NOTHING = c.create_string_buffer(1)


def spans(column: pa.Array) -> Spans:
    """Return address and length of each value of a column from `flat`. Both are 0 for a null.

    The addresses are valid while `column` exists.
    """
    kind = column.type
    wide = pa.types.is_large_binary(kind) or pa.types.is_large_string(kind)
    if len(column) == 0:
        return np.zeros(0, np.uint64), np.zeros(0, np.uint64)
    _, offset_buffer, data = column.buffers()
    dtype, size = (np.int64, 8) if wide else (np.int32, 4)
    offsets = np.frombuffer(offset_buffer, dtype, len(column) + 1, column.offset * size)
    offsets = offsets.astype(np.uint64)
    base = data.address if data is not None and data.size else c.addressof(_NOTHING)
    addresses, lengths = offsets[:-1] + np.uint64(base), np.diff(offsets)
    if column.null_count:
        # The offsets of a null mean nothing: there may be bytes between them.
        null = column.is_null().to_numpy(zero_copy_only=False)
        addresses[null] = 0
        lengths[null] = 0
    return addresses, lengths


def flat(column: pa.Array, name: str) -> pa.Array:
    """Return `column` in one of the four types whose values are in one buffer, found by offsets."""
    kind = column.type
    if (
        pa.types.is_binary(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_large_string(kind)
    ):
        return column
    try:
        return column.cast(pa.large_binary())
    except pa.ArrowNotImplementedError as error:
        raise UsageError(
            f"the {name} column is {kind}, but Kafka takes bytes: cast it to string or binary"
        ) from error


def partition_numbers(column: pa.Array, topic: str, count: int) -> npt.NDArray[np.int32]:
    """Return the partition of each row. For a null the partitioner chooses."""
    wide = _integers(column, "partition")
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    wrong = valid & ((wide < 0) | (wide >= count))
    if wrong.any():
        raise BadRow(
            f"{np.count_nonzero(wrong)} rows name a partition such as {wide[wrong][0]}, "
            f"but topic {topic!r} has the partitions 0 to {count - 1}: correct the partition "
            "column, or add partitions to the topic"
        )
    return np.where(valid, wide, librdkafka.PARTITION_UNASSIGNED).astype(np.int32)


def timestamps_ms(column: pa.Array, topic: str) -> npt.NDArray[np.int64]:
    """Return the timestamp of each row. A null becomes 0, which librdkafka reads as now."""
    times = _integers(column, "timestamp")
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    wrong = valid & (times <= 0)
    if wrong.any():
        raise BadRow(
            f"{np.count_nonzero(wrong)} rows for topic {topic!r} have timestamps in or before the "
            "first millisecond of 1970, which cannot be written: correct the timestamp column, or "
            "use null for the time of writing"
        )
    return np.where(valid, times, 0)


def _integers(column: pa.Array, name: str) -> npt.NDArray[np.int64]:
    if not pa.types.is_integer(column.type):
        raise UsageError(
            f"the {name} column is {column.type}, but must be a number: cast it to int"
        )
    return column.cast(pa.int64()).fill_null(0).to_numpy()


class Headers:
    """A column of lists of structs (key: string, value: binary), read row by row."""

    def __init__(self, column: pa.Array, topic: str):
        kind = column.type
        if not (
            (pa.types.is_list(kind) or pa.types.is_large_list(kind))
            and pa.types.is_struct(kind.value_type)
            and kind.value_type.num_fields == 2
        ):
            raise UsageError(
                f"the headers column is {kind}, but must be array<struct<key: string, value: "
                "binary>>: cast it"
            )
        self._valid = column.is_valid().to_numpy(zero_copy_only=False)
        self._offsets = column.offsets.to_numpy()
        # `flatten` passes a null struct on to its fields. Reading the fields would not.
        names, values = column.values.flatten()
        self._columns = flat(names, "header key"), flat(values, "header value")
        self._names, self._values = map(spans, self._columns)
        self._topic = topic

    def make(self, row: int) -> int | None:
        """Return a new rd_kafka_headers_t, which the caller owns. None if the row has no headers."""
        start, stop = self._offsets[row : row + 2]
        if not self._valid[row] or start == stop:
            return None
        library = librdkafka.load()
        headers = library.headers_new(int(stop - start))
        for i in range(start, stop):
            name, value = int(self._names[0][i]), int(self._values[0][i])
            if not name:
                library.headers_destroy(headers)
                raise BadRow(
                    f"a row for topic {self._topic!r} has a header whose key is null. The key of a "
                    "header may be empty, but not null"
                )
            name_len, value_len = int(self._names[1][i]), int(self._values[1][i])
            library.header_add(headers, name, name_len, value or None, value_len)
        return headers


class Rows:
    """The columns of one topic, as pointers. Keeps the columns, so that the pointers stay valid."""

    def __init__(
        self,
        topic: str,
        partition_count: int,
        keys: pa.Array | None,
        values: pa.Array,
        partitions: pa.Array | None = None,
        headers: pa.Array | None = None,
        timestamps: pa.Array | None = None,
    ):
        for column in (keys, partitions, headers, timestamps):
            if column is not None and len(column) != len(values):
                raise ValueError(f"columns of {len(column)} and of {len(values)} rows")
        self.topic = topic
        self._values = flat(values, "value")
        self._keys = flat(keys, "key") if keys is not None else None
        self._value_spans = spans(self._values)
        self._key_spans = spans(self._keys) if self._keys is not None else None
        self.partitions = (
            partition_numbers(partitions, topic, partition_count)
            if partitions is not None
            else None
        )
        self.headers = Headers(headers, topic) if headers is not None else None
        self.timestamps = timestamps_ms(timestamps, topic) if timestamps is not None else None

    def fill(self, messages: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Fill `messages` repeatedly. Yield the number of the first row, and the filled part."""
        messages["partition"] = librdkafka.PARTITION_UNASSIGNED
        messages["key"] = messages["key_len"] = 0
        for start in range(0, len(self._values), len(messages)):
            stop = min(start + len(messages), len(self._values))
            part = messages[: stop - start]
            part["value"], part["value_len"] = (span[start:stop] for span in self._value_spans)
            if self._key_spans is not None:
                part["key"], part["key_len"] = (span[start:stop] for span in self._key_spans)
            if self.partitions is not None:
                part["partition"] = self.partitions[start:stop]
            yield start, part
