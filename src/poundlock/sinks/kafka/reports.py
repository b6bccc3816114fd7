"""librdkafka's reports about one producer, and the thread that reads them.

Each delivery report event comes from one call of the library's `rd_kafka_dr_msgq0`. Its callers pass
messages of one partition (librdkafka 2.15 sources):

- The answer to a produce request. There is one error for all messages. On success the offsets count
  up from the answer's base offset. The base is negative if the broker already had the request and no
  longer knows where (DUPLICATE_SEQUENCE_NUMBER, which the library rightly takes for success). The
  library still counts up from it, so only the first message's offset shows this.
- Messages that are acknowledged because a later request of the partition succeeded. They have no
  offsets, and the event of that later request comes next.
- Messages that timed out or were purged. There is one error for all of them.

So the first and the last message are enough to read an event.
"""

from __future__ import annotations

import ctypes as c
import os
import re
import threading
from dataclasses import dataclass, field

import numpy as np

from poundlock.sinks.kafka import librdkafka
from poundlock.sinks.kafka.librdkafka import CONSEQUENCES, Failure, Message
from poundlock.sinks.kafka.types import ProducerIdentity, TopicPartition

_POLL_MS = 1000  # closing interrupts it
_INCONSISTENT = -149
# For a thousand partitions the statistics are a megabyte of JSON, many times a second. So only the one
# object that we need is searched for, and the rest is not parsed.
_EOS = re.compile(rb'"eos":\s*\{[^}]*?"producer_id":\s*(-?\d+)[^}]*?"producer_epoch":\s*(-?\d+)')


@dataclass(frozen=True, slots=True)
class Delivered:
    """Rows of one partition that the brokers have acknowledged."""

    topic_partition: TopicPartition
    rows: int
    offset: int | None  # of the first row; the others follow it without a gap


@dataclass(frozen=True, slots=True)
class Problem:
    """An error that ended the branch."""

    failure: Failure
    doing: str
    topic: str | None = None


@dataclass(frozen=True, slots=True)
class Trouble:
    """An error, such as a lost connection, from which the library may recover by itself."""

    failure: Failure


@dataclass(slots=True)
class Ledger:
    """Everything reported so far. Read and write it under `changed`."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    rows: int = 0  # acknowledged
    offsets: dict[TopicPartition, tuple[int, int]] = field(default_factory=dict)  # first and last
    # Partitions whose last rows have no offset yet.
    unplaced: set[TopicPartition] = field(default_factory=set)
    identity: ProducerIdentity | None = None
    problem: Problem | None = None
    trouble: Failure | None = None

    def add(self, report: Delivered | ProducerIdentity | Problem | Trouble) -> None:
        with self.changed:
            match report:
                case Delivered():
                    self._add_delivered(report)
                case ProducerIdentity():
                    self._add_identity(report)
                case Problem():
                    self._add_problem(report)
                case Trouble(failure):
                    # An earlier error says why one broker is down. "All are down" says less.
                    if self.trouble is None or failure.name != "_ALL_BROKERS_DOWN":
                        self.trouble = failure
            self.changed.notify_all()

    def _add_delivered(self, report: Delivered) -> None:
        self.rows += report.rows
        if report.offset is None:
            self.unplaced.add(report.topic_partition)
            return
        self.unplaced.discard(report.topic_partition)
        last = report.offset + report.rows - 1
        known = self.offsets.get(report.topic_partition, (report.offset, last))
        self.offsets[report.topic_partition] = (min(known[0], report.offset), max(known[1], last))

    def _add_identity(self, report: ProducerIdentity) -> None:
        if self.identity is None:
            self.identity = report
        elif self.identity != report:
            text = f"the producer changed from {self.identity} to {report} within its transaction"
            self._add_problem(Problem(Failure(_INCONSISTENT, text), "the transaction broke"))

    def _add_problem(self, report: Problem) -> None:
        # The first problem is the cause, unless it only says that there was one before it.
        if self.problem is None or (
            self.problem.failure.name in CONSEQUENCES and report.failure.name not in CONSEQUENCES
        ):
            self.problem = report


class Handle:
    """Owns the library's objects of one producer, and the thread that reads its events.

    It has no reference to the `ArrowProducer`, so that one can be collected while the thread runs.
    """

    def __init__(self, producer: int, ledger: Ledger):
        self.library = librdkafka.load()
        self.producer = producer
        self.topics: dict[str, tuple[int, int]] = {}  # handle and number of partitions
        self.closed = False
        self._ledger = ledger
        self._queue = self.library.queue_get_main(producer)
        self._process = os.getpid()
        self._server = threading.Thread(target=self._serve, name="poundlock-kafka", daemon=True)
        self._server.start()

    def close(self) -> None:
        """Free everything, without waiting for rows in flight and without ending the transaction."""
        if self.closed or os.getpid() != self._process:
            return  # a forked child has none of the library's threads, and must not free its memory
        if threading.current_thread() is self._server:
            # The garbage collector may run in this thread, and a thread cannot wait for itself.
            threading.Thread(target=self.close, name="poundlock-kafka-close").start()
            return
        self.closed = True
        self.library.purge(self.producer, librdkafka.PURGE_ALL_AT_ONCE)
        self.library.queue_yield(self._queue)
        self._server.join()
        for topic, _ in self.topics.values():
            self.library.topic_destroy(topic)
        self.library.queue_destroy(self._queue)
        self.library.destroy_flags(self.producer, librdkafka.DESTROY_WITHOUT_CLOSE)

    def _serve(self) -> None:
        while not self.closed:
            event = self.library.queue_poll(self._queue, _POLL_MS)
            if not event:
                continue
            try:
                report = self._read(event)
            except Exception as error:  # noqa: BLE001 (the task must see every error)
                failure = Failure(_INCONSISTENT, f"{type(error).__name__}: {error}")
                report = Problem(failure, "a report of librdkafka could not be read")
            # Free the library's queue first, then wake the threads that wait for room in it.
            self.library.event_destroy(event)
            if report is not None:
                self._ledger.add(report)

    def _read(self, event: int) -> Delivered | ProducerIdentity | Problem | Trouble | None:
        match self.library.event_type(event):
            case librdkafka.EVENT_DELIVERY:
                return self._read_delivery(event)
            case librdkafka.EVENT_STATISTICS:
                found = _EOS.search(self.library.event_stats(event))
                producer_id, epoch = map(int, found.groups()) if found else (-1, -1)
                return ProducerIdentity(producer_id, epoch) if producer_id >= 0 else None
            case librdkafka.EVENT_ERROR:
                return self._read_error(event)
        return None

    def _read_delivery(self, event: int) -> Delivered | Problem:
        library = self.library
        rows = library.event_message_count(event)
        pointers = np.empty(rows, np.uintp)
        library.event_message_array(event, pointers.ctypes.data, rows)
        first, last = (Message.from_address(int(pointers[i])) for i in (0, -1))
        topic_partition = librdkafka.decode(library.topic_name(first.topic)), first.partition
        if library.event_error(event) or first.err or last.err:
            return self._read_undelivered(pointers, topic_partition)
        if first.offset < 0:
            return Delivered(topic_partition, rows, None)
        if last.partition != first.partition or last.offset - first.offset != rows - 1:
            raise AssertionError(f"{rows} rows, but offsets {first.offset} to {last.offset}")
        return Delivered(topic_partition, rows, first.offset)

    def _read_undelivered(self, pointers: np.ndarray, topic_partition: TopicPartition) -> Problem:
        messages = [Message.from_address(int(pointer)) for pointer in pointers]
        largest = max(message.key_len + message.value_len for message in messages)
        # Where single rows were refused, the others are marked only as being in the same batch.
        names = {message.err: Failure(message.err, "").name for message in messages}
        refused = [m for m in messages if not names[m.err].endswith("_DIFFERENT_RECORD")]
        worst = (refused or messages)[0]
        reason = self.library.message_produce_errstr(c.addressof(worst))
        failure = Failure(worst.err, librdkafka.decode(reason or self.library.err2str(worst.err)))
        topic, partition = topic_partition
        return Problem(
            failure,
            f"{len(messages)} rows for partition {partition} of topic {topic!r}, the largest of "
            f"{largest} bytes, were not written",
            topic,
        )

    def _read_error(self, event: int) -> Problem | Trouble:
        library = self.library
        failure = Failure(
            library.event_error(event), librdkafka.decode(library.event_error_string(event))
        )
        if library.event_error_is_fatal(event):
            failure = librdkafka.fatal_error(self.producer) or failure
            return Problem(failure, "the producer failed")
        if failure.name == "_AUTHENTICATION":
            # The library would try for ever, but wrong credentials stay wrong.
            return Problem(failure, "the brokers refused the login")
        return Trouble(failure)
