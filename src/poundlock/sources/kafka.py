"""Kafka as a source: Spark's own connector, and offsets for a consumer group.

Spark keeps a query's offsets in its checkpoint and never commits them to a group, so lag tools see
nothing. A source with a group hands the offsets back: after the batch is final (ON_BATCH), inside the
batch's decision (TRANSACTIONAL), or not at all (DISABLED). Spark always reads on from the checkpoint,
never from the group.
"""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Mapping, Sequence, Set
from enum import Enum
from typing import TYPE_CHECKING, Any

from poundlock.core.model import checked_name
from poundlock.errors import PoundlockError, UsageError
from poundlock.secret import SECRET_NAME, resolve, resolve_all
from poundlock.sinks.kafka import cluster
from poundlock.sinks.kafka.client import ClientOwner
from poundlock.sinks.kafka.offsets import (
    GroupOffsetsBranch,
    GroupOffsetsParticipant,
    Offsets,
    commit_offsets,
)
from poundlock.sinks.kafka.settings import MECHANISMS, SECURITY_PREFIXES, client_settings, servers

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

logger = logging.getLogger("poundlock")

SOURCE_OPTION = "poundlock.source"


class OffsetMode(Enum):
    """When the consumer group learns how far the pipeline is."""

    ON_BATCH = "on_batch"  # Flink's ON_CHECKPOINTS
    TRANSACTIONAL = "transactional"  # as one more branch of the batch's decision
    DISABLED = "disabled"


class KafkaSource(ClientOwner):
    """What a pipeline must know about a Kafka source that was opened with `read_kafka`."""

    def __init__(
        self,
        group: str | None,
        mode: OffsetMode,
        settings: Mapping[str, str],
        topics: Sequence[str] = (),
    ):
        self.group = group or ""
        self.mode = mode if group else OffsetMode.DISABLED
        self.settings = dict(settings)
        self.topics = tuple(topics)  # none if a pattern names them
        self._pending: dict[int, Offsets] = {}  # by batch, until the batch is final
        self._participant: GroupOffsetsParticipant | None = None

    @property
    def name(self) -> str:
        """The name of the offsets' branch among the pipeline's sinks."""
        text = "".join(char if char.isalnum() or char in "_-" else "-" for char in self.group)
        return checked_name("consumer group", f"offsets-{text}"[:63])

    @property
    def transactional(self) -> bool:
        return self.mode is OffsetMode.TRANSACTIONAL

    @property
    def key(self) -> tuple[str, str, OffsetMode]:
        """Sources with the same key share one group, and hand their offsets back together."""
        return self.settings["bootstrap.servers"], self.group, self.mode

    def preflight(self) -> None:
        """Check that we can log in and that the topics exist. Changes nothing."""
        topics = self.client.run(cluster.topics, self.topics)
        missing = [name for name, found in topics.items() if not found]
        if missing:
            raise UsageError(
                f"the source's topics {', '.join(missing)} do not exist at "
                f"{self.settings['bootstrap.servers']}: create them, or correct the names"
            )
        if self.transactional:
            for warning in self.participant().preflight():
                logger.warning("group %s: %s", self.group, warning)

    def participant(self) -> GroupOffsetsParticipant:
        """Return the participant that commits the offsets inside the decision."""
        if self._participant is None:
            self._participant = GroupOffsetsParticipant(self.name, self.group, self.settings)
        return self._participant

    def branch(self, offsets: Offsets) -> GroupOffsetsBranch:
        """Return the branch of one batch, which ends at `offsets`."""
        return GroupOffsetsBranch(self.participant(), offsets)

    def positions(self, offsets: Mapping[str, Mapping[str, int]]) -> Offsets:
        """Convert a Kafka source's end offsets from Spark's form."""
        return {
            (topic, int(partition)): offset
            for topic, partitions in offsets.items()
            for partition, offset in partitions.items()
        }

    def pend(self, batch: int, offsets: Offsets) -> None:
        """Keep a batch's offsets until the batch is final."""
        if self.mode is OffsetMode.ON_BATCH:
            self._pending[batch] = offsets

    def completed(self, batch: int) -> None:
        """Commit a final batch's offsets to the group, and drop older ones.

        Runs in the batch's own thread, so there is never more than one commit at a time. An error is
        only logged: the batch is final, and the offsets of the next one cover its offsets.
        """
        if self.mode is not OffsetMode.ON_BATCH:
            return
        if batch not in self._pending:
            logger.warning(
                "group %s: batch %d is final, but its offsets are unknown; they will be handed "
                "back with the next batch",
                *(self.group, batch),
            )
            return
        offsets = self._pending[batch]
        self._pending = {later: kept for later, kept in self._pending.items() if later > batch}
        if not offsets:
            return
        try:
            self.client.run(commit_offsets, self.group, offsets)
        except PoundlockError as error:
            self.not_handed_back(batch, error)

    def not_handed_back(self, batch: int, error: PoundlockError) -> None:
        """Log why a final batch's offsets could not be committed to the group."""
        logger.warning(
            "group %s: the offsets of batch %d were not handed back, but will be with those of the "
            "next batch: %s",
            *(self.group, batch, error),
        )


# By token. A plan holds only the token, so it holds no secret.
_sources: dict[str, KafkaSource] = {}


def source_of(options: Mapping[str, str]) -> KafkaSource | None:
    """Return the source that a plan's options name, if it was opened with `read_kafka`."""
    return _sources.get(options.get(SOURCE_OPTION, ""))


def read_kafka(
    spark: SparkSession,
    topic: str | Sequence[str] | None = None,
    *,
    bootstrap_servers: str,
    pattern: str | None = None,
    starting_offsets: str | Mapping[str, Mapping[str, int]] | None = None,
    include_headers: bool = False,
    group: str | None = None,
    offsets: str | OffsetMode = OffsetMode.ON_BATCH,
    read_uncommitted: bool = False,
    settings: Mapping[str, str] | None = None,
    **options: Any,
) -> DataFrame:
    """Open Kafka topics as a streaming DataFrame, with Spark's own connector.

    Args:
        topic: One topic or several.
        bootstrap_servers: `host:port`, several with commas; or `env:NAME` or `file:PATH` with them.
        pattern: A regular expression for topics, instead of `topic`.
        starting_offsets: "earliest", "latest" (Spark's default) or offsets by topic and partition.
        group: A consumer group that gets the pipeline's offsets, for lag tools.
        offsets: When the group gets them: "on_batch", "transactional" or "disabled".
        read_uncommitted: Also read rows of transactions that may still be aborted.
        settings: Security settings in librdkafka's names, the same as for a Kafka sink.
        options: Any further option of Spark's connector, such as maxOffsetsPerTrigger.
    """
    mode = _offset_mode(offsets)
    known = client_settings(bootstrap_servers, settings)
    if (topic is None) == (pattern is None):
        raise UsageError("read_kafka needs a topic (or several), or a pattern=")
    resolved = resolve_all(known)
    chosen: dict[str, str] = {"kafka.bootstrap.servers": ",".join(servers(resolved))}
    topics: Sequence[str] = ()
    if pattern is not None:
        chosen["subscribePattern"] = pattern
    else:
        assert topic is not None
        named = topic.split(",") if isinstance(topic, str) else topic
        topics = [name.strip() for name in named]
        chosen["subscribe"] = ",".join(topics)
    isolation = "read_uncommitted" if read_uncommitted else "read_committed"
    chosen["kafka.isolation.level"] = isolation
    if starting_offsets is not None:
        is_text = isinstance(starting_offsets, str)
        chosen["startingOffsets"] = starting_offsets if is_text else json.dumps(starting_offsets)  # pyright: ignore
    if include_headers:
        chosen["includeHeaders"] = "true"
    chosen |= _java_security(resolved, options)
    for key, value in options.items():
        chosen[key] = resolve(key, str(value)) if SECRET_NAME.search(key.lower()) else str(value)
    token = uuid.uuid4().hex
    _sources[token] = KafkaSource(group, mode, known, topics)
    for name in ("py4j.clientserver", "py4j.java_gateway"):
        logging.getLogger(name).addFilter(_NO_SECRETS)  # a second time changes nothing
    reader = spark.readStream.format("kafka").option(SOURCE_OPTION, token)
    return reader.options(**chosen).load()


class _NoSecrets(logging.Filter):
    """Drops calls with a password. At DEBUG py4j logs every call with its arguments."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage().lower()
        return record.levelno > logging.DEBUG or not SECRET_NAME.search(text)


_NO_SECRETS = _NoSecrets()


def _offset_mode(offsets: str | OffsetMode) -> OffsetMode:
    if str(offsets).lower() == "kafka_periodic":
        raise UsageError(
            "offsets='kafka_periodic' is refused: Spark's consumers must not commit on their own. "
            "Use 'on_batch', which is also more exact"
        )
    try:
        return OffsetMode(offsets)
    except ValueError:
        modes = ", ".join(f"'{mode.value}'" for mode in OffsetMode)
        raise UsageError(f"offsets={offsets!r} is not known: choose one of {modes}") from None


# Settings that Spark's Java client has in another form: its option, which the user gives instead.
_INSTEAD = {
    "ssl.certificate.location": "kafka.ssl.keystore.location",
    "ssl.certificate.pem": "kafka.ssl.keystore.certificate.chain",
    "ssl.key.location": "kafka.ssl.keystore.location",
    "ssl.key.pem": "kafka.ssl.keystore.key",
}
_TRANSLATED = {
    "security.protocol",
    "sasl.mechanism",
    "sasl.mechanisms",
    "sasl.username",
    "sasl.password",
    "ssl.ca.location",
    "ssl.ca.pem",
    "ssl.cipher.suites",
    "ssl.endpoint.identification.algorithm",
    "enable.ssl.certificate.verification",
}


def _java_security(settings: Mapping[str, str], options: Mapping[str, Any]) -> dict[str, str]:
    """Translate librdkafka's security settings for Spark's Java client.

    Raises `UsageError` for a setting that it has no equivalent for, unless Spark's option is given.
    """
    given = {name.lower() for name in options}
    mine = {name: value for name, value in settings.items() if name.startswith(SECURITY_PREFIXES)}
    for name in mine:
        instead = _INSTEAD.get(name, f"kafka.{name}")
        if name not in _TRANSLATED and instead not in given:
            raise _untranslated(name, instead)
    protocol = settings.get("security.protocol", "plaintext").upper()
    if protocol == "PLAINTEXT":
        if lost := sorted(mine.keys() - {"security.protocol"}):
            raise UsageError(
                f"{', '.join(lost)}: without security.protocol the source connects in plain text, and "
                "these have no effect. Set security.protocol to SSL, SASL_SSL or SASL_PLAINTEXT"
            )
        return {}
    java = {"kafka.security.protocol": protocol}
    if "SASL" in protocol:
        java |= _java_sasl(settings)
    if "SSL" in protocol:
        java |= _java_tls(settings, given)
    return java


def _untranslated(name: str, instead: str) -> UsageError:
    return UsageError(
        f"Spark's connector cannot take {name} from settings=, and without it the source would be less "
        f"secure than a sink. Give Spark's own option {instead}, if Kafka's Java client has it, or "
        "remove the setting"
    )


def _java_sasl(settings: Mapping[str, str]) -> dict[str, str]:
    # librdkafka has two names for this setting. Its default is GSSAPI.
    given = settings.get("sasl.mechanism") or settings.get("sasl.mechanisms") or "GSSAPI"
    mechanism = given.upper()
    if mechanism not in MECHANISMS:
        raise UsageError(
            f"sasl.mechanism {given} is not supported: set it to one of {', '.join(MECHANISMS)}"
        )
    module = "plain.PlainLoginModule" if mechanism == "PLAIN" else "scram.ScramLoginModule"
    return {
        "kafka.sasl.mechanism": mechanism,
        "kafka.sasl.jaas.config": (
            f"org.apache.kafka.common.security.{module} required "
            f"username={_jaas(settings.get('sasl.username', ''))} "
            f"password={_jaas(settings.get('sasl.password', ''))};"
        ),
    }


def _java_tls(settings: Mapping[str, str], given: Set[str]) -> dict[str, str]:
    java: dict[str, str] = {}
    location, pem = settings.get("ssl.ca.location"), settings.get("ssl.ca.pem")
    if pem or (location and location != "probe"):
        java["kafka.ssl.truststore.type"] = "PEM"
    if pem:
        java["kafka.ssl.truststore.certificates"] = pem
    elif location and location != "probe":
        java["kafka.ssl.truststore.location"] = location
    if ciphers := settings.get("ssl.cipher.suites"):
        names = [name for name in re.split("[:, ]+", ciphers) if name]
        if all(name.startswith("TLS_") for name in names):
            java["kafka.ssl.cipher.suites"] = ",".join(names)
        elif "kafka.ssl.cipher.suites" not in given:  # OpenSSL has other names for these than Java
            raise _untranslated("ssl.cipher.suites", "kafka.ssl.cipher.suites, with Java's names")
    algorithm = settings.get("ssl.endpoint.identification.algorithm", "https").lower()
    if algorithm not in ("https", "none"):
        raise UsageError("ssl.endpoint.identification.algorithm must be https or none")
    if algorithm == "none":
        java["kafka.ssl.endpoint.identification.algorithm"] = ""
    if settings.get("enable.ssl.certificate.verification", "true").lower() not in (
        "true",
        "1",
        "t",
    ):
        raise UsageError(
            "Spark's connector always verifies the brokers' certificate: remove "
            "enable.ssl.certificate.verification, and give the certificate's issuer as ssl.ca.location"
        )
    return java


def _jaas(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
