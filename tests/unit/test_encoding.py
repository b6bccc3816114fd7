"""The form of records in the log."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from poundlock.core.encoding import branch_ids, record_from_json, record_to_json
from poundlock.core.model import Decided, Fingerprint, Json, Receipt, Repaired

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
VALUES = PLAIN | st.lists(PLAIN, max_size=2) | st.dictionaries(st.text(max_size=2), PLAIN)
RECEIPTS = st.builds(
    Receipt,
    sink=st.sampled_from(["one", "two"]),
    id=st.sampled_from(["", "a", "lock.1", "lock.2", "lock.22"]),
    task=st.integers(0, 3),
    fingerprint=st.builds(Fingerprint, st.integers(0, 2), st.integers(0, (1 << 64) - 1)),
    handle=st.dictionaries(st.sampled_from(["pid", "epoch", "written"]), VALUES),
    began_at=st.floats(0, 1e10),
    expires_at=st.none() | st.floats(0, 1e10),
    system=st.sampled_from(["", "Kafka"]),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(RECEIPTS, max_size=6))
def test_receipts_are_read_as_they_were_written(receipts: list[Receipt]) -> None:
    for record in (
        Decided(3, 1, 2, "hash", tuple(receipts), {"one": Fingerprint(1, 2)}),
        Repaired(3, 2, (("one", "a"),), tuple(receipts)),
    ):
        body, rest = json.loads(json.dumps(record_to_json(record)))
        again = record_from_json(body, rest)
        assert again == record
        found = [(part.sink, *named) for part in branch_ids(body) for named in part.identities()]
        assert found == [(it.sink, it.id, it.identity) for it in receipts]
        assert not record_from_json(body, None).receipts  # type: ignore[union-attr]


@pytest.mark.parametrize("tasks", [10, 1000])
def test_what_all_receipts_have_in_common_is_stored_once(tasks: int) -> None:
    handle: dict[str, Json] = {"witness": "w" * 100, "into": {"table": "t" * 100}}
    receipts = tuple(
        Receipt("out", f"lock.feed.1.out.7.1.{task}", task, Fingerprint(10, task), handle, 1.0)
        for task in range(tasks)
    )
    text = json.dumps(record_to_json(Decided(7, 1, 1, "hash", receipts, {})))
    assert text.count("w" * 100) == text.count("t" * 100) == 1
    assert len(text) < 1000 + 50 * tasks
