"""Drivers and tasks that wake after they were replaced. Nothing that they do then may become visible.

SIGSTOP pauses Python and its JVM at a named point. SIGCONT wakes them after their successor has run.
"""

from __future__ import annotations

import os
import re
import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from harness import Chaos, Child, Fault, Life, Query
from kafka_oracle import group_offsets, stable_and_high

from poundlock.servers.kafka import Cluster

Keep = Callable[[Child], Child]


@pytest.fixture
def keep() -> Iterator[Keep]:
    """Kills the drivers that a test leaves running or paused."""
    with ExitStack() as stack:

        def keep_(child: Child) -> Child:
            stack.callback(child.kill)
            return child

        yield keep_


def errors(life: Life) -> dict[str, str]:
    """Return the name of the error with which each pipeline of a driver ended."""
    return dict(re.findall(r"^pipeline (\S+) ended with (\w+)$", life.output, re.MULTILINE))


# The point at which each pipeline of the driver is paused, in its second batch.
ASLEEP = {
    "writing": "writing",  # will write its rows, and vote
    "deciding": "deciding",  # will try to write a record whose number another driver has written
    "compacted": "deciding",  # the same, but that record was compacted away
    "decided": "decided",  # will try to commit branches that another driver has committed
    "handing-back": "handing-back",  # will try to set the consumer group back
    "returning": "returning",  # has finished, but Spark will try to record that
}


def test_a_driver_that_wakes_after_its_successor_finished_is_fenced(
    kafka_server: Cluster, tmp_path: Path, keep: Keep
) -> None:
    group = f"g-{uuid.uuid4().hex[:8]}"
    queries = [
        Query(
            *("stateless", name),
            rows=120,
            rows_per_batch=20,
            settings={"keep_batches": 2} if name == "compacted" else {},
            source={"group": group} if name == "handing-back" else {},
        )
        for name in ASLEEP
    ]
    conf = {"spark.sql.streaming.minBatchesToRetain": "2"}
    chaos = Chaos(tmp_path, kafka_server.bootstrap_servers, queries, conf=conf)
    sleeper = keep(chaos.start({name: Fault(at, "hold", nth=2) for name, at in ASLEEP.items()}))
    for name, point in ASLEEP.items():
        sleeper.wait_for(name, point)
    sleeper.signal(signal.SIGSTOP)
    # It will append this record: generation, binding, and two records of the first batch precede it.
    number = chaos.checkpoint("compacted") / "poundlock" / f"{4:020}.json"

    chaos.live().ended()
    chaos.check()
    assert not number.exists(), "the successor has written and compacted it"
    written = high_watermarks(chaos, "writing")
    for name, point in ASLEEP.items():
        sleeper.release(name, point)
    sleeper.signal(signal.SIGCONT)
    assert errors(sleeper.finish()) == dict.fromkeys(ASLEEP, "Fenced")

    assert high_watermarks(chaos, "writing") > written, "it wrote after it woke"
    for name in ASLEEP:
        assert chaos.visible(name) == chaos.expected(name, chaos.batches(name))
    assert group_offsets(chaos.servers, group, chaos.source("handing-back")) == {0: 60, 1: 60}
    chaos.live().ended()  # sweeps the branches that the paused driver left open
    chaos.check()


def high_watermarks(chaos: Chaos, pipeline: str) -> int:
    return sum(stable_and_high(chaos.servers, chaos.outputs(pipeline))[1].values())


def test_only_one_of_two_drivers_continues(
    kafka_server: Cluster, tmp_path: Path, keep: Keep
) -> None:
    """One pipeline is started while it already runs. Another is started twice at the same moment."""
    queries = [Query("stateless", name, rows=100, rows_per_batch=10) for name in ("running", "new")]
    chaos = Chaos(tmp_path, kafka_server.bootstrap_servers, queries)
    first = keep(
        chaos.start(
            {"running": Fault("entered", "hold", nth=3), "new": Fault("taking-over", "hold")}
        )
    )
    first.wait_for("running", "entered")
    second = keep(
        chaos.start({"running": Fault("entered", "hold"), "new": Fault("taking-over", "hold")})
    )
    for driver in (first, second):
        driver.wait_for("running", "entered")
        driver.wait_for("new", "taking-over")
    for driver in (first, second):
        driver.release("running", "entered")
        driver.release("new", "taking-over")
    of_first, of_second = errors(first.finish()), errors(second.finish())

    assert of_first["running"] == "Fenced"
    assert "running" not in of_second, "the second driver took over, and continues"
    # Without a checkpoint, Spark also stops one of the two, not always the same one.
    assert {of_first.get("new"), of_second.get("new")} & {"Fenced", "Py4JJavaError"}
    chaos.live().ended()
    chaos.check()


def test_replaced_tasks_that_wake_write_nothing_visible(
    kafka_server: Cluster, tmp_path: Path, keep: Keep
) -> None:
    """Two executors are paused, each in the middle of a task. Spark runs the tasks elsewhere.

    One task has rows in an open transaction, which is swept before the task wakes, so it is fenced.
    The other has begun but written nothing, so there was nothing to sweep. It writes and prepares,
    and the next sweep aborts its branch.
    """
    conf = {
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
        "spark.executor.heartbeatInterval": "1s",
        "spark.network.timeout": "6s",
        "spark.network.timeoutInterval": "1s",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "5",  # so that a task writes several times
    }
    query = Query(
        *("stateless", "tasks"), rows=120, rows_per_batch=40, settings={"sweep_every_s": 0}
    )
    chaos = Chaos(
        *(tmp_path, kafka_server.bootstrap_servers, [query]),
        master="local-cluster[3,1,512]",
        conf=conf,
    )
    wrote = {"batch": 0, "task": 0, "retry": 0}
    began = {"batch": 0, "task": 1, "retry": 0}
    child = keep(
        chaos.start(
            {
                "tasks": [
                    Fault("task:wrote", "outlive", match=wrote, name="wrote"),
                    Fault("task:refused", "note", match=wrote | {"reason": "ProducerFenced"}),
                    Fault("task:began", "outlive", match=began, name="began"),
                    Fault("task:prepared", "note", match=began),
                    Fault("writing", "hold", match={"batch": 1}),
                ]
            }
        )
    )
    with ExitStack() as stack:
        for name in ("wrote", "began"):
            child.wait_for("tasks", name)
            worker = child.report("tasks", name)["pid"]
            executor = parent(parent(worker))  # between them is the daemon that forked it
            os.kill(executor, signal.SIGSTOP)
            stack.callback(wake, executor)
            stack.callback(end, worker)
        child.wait_for("tasks", "writing")  # batch 0 is finished, and batch 1 has swept
        child.release("tasks", "wrote")
        child.wait_for("tasks", "task:refused")
        child.release("tasks", "began")
        child.wait_for("tasks", "task:prepared")
    child.release("tasks", "writing")
    child.finish().ended()
    chaos.check()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def wake(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def end(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
