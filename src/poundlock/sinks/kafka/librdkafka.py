"""The part of librdkafka that we use: its C interface, and its errors translated.

The library is the one inside confluent-kafka, and no other. Only functions and structs of the public
header `rdkafka.h` are used. No callback is registered: the library reports through
its event queue.
"""

from __future__ import annotations

import base64
import ctypes as c
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

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

PRODUCER = 0
PARTITION_UNASSIGNED = -1
COPY = 0x2  # the library copies key and value, so Arrow's buffers may be freed after the call
PARTITION_PER_MESSAGE = 0x8
PURGE_ALL_AT_ONCE = 0x1 | 0x2 | 0x4  # queued, in flight, and do not wait for it
DESTROY_WITHOUT_CLOSE = 0x8

EVENT_DELIVERY, EVENT_ERROR, EVENT_STATISTICS = 0x1, 0x8, 0x40

QUEUE_FULL = -184
UNKNOWN_TOPIC = 3  # or partition
MESSAGE_TOO_LARGE = 10
TIMED_OUT = -185

# rd_kafka_message_t.
MESSAGE = np.dtype(
    {
        "names": ["err", "partition", "value", "value_len", "key", "key_len", "offset"],
        "formats": ["i4", "i4", "u8", "u8", "u8", "u8", "i8"],
        "offsets": [0, 16, 24, 32, 40, 48, 56],
        "itemsize": 72,
    }
)


class Message(c.Structure):
    """rd_kafka_message_t again, to read single messages in the library's memory."""

    _fields_ = (
        ("err", c.c_int),
        ("topic", c.c_void_p),
        ("partition", c.c_int32),
        ("value", c.c_void_p),
        ("value_len", c.c_size_t),
        ("key", c.c_void_p),
        ("key_len", c.c_size_t),
        ("offset", c.c_int64),
        ("private", c.c_void_p),
    )


class _Memory(c.Structure):
    _fields_ = (("address", c.c_void_p), ("size", c.c_size_t))


class _Argument(c.Union):
    _fields_ = (
        ("i32", c.c_int32),
        ("i64", c.c_int64),
        ("pointer", c.c_void_p),
        ("memory", _Memory),
        ("pad", c.c_char * 64),
    )


class Argument(c.Structure):
    """rd_kafka_vu_t: one tagged argument of rd_kafka_produceva."""

    _fields_ = (("tag", c.c_int), ("u", _Argument))


# Topic handle, flags, partition, key, value, timestamp, headers.
ROW_TAGS = (2, 7, 3, 5, 4, 8, 10)


class _MetadataTopic(c.Structure):
    _fields_ = (
        ("topic", c.c_char_p),
        ("partition_cnt", c.c_int),
        ("partitions", c.c_void_p),
        ("err", c.c_int),
    )


class Metadata(c.Structure):
    """rd_kafka_metadata, up to the fields that we read."""

    _fields_ = (
        ("broker_cnt", c.c_int),
        ("brokers", c.c_void_p),
        ("topic_cnt", c.c_int),
        ("topics", c.POINTER(_MetadataTopic)),
    )


class _TopicPartition(c.Structure):
    """rd_kafka_topic_partition_t, up to the fields that we write."""

    _fields_ = (("topic", c.c_char_p), ("partition", c.c_int32), ("offset", c.c_int64))


_INT, _INT64, _SIZE, _TEXT, _POINTER = c.c_int, c.c_int64, c.c_size_t, c.c_char_p, c.c_void_p

# Result and arguments, without the prefix rd_kafka_.
_FUNCTIONS = {
    "conf_new": (_POINTER, []),
    "conf_destroy": (None, [_POINTER]),
    "conf_set": (_INT, [_POINTER, _TEXT, _TEXT, _TEXT, _SIZE]),
    "conf_set_events": (None, [_POINTER, _INT]),
    "new": (_POINTER, [_INT, _POINTER, _TEXT, _SIZE]),
    "destroy_flags": (None, [_POINTER, _INT]),
    "version_str": (_TEXT, []),
    "err2name": (_TEXT, [_INT]),
    "err2str": (_TEXT, [_INT]),
    "fatal_error": (_INT, [_POINTER, _TEXT, _SIZE]),
    "error_code": (_INT, [_POINTER]),
    "error_string": (_TEXT, [_POINTER]),
    "error_is_retriable": (_INT, [_POINTER]),
    "error_destroy": (None, [_POINTER]),
    "topic_new": (_POINTER, [_POINTER, _TEXT, _POINTER]),
    "topic_name": (_TEXT, [_POINTER]),
    "topic_destroy": (None, [_POINTER]),
    "metadata": (_INT, [_POINTER, _INT, _POINTER, c.POINTER(c.POINTER(Metadata)), _INT]),
    "metadata_destroy": (None, [c.POINTER(Metadata)]),
    "queue_get_main": (_POINTER, [_POINTER]),
    "queue_poll": (_POINTER, [_POINTER, _INT]),
    "queue_yield": (None, [_POINTER]),
    "queue_destroy": (None, [_POINTER]),
    "event_type": (_INT, [_POINTER]),
    "event_error": (_INT, [_POINTER]),
    "event_error_string": (_TEXT, [_POINTER]),
    "event_error_is_fatal": (_INT, [_POINTER]),
    "event_stats": (_TEXT, [_POINTER]),
    "event_message_count": (_SIZE, [_POINTER]),
    "event_message_array": (_SIZE, [_POINTER, _POINTER, _SIZE]),
    "event_destroy": (None, [_POINTER]),
    "message_produce_errstr": (_TEXT, [_POINTER]),
    "produce_batch": (_INT, [_POINTER, c.c_int32, _INT, _POINTER, _INT]),
    "produceva": (_POINTER, [_POINTER, _POINTER, _SIZE]),
    "headers_new": (_POINTER, [_SIZE]),
    "header_add": (_INT, [_POINTER, _POINTER, c.c_ssize_t, _POINTER, c.c_ssize_t]),
    "headers_destroy": (None, [_POINTER]),
    "flush": (_INT, [_POINTER, _INT]),
    "purge": (_INT, [_POINTER, _INT]),
    "init_transactions": (_POINTER, [_POINTER, _INT]),
    "begin_transaction": (_POINTER, [_POINTER]),
    "abort_transaction": (_POINTER, [_POINTER, _INT]),
    "send_offsets_to_transaction": (_POINTER, [_POINTER, _POINTER, _POINTER, _INT]),
    "consumer_group_metadata_new": (_POINTER, [_TEXT]),
    "consumer_group_metadata_destroy": (None, [_POINTER]),
    "topic_partition_list_new": (_POINTER, [_INT]),
    "topic_partition_list_add": (c.POINTER(_TopicPartition), [_POINTER, _TEXT, c.c_int32]),
    "topic_partition_list_destroy": (None, [_POINTER]),
}


class Library:
    """The loaded library. Each function of the table above is a method, without its prefix."""

    def __init__(self, path: str):
        library = c.CDLL(path)
        self.path = path
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, f"rd_kafka_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


@cache
def load() -> Library:
    """Load the librdkafka that confluent-kafka contains. Raises `UsageError` if there is none."""
    try:
        import confluent_kafka  # loads the library, so that we share its copy
    except ImportError as error:
        raise UsageError(
            f"writing to Kafka needs confluent-kafka, which cannot be imported ({error}): run "
            "pip install 'poundlock[kafka]' on the driver and on every executor"
        ) from error
    path = _bundled(Path(confluent_kafka.__file__).parent)
    try:
        return Library(str(path))
    except (OSError, AttributeError) as error:
        raise UsageError(
            f"{path} of confluent-kafka {confluent_kafka.__version__} cannot be loaded, or lacks a "
            f"function that Poundlock needs ({error}). {_CURE}"
        ) from error


_CURE = "To get the wheel that contains it, run: pip install --force-reinstall 'poundlock[kafka]'"


def _bundled(package: Path) -> Path:
    """Return the library that the wheel of confluent-kafka has installed, with the wheel's own content.

    Another librdkafka, such as the system's, is not accepted: its structs and errors may differ.
    """
    name = "confluent-kafka"
    try:
        listed = metadata.distribution(name).files or []
    except metadata.PackageNotFoundError:
        listed = []
    beside = ("confluent_kafka.libs", "confluent_kafka/.dylibs")
    files = [it for it in listed if it.parent.as_posix() in beside and "librdkafka" in it.name]
    hashes = [(package.parent / it, it.hash) for it in files if it.hash is not None]
    if not hashes:
        raise UsageError(
            f"the confluent-kafka in {package} contains no librdkafka, and Poundlock uses no other "
            f"one. {_CURE}"
        )
    [(path, expected), *_] = hashes
    if (found := _digest(path, expected.mode)) != expected.value:
        raise UsageError(
            f"{path} is not the file that confluent-kafka has installed (its hash is "
            f"{found or 'unknown: it is missing'}). Find out who changed it. {_CURE}"
        )
    return path


def _digest(file: Path, kind: str) -> str:
    """Return the hash of a file as the records of installed packages write it."""
    try:
        raw = hashlib.new(kind, file.read_bytes()).digest()
    except OSError:
        return ""
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of the library, copied out of it."""

    code: int
    text: str
    retriable: bool = False

    @property
    def name(self) -> str:
        return decode(load().err2name(self.code))


def take_error(error: int | None) -> Failure | None:
    """Copy an rd_kafka_error_t and free it. Returns None for success."""
    if not error:
        return None
    library = load()
    failure = Failure(
        library.error_code(error),
        decode(library.error_string(error)),
        bool(library.error_is_retriable(error)),
    )
    library.error_destroy(error)
    return failure


def fatal_error(handle: int) -> Failure | None:
    """Return the error that ended this producer for good. None if there is none."""
    reason = c.create_string_buffer(1024)
    code = load().fatal_error(handle, reason, len(reason))
    return Failure(code, decode(reason.value)) if code else None


def set_option(conf: int, name: str, value: str) -> str | None:
    """Set one option. Return why the library refuses it, None if it does not."""
    if "\0" in name + value:  # C would see only the part before it
        return "it contains a NUL character"
    reason = c.create_string_buffer(512)
    if load().conf_set(conf, name.encode(), value.encode(), reason, len(reason)) == 0:
        return None
    return decode(reason.value)


def decode(raw: bytes | None) -> str:
    return (raw or b"").decode(errors="replace")


# Errors that only say that the producer had failed before. The library must be asked for the reason.
CONSEQUENCES = frozenset({"_PURGE_QUEUE", "_PURGE_INFLIGHT", "_STATE", "_FATAL"})

# Errors that say that nobody answered, but not why.
TIMEOUTS = frozenset({"_TIMED_OUT", "_TIMED_OUT_QUEUE", "_MSG_TIMED_OUT", "_TRANSPORT"})

# The library's names of errors (`rd_kafka_err2name`), our error, and what to do. Names with a leading
# underscore are the library's own errors. The others are answers of the broker.
_ERROR_RULES: tuple[tuple[str, type[PoundlockError], str], ...] = (
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
_RULE_BY_NAME = {
    name: (kind, advice) for names, kind, advice in _ERROR_RULES for name in names.split()
}
_OTHER = (Rejected, "the attempt is aborted and the batch runs again")


def translate_error(
    failure: Failure,
    doing: str,
    *,
    topic: str | None = None,
    group: str | None = None,
    transactional_id: str | None = None,
) -> PoundlockError:
    """Return our error for `failure`. `doing` says what could not be done."""
    kind, advice = _RULE_BY_NAME.get(failure.name, _OTHER)
    advice = advice.format(
        topic=f"topic {topic!r}" if topic else "the topic",
        group=f"consumer group {group!r}" if group else "the consumer group",
        transactional_id=(
            f"transactional id {transactional_id!r}" if transactional_id else "transactional ids"
        ),
    )
    reason = f"{failure.name}: {failure.text}" if failure.text else failure.name
    return kind(f"{doing}: {reason}. What to do: {advice}")
