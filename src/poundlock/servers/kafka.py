"""Apache Kafka in KRaft mode: one broker or several, each its own controller too.

    with kafka.running(brokers=3) as cluster:      # private, ended on exit
        cluster.bootstrap_servers, cluster.client_settings()
        cluster.kill(2); cluster.start(2)
"""

from __future__ import annotations

import base64
import os
import shutil
import string
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from poundlock import jars, java
from poundlock.errors import Unavailable, UsageError
from poundlock.servers import base

NAME = "kafka"

# Partitions of the topics that hold transactions and offsets, each with a coordinator of its own:
# enough to spread over the brokers. Kafka's fifty only slow the start down.
_COORDINATORS = 12

# A test broker lives shortly: the first compiler stage is enough, and one thread to collect garbage.
_JVM = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")
_LOGGING = (
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss.SSS",
    # Two hundred lines of configuration at each start.
    "-Dorg.slf4j.simpleLogger.log.org.apache.kafka.common.config.AbstractConfig=warn",
)


@dataclass(frozen=True)
class KafkaServer:
    """What to run; see `base.Server`."""

    brokers: int = 1
    properties: Mapping[str, str] = field(default_factory=dict)
    heap_mb: int = 384

    name = NAME

    def __post_init__(self) -> None:
        if self.brokers < 1:
            raise UsageError(f"brokers={self.brokers}: there must be at least one.")

    @property
    def nodes(self) -> Sequence[str]:
        return [str(number) for number in range(1, self.brokers + 1)]

    @property
    def port_names(self) -> Sequence[str]:
        return [f"{role}-{node}" for node in self.nodes for role in ("client", "controller")]

    @property
    def options(self) -> Mapping[str, Any]:
        return {"brokers": self.brokers}

    def url(self, ports: Mapping[str, int]) -> str:
        return ",".join(f"127.0.0.1:{ports[f'client-{node}']}" for node in self.nodes)

    def prepare(self, home: Path, ports: Mapping[str, int]) -> None:
        for node in self.nodes:
            settings = self._properties(home, ports, node) | dict(self.properties)
            _write_properties(_config(home, node), settings)
        if not all((_data(home, node) / "meta.properties").exists() for node in self.nodes):
            self._format(home)

    def command(self, home: Path, node: str) -> list[str]:
        heap = (f"-Xms{self.heap_mb // 2}m", f"-Xmx{self.heap_mb}m")
        return [*_java(*heap), "kafka.Kafka", str(_config(home, node))]

    def probe(self, home: Path, ports: Mapping[str, int], nodes: Sequence[str]) -> None:
        """Ready are brokers that the controller has let in, and that have loaded transactions."""
        admin_client, errors = _driver()
        servers = [f"127.0.0.1:{ports[f'client-{node}']}" for node in nodes]
        admin = admin_client(
            bootstrap_servers=servers, bootstrap_timeout_ms=2000, request_timeout_ms=5000
        )
        try:
            listed = admin.describe_cluster()["brokers"]
            ready = {str(it["broker_id"]) for it in listed if not it.get("is_fenced")}
            if not ready.issuperset(nodes):
                raise Unavailable(f"of brokers {nodes} only {sorted(ready)} are in the cluster")
            # Nobody has these ids, so the right answer is that they are unknown. To give it, the
            # coordinator of each must be loaded; and nothing is left behind by asking. They differ
            # in the last letter, so their hashes are in sequence and every coordinator is asked.
            for letter in string.ascii_letters[:_COORDINATORS]:
                with suppress(errors.TransactionalIdNotFoundError):
                    admin.describe_transactions([f"poundlock-probe-{letter}"])
        finally:
            admin.close()

    def _properties(self, home: Path, ports: Mapping[str, int], node: str) -> dict[str, str]:
        replicas = min(self.brokers, 3)
        in_sync = max(1, replicas - 1)
        voters = [f"{it}@127.0.0.1:{ports[f'controller-{it}']}" for it in self.nodes]
        client, controller = ports[f"client-{node}"], ports[f"controller-{node}"]
        return {
            "process.roles": "broker,controller",
            "node.id": node,
            "controller.quorum.voters": ",".join(voters),
            "listeners": f"CLIENT://127.0.0.1:{client},CONTROLLER://127.0.0.1:{controller}",
            "listener.security.protocol.map": "CLIENT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "CLIENT",
            "log.dirs": str(_data(home, node)),
            "default.replication.factor": str(replicas),
            "min.insync.replicas": str(in_sync),
            "offsets.topic.replication.factor": str(replicas),
            "transaction.state.log.replication.factor": str(replicas),
            "transaction.state.log.min.isr": str(in_sync),
            "offsets.topic.num.partitions": str(_COORDINATORS),
            "transaction.state.log.num.partitions": str(_COORDINATORS),
            # A broker that was killed is let in again when its old session has run out.
            "broker.session.timeout.ms": "3000",
            "broker.heartbeat.interval.ms": "500",
            "group.initial.rebalance.delay.ms": "0",
            # The default takes a third of the heap at once.
            "log.cleaner.dedupe.buffer.size": str(8 << 20),
        }

    def _format(self, home: Path) -> None:
        """Format all brokers' storage by one run of Kafka's tool, which takes a second each time.

        The tool believes in one broker with several data directories; they differ from what each
        broker would get for itself in nothing but the number of the broker in `meta.properties`.
        """
        for node in self.nodes:
            shutil.rmtree(_data(home, node), ignore_errors=True)
        config = home / "format.properties"
        first = self.nodes[0]
        settings = _read_properties(_config(home, first))
        settings["log.dirs"] = ",".join(str(_data(home, node)) for node in self.nodes)
        _write_properties(config, settings)
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        arguments = ["kafka.tools.StorageTool", "format", f"--cluster-id={cluster}"]
        _run([*_java("-Xmx128m"), *arguments, f"--config={config}"])
        for node in self.nodes:
            file = _data(home, node) / "meta.properties"
            text = file.read_text().replace(f"node.id={first}\n", f"node.id={node}\n")
            file.write_text(text)


class Cluster:
    """A Kafka that runs, and the means to make it suffer. Brokers are numbered from 1."""

    def __init__(self, instance: base.Instance):
        self._instance = instance

    @property
    def bootstrap_servers(self) -> str:
        return self._instance.url

    @property
    def directory(self) -> Path:
        return self._instance.home

    @property
    def brokers(self) -> list[int]:
        """The numbers of all brokers, running or not."""
        return [int(node) for node in self._instance.server.nodes]

    def running(self) -> list[int]:
        return [int(node) for node in self._instance.running()]

    def client_settings(self) -> dict[str, str]:
        """What a client needs, spelled as librdkafka and the Java clients spell it."""
        return {"bootstrap.servers": self.bootstrap_servers}

    def start(self, broker: int, *, wait: bool = True) -> None:
        """Start a broker again. Do not wait when too few others run to elect a controller."""
        self._instance.start(str(broker), timeout=base.START_TIMEOUT if wait else None)

    def stop(self, broker: int) -> None:
        """SIGTERM: the broker hands over its partitions and closes its files."""
        self._instance.stop(str(broker))

    def kill(self, broker: int) -> None:
        """SIGKILL."""
        self._instance.kill(str(broker))

    def pause(self, broker: int) -> None:
        """SIGSTOP: alive, connected, and silent."""
        self._instance.pause(str(broker))

    def resume(self, broker: int) -> None:
        """SIGCONT."""
        self._instance.resume(str(broker))

    def wait_ready(self, timeout: float = base.START_TIMEOUT) -> None:
        """Wait until all brokers that were started answer."""
        self._instance.wait_ready(timeout=timeout)

    def log(self, broker: int) -> Path:
        return self._instance.log(str(broker))


@contextmanager
def running(
    directory: Path | str | None = None,
    *,
    brokers: int = 1,
    properties: Mapping[str, str] | None = None,
    heap_mb: int = 384,
) -> Iterator[Cluster]:
    """A private cluster, ended on exit. Its data goes with it unless a directory was given."""
    home = Path(directory or tempfile.mkdtemp(prefix="poundlock-kafka-"))
    instance = base.Instance(KafkaServer(brokers, properties or {}, heap_mb), home)
    try:
        instance.up()
        yield Cluster(instance)
    finally:
        instance.down(wipe=directory is None)
        if directory is None:
            shutil.rmtree(home, ignore_errors=True)


def _config(home: Path, node: str) -> Path:
    return home / f"server-{node}.properties"


def _data(home: Path, node: str) -> Path:
    return home / f"data-{node}"


def _java(*flags: str) -> list[str]:
    classpath = os.pathsep.join(str(path) for path in jars.paths("kafka-server"))
    return [str(java.executable()), *_JVM, *flags, *_LOGGING, "-cp", classpath]


def _run(command: list[str]) -> None:
    import subprocess

    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"{command[-3:]} failed:\n{done.stdout}{done.stderr}")


def _driver() -> tuple[Any, Any]:
    try:
        from kafka import errors
        from kafka.admin import KafkaAdminClient
    except ImportError as error:
        raise UsageError(
            "The Kafka drivers are not installed. Run: pip install 'poundlock[kafka]'"
        ) from error
    return KafkaAdminClient, errors


def _write_properties(file: Path, settings: Mapping[str, str]) -> None:
    lines = [f"{key}={value}\n" for key, value in settings.items()]
    base.write_private(file, "".join(lines))


def _read_properties(file: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in file.read_text().splitlines())
