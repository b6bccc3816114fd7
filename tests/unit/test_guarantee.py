"""The guarantee table, cell by cell."""

from __future__ import annotations

import pytest

from poundlock.core import guarantee
from poundlock.core.guarantee import Guarantee
from poundlock.core.participant import Commitment, Semantic
from poundlock.errors import UsageError
from poundlock.sinks.memory import Memory, MemorySystem

# Kind of sink: its guarantee without and with a source that can be replayed.
TABLE = {
    "any": ("at_most_once", "at_least_once"),
    "idempotent": ("at_most_once", "exactly_once"),
    "logged": ("at_most_once", "at_least_once"),  # the write-ahead log
    "transactional": ("at_most_once", "exactly_once"),  # two-phase commit
    "staged": ("at_most_once", "exactly_once"),
}


def sink(name: str, kind: Commitment, semantic: Semantic = Semantic.EXACTLY_ONCE) -> Memory:
    made = Memory(name, MemorySystem(), semantic=semantic)
    made.commitment = kind
    return made


def test_the_guarantee_table_has_every_cell() -> None:
    assert guarantee.table() == {
        kind: {"not_replayable": without, "replayable": with_}
        for kind, (without, with_) in TABLE.items()
    }


@pytest.mark.parametrize("kind", TABLE)
def test_a_source_without_replay_loses_rows_with_any_sink(kind: str) -> None:
    cell = guarantee.cell(kind, replayable=False)
    assert cell.guarantee is Guarantee.AT_MOST_ONCE
    assert "gone after a crash" in cell.reason
    assert ("may be sent twice" in cell.reason) is (kind == "logged")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("any", "written again"),
        ("idempotent", "old values again"),
        ("logged", "may send them again"),
        ("transactional", "prepared branches"),
        ("staged", "atomically"),
    ],
)
def test_every_cell_has_a_reason(kind: str, reason: str) -> None:
    assert reason in guarantee.cell(kind, replayable=True).reason


@pytest.mark.parametrize("commitment", Commitment)
@pytest.mark.parametrize("replayable", [True, False])
def test_a_sink_gets_the_guarantee_of_its_cell(commitment: Commitment, replayable: bool) -> None:
    statement = guarantee.state("s", replayable=replayable, sinks=[sink("out", commitment)])
    assert statement.guarantee.value == TABLE[commitment.value][replayable]


@pytest.mark.parametrize("commitment", Commitment)
@pytest.mark.parametrize(
    ("semantic", "replayable", "given"),
    [
        (Semantic.AT_LEAST_ONCE, True, Guarantee.AT_LEAST_ONCE),
        (Semantic.AT_LEAST_ONCE, False, Guarantee.AT_MOST_ONCE),
        (Semantic.NONE, True, Guarantee.NONE),  # the driver does not wait for errors
        (Semantic.NONE, False, Guarantee.NONE),
    ],
)
def test_a_lower_requested_guarantee_is_given(
    commitment: Commitment, semantic: Semantic, replayable: bool, given: Guarantee
) -> None:
    weak = sink("out", commitment, semantic)
    statement = guarantee.state("s", replayable=replayable, sinks=[weak])
    assert statement.guarantee is given
    assert statement.routes[0].kind == "any"


def test_a_pipeline_has_the_guarantee_of_its_weakest_sink() -> None:
    sinks = [sink("a", Commitment.STAGED), sink("b", Commitment.LOGGED)]
    statement = guarantee.state("s", replayable=True, sinks=sinks)
    assert statement.guarantee is Guarantee.AT_LEAST_ONCE
    for line in (
        "source s: can be replayed",
        "sink a (staged): exactly once",
        "sink b (write-ahead log)",
    ):
        assert line in str(statement)


def test_exactly_once_is_refused_where_it_is_impossible() -> None:
    strong, weak = (
        guarantee.state(
            "socket", replayable=False, sinks=[sink("out", Commitment.STAGED, semantic)]
        )
        for semantic in (Semantic.EXACTLY_ONCE, Semantic.AT_LEAST_ONCE)
    )
    with pytest.raises(UsageError, match="semantic='at_least_once'"):
        guarantee.require(strong)
    guarantee.require(weak)
    guarantee.require(guarantee.state("s", replayable=True, sinks=[sink("o", Commitment.LOGGED)]))


def test_a_sink_that_requests_more_than_its_kind_gives_is_refused() -> None:
    logged = sink("out", Commitment.LOGGED)
    logged.asked = Semantic.EXACTLY_ONCE
    with pytest.raises(UsageError, match=r"gives at least once: rows are stored .* may send them"):
        guarantee.require(guarantee.state("s", replayable=True, sinks=[logged]))
    straight = sink("out", Commitment.STAGED, Semantic.AT_LEAST_ONCE)
    straight.asked = Semantic.EXACTLY_ONCE
    with pytest.raises(UsageError, match="gives at least once: rows written before a crash"):
        guarantee.require(guarantee.state("s", replayable=True, sinks=[straight]))


def test_a_write_ahead_sink_accepts_a_source_without_replay() -> None:
    statement = guarantee.state("socket", replayable=False, sinks=[sink("o", Commitment.LOGGED)])
    guarantee.require(statement)
    assert statement.guarantee is Guarantee.AT_MOST_ONCE


def test_what_a_deletion_of_the_log_does_is_said_where_a_system_may_not_notice() -> None:
    knows, forgets, weak = (
        sink(name, Commitment.STAGED, semantic)
        for name, semantic in (
            ("knows", Semantic.EXACTLY_ONCE),
            ("forgets", Semantic.EXACTLY_ONCE),
            ("weak", Semantic.AT_LEAST_ONCE),
        )
    )
    forgets.after_restore = weak.after_restore = "noticed for a week"
    said = str(guarantee.state("s", replayable=True, sinks=[knows, forgets, weak])).splitlines()
    assert [line.split()[1] for line in said if "deleted" in line] == ["forgets"]
    assert said[2].endswith(
        "deleted, or restored together to an older state, that is noticed for a week"
    )


def test_the_advice_for_a_source_without_replay_says_what_it_gives() -> None:
    statement = guarantee.state("socket", replayable=False, sinks=[sink("out", Commitment.STAGED)])
    with pytest.raises(UsageError) as caught:
        guarantee.require(statement)
    assert "at most once, whatever semantic= says" in str(caught.value)
    lower = sink("out", Commitment.STAGED, Semantic.AT_LEAST_ONCE)
    advised = guarantee.state("socket", replayable=False, sinks=[lower])
    guarantee.require(advised)
    assert advised.guarantee is Guarantee.AT_MOST_ONCE
