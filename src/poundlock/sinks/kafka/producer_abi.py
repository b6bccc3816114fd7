"""The part of librdkafka's C interface that we use, on the library inside confluent-kafka.

Only functions and structs of the public header `rdkafka.h` appear here, so any 2.x library fits. No
callback is ever registered: what the library has to say comes out of its event queue.
"""

from __future__ import annotations

import ctypes as c
import ctypes.util
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from poundlock.errors import UsageError

PRODUCER = 0
CONF_UNKNOWN = -2
PARTITION_UNASSIGNED = -1
COPY = 0x2  # the library copies key and value: Arrow's buffers need not outlive the call
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
    """rd_kafka_message_t again, to look at single messages in the library's own memory."""

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
    """rd_kafka_metadata, as far as we read it."""

    _fields_ = (
        ("broker_cnt", c.c_int),
        ("brokers", c.c_void_p),
        ("topic_cnt", c.c_int),
        ("topics", c.POINTER(_MetadataTopic)),
    )


class TopicPartition(c.Structure):
    """rd_kafka_topic_partition_t, as far as we write it."""

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
    "topic_partition_list_add": (c.POINTER(TopicPartition), [_POINTER, _TEXT, c.c_int32]),
    "topic_partition_list_destroy": (None, [_POINTER]),
}


class Library:
    """The loaded library: each function of the table above as a method, without its prefix."""

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
    """Load the librdkafka that confluent-kafka uses. Raises `UsageError` when there is none."""
    try:
        import confluent_kafka  # loads the library, so that we share its copy
    except ImportError as error:
        raise UsageError(
            f"writing to Kafka needs confluent-kafka, which cannot be imported ({error}): run "
            "pip install 'poundlock[kafka]' on the driver and on every executor"
        ) from error
    for path in _candidates(Path(confluent_kafka.__file__).parent):
        # One that cannot be loaded, or lacks one of our functions, gives way to the next.
        with suppress(OSError, AttributeError):
            return Library(path)
    raise UsageError(
        f"confluent-kafka {confluent_kafka.__version__} is installed, but no librdkafka with the "
        "functions we need was found beside it: run pip install --force-reinstall "
        "'poundlock[kafka]' to get the wheel that carries one"
    )


def _candidates(package: Path) -> Iterator[str]:
    # The wheels carry the library beside the package; a source build is linked with another, which
    # is mapped into this process since the import.
    yield from map(str, sorted((package.parent / "confluent_kafka.libs").glob("librdkafka*")))
    maps = Path("/proc/self/maps")
    if maps.exists():
        words = {line.split()[-1] for line in maps.read_text().splitlines()}
        yield from sorted(word for word in words if Path(word).name.startswith("librdkafka"))
    if found := ctypes.util.find_library("rdkafka"):
        yield found


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of the library, copied out of it."""

    code: int
    text: str
    retriable: bool = False

    @property
    def name(self) -> str:
        return text(load().err2name(self.code))


def take(error: int | None) -> Failure | None:
    """Copy an rd_kafka_error_t and free it. None means success."""
    if not error:
        return None
    library = load()
    failure = Failure(
        library.error_code(error),
        text(library.error_string(error)),
        bool(library.error_is_retriable(error)),
    )
    library.error_destroy(error)
    return failure


def fatal(handle: int) -> Failure | None:
    """Return the error that ended this producer for good, if any."""
    reason = c.create_string_buffer(1024)
    code = load().fatal_error(handle, reason, len(reason))
    return Failure(code, text(reason.value)) if code else None


def text(raw: bytes | None) -> str:
    return (raw or b"").decode(errors="replace")
