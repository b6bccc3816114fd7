"""Enumerated schedules: one fault at every effect, and pairs of related faults."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from .schedule import Config, Fault, Schedule
from .world import World

PLAIN = Config()
REMOTE = Config(log="remote", sinks=("kafka",), stubborn=True)
SWALLOWING = Config(log="swallowing", sinks=("database", "kafka"), batches=(2, 1))
STATEFUL = Config(sinks=("kafka", "kafka"), batches=(3,), tasks=3, stateful=True)
SALTED = Config(sinks=("database", "kafka"), batches=(3,), stateful=True, salted=True)
SHIFTING = Config(sinks=("kafka", "database"), batches=(4,), tasks=3, shifting=True)
RESIZED = Config(sinks=("kafka", "database"), batches=(4,), tasks=3, resized=True)
BLIND = Config(sinks=("kafka", "blind"), batches=(2, 1), stubborn=True)
WITNESSED = Config(sinks=("database", "database"), batches=(2, 1, 1))
EPOCHS = Config(sinks=("kafka",), batches=(2, 1, 1), keep=2)
LONG = Config(sinks=("kafka",), batches=(1, 1, 1), keep=1, late=True)
CRON = Config(sinks=("kafka",), batches=(2, 2, 2), cron=True)
CROWDED = replace(LONG, keep=2, records=3, late=False)  # a compaction carries the batches

ALL = (PLAIN, REMOTE, SWALLOWING, STATEFUL, SALTED, SHIFTING, BLIND, LONG)


LOSABLE = ("link", "put", "init", "prepare", "check")  # where a replaced driver loses


def effects(config: Config, *faults: Fault) -> list[str]:
    """Return every effect of a run, by its kind."""
    world = World(Schedule(config, faults), trace=True)
    world.run()
    assert world.trace is not None
    return world.trace


def everywhere(config: Config, kind: str, arg: int = 0, step: int = 1) -> Iterator[Schedule]:
    """One fault at each effect of an undisturbed run."""
    for after in range(0, len(effects(config)), step):
        yield Schedule(config, (Fault(kind, after, arg=arg),))


def crashes() -> Iterator[Schedule]:
    for config in ALL:
        yield from everywhere(config, "crash")


def replaced_drivers() -> Iterator[Schedule]:
    """A driver is paused anywhere, another runs to the end, and the first continues."""
    for config in (LONG, BLIND, PLAIN, SWALLOWING, STATEFUL):
        yield from everywhere(config, "switch")
    yield from everywhere(replace(PLAIN, late=True), "switch")
    yield from everywhere(replace(LONG, log="remote"), "switch")


def machine_crashes() -> Iterator[Schedule]:
    yield from everywhere(PLAIN, "machine", 0)
    yield from everywhere(PLAIN, "machine", 5)
    yield from everywhere(LONG, "machine", 0, step=2)


def interrupted_links() -> Iterator[Schedule]:
    """A call is interrupted between linking a record and syncing it; then the machine crashes."""
    config = replace(PLAIN, stubborn=True)
    for nth, after in itertools.product(range(2, 6), range(0, 36, 2)):
        yield Schedule(config, (Fault("interrupt_after", nth, "link"), Fault("machine", after)))


def unsynced_links() -> Iterator[Schedule]:
    """A driver is paused there; another builds on its record; then the machine crashes."""
    for nth, after, arg in itertools.product(range(effects(PLAIN).count("sync")), range(4), (2, 4)):
        pause = Fault("switch", nth, "sync")
        yield Schedule(PLAIN, (pause, Fault("machine", after, "unlink", arg)))
        yield Schedule(PLAIN, (pause, Fault("machine", 3 + after, "sync", arg)))


def races() -> Iterator[Schedule]:
    """Two drivers race for a number of the log, for a branch, and for the checkpoint's files."""
    for config in (BLIND, PLAIN, SWALLOWING, replace(SWALLOWING, late=True)):
        for place in (*LOSABLE, "commit", "offsets", "commits", "metadata"):
            for nth in range(effects(config).count(place)):
                yield Schedule(config, (Fault("switch", nth, place),))
                back = Fault("switch", 0, place, arg=1)
                yield Schedule(config, (Fault("switch", nth, place), back))


def lost_messages() -> Iterator[Schedule]:
    for config, kind in itertools.product((PLAIN, REMOTE), ("lose_request", "lose_answer")):
        yield from everywhere(config, kind)
    yield from everywhere(BLIND, "lose_answer")
    yield from everywhere(replace(PLAIN, stubborn=True), "interrupt_after")
    yield from everywhere(REMOTE, "delay")
    yield from everywhere(SWALLOWING, "outage", 7)


def repeated_requests() -> Iterator[Schedule]:
    """A commit or an abort that was sent long ago arrives once more, at any time."""
    for config, arg in ((PLAIN, 0), (REMOTE, 2), (SHIFTING, 1)):
        yield from everywhere(config, "repeat", arg, step=2)
    for nth, place in itertools.product(range(6), ("commit", "abort", "init", "put")):
        again = (Fault("duplicate", nth, place), Fault("crash", 20), Fault("deliver", 3, "commit"))
        yield Schedule(replace(PLAIN, log="remote"), again)


def losses() -> Iterator[Schedule]:
    """Branches are aborted by their systems, at any time; then the driver dies, at any time."""
    for arg, config in itertools.product((1, 0), (SHIFTING, SALTED, STATEFUL)):
        yield from everywhere(config, "expire", arg)
    for config, arg in itertools.product((PLAIN, SHIFTING, BLIND), (0, 1)):
        lost = Fault("expire", 0, "commit", arg)
        for after in range(0, 90, 3):
            yield Schedule(config, (lost, Fault("crash", after)))
            yield Schedule(config, (lost, Fault("switch", after)))


def stragglers() -> Iterator[Schedule]:
    """A task that was abandoned long ago opens its id again, writes, and prepares."""
    yield from everywhere(PLAIN, "straggler")


def late_opens() -> Iterator[Schedule]:
    """A failed attempt at a task opens its id when later batches are written or decided."""
    places = ("produce", "check", "commit", "witness")
    for config in (REMOTE, replace(PLAIN, batches=(2, 2, 2)), CRON):
        for nth, place, late in itertools.product(range(6), places, range(6)):
            opened = (Fault("delay", nth, "init"), Fault("deliver", late, place))
            yield Schedule(config, opened)
            yield Schedule(config, (*opened, Fault("crash", 0, "commit")))
            crashed = Fault("crash", late % 3, "commit")
            yield Schedule(config, (opened[0], crashed, Fault("deliver", late, place)))


def woken_writers() -> Iterator[Schedule]:
    """Two drivers sleep while a third writes and compacts. One of them creates its record again."""
    config = replace(REMOTE, batches=(2,), tasks=1, keep=1, records=4)
    for first, second, third in itertools.product(range(4, 9), range(9), range(4)):
        faults = [Fault("switch", first), Fault("switch", second), Fault("crash", 0, "commits")]
        for turns in itertools.product((0, 1), repeat=3):
            woken = [Fault("switch", third * (n == 1), arg=turn) for n, turn in enumerate(turns)]
            yield Schedule(config, (*faults, Fault("switch", 0), *woken, Fault("switch", 0, arg=1)))


def forgotten_outcomes() -> Iterator[Schedule]:
    """The answer to a commit is lost, and the coordinator has forgotten the outcome."""
    for config, nth in itertools.product((PLAIN, REMOTE, BLIND), range(3)):
        lost, forget = Fault("lose_answer", nth, "commit"), Fault("forget_ids")
        yield Schedule(config, (lost, forget))
        yield Schedule(config, (lost, forget, Fault("retention")))
        yield Schedule(config, (Fault("crash", nth, "commit"), forget))
        # An orphan holds the last stable offset back, and the witness with it.
        for late in range(3):
            orphan = Fault("lose_answer", nth, "produce")
            yield Schedule(config, (orphan, Fault("straggler", late, "commit")))


def unknown_appends() -> Iterator[Schedule]:
    """A record is in flight, its writer gets no answer, and another fault happens meanwhile."""
    long = replace(LONG, log="remote", late=False)
    for config, stubborn in itertools.product((REMOTE, SWALLOWING, long), (True, False)):
        yield from _silences(replace(config, stubborn=stubborn))


def _silences(config: Config) -> Iterator[Schedule]:
    for nth in range(effects(config).count("put")):
        for kind, long in itertools.product(("delay", "lose_answer"), (3, 7)):
            silence = (Fault(kind, nth, "put"), Fault("outage", arg=long))
            yield Schedule(config, silence)
            yield Schedule(config, (*silence, Fault("deliver", 0, "put")))
            yield Schedule(config, (*silence, Fault("deliver", 0, "commit")))


def woken_in_compaction() -> Iterator[Schedule]:
    """A driver is paused before a record; it wakes while its successor is compacting the log."""
    logs = (("file", "link"), ("remote", "put"))
    for (log, place), kind in itertools.product(logs, (LONG, CROWDED)):
        config = replace(kind, log=log)
        for nth in range(2, 5):
            pause = Fault("switch", nth, place)
            for deleted in range(effects(config, pause).count("del")):
                yield Schedule(config, (pause, Fault("switch", deleted, "del", arg=1)))


def replaced_while_idle() -> Iterator[Schedule]:
    """A driver waits for rows; another takes over, and both want to plan the next batch."""
    for config in (PLAIN, REMOTE, SWALLOWING, STATEFUL):
        for nth in range(effects(config).count("idle")):
            back = Fault("switch", 0, "offsets", arg=1)
            yield Schedule(config, (Fault("switch", nth, "idle"), back))


def refused_deletes() -> Iterator[Schedule]:
    """Compaction cannot delete a record; then a driver wakes that was paused before a record."""
    logs = (("file", "link"), ("remote", "put"))
    for (log, place), kind in itertools.product(logs, (LONG, CROWDED)):
        config = replace(kind, log=log)
        for refused in range(effects(config).count("del")):
            yield Schedule(config, (Fault("lose_request", refused, "del"),))
        for nth in range(2, 5):
            pause = Fault("switch", nth, place)
            for refused in range(effects(config, pause).count("del")):
                yield Schedule(config, (pause, Fault("lose_request", refused, "del")))


def clean_ends() -> Iterator[Schedule]:
    """Each driver ends after a batch, unless something happens."""
    for config in (CRON, replace(CRON, log="remote", late=True)):
        yield from everywhere(config, "crash")
        yield from everywhere(config, "switch", step=2)
        yield from everywhere(config, "lose_answer", step=2)
        yield from everywhere(config, "expire", step=2)


def crowded_logs() -> Iterator[Schedule]:
    """A log with many records drops those of all batches, and carries what they say."""
    for config in (CROWDED, replace(CROWDED, log="remote"), replace(CROWDED, stateful=True)):
        yield from everywhere(config, "crash")
        yield from everywhere(config, "switch", step=2)
        for nth, after in itertools.product(range(3), range(0, 60, 3)):
            lost = Fault("expire", nth, "commit", 0)
            yield Schedule(config, (lost, Fault("crash", after)))
    yield from everywhere(CROWDED, "machine", 0, step=2)
    yield from everywhere(CROWDED, "restore", 0, step=4)


def tampered_checkpoints() -> Iterator[Schedule]:
    for config, (kind, arg) in itertools.product(
        (PLAIN, REMOTE), (("restore", 0), ("restore", 1), ("delete", 0), ("copy", 0))
    ):
        yield from everywhere(config, kind, arg, step=4)


def restored_together() -> Iterator[Schedule]:
    """Log and checkpoint are restored to one older state, any number of records ago."""
    kinds = (WITNESSED, replace(WITNESSED, log="remote"), replace(WITNESSED, stateful=True))
    for config in (*kinds, EPOCHS, replace(EPOCHS, log="remote", tasks=1)):
        for back in (0, 1, 2, 4, 7):
            yield from everywhere(config, "rewind", back, step=2)
    lost = Fault("expire", 0, "commit", 1)  # a repair, which the restored log does not know
    for after, back in itertools.product(range(0, 60, 2), range(1, 4)):
        yield Schedule(WITNESSED, (lost, Fault("rewind", after, arg=back)))
    # All of a batch is lost, and its repair opens ids.
    several = replace(EPOCHS, batches=(1, 1, 1, 1), tasks=1)
    for nth, after, back in itertools.product((1, 2), range(40), range(2, 6)):
        lost = Fault("expire", nth, "commit", 0)
        yield Schedule(several, (lost, Fault("rewind", after, arg=back)))


def deleted_together() -> Iterator[Schedule]:
    """Log and checkpoint are deleted together, at any time."""
    kinds = (WITNESSED, replace(WITNESSED, log="remote"), replace(WITNESSED, stateful=True))
    for config in (*kinds, EPOCHS, replace(EPOCHS, log="remote", tasks=1)):
        yield from everywhere(config, "vanish", step=2)


def begun_meanwhile() -> Iterator[Schedule]:
    """A driver has found no log; before it asks the systems, another driver begins one."""
    for config in (WITNESSED, replace(WITNESSED, log="remote", late=True)):
        for nth in range(effects(config).count("remembered")):
            yield Schedule(config, (Fault("switch", nth, "remembered"),))


def asked_late() -> Iterator[Schedule]:
    """A driver has read the log; before it asks the systems, the other driver decides."""
    for place in ("sync", "prepare", "check", "commit"):
        for nth in range(effects(WITNESSED).count(place)):
            asked = Fault("switch", 0, "remembered", arg=1)
            yield Schedule(WITNESSED, (Fault("switch", nth, place), asked))


def tombstones() -> Iterator[Schedule]:
    """A stray ends while it is being aborted, so a tombstone proves the abort; then a crash."""
    for nth, after in itertools.product(range(3), range(0, 24, 2)):
        aborted = (Fault("lose_answer", nth, "check"), Fault("expire", 0, "abort"))
        yield Schedule(WITNESSED, (*aborted, Fault("crash", after)))


def late_markers() -> Iterator[Schedule]:
    """A commit is accepted, and its markers follow later; the driver may die before that."""
    yield from everywhere(REMOTE, "slow_markers", step=2)
    for config, nth in itertools.product((PLAIN, REMOTE, STATEFUL), range(3)):
        slow = Fault("slow_markers", nth, "commit")
        yield Schedule(config, (slow, Fault("crash", 0, "witness")))


def failed_syncs() -> Iterator[Schedule]:
    for nth in range(effects(PLAIN).count("sync")):
        yield Schedule(PLAIN, (Fault("lose_request", nth, "sync"),))
        yield Schedule(PLAIN, (Fault("lose_request", nth, "sync"), Fault("crash", 8)))


def gone_for_good() -> Iterator[Schedule]:
    """A system never answers again, or never ends its branches; then another fault happens."""
    for kind, arg in itertools.product(("gone", "stuck"), (0, 1)):
        yield from everywhere(PLAIN, kind, arg)
        yield from everywhere(SHIFTING, kind, arg, step=3)
        for nth, other in itertools.product(range(4), ("crash", "lose_request", "lose_answer")):
            gone = Fault(kind, nth, "commit", arg)
            for after in range(0, 24, 2):
                yield Schedule(PLAIN, (gone, Fault(other, after, "commit")))
    for nth in range(3):
        gone = Fault("gone", nth, "commit")
        yield Schedule(replace(PLAIN, log="remote"), (gone, Fault("outage", 3, "commit", 4)))


def cut_off_executors() -> Iterator[Schedule]:
    """One of two executors cannot reach a system any more; then another fault happens."""
    for config, arg in itertools.product((PLAIN, REMOTE, WITNESSED), (0, 2)):
        yield from everywhere(config, "cut_off", arg, step=3)
        for after in range(0, 60, 6):
            yield Schedule(config, (Fault("cut_off", 0, arg=arg), Fault("crash", after)))


def never_in_time() -> Iterator[Schedule]:
    """Rows begin to take so long that a batch never fits into a transaction."""
    crowded = Config(sinks=("kafka", "database"), batches=(4, 1), tasks=1)
    for config in (crowded, replace(crowded, log="remote"), replace(crowded, stateful=True)):
        yield from everywhere(config, "slow", step=2)
        for after, other in itertools.product(range(0, 90, 6), ("crash", "switch", "lose_answer")):
            yield Schedule(config, (Fault("slow"), Fault(other, after)))


def changed_sinks() -> Iterator[Schedule]:
    """A sink is renamed, removed or downgraded while branches may be open; then another fault."""
    for kind, arg in itertools.product(("rename", "remove", "downgrade"), (0, 1)):
        for config in (PLAIN, replace(PLAIN, log="remote"), WITNESSED):
            yield from everywhere(config, kind, arg, step=2 if config is PLAIN else 5)
        for nth, after in itertools.product(range(3), range(0, 24, 4)):
            changed = Fault(kind, nth, "prepare", arg)
            for other in ("crash", "lose_request", "lose_answer", "expire"):
                yield Schedule(PLAIN, (changed, Fault(other, after)))
            yield Schedule(PLAIN, (changed, Fault("rename", after, arg=1 - arg)))


def resized_clusters() -> Iterator[Schedule]:
    """Some branches of a batch are lost, and the driver comes back on a cluster of another size."""
    yield from everywhere(RESIZED, "crash", step=2)
    for nth, after, other in itertools.product(range(4), range(0, 24, 3), ("crash", "switch")):
        lost = Fault("expire", nth, "commit", 1)
        yield Schedule(RESIZED, (lost, Fault(other, after)))
        yield Schedule(RESIZED, (Fault("crash", nth, "commit"), Fault("expire", after, arg=1)))


def replays_that_differ() -> Iterator[Schedule]:
    """A finished batch of a stateful query runs again after writing nothing or everything."""
    for config in (STATEFUL, SALTED):
        yield Schedule(config, (Fault("crash", 0, "commits"),))
        for nth in range(3):
            yield Schedule(config, (Fault("crash", nth, "commit"),))


def power_losses() -> Iterator[Schedule]:
    """The machine crashes, and with it what Spark had not synced of its checkpoint."""
    several = replace(STATEFUL, batches=(2, 1, 1))
    for config, arg in itertools.product((PLAIN, several), (2, 3, 4, 6)):
        yield from everywhere(config, "machine", arg)
    for arg, after in itertools.product((2, 4), range(0, 60, 3)):
        twice = (Fault("machine", 1, "offsets", arg), Fault("machine", after, arg=arg))
        yield Schedule(several, twice)
        yield Schedule(several, (Fault("crash", 1, "commits"), *twice))


def forgotten_files() -> Iterator[Schedule]:
    """The newest files of the checkpoint are lost, though they were synced; then another crash."""
    several = replace(STATEFUL, batches=(2, 1, 1))
    for config, arg in itertools.product((PLAIN, several), (1, 2, 3, 4, 8, 12, 5, 15)):
        yield from everywhere(config, "forget", arg, step=2)
    for arg in (1, 3):  # the plan is not where it was decided: a compaction has carried it
        yield from everywhere(CROWDED, "forget", arg, step=4)
    for nth, after in itertools.product(range(3), range(6)):
        lost = Fault("forget", nth, "commits", 3)
        yield Schedule(several, (lost, Fault("crash", after, "checkpoint-sync")))
        yield Schedule(several, (lost, Fault("machine", after, "checkpoint-sync", 4)))


def mended_by_two() -> Iterator[Schedule]:
    """After a loss, a driver is paused while it mends; its successor comes through, then it goes on."""
    several = replace(STATEFUL, batches=(2, 1, 1))
    lost = (
        Fault("forget", 1, "offsets", 4),  # the end of a batch
        Fault("forget", 0, "step", 1),
        Fault("forget", 9, "checkpoint-sync", 1),  # a plan that is not decided
        Fault("machine", 6, "checkpoint-sync", 2),
    )
    for fault, place in itertools.product(lost, ("read", "names", "rename", "del", "unlink")):
        for nth in range(4):
            yield Schedule(several, (fault, Fault("switch", nth, f"checkpoint-{place}")))


def withdrawn_plans() -> Iterator[Schedule]:
    """An operator has Spark plan a batch anew while a driver runs, or between two drivers."""
    for config in (PLAIN, REMOTE, STATEFUL):
        yield from everywhere(config, "withdraw", step=2)
        for after, moved in itertools.product(range(0, 60, 3), range(0, 60, 6)):
            # The next driver runs between the record and the move.
            faults = (Fault("withdraw", after, arg=1), Fault("withdraw", moved, arg=2))
            yield Schedule(config, faults)
            yield Schedule(config, (Fault("crash", after), faults[0], faults[1]))


def exchanged_sinks() -> Iterator[Schedule]:
    """The driver dies, and the pipeline is started again with sinks added, removed or both."""
    for arg, absent in ((0, (1,)), (1, ()), (1, (1,))):
        config = replace(STATEFUL, batches=(2, 1), absent=absent)
        yield from everywhere(config, "exchange", arg)


FAMILIES = (
    crashes,
    replaced_drivers,
    races,
    machine_crashes,
    failed_syncs,
    interrupted_links,
    unsynced_links,
    lost_messages,
    repeated_requests,
    unknown_appends,
    losses,
    stragglers,
    late_opens,
    forgotten_outcomes,
    late_markers,
    replays_that_differ,
    withdrawn_plans,
    exchanged_sinks,
    power_losses,
    forgotten_files,
    mended_by_two,
    woken_in_compaction,
    replaced_while_idle,
    refused_deletes,
    clean_ends,
    crowded_logs,
    tampered_checkpoints,
    restored_together,
    deleted_together,
    begun_meanwhile,
    asked_late,
    tombstones,
    gone_for_good,
    cut_off_executors,
    never_in_time,
    changed_sinks,
    resized_clusters,
)
