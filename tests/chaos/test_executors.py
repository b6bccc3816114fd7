"""Executors, workers and tasks that fail after the prepare, and two copies of one task.

Each leaves a branch that no vote names: its rows are in the topic, in a transaction that is never
committed. The batch must succeed, with exactly the rows of the attempt that Spark counted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import cluster
import pytest
from confluent_kafka import Producer
from harness import HERE, Chaos, Fault, Query
from kafka_oracle import open_transactions, quiet

from poundlock.servers.kafka import Cluster

LOCAL_CLUSTER = "local-cluster[2,1,1024]"
EXECUTORS = {
    "spark.executor.memory": "600m",
    "spark.executor.cores": "1",
    "spark.executor.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
    "spark.executorEnv.PYTHONPATH": os.pathsep.join(
        [str(HERE), os.environ.get("PYTHONPATH", "")]  # what the driver imports, too
    ),
}
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "50ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.minTaskRuntime": "0ms",
}


# The visible rows may not depend on the sweep, which runs once a minute.
NO_SWEEP = {"sweep_every_s": 3600}


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with cluster.standalone(tmp_path_factory.mktemp("standalone")) as url:
        yield url


@pytest.fixture
def master(request: pytest.FixtureRequest) -> str:
    return LOCAL_CLUSTER if request.param == "local" else request.getfixturevalue("standalone")


@pytest.mark.parametrize("master", ["local", "standalone"], indirect=True)
def test_output_is_exact_without_faults(kafka_server: Cluster, tmp_path: Path, master: str) -> None:
    query = Query("stateless", rows=100, rows_per_batch=50)
    servers = kafka_server.bootstrap_servers
    chaos = Chaos(tmp_path, servers, [query], master=master, conf=EXECUTORS)
    chaos.live().ended()
    chaos.check()


def orphans(batch: int, then: str) -> list[Fault]:
    """The first attempt that prepares gets a fault after its prepare. The next is only reported."""
    task = {
        "batch": batch,
        "task": 0,
    }  # not the retry number, which starts at 0 again when Spark repeats a stage
    return [
        Fault("task:prepared", then, match=task, name=then),
        Fault("task:prepared", "note", match=task, name=f"{then}, again"),
    ]


def hold(point: str, batch: int) -> Fault:
    return Fault(point, "hold", match={"batch": batch})


def names(faults: list[Fault]) -> list[str]:
    return [fault.report for fault in faults]


@pytest.mark.parametrize("kind", ["outputs", "stateful"])
def test_output_is_exact_when_executor_worker_and_task_are_lost_after_prepare(
    kafka_server: Cluster, tmp_path: Path, kind: str
) -> None:
    query = Query(kind, rows=150, settings=NO_SWEEP)
    servers = kafka_server.bootstrap_servers
    chaos = Chaos(tmp_path, servers, [query], master=LOCAL_CLUSTER, conf=EXECUTORS)
    lost = orphans(1, "kill-worker") + orphans(2, "fail") + orphans(3, "kill-executor")
    child = chaos.start({kind: [*lost, hold("returning", 3)]})
    child.wait_for(kind, "returning")
    chaos.check_underway(kind)  # a leftover branch may not hide later commits
    child.release(kind, "returning")
    life = child.finish().ended()
    assert life.reached == {kind: [*names(lost), "returning"]}
    chaos.check()


def test_a_pipeline_goes_on_when_one_executor_cannot_reach_a_sink(
    kafka_server: Cluster, tmp_path: Path
) -> None:
    """Its tasks fail at once, so it is free for more tasks more often than the executor that works."""
    query = Query("outputs", rows=150)
    servers = kafka_server.bootstrap_servers
    chaos = Chaos(tmp_path, servers, [query], master=LOCAL_CLUSTER, conf=EXECUTORS)
    cut_off = Fault("task:beginning", "cut-off", match={"batch": 1})
    life = chaos.live({"outputs": cut_off}).ended()
    assert life.reached == {"outputs": ["task:beginning"]}
    assert "aborted" not in life.output, "Spark runs the tasks elsewhere, within one attempt"
    chaos.check()


def test_the_sinks_error_is_raised_when_no_executor_reaches_it(
    kafka_server: Cluster, tmp_path: Path
) -> None:
    query = Query("outputs", rows=60, settings={"tries": 1})
    servers = kafka_server.bootstrap_servers
    chaos = Chaos(tmp_path, servers, [query], master=LOCAL_CLUSTER, conf=EXECUTORS)
    batch = {"batch": 1, "sink": "hot"}
    cut_off = [
        Fault("task:beginning", "cut-off", match=batch, name="one"),
        Fault("task:beginning", "cut-off", match=batch, name="the other"),
    ]
    life = chaos.live({"outputs": cut_off})
    assert life.returncode == 1
    assert re.search(
        r"^poundlock\.errors\.Unavailable: \S*outputs.*, sink \S+\] no route to the system from this "
        r"executor\nconnection refused\npipeline outputs ended with Unavailable$",
        life.output,
        re.MULTILINE,
    ), life.tail()
    chaos.live().ended()  # both executors are new
    chaos.check()


def test_output_is_exact_when_spark_runs_two_copies_of_a_task(
    kafka_server: Cluster, tmp_path: Path, standalone: str
) -> None:
    """With speculation, a copy wins while the first attempt has prepared and is still running."""
    query = Query("outputs", rows=90, settings=NO_SWEEP)
    servers, conf = kafka_server.bootstrap_servers, EXECUTORS | SPECULATION
    chaos = Chaos(tmp_path, servers, [query], master=standalone, conf=conf)
    copies = orphans(1, "hold")  # never released: Spark ends the task itself
    child = chaos.start({"outputs": [*copies, hold("returning", 1)]})
    child.wait_for("outputs", "returning")
    chaos.check_underway("outputs")
    child.release("outputs", "returning")
    life = child.finish().ended()
    assert life.reached == {"outputs": [*names(copies), "returning"]}
    chaos.check()


def test_late_rows_of_a_losing_attempt_are_not_visible(
    kafka_server: Cluster, tmp_path: Path
) -> None:
    """A losing attempt can write at any time: between two batches, and after the last one."""
    query = Query("stateless", rows=60, settings=NO_SWEEP)
    chaos = Chaos(tmp_path, kafka_server.bootstrap_servers, [query])
    child = chaos.start({"stateless": [hold("entered", 1), hold("returning", 1)]})
    child.wait_for("stateless", "entered")
    write_late(chaos, "stateless", 998)
    child.release("stateless", "entered")
    child.wait_for("stateless", "returning")
    # The late rows precede the batch in the topic, but do not hide it.
    chaos.check_underway("stateless")
    write_late(chaos, "stateless", 999)
    child.release("stateless", "returning")
    child.finish().ended()
    chaos.check()


def write_late(chaos: Chaos, pipeline: str, attempt: int) -> None:
    """Write to all partitions as a losing attempt would, and leave the transaction open."""
    generation = [it for it in chaos.log(pipeline) if it["kind"] == "Generation"][-1]
    (topic,) = chaos.outputs(pipeline)
    owner = f"poundlock.{chaos.run}-{pipeline}.{generation['identity']}.{generation['number']}"
    name = f"{owner}.{topic}.0.{attempt}.0"
    producer = Producer(quiet(chaos.servers) | {"transactional.id": name})
    producer.init_transactions(30)
    producer.begin_transaction()
    for number in range(chaos.queries[pipeline].partitions):
        producer.produce(topic, value="too late", partition=number)
    assert producer.flush(30) == 0
    assert open_transactions(chaos.servers, [topic])[name] == "Ongoing"
