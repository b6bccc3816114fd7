"""Apache Kafka in KRaft mode: one broker or several, each its own controller too.

    with kafka.running(brokers=3) as cluster:      # private, ended on exit
        cluster.bootstrap_servers, cluster.client_settings()
        cluster.kill(2); cluster.start(2)

`up`, `down` and `status` keep one cluster that outlives the program.
"""

from __future__ import annotations

import base64
import os
import secrets
import shutil
import socket
import string
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from poundlock.errors import Unavailable, UsageError
from poundlock.jvm import jars, java
from poundlock.servers import base, guard
from poundlock.servers.kafka_security import Security

NAME = "kafka"

# Partitions of the topics that hold transactions and offsets, each with a coordinator of its own:
# enough to spread over the brokers. Kafka's fifty only slow the start down.
_COORDINATORS = 12

# A test broker lives shortly: the first compiler stage is enough, and one thread to collect garbage.
_JVM = (
    *("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"),
    "-XX:+ExitOnOutOfMemoryError",  # rather dead than half alive
)
_LOGGING = (
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss.SSS",
    "-Dlog4j2.StatusLogger.level=OFF",  # it misses an implementation, which nobody needs
    # Two hundred lines of configuration at each start.
    "-Dorg.slf4j.simpleLogger.log.org.apache.kafka.common.config.AbstractConfig=warn",
)


@dataclass(frozen=True)
class KafkaServer:
    """What to run; see `base.Server`."""

    brokers: int = 1
    properties: Mapping[str, str] = field(default_factory=dict)
    security: Security | None = None
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
        return {"brokers": self.brokers, "security": "SASL_SSL" if self.security else None}

    @property
    def stop_timeout(self) -> float:
        # The last of several brokers has nobody left to hand over to, and would wait for minutes.
        return 20 if self.brokers == 1 else 4

    def url(self, ports: Mapping[str, int]) -> str:
        return ",".join(f"127.0.0.1:{ports[f'client-{node}']}" for node in self.nodes)

    def prepare(self, home: Path, ports: Mapping[str, int]) -> None:
        if "," in str(home):
            raise UsageError(f"Kafka cannot have data in {home}: choose a path without a comma.")
        secure = {}
        if self.security:
            self.security.prepare(home)
            secure = self.security.properties(home)
        for node in self.nodes:
            settings = self._properties(home, ports, node) | secure | dict(self.properties)
            _write_properties(_config(home, node), settings)
        if not (home / "formatted").exists():
            self._format(home)
            (home / "formatted").touch()

    def command(self, home: Path, node: str) -> list[str]:
        heap = (f"-Xms{self.heap_mb // 2}m", f"-Xmx{self.heap_mb}m")
        record = node == self.nodes[0]
        return [*_java(*heap, record=record), "kafka.Kafka", str(_config(home, node))]

    def probe(self, home: Path, ports: Mapping[str, int], nodes: Sequence[str]) -> None:
        """Ready is a broker that was let into the cluster and coordinates transactions and groups."""
        for node in nodes:  # far sooner noticed than by the driver, which waits between its tries
            socket.create_connection(("127.0.0.1", ports[f"client-{node}"]), timeout=2).close()
        kafka = _driver()
        admin = kafka.admin.KafkaAdminClient(
            bootstrap_servers=[f"127.0.0.1:{ports[f'client-{node}']}" for node in nodes],
            bootstrap_timeout_ms=2000,
            request_timeout_ms=5000,
            **_kafka_python(self.security.broker_settings(home) if self.security else {}),
        )
        with closing(admin):
            listed = admin.describe_cluster()["brokers"]
            ready = {str(it["broker_id"]) for it in listed if not it["is_fenced"]}
            if not ready.issuperset(nodes):
                raise Unavailable(f"of brokers {nodes} only {sorted(ready)} are in the cluster")
            questions = [_ask_transactions, _ask_groups]
            questions += [partial(_ask_producer_id, broker=int(node)) for node in nodes]
            refusals = []
            # All of them each time: a broker makes these things ready when it is first asked.
            for ask in questions:
                try:
                    ask(kafka, admin)
                except (kafka.errors.KafkaError, Unavailable) as error:
                    refusals.append(error)
            if refusals:
                raise refusals[0]

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

        The tool believes in one broker with several data directories. What it makes differs from
        what it would make for each broker in nothing but the broker's number in `meta.properties`.
        """
        for node in self.nodes:
            shutil.rmtree(_data(home, node), ignore_errors=True)
        first, *others = self.nodes
        directories = ",".join(str(_data(home, node)) for node in self.nodes)
        config, arguments = home / "format.properties", home / "format.arguments"
        # The later of two lines with the same key counts.
        text = _config(home, first).read_text() + f"log.dirs={_escape(directories)}\n"
        base.write_private(config, text)
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        lines = ["format", f"--cluster-id={cluster}", f"--config={config}"]
        lines += self.security.format_arguments() if self.security else []
        # By a file, for there are passwords in it and a command line can be read by everybody.
        base.write_private(arguments, "\n".join(lines) + "\n")
        command = [*_java("-Xmx128m"), "kafka.tools.StorageTool", f"@{arguments}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        arguments.unlink()
        if done.returncode != 0:
            said = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
            raise Unavailable(f"Kafka could not format its storage in {home}. It says:\n{said}")
        for node in others:
            file = _data(home, node) / "meta.properties"
            file.write_text(file.read_text().replace(f"node.id={first}\n", f"node.id={node}\n"))


class Cluster:
    """A Kafka that runs, and the means to make it suffer. Brokers are numbered from 1."""

    def __init__(self, server: KafkaServer, home: Path, owner: str = ""):
        self._server = server
        self._instance = base.Instance(server, home, owner)

    @property
    def bootstrap_servers(self) -> str:
        return self._instance.url

    @property
    def directory(self) -> Path:
        return self._instance.home

    @property
    def brokers(self) -> list[int]:
        """The numbers of all brokers, running or not."""
        return [int(node) for node in self._server.nodes]

    def running(self) -> list[int]:
        return [int(node) for node in self._instance.running()]

    def client_settings(
        self, user: str | None = None, *, mechanism: str = "PLAIN"
    ) -> dict[str, str]:
        """What a client needs to connect, spelled as librdkafka spells it."""
        settings = {"bootstrap.servers": self.bootstrap_servers}
        if security := self._server.security:
            settings |= security.client_settings(self.directory, user, mechanism)
        return settings

    def admin_settings(self) -> dict[str, str]:
        """The same for a client with every right, even where an authorizer refuses the others."""
        settings = {"bootstrap.servers": self.bootstrap_servers}
        if security := self._server.security:
            settings |= security.broker_settings(self.directory)
        return settings

    def up(self) -> None:
        """Start every broker that is not running."""
        self._instance.up()

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
    security: str | None = None,
    users: Mapping[str, str] | None = None,
    heap_mb: int = 384,
) -> Iterator[Cluster]:
    """A private cluster, ended on exit, and also if this program is killed.

    Its data goes with it unless a directory was given.

    `properties` are the brokers' own, and go before ours. With `security="SASL_SSL"`, `users` are
    names and passwords; none given, there is one with a random password, in `client_settings()`.
    """
    server = KafkaServer(brokers, properties or {}, _security(security, users), heap_mb)
    private = directory is None
    home = Path(directory or tempfile.mkdtemp(prefix="poundlock-kafka-")).absolute()
    owner = uuid.uuid4().hex
    with guard.watched(home, owner, wipe=private):
        base.down(home)  # what an earlier program may have left there
        try:
            cluster = Cluster(server, home, owner)
            cluster.up()
            yield cluster
        finally:
            base.down(home)
            if private:
                shutil.rmtree(home, ignore_errors=True)


def up(directory: Path | str | None = None, *, brokers: int | None = None) -> Cluster:
    """Start the cluster that outlives the program, or find it running.

    It lives in `directory`/kafka; see `base.home_of`. Not given, `brokers` is as before, or 1.
    """
    home = base.home_of(NAME, directory)
    state = base.State.load(home)
    before = state.options.get("brokers", 1) if state else 1
    cluster = Cluster(KafkaServer(brokers or before), home)
    cluster.up()
    return cluster


def down(directory: Path | str | None = None, *, wipe: bool = False) -> None:
    """End what `up` started; with `wipe`, delete the data too."""
    base.down(base.home_of(NAME, directory), wipe=wipe)


def status(directory: Path | str | None = None) -> base.Status:
    """Address, pids and logs of what `up` started."""
    return base.status(base.home_of(NAME, directory))


def _security(protocol: str | None, users: Mapping[str, str] | None) -> Security | None:
    if protocol not in (None, "SASL_SSL"):
        raise UsageError(f"security={protocol!r}: a local Kafka offers None or 'SASL_SSL'.")
    if protocol is None and users:
        raise UsageError("users= needs security='SASL_SSL'.")
    return Security(users or {"poundlock": secrets.token_hex(8)}) if protocol else None


def _config(home: Path, node: str) -> Path:
    return home / f"server-{node}.properties"


def _data(home: Path, node: str) -> Path:
    return home / f"data-{node}"


def _java(*flags: str, record: bool = False) -> list[str]:
    files = jars.paths("kafka-server")
    archive = java.ClassArchive.of(files, jars.cache().with_name("classes"))
    classpath = os.pathsep.join(str(file) for file in files)
    shared = archive.flags(record=record)
    return [str(java.executable()), *_JVM, *shared, *flags, *_LOGGING, "-cp", classpath]


def _driver() -> Any:
    try:
        import kafka.admin
        import kafka.errors
        import kafka.protocol.producer
    except ImportError as error:
        raise UsageError(
            "The Kafka drivers are not installed. Run: pip install 'poundlock[kafka]'"
        ) from error
    return kafka


# Nobody has these transactions and groups, so the right answer is that they are unknown. To give it,
# the coordinator must be loaded; and nothing is left behind by asking. The names differ in the last
# letter, so their hashes are in sequence, and every coordinator is asked.
_UNKNOWN = [
    f"poundlock-probe-{dead_letter}" for dead_letter in string.ascii_letters[:_COORDINATORS]
]


def _ask_transactions(kafka: Any, admin: Any) -> None:
    for name in _UNKNOWN:
        with suppress(kafka.errors.TransactionalIdNotFoundError):
            admin.describe_transactions([name])


def _ask_groups(kafka: Any, admin: Any) -> None:
    for group in admin.describe_groups(_UNKNOWN).values():
        if group["error"] and kafka.errors.GroupIdNotFoundError.__name__ not in group["error"]:
            raise Unavailable(group["error"])


def _ask_producer_id(kafka: Any, admin: Any, broker: int) -> None:
    message = kafka.protocol.producer.InitProducerIdRequest
    request = message(transactional_id=None, transaction_timeout_ms=60_000)

    async def ask() -> Any:
        return await admin._manager.send(request, node_id=broker)

    code = admin._manager.run(ask).error_code
    if code:
        raise kafka.errors.for_code(code)()


def _kafka_python(settings: Mapping[str, str]) -> dict[str, str]:
    """Settings of librdkafka in kafka-python's spelling."""
    names = {
        "security.protocol": "security_protocol",
        "sasl.mechanism": "sasl_mechanism",
        "sasl.username": "sasl_plain_username",
        "sasl.password": "sasl_plain_password",
        "ssl.ca.location": "ssl_cafile",
    }
    return {names[key]: value for key, value in settings.items()}


def _write_properties(file: Path, settings: Mapping[str, str]) -> None:
    lines = [f"{key}={_escape(str(value))}\n" for key, value in settings.items()]
    base.write_private(file, "".join(lines))


def _escape(value: str) -> str:
    """As java.util.Properties reads it."""
    escaped = value.replace("\\", "\\\\").replace("\n", "\\n")
    return "".join(it if it.isascii() else f"\\u{ord(it):04x}" for it in escaped)
