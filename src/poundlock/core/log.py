"""The transaction log: numbered records, each created only if absent.

Rules of this file: create-if-absent gives order, durability and fencing. A driver that finds the number
of its append taken has been replaced, and stops. Success is concluded only from reading the record's
nonce back, never from a call that returned. An append with an unknown outcome stays pending and blocks
all others until it is settled.

`TransactionLog` has that logic over a few primitives. `FileLog` implements them for local disks,
`MemoryLog` for tests, and `poundlock.spark.storage` for other file systems.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from poundlock.core.disk import Disk
from poundlock.core.encoding import BranchIds, branch_ids, record_from_json, record_to_json
from poundlock.core.model import Compacted, Decided, Finished, FinishedBatch, Generation, Record
from poundlock.core.protocol import LogState
from poundlock.errors import Fenced, LogCorrupt, Unavailable, UsageError

logger = logging.getLogger("poundlock")

FORMAT = 2

NOTE = "audit-"  # begins the name of each note

_RECORD = re.compile(r"(\d{20})\.json")


def record_numbers(names: Iterable[str]) -> list[int]:
    """Return the numbers of the records among the names of files."""
    return [int(match[1]) for match in map(_RECORD.fullmatch, names) if match]


class NumberTaken(Exception):
    """The number has a record: of this driver from an earlier try, or of another driver."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A record with its place in the log and its writer's nonce."""

    number: int
    nonce: str
    at: float  # seconds since 1970, only for display
    record: Record
    unread: tuple[BranchIds, ...] = ()  # the ids of receipts that were left out

    def encode(self) -> bytes:
        record, rest = record_to_json(self.record)
        body = {
            "format": FORMAT,
            "number": self.number,
            "nonce": self.nonce,
            "at": self.at,
            "record": record,
        }
        return _seal(_canonical(body), _canonical(rest) if rest else b"")

    @classmethod
    def decode(
        cls, number: int, data: bytes, where: str, finished: Set[int] = frozenset()
    ) -> Entry:
        """Decode a published record. Any damage raises `LogCorrupt`.

        Of the receipts of these finished batches, only the ids are read.
        """
        with _readable(number, where):
            body, rest = cls._open(number, data)
            record = body["record"]
            unread = "receipts" in record and record["batch"] in finished
            return cls(
                number,
                body["nonce"],
                body["at"],
                record_from_json(record, None if unread else json.loads(rest or "[]")),
                branch_ids(record) if unread else (),
            )

    @classmethod
    def nonce_in(cls, number: int, data: bytes, where: str) -> str:
        """Return the nonce of a published record, without decoding its receipts.

        Any damage raises `LogCorrupt`.
        """
        with _readable(number, where):
            body, _ = cls._open(number, data)
            record_from_json(body["record"], None)
            return body["nonce"]

    @staticmethod
    def _open(number: int, data: bytes) -> tuple[dict[str, Any], bytes]:
        text, rest = _unseal(data)
        body = json.loads(text)
        if body["format"] != FORMAT:
            raise ValueError(f"its format is {body['format']}, but this release reads {FORMAT}")
        if body["number"] != number:
            raise ValueError(f"it has the number {body['number']}")
        return body, rest


@contextlib.contextmanager
def _readable(number: int, where: str) -> Generator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LogCorrupt(
            f"record {number} of the log at {where} is damaged: {error}. Restore it from a copy, "
            "and never delete it"
        ) from error


# A record in a file: a line with the body and the checksum of all, and a line with the rest, if any.
_LINE = re.compile(rb'\{"body":(.*),"checksum":"([0-9a-f]{64})"\}\n')


def _seal(text: bytes, rest: bytes) -> bytes:
    return b'{"body":%b,"checksum":"%b"}\n%b' % (text, _checksum(text, rest), rest)


def _unseal(data: bytes) -> tuple[bytes, bytes]:
    match = _LINE.match(data)
    if match is None:
        raise ValueError("it is not whole")
    text, rest = match[1], data[match.end() :]
    if match[2] != _checksum(text, rest):
        raise ValueError("its checksum is wrong")
    return text, rest


def _canonical(body: object) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _checksum(text: bytes, rest: bytes) -> bytes:
    found = hashlib.sha256(text)
    for part in (b"\n", rest):
        found.update(part)
    return found.hexdigest().encode()


class TransactionLog(ABC):
    """The log of one pipeline, as one driver sees it. Not thread-safe."""

    settle_tries = 5

    def __init__(self, uri: str, *, clock: Callable[[], float] = time.time):
        self.uri = uri
        self.state = LogState()
        self._clock = clock
        self._next = 0
        self._last: Entry | None = None
        self._pending: Entry | None = None
        self._floor = 0  # the number of the first record
        self._decided_at: dict[int, int] = {}  # batch to the record that has its plan

    # The primitives of a file system. `_create` may raise anything except NumberTaken for an unknown
    # outcome. The others raise OSError or Unavailable.

    @abstractmethod
    def _create(self, number: int, data: bytes) -> None:
        """Make the record durable. Raise `NumberTaken` if the number exists."""

    @abstractmethod
    def _read(self, number: int) -> bytes | None: ...

    @abstractmethod
    def _numbers(self) -> list[int]: ...

    @abstractmethod
    def _delete(self, number: int) -> None: ...

    # Notes of operators' acts lie beside the records. They are none, and fence nobody.

    @abstractmethod
    def put_note(self, name: str, data: bytes) -> None:
        """Make a file durable. Raise `NumberTaken` if it exists."""

    @abstractmethod
    def notes(self) -> dict[str, bytes]:
        """Return the files that `put_note` stored, by name. Raises OSError or Unavailable."""

    def drop_unpublished(self) -> None:  # noqa: B027 (only local disks have such files)
        """Remove unpublished files of writers that died."""

    def load(self) -> LogState:
        """Read all records since the last compaction, and replace the state."""
        for tries_left in reversed(range(self.settle_tries)):
            entries = self._entries(whole=False)
            try:
                return self._replay(entries)
            except LogCorrupt:
                # After a compaction, a driver that slept since before it can create a number again. The
                # records that are read may then be of both ages: read again if the log has grown.
                with self._reachable():
                    newest = max(self._numbers(), default=-1)
                if not tries_left or newest == entries[-1].number:
                    raise
        raise AssertionError("the last try returns or raises")

    def _replay(self, entries: Sequence[Entry]) -> LogState:
        floors = [e.record.batch_floor for e in entries if isinstance(e.record, Compacted)]
        self.state = LogState(batch_floor=max(floors, default=0))
        self._decided_at.clear()
        self._pending = None
        for entry in entries:
            self._apply(entry)
        self._floor = entries[0].number if entries else 0
        if not entries:
            self._last, self._next = None, 0
        return self.state

    @property
    def length(self) -> int:
        """Return how many records the log has."""
        return self._next - self._floor

    def entries(self) -> list[Entry]:
        """Return all records since the last compaction, oldest first. They may take much memory."""
        return self._entries(whole=True)

    def naming(self, id: str) -> list[Entry]:
        """Return the records since the last compaction that have a receipt with this id."""
        found = list[Entry]()
        for entry in self._entries(whole=False):
            if any(id in part.ids for part in entry.unread):
                entry = self._read_whole(entry)
            if any(receipt.id == id for receipt in getattr(entry.record, "receipts", ())):
                found.append(entry)
        return found

    def plan_of(self, batch: int) -> str | None:
        """Return Spark's plan as a batch was decided with it. None if the log does not have it."""
        number = self._decided_at.get(batch)
        if number is None:
            return None
        with self._reachable():
            data = self._read(number)
        record = None if data is None else Entry.decode(number, data, self.uri).record
        carried = record.carried if isinstance(record, Compacted) else None
        decided = carried[-1].decided if carried else record
        return decided.plan if isinstance(decided, Decided) else None

    def _read_whole(self, entry: Entry) -> Entry:
        with self._reachable():
            data = self._read(entry.number)
        return entry if data is None else Entry.decode(entry.number, data, self.uri)

    def _entries(self, *, whole: bool) -> list[Entry]:
        """Return all records. If not `whole`, those of finished batches are without receipts."""
        # A compaction by another driver can open a gap between listing and reading: try again.
        for _ in range(self.settle_tries):
            with self._reachable():
                entries = self._read_back(whole)
            if entries is not None:
                return entries
        raise LogCorrupt(
            f"the log at {self.uri} has a gap: a record is missing, and a decision with it. Restore "
            "the record from a copy"
        )

    def append(self, record: Record) -> None:
        """Make `record` the next one of the log, durably.

        Raises `Fenced` if another driver wrote in the meantime, and `Unavailable` if the outcome is
        unknown. The record then stays pending: until `settle` returns, do nothing that would be wrong
        in either case.
        """
        self.settle()
        self.state.check(record)  # a record that cannot be applied is never written
        self._pending = Entry(self._next, uuid.uuid4().hex, self._clock(), record)
        self.settle()

    def settle(self) -> None:
        """Complete a pending append, or find out that it has failed."""
        if self._pending is None:
            return
        entry = self._pending
        if self._publish(entry) != entry.nonce or not self._is_newest(entry.number):
            self._pending = None
            raise self._fenced()
        self._pending = None
        self._apply(entry)

    def ensure_owned(self) -> None:
        """Raise `Fenced` if another driver has written since this driver's last record."""
        self.settle()
        with self._reachable():
            taken = self._read(self._next) is not None
        if taken or not self._is_newest(self._next):
            raise self._fenced()

    def compact(self, keep: int, most_records: int | None = None) -> bool:
        """Drop the records of all but the newest `keep` batches. Return whether any was dropped.

        If more than `most_records` would remain, the records of those batches are dropped too, and the
        record of the compaction carries what they say. That is possible when all are finished. A record
        that cannot be deleted is ignored from now on, and the next compaction deletes it.
        """
        newest = sorted(self.state.batches)[-keep:]
        held = [history.decided.batch for history in self.state.unfinished]
        if self.state.generation is None:
            return False
        batch_floor = min([*newest[:1], *held], default=self.state.batch_floor)
        floor, carried = self._decided_at.get(batch_floor, self._floor), None
        if most_records is not None and self._next - floor > most_records and not held:
            floor, carried = self._next, self._with_plan(self.state.carried(batch_floor))
        if floor == self._floor:
            return False
        generation = replace(self.state.generation, query=self.state.query)
        self.append(Compacted(floor, batch_floor, generation, self.state.places, carried))
        self._decided_at = {b: n for b, n in self._decided_at.items() if b >= batch_floor}
        try:
            self._delete_below(floor)
        except (OSError, Unavailable) as error:
            logger.warning(
                "old records of the log at %s were not deleted, and only take space until the next "
                "compaction: %s",
                *(self.uri, error),
            )
        return True

    def _with_plan(self, carried: tuple[FinishedBatch, ...]) -> tuple[FinishedBatch, ...]:
        """Add Spark's plan of the newest batch. It may still be lost, and then be asked for."""
        if not carried:
            return carried
        newest = carried[-1]
        decided = replace(newest.decided, plan=self.plan_of(newest.decided.batch))
        return (*carried[:-1], replace(newest, decided=decided))

    def _delete_below(self, floor: int) -> None:
        # Oldest first, and none after a failure: a driver that finds its last record deleted knows
        # that it was replaced.
        for number in sorted(self._numbers()):
            if number < floor:
                self._delete(number)

    def _publish(self, entry: Entry) -> str:
        """Create the record and return the nonce of the record that then has its number."""
        data, error = entry.encode(), None
        for _ in range(self.settle_tries):
            try:
                self._create(entry.number, data)
            except NumberTaken:
                pass
            except (LogCorrupt, UsageError):
                raise
            except Exception as unknown:  # noqa: BLE001 (any failure here leaves the outcome unknown)
                error = unknown
            try:
                found = self._read(entry.number)
            except (OSError, Unavailable) as unreadable:
                error = unreadable
                continue
            if found is not None:
                return Entry.nonce_in(entry.number, found, self.uri)
        raise Unavailable(
            f"record {entry.number} of the log at {self.uri} could not be written and its fate is "
            f"unknown ({type(error).__name__}: {error}). Nothing was committed or aborted since. Make "
            "the file system reachable and start the pipeline again"
        ) from error

    @contextlib.contextmanager
    def _reachable(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise Unavailable(
                f"the log at {self.uri} cannot be read or written ({error}). Nothing was committed or "
                "aborted since. Make the file system reachable and start the pipeline again"
            ) from error

    def _is_newest(self, number: int) -> bool:
        """Return whether no other driver has written beyond `number`, or in place of the record before.

        A compaction makes numbers free again. The record before may be deleted and created again, by a
        driver that slept, or by a request that was delayed. So neither of the two checks is enough.
        """
        with self._reachable():
            if any(other > number for other in self._numbers()):
                return False
            if self._last is None:
                return True
            data = self._read(self._last.number)
        if data is None:
            return False
        return Entry.nonce_in(self._last.number, data, self.uri) == self._last.nonce

    def _fenced(self) -> Fenced:
        return Fenced(
            f"{self._successor()} (record {self._next} of the log at {self.uri}). This driver stopped "
            "and committed nothing more. Run only one driver per pipeline"
        )

    def _successor(self) -> str:
        """Say who has written the next record, as far as that can be read."""
        with contextlib.suppress(OSError, Unavailable, LogCorrupt):
            data = self._read(self._next)
            entry = Entry.decode(self._next, data, self.uri) if data else None
            if entry is not None and isinstance(entry.record, Generation):
                began = time.strftime("%Y-%m-%d at %H:%M:%S UTC", time.gmtime(entry.at))
                number, owner = entry.record.number, entry.record.owner
                return f"driver {owner} took over the pipeline on {began}, as generation {number}"
        return "another driver, or an operator, has written to the log since"

    def _apply(self, entry: Entry) -> None:
        self.state.apply(entry.record, entry.unread)
        record = entry.record
        if isinstance(record, Decided):
            self._decided_at[record.batch] = entry.number
        elif isinstance(record, Compacted):
            self._floor = record.floor
            if record.carried is not None:  # the newest has its plan
                self._decided_at = {it.decided.batch: entry.number for it in record.carried[-1:]}
        self._last, self._next = replace(entry, unread=()), entry.number + 1

    def _read_back(self, whole: bool) -> list[Entry] | None:
        """Read from the newest record down to the floor. Return None if a number is missing."""
        entries, floor, finished = list[Entry](), 0, set[int]()
        for number in sorted(self._numbers(), reverse=True):
            if number < floor:
                break  # compacted: ignored even if it reappears
            data = self._read(number)
            if data is None or (entries and entries[-1].number != number + 1):
                return None
            entries.append(Entry.decode(number, data, self.uri, finished))
            record = entries[-1].record
            if isinstance(record, Finished) and not whole:
                finished.add(record.batch)
            if isinstance(record, Compacted):
                floor = max(floor, record.floor)
        if entries and entries[-1].number != floor:
            return None
        return entries[::-1]


class FileLog(TransactionLog):
    """The log in a directory of a local disk: write aside, fsync, link, fsync the directory."""

    def __init__(
        self,
        directory: str | Path,
        *,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.time,
        create: bool = True,
    ):
        self._directory = os.path.realpath(directory)
        super().__init__(Path(self._directory).as_uri(), clock=clock)
        self._disk = disk or Disk()
        self._broken: OSError | None = None
        self._names_are_durable = False  # of records that other drivers created
        if create:
            self._make_directory()

    def _make_directory(self) -> None:
        """Create the directory. Make its name, and those above it, as durable as its records."""
        with self._reachable():
            self._disk.make_directory(self._directory)
        path = self._directory
        while not os.path.ismount(path):
            path = os.path.dirname(path)
            with contextlib.suppress(PermissionError):  # then another user made it earlier
                self._sync(path)

    def load(self) -> LogState:
        self._names_are_durable = False
        return super().load()

    def _path(self, number: int) -> str:
        return os.path.join(self._directory, f"{number:020}.json")

    def _create(self, number: int, data: bytes) -> None:
        self._publish_file(self._path(number), data)

    def _publish_file(self, path: str, data: bytes) -> None:
        if self._broken is not None:
            raise self._disk_failure() from self._broken
        aside = os.path.join(self._directory, f".{uuid.uuid4().hex}.tmp")
        if not self._names_are_durable:
            # Another driver may have died between link and sync: sync its record before adding one.
            self._sync(self._directory)
            self._names_are_durable = True
        try:
            newest = self._path(self._last.number) if self._last else None
            self._disk.write(aside, data, newest)
            self._sync(aside)
            try:
                self._disk.link(aside, path)
            except FileExistsError:
                self._sync(self._directory)  # an earlier try may have been interrupted here
                raise NumberTaken from None
            except PermissionError as error:
                raise UsageError(
                    f"{self._directory} does not allow hard links, which the log needs. Put the "
                    "checkpoint on a local file system that supports them"
                ) from error
            self._sync(self._directory)
        finally:
            with contextlib.suppress(FileNotFoundError):
                self._disk.unlink(aside)

    def _sync(self, path: str) -> None:
        try:
            self._disk.sync(path)
        except (FileNotFoundError, PermissionError):
            raise  # not synced: another driver deleted the file, or another user has the directory
        except OSError as error:
            # After a failed fsync the kernel may mark the pages clean: a second try proves nothing.
            self._broken = error
            raise self._disk_failure() from error

    def _disk_failure(self) -> LogCorrupt:
        return LogCorrupt(
            f"the disk under {self._directory} failed to make the log durable ({self._broken}). This "
            "driver writes nothing more. Repair the disk and start the pipeline again"
        )

    def _read(self, number: int) -> bytes | None:
        try:
            return self._disk.read(self._path(number))
        except FileNotFoundError:
            return None

    def _numbers(self) -> list[int]:
        try:
            names = self._disk.names(self._directory)
        except FileNotFoundError:
            return []
        return record_numbers(names)

    def _delete(self, number: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._disk.unlink(self._path(number))

    def put_note(self, name: str, data: bytes) -> None:
        self._publish_file(os.path.join(self._directory, name), data)

    def notes(self) -> dict[str, bytes]:
        names = (name for name in self._disk.names(self._directory) if name.startswith(NOTE))
        return {name: self._disk.read(os.path.join(self._directory, name)) for name in names}

    def drop_unpublished(self) -> None:
        # A live writer whose file is removed fails to link it, and writes it again.
        with self._reachable():
            for name in self._disk.names(self._directory):
                if name.endswith(".tmp"):
                    with contextlib.suppress(FileNotFoundError):
                        self._disk.unlink(os.path.join(self._directory, name))


class MemoryLog(TransactionLog):
    """A log in a dict that several drivers may share: for tests and examples."""

    def __init__(
        self,
        records: dict[int, bytes] | None = None,
        *,
        uri: str = "memory:",
        clock: Callable[[], float] = time.time,
    ):
        super().__init__(uri, clock=clock)
        self.records: dict[int, bytes] = {} if records is None else records
        self._notes: dict[str, bytes] = {}

    def _create(self, number: int, data: bytes) -> None:
        if self.records.setdefault(number, data) is not data:
            raise NumberTaken

    def _read(self, number: int) -> bytes | None:
        return self.records.get(number)

    def _numbers(self) -> list[int]:
        return list(self.records)

    def _delete(self, number: int) -> None:
        self.records.pop(number, None)

    def put_note(self, name: str, data: bytes) -> None:
        if self._notes.setdefault(name, data) is not data:
            raise NumberTaken

    def notes(self) -> dict[str, bytes]:
        return dict(self._notes)
