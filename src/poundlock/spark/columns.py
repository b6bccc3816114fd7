"""Names and layout of the columns in which rows travel from the driver's plan to the tasks.

Two frames have such columns:

- The routed frame of a pipeline has, for the sink at `index`, the hash of each row and the rows. The
  rows are one struct column, null where the sink does not take the row, or one column for each field
  if the sink takes every row. `pipeline.routes` makes the frame and `pipeline.task` reads it.
- The tagged frame of a flow has, in each row, the name of an output and a struct column for every
  output; only that of the named one is not null. `stream.keyed` makes it, `pipeline.routes` reads it.
"""

from __future__ import annotations

import pyarrow as pa

OUTPUT_TAG = "output"  # the column with the name of a row's output

_FIELD = "__poundlock_rows"


def output_column(name: str) -> str:
    """Return the name of the struct column with the rows of an output."""
    return f"output_{name}"


def rows_column(index: int) -> str:
    """Return the name of the struct column with the rows of the sink at `index`."""
    return f"rows{index}"


def hash_column(index: int) -> str:
    """Return the name of the column with the hashes of these rows."""
    return f"hash{index}"


def field_column(index: int, field: str) -> str:
    """Return the name of the column with one field of these rows.

    The field's name is in hexadecimal: Spark interprets dots and quotes in column names.
    """
    return f"{_FIELD}{index}_{field.encode().hex()}"


def field_of(column: str, index: int) -> str | None:
    """Return the field that a column has for the sink at `index`, None if it has none."""
    head = f"{_FIELD}{index}_"
    return bytes.fromhex(column.removeprefix(head)).decode() if column.startswith(head) else None


def read_rows(batch: pa.RecordBatch, index: int) -> pa.StructArray:
    """Return the rows of the sink at `index` in a batch of the routed frame."""
    if rows_column(index) in batch.schema.names:
        return batch.column(rows_column(index))  # pyright: ignore[reportReturnType]
    found = [(column, field_of(column, index)) for column in batch.schema.names]
    fields = {field: batch.column(column) for column, field in found if field is not None}
    return pa.StructArray.from_arrays(list(fields.values()), names=list(fields))
