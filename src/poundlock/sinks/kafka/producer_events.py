"""What librdkafka reports about one producer, and the thread that takes the reports.

A delivery report event is one call of the library's `rd_kafka_dr_msgq0`, and each of its callers hands
over messages of one partition (librdkafka 2.15 sources):

- the answer to a produce request: one error for all; on success the offsets count up from the
  answer's base offset. The base is negative when the broker had the request already and no longer
  knows where (DUPLICATE_SEQUENCE_NUMBER, which the library rightly takes for success); the library
  counts up from there all the same, so only the first message's offset tells;
- implicitly acknowledged messages, when a later request of the partition succeeded: no offsets, and
  that later request's event comes next;
- messages that timed out or were purged: one error for all.

So the first and the last message stand for the whole event.
"""

from __future__ import annotations

import os
import re
import threading
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from poundlock.sinks.kafka import producer_abi as abi
from poundlock.sinks.kafka.producer_abi import Failure, Message
from poundlock.sinks.kafka.producer_errors import CONSEQUENCES

Place = tuple[str, int]  # topic and partition

_POLL_MS = 1000  # closing interrupts it
_OUR_FAULT = -149  # _INCONSISTENT
# The statistics of a thousand partitions are a megabyte of JSON, many times a second: find the one
# object that matters and leave the rest unread.
_EOS = re.compile(rb'"eos":\s*\{[^}]*?"producer_id":\s*(-?\d+)[^}]*?"producer_epoch":\s*(-?\d+)')


class Identity(NamedTuple):
    """How a broker knows a producer."""

    producer_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Delivered:
    """Rows of one partition that the brokers hold."""

    place: Place
    rows: int
    offset: int | None  # of the first; the others follow it without a gap


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that ended the branch."""

    failure: Failure
    doing: str
    topic: str | None = None


@dataclass(frozen=True, slots=True)
class Trouble:
    """A lost connection or the like, from which the library may recover by itself."""

    failure: Failure


@dataclass(slots=True)
class Ledger:
    """All that was reported so far. Read and written under `changed`."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    rows: int = 0  # acknowledged
    offsets: dict[Place, tuple[int, int]] = field(default_factory=dict)  # first and last
    unplaced: set[Place] = field(default_factory=set)  # where the last rows have no offset yet
    identity: Identity | None = None
    problem: Problem | None = None
    trouble: Failure | None = None

    def note(self, report: Delivered | Identity | Problem | Trouble) -> None:
        with self.changed:
            match report:
                case Delivered():
                    self._note_delivered(report)
                case Identity():
                    self._note_identity(report)
                case Problem():
                    self._note_problem(report)
                case Trouble(failure):
                    # That all are down is no news to somebody who knows why one is.
                    if self.trouble is None or failure.name != "_ALL_BROKERS_DOWN":
                        self.trouble = failure
            self.changed.notify_all()

    def _note_delivered(self, report: Delivered) -> None:
        self.rows += report.rows
        if report.offset is None:
            self.unplaced.add(report.place)
            return
        self.unplaced.discard(report.place)
        last = report.offset + report.rows - 1
        known = self.offsets.get(report.place, (report.offset, last))
        self.offsets[report.place] = (min(known[0], report.offset), max(known[1], last))

    def _note_identity(self, report: Identity) -> None:
        if self.identity is None:
            self.identity = report
        elif self.identity != report:
            text = f"the producer changed from {self.identity} to {report} within its transaction"
            self._note_problem(Problem(Failure(_OUR_FAULT, text), "the transaction broke"))

    def _note_problem(self, report: Problem) -> None:
        # The first one is the cause, unless it only says that there was another before it.
        if self.problem is None or (
            self.problem.failure.name in CONSEQUENCES and report.failure.name not in CONSEQUENCES
        ):
            self.problem = report


class Handle:
    """Owns the library's objects of one producer, and the thread that serves its events.

    Knows nothing of the producer object, so that this one can be collected while the thread runs.
    """

    def __init__(self, producer: int, ledger: Ledger):
        self.library = abi.load()
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
            return  # in a forked child the library has no threads, and its memory is not ours
        if threading.current_thread() is self._server:
            # The garbage collector may run here, but a thread cannot wait for itself.
            threading.Thread(target=self.close, name="poundlock-kafka-close").start()
            return
        self.closed = True
        self.library.purge(self.producer, abi.PURGE_ALL_AT_ONCE)
        self.library.queue_yield(self._queue)
        self._server.join()
        for topic, _ in self.topics.values():
            self.library.topic_destroy(topic)
        self.library.queue_destroy(self._queue)
        self.library.destroy_flags(self.producer, abi.DESTROY_WITHOUT_CLOSE)

    def _serve(self) -> None:
        while not self.closed:
            event = self.library.queue_poll(self._queue, _POLL_MS)
            if not event:
                continue
            try:
                report = self._read(event)
            except Exception as error:  # noqa: BLE001 (the task must learn of it, whatever it is)
                failure = Failure(_OUR_FAULT, f"{type(error).__name__}: {error}")
                report = Problem(failure, "a report of librdkafka could not be read")
            # First make room in the library's queue, then wake those who wait for it.
            self.library.event_destroy(event)
            if report is not None:
                self._ledger.note(report)

    def _read(self, event: int) -> Delivered | Identity | Problem | Trouble | None:
        match self.library.event_type(event):
            case abi.EVENT_DELIVERY:
                return self._read_delivery(event)
            case abi.EVENT_STATISTICS:
                found = _EOS.search(self.library.event_stats(event))
                producer_id, epoch = map(int, found.groups()) if found else (-1, -1)
                return Identity(producer_id, epoch) if producer_id >= 0 else None
            case abi.EVENT_ERROR:
                return self._read_error(event)
        return None

    def _read_delivery(self, event: int) -> Delivered | Problem:
        library = self.library
        rows = library.event_message_count(event)
        pointers = np.empty(rows, np.uintp)
        library.event_message_array(event, pointers.ctypes.data, rows)
        first, last = (Message.from_address(int(pointers[i])) for i in (0, -1))
        place = abi.text(library.topic_name(first.topic)), first.partition
        if library.event_error(event) or first.err or last.err:
            return self._undelivered(pointers, place)
        if first.offset < 0:
            return Delivered(place, rows, None)
        if last.partition != first.partition or last.offset - first.offset != rows - 1:
            raise AssertionError(f"{rows} rows, but offsets {first.offset} to {last.offset}")
        return Delivered(place, rows, first.offset)

    def _undelivered(self, pointers: np.ndarray, place: Place) -> Problem:
        messages = [Message.from_address(int(pointer)) for pointer in pointers]
        largest = max(message.key_len + message.value_len for message in messages)
        # Where single rows were found wrong, the others are marked as merely lying in their batch.
        names = {message.err: Failure(message.err, "").name for message in messages}
        guilty = [m for m in messages if not names[m.err].endswith("_DIFFERENT_RECORD")]
        worst = (guilty or messages)[0]
        said = self.library.message_produce_errstr(abi.c.addressof(worst))
        failure = Failure(worst.err, abi.text(said or self.library.err2str(worst.err)))
        topic, partition = place
        return Problem(
            failure,
            f"{len(messages)} rows for partition {partition} of topic {topic!r}, the largest of "
            f"{largest} bytes, were not written",
            topic,
        )

    def _read_error(self, event: int) -> Problem | Trouble:
        library = self.library
        failure = Failure(library.event_error(event), abi.text(library.event_error_string(event)))
        if library.event_error_is_fatal(event):
            failure = abi.fatal(self.producer) or failure
            return Problem(failure, "the producer failed")
        if failure.name == "_AUTHENTICATION":
            # The library would try for ever; wrong credentials do not become right by that.
            return Problem(failure, "the brokers did not let us in")
        return Trouble(failure)
