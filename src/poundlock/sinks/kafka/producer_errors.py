"""librdkafka's errors in our words: the one place where they are translated.

Everything here goes by the library's own names (`rd_kafka_err2name`): those with a leading underscore
are its own findings, the others are the broker's answers.
"""

from __future__ import annotations

from poundlock.errors import (
    BadRow,
    NotAuthorised,
    PoundlockError,
    ProducerFenced,
    Rejected,
    SequenceBroken,
    Unavailable,
    UsageError,
)
from poundlock.sinks.kafka.producer_abi import Failure

# What only says that the producer had already failed: the reason is to be asked for.
CONSEQUENCES = frozenset({"_PURGE_QUEUE", "_PURGE_INFLIGHT", "_STATE", "_FATAL"})

# What says that nobody answered, but not why.
TIMEOUTS = frozenset({"_TIMED_OUT", "_TIMED_OUT_QUEUE", "_MSG_TIMED_OUT", "_TRANSPORT"})

# Name, or names, to our error and to what should be done. The places in braces are filled in.
_RULES: tuple[tuple[str, type[PoundlockError], str], ...] = (
    (
        "MSG_SIZE_TOO_LARGE RECORD_LIST_TOO_LARGE",
        BadRow,
        "raise max.message.bytes of {topic} (and message.max.bytes of the sink with it), or lower "
        "batch.size of the sink if no single row is that large",
    ),
    (
        "UNKNOWN_TOPIC_OR_PART _UNKNOWN_TOPIC _UNKNOWN_PARTITION",
        UsageError,
        "create {topic} before the pipeline starts, or correct its name",
    ),
    ("TOPIC_EXCEPTION", UsageError, "Kafka does not allow the name of {topic}: choose another"),
    (
        "INVALID_RECORD INVALID_MSG INVALID_TIMESTAMP _INVALID_DIFFERENT_RECORD _BAD_MSG",
        BadRow,
        "{topic} does not take such rows: a compacted topic needs a key in every row, and "
        "timestamps must be within the topic's limits",
    ),
    (
        "OUT_OF_ORDER_SEQUENCE_NUMBER DUPLICATE_SEQUENCE_NUMBER UNKNOWN_PRODUCER_ID "
        "_GAPLESS_GUARANTEE _INCONSISTENT",
        SequenceBroken,
        "nothing is lost: the attempt is aborted and the batch runs again. If it comes back, look "
        "for a partition that lost acknowledged records (unclean leader election, deleted records)",
    ),
    (
        "_FENCED INVALID_PRODUCER_EPOCH PRODUCER_FENCED INVALID_PRODUCER_ID_MAPPING",
        ProducerFenced,
        "a newer producer uses the same transactional id, or the transaction timed out; nothing is "
        "lost: the attempt is aborted. If it comes back, look for a second driver of this pipeline",
    ),
    (
        "TOPIC_AUTHORIZATION_FAILED",
        NotAuthorised,
        "grant the sink's user the operations Write and Describe on {topic}",
    ),
    (
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
        NotAuthorised,
        "grant the sink's user the operations Write and Describe on {transactional_id}",
    ),
    (
        "GROUP_AUTHORIZATION_FAILED",
        NotAuthorised,
        "grant the sink's user the operation Read on {group}",
    ),
    (
        "CLUSTER_AUTHORIZATION_FAILED",
        NotAuthorised,
        "grant the sink's user the operation IdempotentWrite on the cluster",
    ),
    (
        "_AUTHENTICATION SASL_AUTHENTICATION_FAILED",
        NotAuthorised,
        "check sasl.mechanism, sasl.username and sasl.password (or the TLS certificate) of the sink",
    ),
    (
        "INVALID_TRANSACTION_TIMEOUT",
        UsageError,
        "lower transaction.timeout.ms of the sink, or raise transaction.max.timeout.ms of the "
        "brokers to it",
    ),
    (
        "UNSUPPORTED_VERSION UNSUPPORTED_FOR_MESSAGE_FORMAT UNSUPPORTED_COMPRESSION_TYPE "
        "_UNSUPPORTED_FEATURE _NOT_IMPLEMENTED INVALID_CONFIG POLICY_VIOLATION _INVALID_ARG",
        UsageError,
        "the brokers, or this librdkafka, cannot do what the sink's settings ask for: change them",
    ),
    (
        "_TIMED_OUT _TIMED_OUT_QUEUE _MSG_TIMED_OUT _TRANSPORT _ALL_BROKERS_DOWN _RESOLVE _SSL "
        "REQUEST_TIMED_OUT NETWORK_EXCEPTION BROKER_NOT_AVAILABLE LEADER_NOT_AVAILABLE "
        "NOT_LEADER_FOR_PARTITION REPLICA_NOT_AVAILABLE NOT_ENOUGH_REPLICAS "
        "NOT_ENOUGH_REPLICAS_AFTER_APPEND COORDINATOR_LOAD_IN_PROGRESS COORDINATOR_NOT_AVAILABLE "
        "NOT_COORDINATOR CONCURRENT_TRANSACTIONS KAFKA_STORAGE_ERROR THROTTLING_QUOTA_EXCEEDED",
        Unavailable,
        "check that the brokers are up, can be reached from the executors, and speak the sink's "
        "security.protocol on that port; the batch is run again",
    ),
)
_BY_NAME = {name: (kind, advice) for names, kind, advice in _RULES for name in names.split()}
_UNNAMED = (Rejected, "the attempt is aborted and the batch runs again")


def translate(
    failure: Failure,
    doing: str,
    *,
    topic: str | None = None,
    group: str | None = None,
    transactional_id: str | None = None,
) -> PoundlockError:
    """Return our error for `failure`, which came while `doing`."""
    kind, advice = _BY_NAME.get(failure.name, _UNNAMED)
    advice = advice.format(
        topic=f"topic {topic!r}" if topic else "the topic",
        group=f"consumer group {group!r}" if group else "the consumer group",
        transactional_id=(
            f"transactional id {transactional_id!r}" if transactional_id else "transactional ids"
        ),
    )
    said = f"{failure.name}: {failure.text}" if failure.text else failure.name
    return kind(f"{doing}: {said}. What to do: {advice}")
