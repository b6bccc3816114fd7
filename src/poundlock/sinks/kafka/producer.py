"""A Kafka producer over Arrow columns: librdkafka through ctypes, without a Python call per row.

One producer is one transaction. A task begins it, writes columns, flushes, takes the identity and the
offsets for its receipt, and drops the producer: the transaction stays open on the broker, for the
driver to commit.

Rules of this file:

- Rows go in with `rd_kafka_produce_batch` over an array of pointers into Arrow's buffers; reports come
  out of the event queue, one event for all rows of one request. Only rows with headers or timestamps
  are handed over singly.
- A thread serves the event queue from first to last. The library asks for it (its flush and abort wait
  for somebody else to take the reports), and without it statistics would pile up while a task waits
  for input.
- The first failure ends the branch: from then on every call but `abort` and `drop` raises it, so that
  nothing can be prepared after a row was refused.
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
from poundlock.sinks.kafka import producer_abi as abi
from poundlock.sinks.kafka.producer_abi import Failure
from poundlock.sinks.kafka.producer_columns import Rows
from poundlock.sinks.kafka.producer_errors import CONSEQUENCES, TIMEOUTS, translate
from poundlock.sinks.kafka.producer_events import Handle, Identity, Ledger, Place
from poundlock.sinks.kafka.producer_settings import (
    DEFAULTS,
    SECRET,
    STATISTICS_MS,
    check_settings,
    configure,
)

__all__ = ["ArrowProducer", "Identity", "check_settings"]

_ROWS_AT_ONCE = 10_000  # per call into the library: the pointers to them fit into the cache
_SLICE_MS = 100  # how long a call into the library may keep us from seeing a failure
_FIRST_SLICE_MS = 20
_SETTLE_S = 10.0  # how long a report may take from the library's queue into our ledger
_NEW_TOPIC_S = 5.0  # how long a topic may stay unknown: a new one needs a moment to get around
_NO_TRANSACTION = (
    "there is no transaction: make the producer with a transactional id, and call begin"
)


class ArrowProducer:
    """One producer and, with a `transactional_id`, one transaction. For one thread.

    Whatever happens, `drop` or `abort` it, or leave its `with` block: only then are its threads and
    its memory given back.
    """

    def __init__(
        self,
        settings: Mapping[str, str],
        *,
        transactional_id: str | None,
        stall_timeout_s: float = 120.0,
    ):
        settings = {name: str(value) for name, value in settings.items()}
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
        self._secrets = [v for k, v in settings.items() if v and SECRET.search(k)]
        self._library = abi.load()
        self._ledger = Ledger()
        self._sent = 0
        self._began = False
        self._failed: PoundlockError | None = None
        self._messages = np.zeros(_ROWS_AT_ONCE, abi.MESSAGE)
        self._handle = Handle(self._create(settings), self._ledger)
        self._finalizer = weakref.finalize(self, self._handle.close)

    def _create(self, settings: Mapping[str, str]) -> int:
        conf = configure(settings)
        events = abi.EVENT_DELIVERY | abi.EVENT_ERROR | abi.EVENT_STATISTICS
        self._library.conf_set_events(conf, events)
        reason = c.create_string_buffer(512)
        producer = self._library.new(abi.PRODUCER, conf, reason, len(reason))
        if not producer:
            self._library.conf_destroy(conf)  # only success takes it over
            raise UsageError(
                f"librdkafka refuses the Kafka settings: {self._scrubbed(abi.text(reason.value))}. "
                "Correct the settings that it names"
            )
        return producer

    def __repr__(self) -> str:
        return f"ArrowProducer(transactional_id={self._transactional_id!r})"

    def __enter__(self) -> ArrowProducer:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    # The life of a transaction.

    def begin(self, timeout_s: float) -> None:
        """Fence every earlier producer of the same transactional id, and begin."""
        if self._transactional_id is None:
            return
        doing = "the transaction could not begin"
        self._insist(self._library.init_transactions, doing, timeout_s)
        if failure := abi.take(self._library.begin_transaction(self._producer)):
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
        """Hand rows over, waiting only for room. They are safe once `flush` has returned.

        A null key is no key, a null value a tombstone; a null partition is chosen by the key, and a
        null timestamp is now. Rows of one partition keep their order. `headers` are lists of structs
        of a string and a binary, `timestamps` milliseconds since 1970.
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
                "a write was interrupted, and nobody knows which of its rows were handed over: "
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
                raise self._silence(f"rows were not acknowledged within {timeout_s:g} s")
        with self._ledger.changed:  # the library knows a moment before the ledger does
            self._ledger.changed.wait_for(
                lambda: self._ledger.rows >= self._sent or self._ledger.problem, timeout=_SETTLE_S
            )
        self._check()
        self._audit()

    def _audit(self) -> None:
        """Raise unless every row is accounted for, and the transaction sound."""
        with self._ledger.changed:
            rows, unplaced = self._ledger.rows, sorted(self._ledger.unplaced)
        if failure := self._cause():
            raise self._fail(self._error(failure, "the transaction failed"))
        if rows != self._sent:
            said = f"{self._sent} rows were sent but {rows} acknowledged: run the batch again"
            raise self._fail(Rejected(said))
        if unplaced:
            said = (
                f"the brokers acknowledged rows of {unplaced} without saying where they are, so that "
                "nobody could prove later whether they were committed: run the batch again"
            )
            raise self._fail(Rejected(said))

    def identity(self, timeout_s: float = 10.0) -> Identity:
        """Return the producer id and epoch, with which anybody can end this transaction."""
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
    def acknowledged(self) -> dict[Place, tuple[int, int]]:
        """First and last offset of what was acknowledged so far, by topic and partition."""
        with self._ledger.changed:
            return dict(self._ledger.offsets)

    def send_offsets(
        self, group_id: str, offsets: Mapping[Place, int], timeout_s: float = 30.0
    ) -> None:
        """Make these the consumer group's offsets when, and only when, the transaction commits."""
        if not self._began:
            raise UsageError(_NO_TRANSACTION)
        library = self._library
        group = library.consumer_group_metadata_new(_text(group_id, "consumer group"))
        places = library.topic_partition_list_new(len(offsets))
        try:
            for (topic, partition), offset in offsets.items():
                place = library.topic_partition_list_add(places, _text(topic, "topic"), partition)
                place.contents.offset = offset
            self._insist(
                lambda handle, ms: library.send_offsets_to_transaction(handle, places, group, ms),
                f"the offsets of consumer group {group_id!r} were not added to the transaction",
                timeout_s,
                group=group_id,
            )
        finally:
            library.topic_partition_list_destroy(places)
            library.consumer_group_metadata_destroy(group)

    def drop(self) -> None:
        """Free everything at once. A transaction stays open on the broker. May be repeated."""
        self._finalizer()

    def abort(self, timeout_s: float) -> None:
        """End the transaction if that can be done in time, and drop. Never raises."""
        if self._began and not self._handle.closed:
            self._repeat(self._library.abort_transaction, timeout_s)
        self.drop()

    # Handing rows over.

    def _topic(self, name: str) -> tuple[int, int]:
        """Return the handle of a topic, and how many partitions it has.

        Asking first finds missing topics and permissions before anything is sent. It is needed
        besides: given partition numbers of a topic that it does not know yet, `rd_kafka_produce_batch`
        can add partition -1 to the transaction, which kills it (seen with librdkafka 2.16).
        """
        known = self._handle.topics.get(name)
        if known is not None:
            return known
        handle = self._library.topic_new(self._producer, _text(name, "topic"), None)
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
            failure = Failure(code or abi.UNKNOWN_TOPIC, self._said(code or abi.UNKNOWN_TOPIC))
            error = self._error(failure, f"topic {name!r} cannot be written to", topic=name)
            patience_s = 0.0
            if failure.code == abi.UNKNOWN_TOPIC:
                patience_s = _NEW_TOPIC_S
            elif isinstance(error, Unavailable):
                patience_s = self._stall_timeout_s
            if time.monotonic() - asked_at >= patience_s:
                raise error
            time.sleep(0.05)

    def _ask_for_topic(self, handle: int) -> tuple[int, int]:
        """Return an error code and the number of partitions."""
        found = c.POINTER(abi.Metadata)()
        code = self._library.metadata(self._producer, 0, handle, c.byref(found), 10 * _SLICE_MS)
        if code:
            return code, 0
        try:
            if found.contents.topic_cnt != 1:
                return abi.UNKNOWN_TOPIC, 0
            topic = found.contents.topics[0]
            return topic.err, topic.partition_cnt
        finally:
            self._library.metadata_destroy(found)

    def _submit(self, topic: int, rows: Rows) -> None:
        """The fast road: many rows with each call."""
        flags = abi.COPY | (0 if rows.partitions is None else abi.PARTITION_PER_MESSAGE)
        for _, messages in rows.fill(self._messages):
            while len(messages):
                seen = self._acknowledged_rows()
                sent = self._library.produce_batch(
                    topic, abi.PARTITION_UNASSIGNED, flags, messages.ctypes.data, len(messages)
                )
                self._sent += sent
                if sent == len(messages):
                    break
                first = int(np.flatnonzero(messages["err"])[0])
                code = int(messages["err"][first])
                if code != abi.QUEUE_FULL or first != sent:
                    size = messages["key_len"][first] + messages["value_len"][first]
                    raise self._refusal(code, rows.topic, int(size))
                # Once the queue is full the call refuses all that follows, even if room appears
                # meanwhile: those sent are the first ones, and order is kept.
                messages = messages[sent:]
                self._wait_for_room(seen)

    def _submit_singly(self, topic: int, rows: Rows) -> None:
        """The slower road, for what `rd_kafka_produce_batch` does not take."""
        arguments = (abi.Argument * len(abi.ROW_TAGS))()
        for argument, tag in zip(arguments, abi.ROW_TAGS, strict=True):
            argument.tag = tag
        rkt, flags, partition, key, value, timestamp, header = (a.u for a in arguments)
        rkt.pointer, flags.i32 = topic, abi.COPY
        for start, messages in rows.fill(self._messages):
            for row, message in enumerate(messages.tolist(), start):
                _, partition.i32, value_at, value_len, key_at, key_len, _ = message
                key.memory.address, key.memory.size = key_at, key_len
                value.memory.address, value.memory.size = value_at, value_len
                timestamp.i64 = 0 if rows.timestamps is None else int(rows.timestamps[row])
                header.pointer = None if rows.headers is None else rows.headers.of(row)
                self._submit_one(rows.topic, arguments, header.pointer, key_len + value_len)

    def _submit_one(
        self, topic: str, arguments: c.Array[abi.Argument], headers: int | None, size: int
    ) -> None:
        count = len(arguments) - (0 if headers else 1)  # they come last
        try:
            while True:
                seen = self._acknowledged_rows()
                failure = abi.take(self._library.produceva(self._producer, arguments, count))
                if failure is None:
                    self._sent += 1
                    return  # and the headers belong to the library
                if failure.code != abi.QUEUE_FULL:
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
            raise self._silence(
                f"the queue is full and no row was acknowledged for {self._stall_timeout_s:g} s"
            )

    # Failing.

    @property
    def _producer(self) -> int:
        if self._handle.closed:
            raise UsageError("this producer has been dropped: make another")
        return self._handle.producer

    def _insist(
        self,
        call: Callable[[int, int], int | None],
        doing: str,
        timeout_s: float,
        group: str | None = None,
    ) -> None:
        """Make a call of the transaction API succeed, or raise."""
        failure = self._repeat(call, timeout_s, self._check)
        if failure is None:
            return
        if failure.name in CONSEQUENCES | TIMEOUTS:
            self._check()  # the reports may know the cause
        raise self._fail(self._error(failure, doing, group=group))

    def _repeat(
        self,
        call: Callable[[int, int], int | None],
        timeout_s: float,
        watch: Callable[[], None] = lambda: None,
    ) -> Failure | None:
        """Repeat a call of the transaction API, as it allows after a time-out, while time is left.

        The first waits are short: half of all new producers sleep through the news that their
        coordinator was found, and another call wakes them (500 ms become 20).
        """
        deadline, patience_ms = time.monotonic() + timeout_s, _FIRST_SLICE_MS
        while True:
            watch()
            left = deadline - time.monotonic()
            failure = abi.take(call(self._producer, _milliseconds(left, patience_ms)))
            if failure is None or not failure.retriable or left <= 0:
                return failure
            if failure.code != abi.TIMED_OUT:  # that one has waited already
                time.sleep(0.05)
            patience_ms = min(2 * patience_ms, 10 * _SLICE_MS)

    def _check(self) -> None:
        """Raise what ended this branch, if anything did."""
        if self._failed is None:
            with self._ledger.changed:
                problem = self._ledger.problem
            if problem is not None:
                self._failed = self._error(problem.failure, problem.doing, topic=problem.topic)
        if self._failed is not None:
            raise self._failed

    def _refusal(self, code: int, topic: str, size: int) -> PoundlockError:
        if code == abi.MESSAGE_TOO_LARGE:
            return BadRow(
                f"a row for topic {topic!r} has {size} bytes of key and value, and with its headers "
                f"and frame exceeds message.max.bytes={self._largest_message}: raise "
                "message.max.bytes of the sink, and max.message.bytes of the topic with it, or make "
                "the row smaller"
            )
        failure = Failure(code, self._said(code))
        return self._error(failure, f"a row for topic {topic!r} was not taken", topic=topic)

    def _said(self, code: int) -> str:
        return abi.text(self._library.err2str(code))

    def _silence(self, doing: str) -> PoundlockError:
        missing = self._sent - self._acknowledged_rows()
        failure = Failure(abi.TIMED_OUT, f"{missing} of {self._sent} rows are outstanding")
        return self._fail(self._error(failure, doing))

    def _fail(self, error: PoundlockError) -> PoundlockError:
        self._failed = error
        return error

    def _error(
        self,
        failure: Failure,
        doing: str,
        *,
        topic: str | None = None,
        group: str | None = None,
    ) -> PoundlockError:
        if failure.name in CONSEQUENCES:
            failure = self._cause() or failure
        trouble = self._ledger.trouble
        if failure.name in TIMEOUTS and trouble is not None:
            said = f"{failure.text}; the last trouble was {trouble.name}: {trouble.text}"
            failure = replace(failure, text=said)
        return translate(
            replace(failure, text=self._scrubbed(failure.text)),
            doing,
            topic=topic,
            group=group,
            transactional_id=self._transactional_id,
        )

    def _cause(self) -> Failure | None:
        """Ask for the error that ended the transaction."""
        if failure := abi.fatal(self._producer):
            return failure
        if not self._began:
            return None
        # Refused within a transaction; and in one that has failed, with the reason for that.
        failure = abi.take(self._library.begin_transaction(self._producer))
        return None if failure is None or failure.name in CONSEQUENCES else failure

    def _scrubbed(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def _milliseconds(seconds: float, most: int) -> int:
    return max(0, min(most, round(seconds * 1000)))


def _text(text: str, what: str) -> bytes:
    if not text or "\0" in text:  # C would see only the part before it
        raise BadRow(f"{text!r} cannot be the name of a {what}: correct it")
    return text.encode()
