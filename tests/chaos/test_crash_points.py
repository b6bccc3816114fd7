"""The driver is killed at every step of a batch's life, for three queries, in one long run.

Each line of `SCRIPT` kills one driver. All three pipelines run in it. Each stops at its point, and
when all have stopped, SIGKILL ends Python and JVM together. The next driver starts from what is left.
After every kill, clients that share no code with the product compare the log, Spark's checkpoint and
the topics. After the last run the output must be exact, and nothing may be left open.
"""

from __future__ import annotations

import signal
import uuid
from collections.abc import Mapping
from pathlib import Path

import pytest
from harness import Chaos, Fault, Query, several, wait_until
from kafka_oracle import abort_transactions, group_offsets, open_transactions

from poundlock.core.protocol import Step
from poundlock.servers.kafka import Cluster

KINDS = ("stateless", "outputs", "stateful")
ROWS, ROWS_PER_BATCH = 300, 30

Points = Fault | Mapping[str, Fault | list[Fault]]


def at(point: str, phase: str) -> Fault:
    return Fault(point, match={"phase": phase})


BATCH, TAKE_OVER = "batch", "take-over"

# In the order of a batch's steps. Each line starts from the state that the previous kill left.
SCRIPT: list[Points] = [
    # Nothing exists yet.
    at("taking-over", TAKE_OVER),
    at("log:Generation:aside", TAKE_OVER),
    at("log:Generation:linked", TAKE_OVER),
    at("took-over", TAKE_OVER),
    # Spark has planned a batch.
    at("entered", BATCH),
    at("writing", BATCH),
    Fault("task:beginning"),
    Fault("task:began"),
    Fault("task:wrote"),
    Fault("task:prepared"),
    # Branches are open everywhere, and no decision names them.
    at("prepared", BATCH),
    at("sweep:aborted-one", TAKE_OVER),
    at("checked", BATCH),
    at("sweeping", TAKE_OVER),
    at("deciding", BATCH),
    at("swept", TAKE_OVER),
    at("log:Decided:aside", BATCH),
    # It is decided.
    at("log:Decided:linked", BATCH),
    at("took-over", TAKE_OVER),
    at("committing", TAKE_OVER),
    at("commit:sent", TAKE_OVER),
    at("committed-one", TAKE_OVER),
    at("committed", TAKE_OVER),
    at("log:Finished:aside", TAKE_OVER),
    at("finished", TAKE_OVER),
    # It is finished, but Spark does not know. A query with state must drain it.
    {
        "stateless": at("handing-back", BATCH),
        "outputs": at("entered", BATCH),
        "stateful": at("draining", BATCH),
    },
    {
        "stateless": at("offsets:prepared", BATCH),
        "outputs": at("handed-back", BATCH),
        "stateful": at("drained", BATCH),
    },
    at("returning", BATCH),
    # Decided, and then lost: the test aborts it in between.
    at("decided", BATCH),
    at("repairing", BATCH),
    at("log:Repaired:aside", BATCH),
    at("repaired", BATCH),
    # The second gate, without a crash before it.
    at("commit:sent", BATCH),
    at("committed-one", BATCH),
    at("finishing", BATCH),
    at("finished", BATCH),
    # A no vote.
    {kind: [Fault("task:prepared", "reject"), at("aborted", BATCH)] for kind in KINDS},
]


@pytest.mark.timeout(2400)  # dozens of drivers, one after the other
def test_output_is_exact_when_the_driver_is_killed_at_every_point(
    kafka_server: Cluster, tmp_path: Path
) -> None:
    groups = {kind: f"{kind}-{uuid.uuid4().hex[:8]}" for kind in KINDS}
    sources = {
        "stateless": {"group": groups["stateless"], "offsets": "transactional"},
        "outputs": {"group": groups["outputs"], "offsets": "on_batch"},
        "stateful": {},
    }
    one_by_one = {"commits_at_once": 1}  # so that a kill can hit the middle of the commit
    queries = [
        Query(kind, rows=ROWS, rows_per_batch=ROWS_PER_BATCH, settings=one_by_one, source=source)
        for kind, source in sources.items()
    ]
    chaos = Chaos(tmp_path, kafka_server.bootstrap_servers, queries)

    for points in SCRIPT:
        faults = dict.fromkeys(KINDS, points) if isinstance(points, Fault) else points
        life = chaos.die_at(faults)
        print(chaos.lives, life.reached)
        if points == at("decided", BATCH):
            lose_what_is_decided(chaos)
    chaos.live().ended()

    chaos.check()
    for kind in ("stateless", "outputs"):
        found = group_offsets(chaos.servers, groups[kind], chaos.source(kind))
        assert found == dict.fromkeys(range(2), ROWS // 2)
    # A driver was killed at every step, and the log has every kind of record.
    died_at = {fault.at for points in SCRIPT for fault in faults_of(points)}
    assert {step.value for step in Step} <= died_at
    for kind in KINDS:
        kinds = {record["kind"] for record in chaos.log(kind)}
        assert kinds == {"Generation", "Bound", "Opened", "Decided", "Repaired", "Finished"}


def lose_what_is_decided(chaos: Chaos) -> None:
    """Abort decided transactions while no driver runs: all, or those of one sink."""
    _, hot, *_ = chaos.outputs("outputs")
    for topics in (chaos.outputs("stateless"), [hot], chaos.outputs("stateful")):
        assert abort_transactions(chaos.servers, topics)


def faults_of(points: Points) -> list[Fault]:
    if isinstance(points, Fault):
        return [points]
    return [fault for each in points.values() for fault in several(each)]


def test_a_task_that_outlives_the_python_driver_writes_nothing_visible(
    kafka_server: Cluster, tmp_path: Path
) -> None:
    """Only the driver's Python is killed. A task of its JVM writes after the take-over."""
    query = Query("stateless", rows=150, settings={"sweep_every_s": 0})
    chaos = Chaos(tmp_path, kafka_server.bootstrap_servers, [query])
    outputs = chaos.outputs("stateless")

    zombie = chaos.start({"stateless": Fault("task:beginning", "hold", match={"batch": 1})})
    zombie.wait_for("stateless", "task:beginning")
    zombie.signal(signal.SIGSTOP)  # otherwise the JVM would notice, and end
    zombie.process.kill()

    driver = chaos.start({"stateless": Fault("entered", "hold", match={"batch": 3})})
    driver.wait_for("stateless", "entered")
    assert open_transactions(chaos.servers, outputs) == {}
    zombie.release("stateless", "task:beginning")
    wait_until(lambda: open_transactions(chaos.servers, outputs) != {}, "the zombie's branch")
    zombie.signal(signal.SIGCONT)
    assert zombie.finish().killed

    driver.release("stateless", "entered")
    driver.finish().ended()
    chaos.check()
