"""Values by which Delta cannot partition are found before a row is stored."""

from __future__ import annotations

import pyarrow as pa
import pytest

from poundlock.errors import UsageError
from poundlock.sinks.partitions import SparkDirectories

YEAR_ONE = -62_135_596_800_000_000
# At both, a clock in Berlin shows 02:30. It does so again after 400 years, and beyond the year 9999.
FIRST, SECOND = 1_792_888_200_000_000, 1_792_891_800_000_000
CALENDAR = 146_097 * 86_400_000_000
MOMENTS = [FIRST, SECOND, None, SECOND, SECOND + 100 * CALENDAR, FIRST + CALENDAR, YEAR_ONE]


def unfit(moments: list[int | None], zone: str | None, *, by_value: bool = True) -> list[int]:
    rows = pa.RecordBatch.from_pydict({"T": pa.array(moments, pa.timestamp("us", zone))})
    return sorted(SparkDirectories(("t",), by_value).unfit(rows))


@pytest.mark.parametrize("by_value", [True, False])
def test_the_second_of_two_equal_hours_is_unfit(by_value: bool) -> None:
    assert unfit(MOMENTS, "Europe/Berlin", by_value=by_value) == [1, 3, 4]


@pytest.mark.parametrize("zone", ["UTC", "Z", "+02:00", "-09:30:15", "GMT+2", "UTC+02:00", None])
def test_a_zone_whose_clocks_never_change_has_no_such_hours(zone: str | None) -> None:
    assert unfit(MOMENTS, zone) == []


def test_a_year_whose_sign_is_lost_is_unfit_with_a_zone_only() -> None:
    early: list[int | None] = [YEAR_ONE - 1, -(2**63), None]
    assert unfit(early, "America/New_York") == [0, 1]
    assert unfit(early, None) == []


def test_a_zone_without_data_is_reported() -> None:
    with pytest.raises(UsageError, match="does not know the time zone No/Where on this machine"):
        unfit([FIRST], "No/Where")


@pytest.mark.parametrize("by_value", [True, False])
def test_texts_that_delta_changes_are_unfit_in_any_directory(by_value: bool) -> None:
    broken = pa.array([b"", b"\xff", b"__HIVE_DEFAULT_PARTITION__", b"a", None, b"x" * 300])
    rows = pa.RecordBatch.from_arrays(
        [pa.Array.from_buffers(pa.string(), len(broken), broken.buffers())], ["t"]
    )
    found = SparkDirectories(("t",), by_value).unfit(rows)
    assert sorted(found) == ([0, 1, 2, 5] if by_value else [0, 1, 2])
