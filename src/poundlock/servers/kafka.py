"""Apache Kafka in KRaft mode: one broker or several, each of which is also a controller.

with kafka.running(brokers=3) as cluster:      # private, ends with the block
    cluster.bootstrap_servers, cluster.client_settings()
    cluster.kill(2); cluster.start(2)
"""

from __future__ import annotations

import base64
import secrets
import socket
import string
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from poundlock.errors import Unavailable, UsageError
from poundlock.servers import base, demote, programs, rooms
from poundlock.servers.kafka_security import Security
from poundlock.servers.node import Node, lasting, private

NAME = "kafka"

# The number of partitions of each topic that holds transactions or offsets. Each partition has its own
# coordinator, and these are enough to spread over the brokers. Kafka's fifty slow the start down.
_COORDINATORS = 12

_LOGGING = (
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss.SSS",
    "-Dlog4j2.StatusLogger.level=OFF",  # it reports a missing implementation that is not needed
    # It would log two hundred lines of configuration at each start.
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
            raise UsageError(f"brokers={self.brokers}: there must be at least one")

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
        # The last of several brokers cannot hand its partitions over, and would wait for minutes.
        return 20 if self.brokers == 1 else 4

    def url(self, ports: Mapping[str, int]) -> str:
        return ",".join(f"127.0.0.1:{ports[f'client-{node}']}" for node in self.nodes)

    def prepare(self, home: Path, ports: Mapping[str, int]) -> None:
        if "," in str(home):
            raise UsageError(f"Kafka cannot keep data in {home}: choose a path without a comma")
        rooms.show(_own(home))
        if not (home / "formatted").exists():
            for node in self.nodes:
                rooms.delete(_data(home, node))
        for node in self.nodes:
            rooms.hand_over(_data(home, node))
        secure = {}
        if self.security:
            self.security.prepare(_own(home))
            secure = self.security.properties(_own(home).resolve())
        for node in self.nodes:
            settings = self._properties(home, ports, node) | secure | dict(self.properties)
            _write_properties(_config(home, node), settings)
        rooms.show(_own(home))
        if not (home / "formatted").exists():
            self._format(home)
            (home / "formatted").touch()

    def command(self, home: Path, node: str) -> list[str]:
        heap = (f"-Xms{self.heap_mb // 2}m", f"-Xmx{self.heap_mb}m")
        record = node == self.nodes[0]
        config = _config(home, node).resolve()
        return demote.demoted([*_java(*heap, record=record), "kafka.Kafka", str(config)])

    def probe(self, home: Path, ports: Mapping[str, int], nodes: Sequence[str]) -> None:
        """Check that the brokers have joined the cluster and coordinate transactions and groups."""
        for node in nodes:  # faster than the client library, which waits between its attempts
            socket.create_connection(("127.0.0.1", ports[f"client-{node}"]), timeout=2).close()
        kafka = base.import_client("kafka", "kafka", "admin", "errors", "protocol.producer")
        admin = kafka.admin.KafkaAdminClient(
            bootstrap_servers=[f"127.0.0.1:{ports[f'client-{node}']}" for node in nodes],
            bootstrap_timeout_ms=2000,
            request_timeout_ms=5000,
            **_kafka_python(self.security.broker_settings(_own(home)) if self.security else {}),
        )
        with closing(admin):
            listed = admin.describe_cluster()["brokers"]
            ready = {str(it["broker_id"]) for it in listed if not it["is_fenced"]}
            if not ready.issuperset(nodes):
                raise Unavailable(f"only {sorted(ready)} of brokers {nodes} are in the cluster")
            checks = [_check_transactions, _check_groups]
            checks += [partial(_check_producer_id, broker=int(node)) for node in nodes]
            errors = []
            # Send all requests each time: a broker loads each of these on the first request.
            for check in checks:
                try:
                    check(kafka, admin)
                except (kafka.errors.KafkaError, Unavailable) as error:
                    errors.append(error)
            if errors:
                raise errors[0]

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
            "log.dirs": str(_data(home, node).resolve()),
            "default.replication.factor": str(replicas),
            "min.insync.replicas": str(in_sync),
            "offsets.topic.replication.factor": str(replicas),
            "transaction.state.log.replication.factor": str(replicas),
            "transaction.state.log.min.isr": str(in_sync),
            "offsets.topic.num.partitions": str(_COORDINATORS),
            "transaction.state.log.num.partitions": str(_COORDINATORS),
            # A broker that was killed may join again when its old session has expired.
            "broker.session.timeout.ms": "3000",
            "broker.heartbeat.interval.ms": "500",
            "group.initial.rebalance.delay.ms": "0",
            # The default would use a third of the heap.
            "log.cleaner.dedupe.buffer.size": str(8 << 20),
        }

    def _format(self, home: Path) -> None:
        """Format the storage of all brokers with one run of Kafka's tool, since a run takes a second.

        The tool formats it as several data directories of one broker. Only the broker's number in
        `meta.properties` differs from what a run for each broker would write.
        """
        first, *others = self.nodes
        directories = ",".join(str(_data(home, node).resolve()) for node in self.nodes)
        own = _own(home).resolve()
        config, arguments = own / "format.properties", own / "format.arguments"
        # If a key occurs twice, the later line counts.
        text = _config(home, first).read_text() + f"log.dirs={_escape(directories)}\n"
        base.write_private(config, text)
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        lines = ["format", f"--cluster-id={cluster}", f"--config={config}"]
        lines += self.security.format_arguments() if self.security else []
        # A file, because it contains passwords and every user can read a command line.
        base.write_private(arguments, "\n".join(lines) + "\n")
        rooms.show(_own(home))
        command = [*_java("-Xmx128m"), "kafka.tools.StorageTool", f"@{arguments}"]
        try:
            base.run_tool(demote.demoted(command), f"Kafka could not format its storage in {home}")
        finally:
            arguments.unlink()
        for node in others:
            file = _data(home, node) / "meta.properties"
            text = file.read_text().replace(f"node.id={first}\n", f"node.id={node}\n")
            base.write_private(file, text)
            rooms.hand_over(_data(home, node))


class Cluster(Node):
    """A running Kafka. Its nodes are the brokers, numbered from 1."""

    server: KafkaServer

    @property
    def bootstrap_servers(self) -> str:
        return self.url

    @property
    def brokers(self) -> list[int]:
        """The numbers of all brokers, whether they run or not."""
        return [int(node) for node in self.server.nodes]

    def client_settings(
        self, user: str | None = None, *, mechanism: str = "PLAIN"
    ) -> dict[str, str]:
        """Return what a client needs to connect, as settings of librdkafka."""
        settings = {"bootstrap.servers": self.bootstrap_servers}
        if security := self.server.security:
            settings |= security.client_settings(_own(self.directory), user, mechanism)
        return settings

    def admin_settings(self) -> dict[str, str]:
        """Return the same for a client that has every right, whatever an authorizer denies others."""
        settings = {"bootstrap.servers": self.bootstrap_servers}
        if security := self.server.security:
            settings |= security.broker_settings(_own(self.directory))
        return settings


def running(
    directory: Path | str | None = None,
    *,
    brokers: int = 1,
    properties: Mapping[str, str] | None = None,
    security: str | None = None,
    users: Mapping[str, str] | None = None,
    heap_mb: int = 384,
) -> AbstractContextManager[Cluster]:
    """Run a private cluster; see `node.private`.

    `properties` of the brokers override ours. With `security="SASL_SSL"`, `users` are names and
    passwords. Without `users` there is one with a random password, in `client_settings()`.
    """
    server = KafkaServer(brokers, properties or {}, _security(security, users), heap_mb)
    # Brokers that are killed would not write the archive of their classes.
    return private(Cluster, server, directory, kill=False)


def up(directory: Path | str | None = None, *, brokers: int | None = None) -> Cluster:
    """Start the cluster that outlives the program, if it is not running; see `base.home_of`.

    Without `brokers`, there are as many as at the last start, or one.
    """
    state = base.State.load(base.home_of(NAME, directory))
    before = state.options.get("brokers", 1) if state else 1
    return lasting(Cluster, KafkaServer(brokers or before), directory)


def _security(protocol: str | None, users: Mapping[str, str] | None) -> Security | None:
    if protocol not in (None, "SASL_SSL"):
        raise UsageError(f"security={protocol!r}: a local Kafka takes only None or 'SASL_SSL'")
    if protocol is None and users:
        raise UsageError("users= needs security='SASL_SSL': give it, or leave users= out")
    return Security(users or {"poundlock": secrets.token_hex(8)}) if protocol else None


def _own(home: Path) -> Path:
    """Return the directory of what the brokers read and may not change."""
    return home / "config"


def _config(home: Path, node: str) -> Path:
    return _own(home) / f"server-{node}.properties"


def _data(home: Path, node: str) -> Path:
    return home / f"data-{node}"


def _java(*flags: str, record: bool = False) -> list[str]:
    return programs.java_command("kafka-server", *flags, *_LOGGING, record=record)


# No such transactions and groups exist, so the right answer is that they are unknown. Only a loaded
# coordinator gives it, and the request changes nothing. The names differ in the last letter, so their
# hashes are consecutive, and every coordinator gets a request.
_UNKNOWN = [f"poundlock-probe-{letter}" for letter in string.ascii_letters[:_COORDINATORS]]


def _check_transactions(kafka: Any, admin: Any) -> None:
    for name in _UNKNOWN:
        with suppress(kafka.errors.TransactionalIdNotFoundError):
            admin.describe_transactions([name])


def _check_groups(kafka: Any, admin: Any) -> None:
    for group in admin.describe_groups(_UNKNOWN).values():
        if group["error"] and kafka.errors.GroupIdNotFoundError.__name__ not in group["error"]:
            raise Unavailable(group["error"])


def _check_producer_id(kafka: Any, admin: Any, broker: int) -> None:
    message = kafka.protocol.producer.InitProducerIdRequest
    request = message(transactional_id=None, transaction_timeout_ms=60_000)

    async def send() -> Any:
        return await admin._manager.send(request, node_id=broker)

    code = admin._manager.run(send).error_code
    if code:
        raise kafka.errors.for_code(code)()


def _kafka_python(settings: Mapping[str, str]) -> dict[str, str]:
    """Translate settings of librdkafka to those of kafka-python."""
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
    """Escape a value as java.util.Properties reads it."""
    escaped = value.replace("\\", "\\\\").replace("\n", "\\n")
    return "".join(it if it.isascii() else f"\\u{ord(it):04x}" for it in escaped)
