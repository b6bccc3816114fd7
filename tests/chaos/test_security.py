"""TLS, SASL and ACLs, end to end. Afterwards the password appears nowhere."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from pyspark.sql import SparkSession

import oracle
import poundlock as lock
import trial
from poundlock import sinks
from poundlock.errors import NotAuthorised
from poundlock.servers import kafka as servers

ROWS = [f"row-{number}" for number in range(20)]
# The tests search for the middle of a password. It has every character that some format escapes.
NEEDLE = f"needle{uuid.uuid4().hex}"
PASSWORD = f"\"'\\{NEEDLE}%{{}}$;="
JOB = Path(__file__).with_name("secure_job.py")

# For the JVM, where Spark and its Kafka client log. By default PySpark shows only WARN and above.
LOUD = """
rootLogger.level = info
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %p %c: %m%n%ex
logger.kafka.name = org.apache.kafka
logger.kafka.level = debug
logger.source.name = org.apache.spark.sql.kafka010
logger.source.level = debug
"""

Rule = tuple[ResourceType, str, tuple[AclOperation, ...]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[servers.Cluster]:
    authorizer = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "auto.create.topics.enable": "false",
    }
    with servers.running(
        security="SASL_SSL", users={"driver": PASSWORD}, properties=authorizer
    ) as running:
        yield running


@pytest.fixture(scope="module")
def kafka(cluster: servers.Cluster) -> oracle.Kafka:
    """Kafka, seen by a user with all permissions."""
    return oracle.Kafka(cluster.admin_settings())


@pytest.fixture
def source(kafka: oracle.Kafka) -> str:
    topic = kafka.create(partitions=2)
    kafka.produce(topic, ROWS)
    return topic


@pytest.fixture
def target(kafka: oracle.Kafka) -> str:
    return kafka.create(partitions=2)


def needed(source: str, target: str, group: str, pipeline: str) -> list[Rule]:
    """Return the permissions that a pipeline's user needs, and no others."""
    ours = AclOperation
    return [
        (ResourceType.TOPIC, source, (ours.READ, ours.DESCRIBE)),
        (ResourceType.TOPIC, target, (ours.WRITE, ours.DESCRIBE)),
        (ResourceType.TRANSACTIONAL_ID, f"poundlock.{pipeline}.", (ours.WRITE, ours.DESCRIBE)),
        (ResourceType.GROUP, group, (ours.READ,)),
        (ResourceType.GROUP, "spark-kafka-source-", (ours.READ,)),  # Spark's own consumers
    ]


def grant(kafka: oracle.Kafka, rules: Iterable[Rule]) -> None:
    admin = AdminClient(kafka.settings)
    acls = [
        AclBinding(
            *(kind, name, ResourcePatternType.PREFIXED, "User:driver", "*"),
            *(operation, AclPermissionType.ALLOW),
        )
        for kind, name, operations in rules
        for operation in operations
    ]
    for future in admin.create_acls(acls).values():
        future.result(oracle.SECONDS)


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
def test_the_password_appears_nowhere(
    cluster: servers.Cluster,
    kafka: oracle.Kafka,
    source: str,
    target: str,
    tmp_path: Path,
    mechanism: str,
) -> None:
    """A run with minimal permissions and maximal logging succeeds without showing the password."""
    group = f"g-{source}"
    grant(kafka, needed(source, target, group, "secure"))
    (tmp_path / "events").mkdir()
    (tmp_path / "log4j2.properties").write_text(LOUD)
    config = {
        "settings": cluster.client_settings(mechanism=mechanism),
        "source": source,
        "target": target,
        "group": group,
        "checkpoint": str(tmp_path / "checkpoint"),
        "conf": {
            "spark.ui.enabled": "false",
            "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={tmp_path}/log4j2.properties",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": (tmp_path / "events").as_uri(),
        },
    }
    output = run_child(config, tmp_path)
    kafka.assert_exact(target, ROWS)
    kafka.assert_settled(target)
    assert kafka.group(group, source) == {0: 10, 1: 10}

    searched = [output, *(file for file in tmp_path.rglob("*") if file.is_file())]
    kinds = {str(file.relative_to(tmp_path)).split("/")[0] for file in searched}
    assert {"output", "checkpoint", "events"} <= kinds
    for file in searched:
        assert NEEDLE.encode() not in file.read_bytes(), file
    said = output.read_text()
    for talkative in ("poundlock INFO", "kafka.net", "py4j.clientserver DEBUG", "Step.DECIDED"):
        assert talkative in said, f"{talkative} was not logged, so the search proves nothing"
    for talkative in ("KafkaClient(", "sasl.jaas.config = [hidden]", "DEBUG org.apache.kafka"):
        assert talkative in said, f"{talkative} was not logged, so the search proves nothing"


def run_child(config: dict[str, Any], directory: Path) -> Path:
    """Run `secure_job`, and check the command lines of its processes while it runs."""
    output = directory / "output"
    with output.open("wb") as file:
        child = subprocess.Popen(
            [sys.executable, str(JOB)],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        assert child.stdin is not None
        child.stdin.write(json.dumps(config).encode())
        child.stdin.close()
        oracle.eventually(
            lambda: "Step.DECIDED" in output.read_text() or child.poll() is not None, seconds=180
        )
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                assert NEEDLE.encode() not in file.read_bytes(), file
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
        assert child.wait(180) == 0, output.read_text()[-5000:]
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return output


@pytest.mark.parametrize("of", ["sink", "source"])
def test_a_wrong_password_is_refused_at_the_start(
    spark: SparkSession,
    cluster: servers.Cluster,
    kafka: oracle.Kafka,
    source: str,
    target: str,
    tmp_path: Path,
    of: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is refused before anything starts. The error names the setting but does not show its value."""
    right = cluster.client_settings()
    wrong = right | {"sasl.password": PASSWORD + "x"}
    grant(kafka, needed(source, target, f"g-{source}", trial.TRIAL))
    pipeline = secured(
        *(spark, kafka, source, target, tmp_path / "c"),
        source_settings=wrong if of == "source" else right,
        sink_settings=wrong if of == "sink" else right,
    )
    with (
        caplog.at_level(logging.DEBUG, "poundlock"),
        caplog.at_level(logging.DEBUG, "kafka"),
        pytest.raises(NotAuthorised, match=r"sasl\.password") as refused,
    ):
        pipeline.start(availableNow=True)
    assert not (tmp_path / "c").exists(), "nothing may be written"
    assert NEEDLE not in str(refused.value) + repr(refused.value) + caplog.text


def secured(
    spark: SparkSession,
    kafka: oracle.Kafka,
    source: str,
    target: str,
    checkpoint: Path,
    *,
    source_settings: dict[str, str],
    sink_settings: dict[str, str],
    **options: Any,
) -> lock.Pipeline:
    value = ["CAST(value AS STRING) AS value"]
    frame = trial.read(spark, kafka, source, value, settings=source_settings, **options)
    sink = sinks.Kafka(target, bootstrap_servers=kafka.servers, settings=sink_settings)
    return lock.pipeline(frame, name=trial.TRIAL, checkpoint_location=str(checkpoint)).to(sink)


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (ResourceType.TOPIC, r"operations Write and Describe on topic '{target}'"),
        (ResourceType.TRANSACTIONAL_ID, r"Write and Describe on transactional id 'poundlock\.acl"),
        (ResourceType.GROUP, r"coordinator of {group} .*READ on the Group"),
    ],
    ids=["topic", "transactional-id", "group"],
)
def test_a_missing_permission_is_named(
    spark: SparkSession,
    cluster: servers.Cluster,
    kafka: oracle.Kafka,
    source: str,
    target: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    missing: ResourceType,
    said: str,
) -> None:
    """The error names the permission. After it is granted, the output is exact.

    The offsets of a group are set after the batch is final, so there it is a warning.
    """
    group, name = f"g-{source}", f"acl-{source}"
    rules = needed(source, target, group, name)
    short = [
        (kind, pattern, tuple(op for op in operations if op is AclOperation.DESCRIBE))
        if kind is missing and pattern in (target, group, f"poundlock.{name}.")
        else (kind, pattern, operations)
        for kind, pattern, operations in rules
    ]
    grant(kafka, short)
    settings = cluster.client_settings()
    frame = trial.read(
        *(spark, kafka, source, ["CAST(value AS STRING) AS value"]), settings=settings, group=group
    )
    sink = sinks.Kafka(target, bootstrap_servers=kafka.servers, settings=settings)
    pipeline = lock.pipeline(frame, name=name, checkpoint_location=str(tmp_path)).to(sink)
    said = said.format(target=target, group=group)
    if missing is ResourceType.GROUP:
        with caplog.at_level(logging.WARNING, "poundlock"):
            trial.finish(pipeline)
        assert re.search(said, caplog.text)
        assert NEEDLE not in caplog.text
        kafka.assert_exact(target, ROWS)
    else:
        with pytest.raises(NotAuthorised, match=said) as refused:
            trial.finish(pipeline)
        assert NEEDLE not in str(refused.value)
        assert kafka.values(target) == Counter()
    kafka.assert_settled(target)

    grant(kafka, rules)
    trial.finish(pipeline)
    kafka.assert_exact(target, ROWS)
    kafka.assert_settled(target)
