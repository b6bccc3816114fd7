"""A Kafka producer over Arrow columns: librdkafka through ctypes, without a Python call per row.

One producer is one transaction. A task begins it, writes columns, flushes, takes the identity and the
offsets for its receipt, and drops the producer. The transaction stays open on the broker, for the
driver to commit.

Rules of this file:

- `rd_kafka_produce_batch` takes an array of pointers into Arrow's buffers. The event queue gives one
  report for all rows of one request. Only rows with headers or timestamps are sent one by one.
- A thread reads the event queue from beginning to end. The library needs it: its flush and abort wait
  until another thread takes the reports. Without it statistics would pile up while a task waits for
  input.
- The first failure ends the branch. After it every call except `abort` and `drop` raises that failure,
  so nothing can be prepared after a row was refused.
"""

from __future__ import annotations

import ctypes as c
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa

from poundlock.errors import BadRow, PoundlockError, Rejected, Unavailable, UsageError
from poundlock.secret import SECRET_NAME, resolve_all
from poundlock.sinks.kafka import librdkafka
from poundlock.sinks.kafka.columns import Rows
from poundlock.sinks.kafka.librdkafka import CONSEQUENCES, TIMEOUTS, Failure, translate_error
from poundlock.sinks.kafka.reports import Handle, Ledger
from poundlock.sinks.kafka.settings import DEFAULTS, STATISTICS_MS, check_settings, configure
from poundlock.sinks.kafka.types import ProducerIdentity, TopicPartition

_ROWS_AT_ONCE = 10_000  # per call into the library: the pointers to them fit into the cache
_SLICE_MS = 100  # a call into the library lasts no longer, so that a failure is seen soon
_FIRST_SLICE_MS = 20
_SETTLE_S = 10.0  # how long a report may take from the library's queue to our ledger
_NEW_TOPIC_S = 5.0  # how long a topic may stay unknown: brokers learn of a new one after a moment
_NO_TRANSACTION = (
    "there is no transaction: make the producer with a transactional id, and call begin"
)


class ArrowProducer:
    """One producer and, with a `transactional_id`, one transaction. For one thread.

    Always `drop` or `abort` it, or leave its `with` block. Only this frees its threads and memory.
    """

    def __init__(
        self,
        settings: Mapping[str, str],
        *,
        transactional_id: str | None,
        stall_timeout_s: float = 120.0,
    ):
        settings = resolve_all(settings)
        check_settings(settings, transactional=transactional_id is not None)
        settings = {**DEFAULTS, **settings}
        if transactional_id is not None:
            settings["transactional.id"] = transactional_id
            settings["statistics.interval.ms"] = STATISTICS_MS
        else:
            settings.setdefault("enable.idempotence", "true")
        self._transactional_id = transactional_id
        self._stall_timeout_s = stall_timeout_s
        self._largest_message = settings["message.max.bytes"]
        self._secrets = [v for k, v in settings.items() if v and SECRET_NAME.search(k)]
        self._library = librdkafka.load()
        self._ledger = Ledger()
        self._sent = 0
        self._began = False
        self._failed: PoundlockError | None = None
        self._messages = np.zeros(_ROWS_AT_ONCE, librdkafka.MESSAGE)
        self._handle = Handle(self._create(settings), self._ledger)
        self._finalizer = weakref.finalize(self, self._handle.close)

    def _create(self, settings: Mapping[str, str]) -> int:
        conf = configure(settings)
        events = librdkafka.EVENT_DELIVERY | librdkafka.EVENT_ERROR | librdkafka.EVENT_STATISTICS
        self._library.conf_set_events(conf, events)
        reason = c.create_string_buffer(512)
        producer = self._library.new(librdkafka.PRODUCER, conf, reason, len(reason))
        if not producer:
            self._library.conf_destroy(conf)  # the library frees it only after success
            why = self._without_secrets(librdkafka.decode(reason.value))
            raise UsageError(
                f"librdkafka refuses the Kafka settings: {why}. Correct the settings that it names"
            )
        return producer

    def __repr__(self) -> str:
        return f"ArrowProducer(transactional_id={self._transactional_id!r})"

    def __enter__(self) -> ArrowProducer:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    # The transaction.

    def begin(self, timeout_s: float) -> None:
        """Fence every earlier producer of the same transactional id, and begin."""
        if self._transactional_id is None:
            return
        doing = "the transaction could not begin"
        self._call(self._library.init_transactions, doing, timeout_s)
        if failure := librdkafka.take_error(self._library.begin_transaction(self._producer)):
            raise self._fail(self._error(failure, doing))
        self._began = True

    def write(
        self,
        topic: str,
        *,
        keys: pa.Array | None,
        values: pa.Array,
        partitions: pa.Array | None = None,
        headers: pa.Array | None = None,
        timestamps: pa.Array | None = None,
    ) -> None:
        """Queue rows, and wait only for room in the queue. They are safe after `flush`.

        A null key means no key, and a null value a tombstone. For a null partition the partitioner
        chooses. A null timestamp means now. Rows of one partition keep their order. `headers` are
        lists of structs of a string and a binary. `timestamps` are milliseconds since 1970.
        """
        if self._transactional_id is not None and not self._began:
            raise UsageError(_NO_TRANSACTION)
        self._check()
        try:
            handle, partition_count = self._topic(topic)
            rows = Rows(topic, partition_count, keys, values, partitions, headers, timestamps)
            if rows.headers is None and rows.timestamps is None:
                self._submit(handle, rows)
            else:
                self._submit_singly(handle, rows)
        except PoundlockError as error:
            self._failed = error
            raise
        except BaseException:
            self._failed = Rejected(
                "a write was interrupted, and nobody knows which of its rows were sent: "
                "abort this branch and run the batch again"
            )
            raise

    def flush(self, timeout_s: float) -> None:
        """Wait until every row is acknowledged without error."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._check()
            left = deadline - time.monotonic()
            if self._library.flush(self._producer, _milliseconds(left, _SLICE_MS)) == 0:
                break
            if left <= 0:
                raise self._stalled(f"rows were not acknowledged within {timeout_s:g} s")
        with self._ledger.changed:  # the ledger is updated a moment after the library knows
            self._ledger.changed.wait_for(
                lambda: self._ledger.rows >= self._sent or self._ledger.problem, timeout=_SETTLE_S
            )
        self._check()
        self._check_acknowledged()

    def _check_acknowledged(self) -> None:
        """Raise unless every row was acknowledged and the transaction has not failed."""
        with self._ledger.changed:
            rows, unplaced = self._ledger.rows, sorted(self._ledger.unplaced)
        if failure := self._cause():
            raise self._fail(self._error(failure, "the transaction failed"))
        if rows != self._sent:
            message = f"{self._sent} rows were sent but {rows} acknowledged: run the batch again"
            raise self._fail(Rejected(message))
        if unplaced:
            message = (
                f"the brokers acknowledged rows of {unplaced} without their offsets, so nobody could "
                "prove later whether they were committed: run the batch again"
            )
            raise self._fail(Rejected(message))

    def identity(self, timeout_s: float = 10.0) -> ProducerIdentity:
        """Return the producer id and epoch. With them any process can end this transaction."""
        if not self._began:
            raise UsageError(_NO_TRANSACTION)
        with self._ledger.changed:
            self._ledger.changed.wait_for(
                lambda: self._ledger.identity or self._ledger.problem, timeout=timeout_s
            )
            identity = self._ledger.identity
        self._check()
        if identity is None:
            raise Unavailable(
                f"librdkafka reported no producer id within {timeout_s:g} s: the executor is "
                "overloaded, or this version of librdkafka reports it elsewhere. Use a version that "
                "pip install 'poundlock[kafka]' chooses"
            )
        return identity

    @property
    def acknowledged(self) -> dict[TopicPartition, tuple[int, int]]:
        """First and last acknowledged offset, by topic and partition."""
        with self._ledger.changed:
            return dict(self._ledger.offsets)

    def send_offsets(
        self, group_id: str, offsets: Mapping[TopicPartition, int], timeout_s: float = 30.0
    ) -> None:
        """Set the consumer group's offsets if, and only if, the transaction commits."""
        if not self._began:
            raise UsageError(_NO_TRANSACTION)
        library = self._library
        group = library.consumer_group_metadata_new(_encode_name(group_id, "consumer group"))
        entries = library.topic_partition_list_new(len(offsets))
        try:
            for (topic, partition), offset in offsets.items():
                name = _encode_name(topic, "topic")
                entry = library.topic_partition_list_add(entries, name, partition)
                entry.contents.offset = offset
            self._call(
                lambda handle, ms: library.send_offsets_to_transaction(handle, entries, group, ms),
                f"the offsets of consumer group {group_id!r} were not added to the transaction",
                timeout_s,
                group=group_id,
            )
        finally:
            library.topic_partition_list_destroy(entries)
            library.consumer_group_metadata_destroy(group)

    def drop(self) -> None:
        """Free everything at once. The transaction stays open on the broker. May be repeated."""
        self._finalizer()

    def abort(self, timeout_s: float) -> None:
        """Abort the transaction if there is time, and drop. Never raises."""
        if self._began and not self._handle.closed:
            self._repeat(self._library.abort_transaction, timeout_s)
        self.drop()

    # Sending rows.

    def _topic(self, name: str) -> tuple[int, int]:
        """Return the handle of a topic, and how many partitions it has.

        Asking first finds missing topics and permissions before anything is sent. There is another
        reason: with partition numbers of a topic that it does not know yet, `rd_kafka_produce_batch`
        can add partition -1 to the transaction, which ends it (seen with librdkafka 2.16).
        """
        known = self._handle.topics.get(name)
        if known is not None:
            return known
        handle = self._library.topic_new(self._producer, _encode_name(name, "topic"), None)
        if not handle:
            raise BadRow(f"{name!r} cannot be the name of a topic: correct the topic column")
        self._handle.topics[name] = (handle, 0)
        asked_at = time.monotonic()
        while True:
            code, partition_count = self._ask_for_topic(handle)
            if code == 0 and partition_count > 0:
                self._handle.topics[name] = (handle, partition_count)
                return handle, partition_count
            self._check()
            failure = self._failure(code or librdkafka.UNKNOWN_TOPIC)
            error = self._error(failure, f"topic {name!r} cannot be written to", topic=name)
            wait_s = 0.0
            if failure.code == librdkafka.UNKNOWN_TOPIC:
                wait_s = _NEW_TOPIC_S
            elif isinstance(error, Unavailable):
                wait_s = self._stall_timeout_s
            if time.monotonic() - asked_at >= wait_s:
                raise error
            time.sleep(0.05)

    def _ask_for_topic(self, handle: int) -> tuple[int, int]:
        """Return an error code and the number of partitions."""
        found = c.POINTER(librdkafka.Metadata)()
        code = self._library.metadata(self._producer, 0, handle, c.byref(found), 10 * _SLICE_MS)
        if code:
            return code, 0
        try:
            if found.contents.topic_cnt != 1:
                return librdkafka.UNKNOWN_TOPIC, 0
            topic = found.contents.topics[0]
            return topic.err, topic.partition_cnt
        finally:
            self._library.metadata_destroy(found)

    def _submit(self, topic: int, rows: Rows) -> None:
        """The fast way: many rows with each call."""
        flags = librdkafka.COPY | (
            0 if rows.partitions is None else librdkafka.PARTITION_PER_MESSAGE
        )
        for _, messages in rows.fill(self._messages):
            while len(messages):
                seen = self._acknowledged_rows()
                sent = self._library.produce_batch(
                    topic,
                    librdkafka.PARTITION_UNASSIGNED,
                    flags,
                    messages.ctypes.data,
                    len(messages),
                )
                self._sent += sent
                if sent == len(messages):
                    break
                first = int(np.flatnonzero(messages["err"])[0])
                code = int(messages["err"][first])
                if code != librdkafka.QUEUE_FULL or first != sent:
                    size = messages["key_len"][first] + messages["value_len"][first]
                    raise self._refusal(code, rows.topic, int(size))
                # When the queue is full the call refuses all rows that follow, even if there is room
                # again. So the rows sent are the first ones, and their order is kept.
                messages = messages[sent:]
                self._wait_for_room(seen)

    def _submit_singly(self, topic: int, rows: Rows) -> None:
        """The slower way, for rows that `rd_kafka_produce_batch` does not take."""
        arguments = (librdkafka.Argument * len(librdkafka.ROW_TAGS))()
        for argument, tag in zip(arguments, librdkafka.ROW_TAGS, strict=True):
            argument.tag = tag
        rkt, flags, partition, key, value, timestamp, header = (a.u for a in arguments)
        rkt.pointer, flags.i32 = topic, librdkafka.COPY
        for start, messages in rows.fill(self._messages):
            for row, message in enumerate(messages.tolist(), start):
                _, partition.i32, value_at, value_len, key_at, key_len, _ = message
                key.memory.address, key.memory.size = key_at, key_len
                value.memory.address, value.memory.size = value_at, value_len
                timestamp.i64 = 0 if rows.timestamps is None else int(rows.timestamps[row])
                header.pointer = None if rows.headers is None else rows.headers.make(row)
                self._submit_one(rows.topic, arguments, header.pointer, key_len + value_len)

    def _submit_one(
        self, topic: str, arguments: c.Array[librdkafka.Argument], headers: int | None, size: int
    ) -> None:
        count = len(arguments) - (0 if headers else 1)  # the headers are the last argument
        try:
            while True:
                seen = self._acknowledged_rows()
                failure = librdkafka.take_error(
                    self._library.produceva(self._producer, arguments, count)
                )
                if failure is None:
                    self._sent += 1
                    return  # now the library owns the headers
                if failure.code != librdkafka.QUEUE_FULL:
                    raise self._refusal(failure.code, topic, size)
                self._wait_for_room(seen)
        except BaseException:
            if headers:
                self._library.headers_destroy(headers)
            raise

    def _acknowledged_rows(self) -> int:
        with self._ledger.changed:
            return self._ledger.rows

    def _wait_for_room(self, seen: int) -> None:
        """Wait until more than `seen` rows are acknowledged."""
        with self._ledger.changed:
            moved = self._ledger.changed.wait_for(
                lambda: self._ledger.rows > seen or self._ledger.problem,
                timeout=self._stall_timeout_s,
            )
        self._check()
        if not moved:
            raise self._stalled(
                f"the queue is full and no row was acknowledged for {self._stall_timeout_s:g} s"
            )

    # Failures.

    @property
    def _producer(self) -> int:
        if self._handle.closed:
            raise UsageError("this producer has been dropped: make another")
        return self._handle.producer

    def _call(
        self,
        call: Callable[[int, int], int | None],
        doing: str,
        timeout_s: float,
        group: str | None = None,
    ) -> None:
        """Make a call of the transaction API. Raises if it does not succeed in time."""
        failure = self._repeat(call, timeout_s, self._check)
        if failure is None:
            return
        if failure.name in CONSEQUENCES | TIMEOUTS:
            self._check()  # the reports may have the cause
        raise self._fail(self._error(failure, doing, group=group))

    def _repeat(
        self,
        call: Callable[[int, int], int | None],
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> Failure | None:
        """Repeat a call of the transaction API while it may succeed and there is time.

        The first waits are short, because half of all new producers do not notice that their
        coordinator was found. Another call wakes them, after 20 ms instead of 500.
        """
        deadline, slice_ms = time.monotonic() + timeout_s, _FIRST_SLICE_MS
        while True:
            check()
            left = deadline - time.monotonic()
            failure = librdkafka.take_error(call(self._producer, _milliseconds(left, slice_ms)))
            if failure is None or not failure.retriable or left <= 0:
                return failure
            if failure.code != librdkafka.TIMED_OUT:  # that call has already waited
                time.sleep(0.05)
            slice_ms = min(2 * slice_ms, 10 * _SLICE_MS)

    def _check(self) -> None:
        """Raise the error that ended this branch, if there is one."""
        if self._failed is None:
            with self._ledger.changed:
                problem = self._ledger.problem
            if problem is not None:
                self._failed = self._error(problem.failure, problem.doing, topic=problem.topic)
        if self._failed is not None:
            raise self._failed

    def _refusal(self, code: int, topic: str, size: int) -> PoundlockError:
        if code == librdkafka.MESSAGE_TOO_LARGE:
            return BadRow(
                f"a row for topic {topic!r} is too large: its key and value have {size} bytes, and "
                f"with headers and frame it exceeds message.max.bytes={self._largest_message}. "
                "Make the row smaller, or raise both the sink's message.max.bytes and the topic's "
                "max.message.bytes"
            )
        doing = f"a row for topic {topic!r} was refused"
        return self._error(self._failure(code), doing, topic=topic)

    def _failure(self, code: int) -> Failure:
        return Failure(code, librdkafka.decode(self._library.err2str(code)))

    def _stalled(self, doing: str) -> PoundlockError:
        missing = self._sent - self._acknowledged_rows()
        failure = Failure(librdkafka.TIMED_OUT, f"{missing} of {self._sent} rows are outstanding")
        return self._fail(self._error(failure, doing))

    def _fail(self, error: PoundlockError) -> PoundlockError:
        self._failed = error
        return error

    def _error(
        self, failure: Failure, doing: str, *, topic: str | None = None, group: str | None = None
    ) -> PoundlockError:
        if failure.name in CONSEQUENCES:
            failure = self._cause() or failure
        trouble = self._ledger.trouble
        if failure.name in TIMEOUTS and trouble is not None:
            text = f"{failure.text}; the last trouble was {trouble.name}: {trouble.text}"
            failure = replace(failure, text=text)
        return translate_error(
            replace(failure, text=self._without_secrets(failure.text)),
            doing,
            topic=topic,
            group=group,
            transactional_id=self._transactional_id,
        )

    def _cause(self) -> Failure | None:
        """Return the error that ended the transaction. None if there is none."""
        if failure := librdkafka.fatal_error(self._producer):
            return failure
        if not self._began:
            return None
        # Beginning again is refused. In a failed transaction the refusal is the reason of the failure.
        failure = librdkafka.take_error(self._library.begin_transaction(self._producer))
        return None if failure is None or failure.name in CONSEQUENCES else failure

    def _without_secrets(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def _milliseconds(seconds: float, most: int) -> int:
    return max(0, min(most, round(seconds * 1000)))


def _encode_name(text: str, what: str) -> bytes:
    if not text or "\0" in text:  # C would see only the part before it
        raise BadRow(f"{text!r} cannot be the name of a {what}: correct it")
    return text.encode()
