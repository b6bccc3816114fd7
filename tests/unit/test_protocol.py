"""The tables of the protocol, cell by cell, and the pure functions over them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poundlock.core.encoding import record_from_json, record_to_json
from poundlock.core.model import (
    Bound,
    Compacted,
    Decided,
    Fingerprint,
    Finished,
    Generation,
    Json,
    Namespace,
    OperatorDecided,
    OperatorDecision,
    Receipt,
    Record,
    Repaired,
    Stray,
    total,
)
from poundlock.core.protocol import (
    FOLLOWS,
    LOSS_ACCEPTED,
    RECOVERY,
    Action,
    BatchHistory,
    BranchState,
    LastUse,
    LogState,
    Mismatch,
    Stage,
    compare,
    enter,
    match_lost,
    strays_to_abort,
)
from poundlock.errors import LogCorrupt, LogMismatch

OURS = Namespace("lock", "feed")

# The recovery table of the design document.
DESIGN = """
| last record of batch | prepared | committed | hidden | aborted | no witness | unreachable |
| none                 | abort    | stop      |        | nothing | nothing    | retry       |
| decided              | commit   | done      | sweep  | repair  | stop       | retry       |
| finished             | stop     |           |        |         |            |             |
"""

# Which record can follow which in the history of a batch.
STORY = """
|                 | Decided | Repaired | OperatorDecided | Finished |
| nothing         | yes     |          |                 |          |
| Decided         |         | yes      | yes             | yes      |
| Repaired        |         | yes      | yes             | yes      |
| OperatorDecided |         | yes      | yes             | yes      |
| Finished        |         |          | yes             |          |
"""


def cells(table: str) -> list[tuple[str, str, str]]:
    """Read a table. Return (row, column, cell) for each cell."""
    lines = [line.strip("|").split("|") for line in table.strip().splitlines()]
    (_, *columns), *rows = [[cell.strip() for cell in line] for line in lines]
    return [
        (name, column, cell)
        for name, *values in rows
        for column, cell in zip(columns, values, strict=True)
    ]


def generation(number: int = 1) -> Generation:
    return Generation(number, OURS, "file:///log", "query-1", "here:1")


def receipt(id: str = "b1", *, sink: str = "out", task: int = 0, digest: int = 7) -> Receipt:
    return Receipt(sink, id, task, Fingerprint(1, digest), {"pid": 1, "epoch": 2})


def decided(batch: int = 0, *receipts: Receipt, offsets: str = "hash") -> Decided:
    return Decided(batch, 1, 1, f"{offsets}-{batch}", receipts or (receipt(f"b{batch}"),), {})


def state_of(*records: Record) -> LogState:
    state = LogState()
    for record in (generation(), *records):
        state.apply(record)
    return state


# The tables.


ASKED = [cell for cell in cells(DESIGN) if cell[2]]


@pytest.mark.parametrize(("stage", "state", "action"), ASKED)
def test_recovery_follows_the_table(stage: str, state: str, action: str) -> None:
    row = next(row for key, row in RECOVERY.items() if key.value == stage)
    cell = next(cell for key, cell in row.items() if key.value == state)
    assert cell.value == action


def test_recovery_has_every_cell_of_the_design_and_no_other() -> None:
    ours = {(s.value, b.value) for s, row in RECOVERY.items() for b in row}
    assert ours == {(stage, state) for stage, state, _ in ASKED}


def test_an_accepted_loss_has_an_action_for_every_state_and_never_blocks() -> None:
    blocks = {Action.STOP, Action.RETRY, Action.COMMIT, Action.REPAIR}
    assert set(LOSS_ACCEPTED) == set(BranchState)
    assert not blocks & set(LOSS_ACCEPTED.values())
    proven = {state for state, action in LOSS_ACCEPTED.items() if action is not Action.LET_GO}
    assert proven == {BranchState.COMMITTED, BranchState.HIDDEN}


RECORDS: dict[str, Record] = {
    "Decided": decided(),
    "Repaired": Repaired(0, 1, (("out", "b0"),), (receipt("b1"),)),
    "OperatorDecided": OperatorDecided(0, OperatorDecision.ACCEPT_LOSS, ("out",), "me"),
    "Finished": Finished(0),
}
BEFORE: dict[str, Sequence[Record]] = {
    "nothing": (),
    "Decided": (decided(),),
    "Repaired": (decided(), RECORDS["Repaired"]),
    "OperatorDecided": (decided(), RECORDS["OperatorDecided"]),
    "Finished": (decided(), RECORDS["Finished"]),
}


@pytest.mark.parametrize(("last", "following", "allowed"), cells(STORY))
def test_records_follow_each_other_as_in_the_table(last: str, following: str, allowed: str) -> None:
    kinds = {None if kind is None else kind.__name__: f for kind, f in FOLLOWS.items()}
    followers = {kind.__name__ for kind in kinds[None if last == "nothing" else last]}
    assert (following in followers) is bool(allowed)
    state = state_of(*BEFORE[last])
    if allowed:
        state.apply(RECORDS[following])
        return
    before = dict(state.batches)
    with pytest.raises(LogCorrupt, match="cannot follow"):
        state.apply(RECORDS[following])
    assert state.batches == before  # the state is unchanged


def test_the_table_of_records_has_no_other_row() -> None:
    rows = {last for last, _, _ in cells(STORY)}
    assert {"nothing" if kind is None else kind.__name__ for kind in FOLLOWS} == rows


# The state of a log.


def test_a_batch_goes_from_decision_to_end() -> None:
    state = state_of(decided(0, receipt("b1"), receipt("b2")))
    assert state.batches[0].stage is Stage.DECIDED
    assert state.held() == {("out", "b1"), ("out", "b2")}
    state.apply(Repaired(0, 1, (("out", "b1"),), (receipt("b3"),)))
    assert {r.id for r in state.batches[0].receipts} == {"b2", "b3"}
    assert state.held() == {("out", "b2"), ("out", "b3")}
    state.apply(OperatorDecided(0, OperatorDecision.ACCEPT_LOSS, ("out",), "me"))
    state.apply(Finished(0))
    assert state.batches[0].stage is Stage.FINISHED
    assert state.batches[0].operator_decisions == {"out": OperatorDecision.ACCEPT_LOSS}
    assert not state.unfinished and not state.held()


def test_an_empty_batch_is_finished_by_its_decision() -> None:
    state = state_of(Decided(0, 1, 1, "hash", (), {}))
    assert state.batches[0].stage is Stage.FINISHED


def test_a_batch_whose_whole_loss_is_accepted_is_finished() -> None:
    state = state_of(decided(0, receipt("b1")), Repaired(0, 1, (("out", "b1"),), ()))
    assert state.batches[0].stage is Stage.FINISHED


def test_an_operator_decision_does_not_reopen_a_finished_batch() -> None:
    state = state_of(
        decided(), Finished(0), OperatorDecided(0, OperatorDecision.ACCEPT_REPLAY, ("out",), "me")
    )
    assert state.batches[0].stage is Stage.FINISHED
    assert state.batches[0].operator_decisions == {"out": OperatorDecision.ACCEPT_REPLAY}


def test_compaction_drops_old_batches_and_later_records_about_them() -> None:
    state = state_of(decided(0), Finished(0), decided(1), Finished(1))
    state.apply(Compacted(3, 1, generation()))
    assert set(state.batches) == {1} and state.batch_floor == 1
    state.apply(OperatorDecided(0, OperatorDecision.ACCEPT_LOSS, ("out",), "me"))  # on an old batch
    assert set(state.batches) == {1}


@pytest.mark.parametrize(
    "wrong",
    [
        generation(1),
        generation(0),
        Generation(2, Namespace("lock", "other"), "file:///log", None, "here:2"),
        Bound("query-2"),
    ],
)
def test_generations_only_rise_within_one_namespace_and_query(wrong: Record) -> None:
    with pytest.raises(LogCorrupt):
        state_of(wrong)


@pytest.mark.parametrize(
    "record",
    [
        generation(),
        Bound("query-1"),
        Decided(3, 2, 1, "hash", (receipt(),), {"out": Fingerprint(3, 2**64 - 1)}),
        Repaired(3, 1, (("out", "b1"),), (receipt("b2"),)),
        OperatorDecided(3, OperatorDecision.ACCEPT_REPLAY, ("out",), "me"),
        Finished(3),
        Compacted(7, 2, generation()),
    ],
)
def test_records_survive_the_log(record: Record) -> None:
    assert record_from_json(*record_to_json(record)) == record


# Entering a batch.


FLOORED = (decided(0), Finished(0), decided(1), Finished(1), Compacted(3, 1, generation()))


@pytest.mark.parametrize(
    ("records", "batch", "stage"),
    [
        ((), 0, Stage.NONE),
        ((), 17, Stage.NONE),  # a query that ran batches before it had a log
        ((decided(0),), 0, Stage.DECIDED),
        ((decided(0), RECORDS["Repaired"]), 0, Stage.DECIDED),
        ((decided(0), Finished(0)), 0, Stage.FINISHED),
        ((decided(0), Finished(0)), 1, Stage.NONE),
        ((decided(0), Finished(0), decided(1), Finished(1)), 0, Stage.FINISHED),  # restored, known
        (FLOORED, 1, Stage.FINISHED),
        (FLOORED, 2, Stage.NONE),
    ],
)
def test_entering_a_batch_compares_its_offsets(
    records: Sequence[Record], batch: int, stage: Stage
) -> None:
    assert enter(state_of(*records), batch, f"hash-{batch}") is stage


@pytest.mark.parametrize(
    ("records", "batch", "offsets", "reason"),
    [
        ((decided(0),), 0, "other", "other source offsets"),
        ((decided(0), Finished(0)), 0, "other", "other source offsets"),
        ((decided(0),), 1, "hash-1", "batch 0 is not finished"),
        ((decided(0), Finished(0)), 2, "hash-2", "the last is 0"),  # the log is older
        (FLOORED, 0, "hash-0", "compacted up to batch 0"),  # the checkpoint is older
        (FLOORED, 3, "hash-3", "the last is 1"),
    ],
)
def test_entering_a_batch_is_refused(
    records: Sequence[Record], batch: int, offsets: str, reason: str
) -> None:
    with pytest.raises(LogMismatch, match=reason):
        enter(state_of(*records), batch, offsets)


def test_the_checkpoint_must_still_hold_the_executed_plan() -> None:
    state = state_of(decided(0), Finished(0))
    for before in ("hash-0", None):
        assert enter(state, 1, "hash-1", before) is Stage.NONE
    with pytest.raises(LogMismatch, match="batch 0 is in the log with other source offsets"):
        enter(state, 1, "hash-1", "other")
    state = state_of(decided(0), Finished(0), decided(1), Finished(1))
    with pytest.raises(LogMismatch, match="batch 0"):
        enter(state, 1, "hash-1", "other")


# Sweeping.


def stray(id: str, *, number: int = 1, sink: str = "out", epoch: int = 2) -> Stray:
    return Stray(sink, id, number, "Ongoing", {"pid": 1, "epoch": epoch})


def test_the_sweep_aborts_only_undecided_branches() -> None:
    state = state_of(generation(2), decided(0, receipt("held")))
    strays = [stray("held"), stray("loose"), stray("held", sink="other"), stray("own", number=2)]
    assert strays_to_abort(state, strays) == strays[1:]


def test_a_repaired_branch_is_swept() -> None:
    state = state_of(
        decided(0, receipt("lost")), Repaired(0, 1, (("out", "lost"),), (receipt("new"),))
    )
    assert strays_to_abort(state, [stray("lost"), stray("new")]) == [stray("lost")]


def test_a_stray_of_a_later_generation_stops_the_sweep() -> None:
    with pytest.raises(LogMismatch, match="generation 2"):
        strays_to_abort(state_of(), [stray("b", number=2)])


def test_an_open_branch_of_a_finished_batch_stops_the_sweep() -> None:
    state = state_of(decided(0, receipt("b1")), Finished(0))
    with pytest.raises(LogMismatch, match="its batch 0 is finished"):
        strays_to_abort(state, [stray("b1")])


def test_a_value_that_only_the_stray_has_does_not_hide_its_finished_batch() -> None:
    state = state_of(decided(0, receipt("b1")), Finished(0))
    shown = Stray("out", "b1", 1, "prepared", {"owner": "someone"})
    with pytest.raises(LogMismatch, match="its batch 0 is finished"):
        strays_to_abort(state, [shown])


def test_the_last_use_of_an_id_is_known_until_its_batch_is_compacted_away() -> None:
    handle: dict[str, Json] = {"pid": 1, "epoch": 9, "written": [["t", 0, 17]]}
    state = state_of(decided(0, receipt("b1")), Finished(0))
    state.apply(Decided(1, 1, 1, "hash-1", (Receipt("out", "b1", 0, Fingerprint(), handle),), {}))
    for _ in range(2):
        assert state.last_use("out", "b1") == LastUse(1, (("epoch", 9), ("pid", 1)))
        assert state.last_use("other", "b1") is None
        state.apply(Finished(1) if state.unfinished else Compacted(4, 1, generation()))
    state.apply(decided(2, receipt("b2")))
    state.apply(Compacted(5, 2, generation()))
    assert state.last_use("out", "b1") is None
    assert state.last_use("out", "b2") == LastUse(2, (("epoch", 2), ("pid", 1)))


def test_a_finished_batch_keeps_no_receipts() -> None:
    state = state_of(decided(0, receipt("b1"), receipt("b2")))
    assert not state.batches[0].decided.receipts and len(state.batches[0].receipts) == 2
    state.apply(Finished(0))
    assert not state.batches[0].receipts


class CountedId(str):
    """An id that counts how often it is looked up or compared."""

    __slots__ = ()
    uses = 0

    def __hash__(self) -> int:
        CountedId.uses += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        CountedId.uses += 1
        return super().__eq__(other)


@pytest.mark.parametrize("batches", [2, 20])
def test_a_sweep_compares_each_stray_once_however_many_batches_there_are(batches: int) -> None:
    state = state_of()
    for batch in range(batches):
        state.apply(decided(batch, *(receipt(f"{batch}-{task}") for task in range(50))))
        state.apply(Finished(batch))
    strays = [stray(CountedId(f"new-{task}")) for task in range(100)]
    CountedId.uses = 0
    assert len(strays_to_abort(state, strays)) == 100
    assert 100 <= CountedId.uses <= 200


def test_the_next_use_of_a_finished_id_is_swept() -> None:
    state = state_of(decided(0, receipt("b1")), Finished(0))
    again = stray("b1", epoch=4)
    assert strays_to_abort(state, [again]) == [again]


# Comparing and repairing.


def test_a_comparison_names_the_sinks_that_differ() -> None:
    one, two, none = Fingerprint(1, 1), Fingerprint(2, 2), Fingerprint()
    assert compare({"a": one, "b": none}, {"a": one, "b": none}) == []
    differing = compare({"a": one, "b": one, "c": one}, {"a": two, "b": none, "c": one})
    assert [(m.sink, m.recorded, m.replayed) for m in differing] == [
        ("a", one, two),
        ("b", one, none),
    ]


def test_a_sink_that_was_added_or_removed_since_the_decision_is_not_compared() -> None:
    one, two = Fingerprint(1, 1), Fingerprint(2, 2)
    assert compare({"a": one, "removed": two}, {"a": one, "added": one}) == []
    assert [m.sink for m in compare({"a": one, "removed": two}, {"a": two})] == ["a"]


def branches(digests: Sequence[int], name: str) -> list[Receipt]:
    return [receipt(f"{name}{n}", task=n, digest=d) for n, d in enumerate(digests)]


digests = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@given(digests, st.data())
def test_a_replay_of_the_same_branches_replaces_only_lost_branches(
    before: list[int], data: st.DataObject
) -> None:
    recorded = branches(before, "old")
    replayed = branches(data.draw(st.permutations(before)), "new")
    gone = data.draw(st.sets(st.sampled_from([r.id for r in recorded]), min_size=1))
    lost = frozenset(("out", id_) for id_ in gone)
    chosen = match_lost(recorded, lost, replayed)
    assert not isinstance(chosen, Mismatch)
    wanted = Counter(r.fingerprint for r in recorded if r.id in gone)
    assert Counter(r.fingerprint for r in chosen) == wanted
    assert len({r.id for r in chosen}) == len(gone)


@given(digests, digests, st.data())
def test_a_repair_never_repeats_or_omits_rows(
    before: list[int], after: list[int], data: st.DataObject
) -> None:
    """For any replay, kept and chosen branches have the decided rows, or the replay is refused."""
    recorded, replayed = branches(before, "old"), branches(after, "new")
    gone = data.draw(st.sets(st.sampled_from([r.id for r in recorded]), min_size=1))
    chosen = match_lost(recorded, frozenset(("out", id_) for id_ in gone), replayed)
    if isinstance(chosen, Mismatch):
        same_rows = total(r.fingerprint for r in recorded) == total(r.fingerprint for r in replayed)
        same_cut = sorted(before) == sorted(after)
        assert not same_cut
        assert not same_rows or len(gone) < len(recorded)
    else:
        kept = [r for r in recorded if r.id not in gone]
        assert total(r.fingerprint for r in (*kept, *chosen)) == total(
            r.fingerprint for r in recorded
        )


def test_other_partitions_of_the_same_rows_can_replace_only_a_whole_sink() -> None:
    recorded, replayed = branches([1, 2], "old"), branches([3], "new")
    replayed = [Receipt("out", "new0", 0, Fingerprint(2, 3))]
    both = frozenset({("out", "old0"), ("out", "old1")})
    assert match_lost(recorded, both, replayed) == replayed
    refused = match_lost(recorded, frozenset({("out", "old0")}), replayed)
    assert isinstance(refused, Mismatch) and "1 of 2 branches are already committed" in str(refused)


@pytest.mark.parametrize("operator_decision", [None, *OperatorDecision])
def test_other_rows_need_an_operator_decision_and_replace_a_whole_sink(
    operator_decision: OperatorDecision | None,
) -> None:
    recorded, replayed = branches([1, 2], "old"), branches([5, 6, 7], "new")
    for lost in itertools.chain([recorded], ([r] for r in recorded)):
        keys = frozenset((r.sink, r.id) for r in lost)
        result = match_lost(recorded, keys, replayed, operator_decision=operator_decision)
        if operator_decision is OperatorDecision.ACCEPT_REPLAY and lost is recorded:
            assert result == replayed
        else:
            assert isinstance(result, Mismatch) and "different rows" in str(result)


def test_fingerprints_have_the_same_sum_in_any_order() -> None:
    parts = [Fingerprint(1, 2**63), Fingerprint(2, 2**63), Fingerprint(3, 5)]
    assert {total(order) for order in itertools.permutations(parts)} == {Fingerprint(6, 5)}


def test_a_batch_keeps_its_decision() -> None:
    history = BatchHistory(decided(), (receipt(),))
    assert history.stage is Stage.DECIDED and history.decided.batch == 0
