"""librdkafka's settings: our defaults, and what must be left to us."""

from __future__ import annotations

import ctypes as c
import re
from collections.abc import Mapping

from poundlock.errors import UsageError
from poundlock.sinks.kafka import producer_abi as abi

# For speed in long batches, and no waiting in short ones. Users may set all of these.
DEFAULTS: Mapping[str, str] = {
    # Where Java's producers, and so Spark's own sink, would put the same key.
    "partitioner": "murmur2_random",
    "linger.ms": "5",
    "batch.size": "300000",
    "batch.num.messages": "100000",
    "message.max.bytes": "1000000",
    # Together they bound the memory of a task, however long its batch. More messages make it slower:
    # the library walks over them several times, and should find them in the processor's cache.
    "queue.buffering.max.messages": "50000",
    "queue.buffering.max.kbytes": "32768",
    # Half of it is how long the library waits between its first two connections.
    "reconnect.backoff.ms": "20",
    # A misspelled topic is an error, not a new topic.
    "allow.auto.create.topics": "false",
    # Would make the end of every producer wait for a last report.
    "enable.metrics.push": "false",
}

# The producer id is read from the statistics. Each report costs time in proportion to the partitions
# of all topics written to, and a short batch waits for one: this is long for the one, short for the
# other.
STATISTICS_MS = "50"

_OURS: Mapping[str, str] = {
    "transactional.id": "each task's producer gets its own",
    "statistics.interval.ms": "the producer id is read from the statistics",
    "enable.gapless.guarantee": "the transaction already gives more",
    "delivery.report.only.error": "every acknowledgement is checked",
    "log.queue": "nobody reads that queue",
    "test.mock.num.brokers": "the rows would be written to no real broker",
}
_TRANSACTIONAL_VALUES: Mapping[str, frozenset[str]] = {
    "enable.idempotence": frozenset({"true"}),
    "acks": frozenset({"all", "-1"}),
    "request.required.acks": frozenset({"all", "-1"}),
}
SECRET = re.compile(r"password|secret|token|credential|passphrase|jaas|\.pem$|\.config$")


def check_settings(settings: Mapping[str, str], *, transactional: bool = True) -> None:
    """Raise `UsageError` for settings that are unknown or would break the promise."""
    for name, value in settings.items():
        reason = _OURS.get(name)
        if reason is None and name.endswith("_cb"):
            reason = "callbacks cannot travel to the executors"
        allowed = _TRANSACTIONAL_VALUES.get(name)
        if transactional and allowed and str(value).lower() not in allowed:
            reason = f"exactly-once output needs {' or '.join(sorted(allowed))}"
        if reason is not None:
            raise UsageError(f"the Kafka setting {name!r} cannot be set here: {reason}. Remove it")
    if not (settings.get("bootstrap.servers") or settings.get("metadata.broker.list")):
        raise UsageError("the Kafka setting 'bootstrap.servers' is missing: give host:port[,...]")
    abi.load().conf_destroy(configure(settings))


def configure(settings: Mapping[str, str]) -> int:
    """Return a new rd_kafka_conf_t, which the caller owns."""
    library = abi.load()
    conf = library.conf_new()
    reason = c.create_string_buffer(512)
    for name, value in settings.items():
        given = str(value)
        if "\0" in name + given:  # C would see only the part before it
            code, why = 1, "it contains a NUL character"
        else:
            code = library.conf_set(conf, name.encode(), given.encode(), reason, len(reason))
            why = abi.text(reason.value)
        if code != 0:
            library.conf_destroy(conf)
            version = abi.text(library.version_str())
            raise UsageError(
                f"librdkafka {version} refuses the Kafka setting {name!r}: "
                f"{'its value is wrong' if SECRET.search(name) else why}. Correct or remove it; "
                "all settings are listed in librdkafka's CONFIGURATION.md"
            )
    return conf
