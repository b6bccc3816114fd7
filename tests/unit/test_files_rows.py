"""Names of files."""

from __future__ import annotations

import pytest

from poundlock.sinks.files.types import COMPRESSIONS, format_of, suffix


@pytest.mark.parametrize(
    ("format", "compression"), [(f, c) for f, marks in COMPRESSIONS.items() for c in marks]
)
@pytest.mark.parametrize("name", ["plain", *COMPRESSIONS])
def test_a_file_name_shows_its_format_for_any_pipeline_name(
    format: str, compression: str, name: str
) -> None:
    file = f"part-poundlock.{name}.00.1.{name}.0.1.0-0{suffix(format, compression)}"
    assert format_of(file) == format
