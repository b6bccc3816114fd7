"""A schedule: one pipeline and its faults in order. It alone determines a run."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

# What a fault can be.
PROCESS = ("crash", "switch", "machine", "interrupt", "interrupt_after", "stop")
REQUEST = ("lose_request", "lose_answer", "delay", "duplicate", "outage")
SLOW = ("slow", "cut_off")  # rows take long; an executor does not reach a system
SYSTEM = ("expire", "deliver", "repeat", "slow_markers", "forget_ids", "retention", "straggler")
OPERATOR = ("withdraw",)  # an operator has Spark plan a batch anew
TAMPER = ("restore", "delete", "copy", "rewind", "vanish")
FORGETFUL = ("forget",)  # the newest files of Spark's checkpoint are lost though they were synced
DEPLOYED = ("exchange",)  # the pipeline is started again with other sinks
CHANGED = ("rename", "remove", "downgrade")  # a sink, with a new start
FOR_GOOD = ("gone", "stuck")  # a system that never answers again, or that never ends its branches

# The effects a driver can have, each of them a place for a fault.
LOG_EFFECTS = (
    "write",
    "sync",
    "link",
    "unlink",
    "read",
    "names",
    "mkdir",
    "put",
    "get",
    "list",
    "del",
)
TASK_EFFECTS = ("init", "produce", "prepare")
DRIVER_EFFECTS = (
    "remembered",
    "place",
    "check",
    "commit",
    "witness",
    "find",
    "abort",
    "sleep",
    "step",
)
SPARK_EFFECTS = ("metadata", "idle", "offsets", "commits")


@dataclass(frozen=True)
class Fault:
    """Fires `after` effects after the previous fault; counts only effects of kind `at`, if given."""

    kind: str
    after: int = 0
    at: str | None = None
    arg: int = 0


@dataclass(frozen=True)
class Config:
    """One pipeline and its surroundings."""

    log: str = "file"  # file, remote, or swallowing: remote, and the loser of a race gets no error
    sinks: tuple[str, ...] = ("kafka", "database")  # kafka, database, blind
    batches: tuple[int, ...] = (2, 1)  # rows of each
    tasks: int = 2
    absent: tuple[int, ...] = ()  # sinks that the pipeline gets by an exchange
    stateful: bool = False
    salted: bool = False  # the query is not deterministic
    resized: bool = False  # each driver has a cluster of another size, which cuts the rows
    shifting: bool = False  # a replay cuts the batch into other partitions
    keep: int = 1
    records: int = 1000  # a longer log is compacted
    cron: bool = False  # each driver ends after one batch
    stubborn: bool = False  # a failed step is repeated in the same process
    late: bool = False  # paused drivers wake at the very end, not when their successor ends
    operator_decision: str | None = (
        "accept_loss"  # what the operator decides when a batch cannot be repaired
    )


@dataclass(frozen=True)
class Schedule:
    config: Config = Config()
    faults: tuple[Fault, ...] = ()


_OFTEN = ("crash", "switch", "switch", "machine", "expire")
_KINDS = (*PROCESS, *REQUEST, *SLOW, *SYSTEM, *TAMPER, *OPERATOR, *FORGETFUL, *_OFTEN)
_PLACES = (
    *((None,) * 10),
    *("write", "sync", "sync", "link", "put", "put", "del", "unlink", "read"),
    *("init", "prepare", "check", "commit", "commit", "commit", "find", "abort", "abort"),
    *("offsets", "commits", "checkpoint-sync", "checkpoint-rename"),
)


def faults() -> st.SearchStrategy[Fault]:
    far = st.integers(0, 120)
    near = st.integers(0, 6)
    return st.sampled_from(_PLACES).flatmap(
        lambda place: st.builds(
            Fault,
            kind=st.sampled_from(_KINDS),
            after=far if place is None else near,
            at=st.just(place),
            arg=st.integers(0, 7),
        )
    )


def configs() -> st.SearchStrategy[Config]:
    one_in_four = st.sampled_from((False, False, False, True))
    return st.builds(
        Config,
        log=st.sampled_from(("file", "file", "remote", "swallowing")),
        sinks=st.sampled_from(
            (
                ("kafka",),
                ("database",),
                ("database", "database"),
                ("kafka", "database"),
                ("kafka", "kafka"),
                ("kafka", "database"),
                ("database", "blind"),
                ("kafka", "blind"),
            )
        ),
        batches=st.sampled_from(((2,), (2, 1), (1, 1, 1), (0, 2), (3, 2), (4,))),
        tasks=st.integers(1, 3),
        stateful=one_in_four,
        salted=one_in_four,
        shifting=one_in_four,
        keep=st.integers(1, 2),
        records=st.sampled_from((1000, 1000, 4, 8)),
        stubborn=st.booleans(),
        late=st.booleans(),
        operator_decision=st.sampled_from(("accept_loss", "accept_replay", None)),
    )


def duels() -> st.SearchStrategy[tuple[Fault, ...]]:
    """Two or three drivers that take turns, with one other fault."""
    turn = st.builds(Fault, st.just("switch"), st.integers(0, 40), arg=st.integers(0, 3))
    return st.tuples(st.lists(turn, min_size=2, max_size=7), faults(), st.integers(0, 7)).map(
        lambda drawn: (*drawn[0][: drawn[2]], drawn[1], *drawn[0][drawn[2] :])
    )


def schedules() -> st.SearchStrategy[Schedule]:
    several = st.lists(faults(), min_size=1, max_size=5).map(tuple)
    return st.builds(Schedule, configs(), st.one_of(several, several, duels()))
