"""Spark's checkpoint: read, made durable before each batch, and mended after a loss of power.

Rules of this file: Spark does not sync what it writes to a local disk. So all that a replay of a batch
reads is synced before the batch begins, and its decision keeps Spark's plan. What Spark writes later
may be lost: the end of a finished batch (`commits/N`), and the plan of a batch that is not decided,
with the files of its sources (`sources/S/K`).
Nothing is changed except what the log proves. All else that does not match is refused as before.

`Checkpoint` has that logic over a few primitives. `FileCheckpoint` implements them for local disks, and
`poundlock.spark.storage` for other file systems.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass

from poundlock.core.disk import Disk
from poundlock.core.log import TransactionLog
from poundlock.core.protocol import Stage
from poundlock.core.sourcefiles import (
    ends_of,
    is_json,
    is_value,
    is_whole_source,
    needed_files,
    next_file,
)
from poundlock.errors import LogCorrupt, LogMismatch, Unavailable

logger = logging.getLogger("poundlock")

METADATA, PLANS, COMMITS, SOURCES = "metadata", "offsets", "commits", "sources"
STATE = "state"
WITHDRAWN = "poundlock-withdrawn"  # a directory that Spark does not know

_Files = dict[int, tuple[str, bytes]]  # name and content, by number


@dataclass(frozen=True, slots=True)
class Plan:
    """Spark's plan for a batch, and the one that the checkpoint now holds for the batch before."""

    text: bytes
    before: bytes | None = None

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.text).hexdigest()

    @property
    def hash_before(self) -> str | None:
        return None if self.before is None else hashlib.sha256(self.before).hexdigest()

    def check_runs(self, batch: int, offsets: Iterable[str]) -> None:
        """Check that Spark runs the batch with the end offsets of this plan.

        Spark runs a plan that it has in memory. If two drivers plan a batch at once, some file systems
        keep the plan of one, and do not tell the other. Raises `LogMismatch`.
        """
        stored = (end.decode(errors="replace") for end in ends_of(self.text).values())
        if _alike(offsets) != _alike(stored):
            raise LogMismatch(
                f"Spark runs batch {batch} with other source offsets than the checkpoint has for it: "
                "another driver has planned the same batch. This driver has written nothing of it. Run "
                "only one driver of the pipeline, and start it again"
            )


def _alike(offsets: Iterable[str]) -> set[str]:
    """Return offsets in one form, whoever wrote them. A source that is read twice has one."""
    found = set[str]()
    for text in offsets:
        try:
            found.add(json.dumps(json.loads(text), sort_keys=True))
        except ValueError:  # the offset of a source of one's own
            found.add(text)
    return found


class Checkpoint(ABC):
    """The checkpoint of one query, as one driver sees it."""

    def __init__(self, uri: str):
        self.uri = uri

    # The primitives of a file system. Names are relative to the checkpoint.

    @abstractmethod
    def _read(self, name: str) -> bytes | None: ...

    @abstractmethod
    def _names(self, directory: str) -> list[str]: ...

    @abstractmethod
    def _replace(self, name: str, data: bytes) -> None:
        """Give a file new content, durably."""

    @abstractmethod
    def _remove(self, name: str, data: bytes) -> None:
        """Remove a file, durably. If it does not have this content any more, leave it."""

    def _clear_way(self, names: Iterable[str]) -> None:  # noqa: B027 (only local disks need it)
        """Remove what keeps Spark from writing these files, which do not exist."""

    def _sync(self, names: Iterable[str]) -> None:  # noqa: B027 (only local disks need it)
        """Make files and their names durable. One that does not exist is left out."""

    def _files_of_sources(self) -> list[str]:
        """Return the files in which the sources keep what an offset means."""
        return []

    @abstractmethod
    def _move_state(self, target: str) -> None:
        """Move the directory of the query's state, durably."""

    # What an operator asks for.

    def plans(self) -> list[int]:
        """Return the batches of which Spark has a plan."""
        with self._reachable():
            return sorted(self._numbers(PLANS))

    def planned(self, batch: int) -> bytes | None:
        """Return Spark's plan for a batch, None if it has none."""
        with self._reachable():
            return self._read(f"{PLANS}/{batch}")

    def first_offsets(self, source: int) -> bytes | None:
        """Return what Spark has noted of where a source began, None if nothing."""
        with self._reachable():
            return self._read(f"{SOURCES}/{source}/0")

    def is_committed(self, batch: int) -> bool:
        """Return whether Spark has the batch in its commit log."""
        with self._reachable():
            return batch in self._numbers(COMMITS)

    def set_aside(self, batch: int, plan: bytes, name: str) -> str:
        """Move Spark's plan of a batch to where Spark does not read it, and return where. Durable.

        Spark refuses to plan the first batch if there is state. So the state of its tasks, which never
        counted, is moved first.
        """
        target = f"{WITHDRAWN}/{name}"
        with self._reachable():
            if batch == 0 and self._names(STATE):
                self._move_state(f"{target}-state-{uuid.uuid4().hex[:8]}")
            self._replace(target, plan)
            self._remove(f"{PLANS}/{batch}", plan)
        return f"{self.uri}/{target}"

    def has_lost_state(self) -> bool:
        """Return whether there is state, but no plan of any batch."""
        with self._reachable():
            return self._has_lost_state()

    def set_state_aside(self, log: TransactionLog) -> str:
        """Move the state of a first batch whose plan is gone, and return where."""
        with self._reachable():
            return self._move_lost_state(log)

    # What the coordinator's surroundings ask for.

    def query(self) -> str | None:
        """Return Spark's query id, None if there is no checkpoint yet. The log may then rely on it."""
        with self._reachable():
            text = self._read(METADATA)
            if text is None or not is_json(text):
                return None
            self._sync([METADATA])
            return json.loads(text)["id"]

    def running_query(self) -> str:
        """Return the id of the query that is running: Spark writes it before the first batch."""
        query = self.query()
        if query is None:
            raise LogMismatch(
                f"the checkpoint at {self.uri} was deleted while its query runs. Restore it, or start "
                "with a new pipeline name and checkpoint location"
            )
        return query

    def plan(self, batch: int) -> Plan:
        """Return Spark's plan for a batch. First make durable all that a replay of the batch reads."""
        with self._reachable():
            ends = [f"{PLANS}/{batch - 1}", f"{PLANS}/{batch}", f"{COMMITS}/{batch - 1}"]
            self._sync([*ends, *self._files_of_sources()])
            text = self._read(f"{PLANS}/{batch}")
            if text is None:
                raise LogMismatch(
                    f"Spark runs batch {batch}, but offsets/{batch} is not in its checkpoint at "
                    f"{self.uri}. Check that only one query uses the checkpoint"
                )
            return Plan(text, self._read(f"{PLANS}/{batch - 1}"))

    def mend(self, log: TransactionLog) -> None:
        """Put right what a loss of power has taken. Spark must not have read the checkpoint yet.

        The caller has taken over, so all that can be finished is.
        """
        with self._reachable():
            last = max(log.state.batches, default=log.state.batch_floor - 1)
            self._mend_metadata(log)
            self._restore_plan(log, last)
            planned = self._numbers(PLANS)
            if max(planned, default=-1) <= last + 1:
                self._drop_what_is_torn(log, last)
                self._mend_sources(log, last)
            gone = last < 0 and (0 in planned or 0 in log.state.withdrawn)
            if gone and self._has_lost_state():
                self._move_lost_state(log)

    def _mend_metadata(self, log: TransactionLog) -> None:
        text = self._read(METADATA)
        if log.state.query is not None:
            return
        if text is None:
            self._clear_way([METADATA])
        elif not is_json(text):
            self._drop(log, METADATA, text, "is torn, and no batch of its query ran")

    def _restore_plan(self, log: TransactionLog, batch: int) -> None:
        """Write the plan of the newest decided batch again if it was lost."""
        decided, name = log.plan_of(batch), f"{PLANS}/{batch}"
        if decided is None:
            return
        found, text = self._read(name), decided.encode()
        if found is None:
            # With less than the batch before, the checkpoint is older: Spark would go on from there.
            lost = batch == 0 or self._committed(batch - 1)
        else:
            lost = found != text and _is_part(found, text)
        if lost:
            logger.warning(
                "%s of Spark's checkpoint at %s %s, as after a loss of power: it is restored from the "
                "decision",
                *(name, self.uri, "is missing" if found is None else "is torn"),
            )
            log.ensure_owned()
            self._replace(name, text)

    def _drop_what_is_torn(self, log: TransactionLog, last: int) -> None:
        """Drop what Spark wrote after the last decision, and must write again."""
        history = log.state.batches.get(last)
        commit, plan = f"{COMMITS}/{last}", f"{PLANS}/{last + 1}"
        end, found = self._read(commit), self._read(plan)
        committed = end is not None and _is_whole(end)
        if history is not None and history.stage is Stage.FINISHED and not committed:
            # Spark runs its newest plan only. Without the later one, it runs this batch again.
            if found is not None:
                self._drop(log, plan, found, f"is not decided, and batch {last} has no end")
            if end is not None:
                again = "Spark runs the batch again, and it is not written again"
                self._drop(log, commit, end, f"is torn: {again}")
        elif found is not None and not _is_whole(found):
            self._drop(log, plan, found, "is torn, and not decided: Spark plans the batch again")
        self._clear_way(name for name in (commit, plan) if self._read(name) is None)

    def _mend_sources(self, log: TransactionLog, last: int) -> None:
        """Drop torn files of sources that no decided batch reads, and a plan that lacks one."""
        decided = self._decided_ends(log, last)
        if decided is None:
            return  # Spark knows batches that the log does not: it is unknown what they read
        plan = f"{PLANS}/{last + 1}"
        found = self._read(plan)
        planned = ends_of(found) if found is not None and _is_whole(found) else dict[str, bytes]()
        # A source that is read twice has two offsets and one directory, so directories count if any.
        for source in sorted(self._names(SOURCES) or planned):
            first = next_file(decided.get(source))
            if first is None:
                continue
            whole, torn = self._source_files(f"{SOURCES}/{source}", first)
            missing = needed_files(planned.get(source), first) - whole.keys()
            if found is not None and (missing or torn):
                self._drop(log, plan, found, f"is not decided, and lacks files of source {source}")
                found = None
            # From the first torn file on: Spark wants no gap. It lists what is missing again.
            after = whole | torn if torn else {}
            for number in sorted((n for n in after if n >= min(torn)), reverse=True):
                name, data = after[number]
                self._drop(log, name, data, "is torn, or follows a torn one, and not decided")

    def _decided_ends(self, log: TransactionLog, last: int) -> Mapping[str, bytes] | None:
        """Return where the newest decided batch ends, by source. None if that is not known."""
        if last < 0:
            return None if self._numbers(COMMITS) else {}
        history, text = log.state.batches.get(last), self._read(f"{PLANS}/{last}")
        if history is None or text is None or Plan(text).hash != history.decided.offsets:
            return None
        return ends_of(text)

    def _source_files(self, directory: str, first: int) -> tuple[_Files, _Files]:
        """Return the whole and the torn files of a source, by number from `first` on."""
        names = self._names(directory)
        whole, torn = _Files(), _Files()
        for name in names:
            number = name.removesuffix(".compact")
            if not number.isdecimal() or int(number) < first:
                continue
            path = f"{directory}/{name}"
            data = self._read(path)
            if data is not None:
                (whole if is_whole_source(data) else torn)[int(number)] = (path, data)
        lost = [name[1:-4] for name in names if name.startswith(".") and name.endswith(".crc")]
        self._clear_way(f"{directory}/{name}" for name in lost if name not in names)
        return whole, torn

    def _has_lost_state(self) -> bool:
        # Spark refuses to plan the first batch then. Late tasks of a withdrawn plan may write some.
        planned = self._numbers(PLANS) or self._numbers(COMMITS)
        return not planned and bool(self._names(STATE))

    def _move_lost_state(self, log: TransactionLog) -> str:
        target = f"{WITHDRAWN}/0-state-{uuid.uuid4().hex[:8]}"
        log.ensure_owned()
        logger.warning(
            "the state in Spark's checkpoint at %s was written for a plan of batch 0 that is gone: it "
            "is moved to %s",
            *(self.uri, target),
        )
        self._move_state(target)
        return f"{self.uri}/{target}"

    def _committed(self, batch: int) -> bool:
        text = self._read(f"{COMMITS}/{batch}")
        return text is not None and _is_whole(text)

    def _drop(self, log: TransactionLog, name: str, data: bytes, why: str) -> None:
        log.ensure_owned()  # the owner may have written the file since, so its content counts too
        logger.warning(
            "%s of Spark's checkpoint at %s %s, as after a loss of power: it is removed",
            *(name, self.uri, why),
        )
        self._remove(name, data)

    def _numbers(self, directory: str) -> list[int]:
        return [int(name) for name in self._names(directory) if name.isdecimal()]

    @contextlib.contextmanager
    def _reachable(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise Unavailable(
                f"Spark's checkpoint at {self.uri} cannot be read or written ({error}). Make the file "
                "system reachable and start the pipeline again"
            ) from error


class FileCheckpoint(Checkpoint):
    """A checkpoint in a directory of a local disk."""

    def __init__(self, directory: str, *, disk: Disk | None = None):
        super().__init__(directory)
        self._directory = directory
        self._disk = disk or Disk()
        self._synced: frozenset[str] = frozenset()  # by the last call: Spark never changes a file

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)

    def _read(self, name: str) -> bytes | None:
        try:
            return self._disk.read(self._path(name))
        except FileNotFoundError:
            return None

    def _names(self, directory: str) -> list[str]:
        try:
            return self._disk.names(self._path(directory))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _files_of_sources(self) -> list[str]:
        return [f"{SOURCES}/{name}" for name in self._disk.below(self._path(SOURCES))]

    def _move_state(self, target: str) -> None:
        self._disk.make_directory(os.path.dirname(self._path(target)))
        self._disk.rename(self._path(STATE), self._path(target))
        self._sync_above(target)

    def _replace(self, name: str, data: bytes) -> None:
        self._clear_way([name])
        path = self._path(name)
        self._disk.make_directory(os.path.dirname(path))
        aside = self._aside(path)
        self._disk.write(aside, data)
        self._sync_one(aside)
        self._disk.rename(aside, path)
        self._sync_above(name)

    def _remove(self, name: str, data: bytes) -> None:
        path = self._path(name)
        aside = self._aside(path)
        with contextlib.suppress(FileNotFoundError):
            self._disk.rename(path, aside)
            if self._disk.read(aside) == data:
                self._clear_way([name])
            else:
                with contextlib.suppress(FileExistsError):
                    self._disk.link(aside, path)
            self._disk.unlink(aside)
        self._sync_above(name)

    def _clear_way(self, names: Iterable[str]) -> None:
        # Spark does not replace Hadoop's checksum of a file that was lost. It would also not match.
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._disk.unlink(self._path(_checksum_of(name)))

    def _aside(self, path: str) -> str:
        return os.path.join(os.path.dirname(path), f".{uuid.uuid4().hex}.tmp")

    def _sync(self, names: Iterable[str]) -> None:
        synced, above = set[str](), set[str]()
        for name in names:
            if name not in self._synced:
                try:
                    self._sync_one(self._path(name))
                except FileNotFoundError:
                    continue
                with contextlib.suppress(FileNotFoundError):
                    self._sync_one(self._path(_checksum_of(name)))
                above.update(self._above(name))
            synced.add(name)
        for directory in sorted(above, key=lambda path: (-len(path), path)):
            self._sync_one(directory)
        self._synced = frozenset(synced)

    def _sync_above(self, name: str) -> None:
        """Make the name of a file durable, and those of the directories above it."""
        for directory in self._above(name):
            self._sync_one(directory)

    def _above(self, name: str) -> Iterator[str]:
        """Yield the directories above a file, up to that of the checkpoint."""
        while name:
            name = os.path.dirname(name)
            yield self._path(name) if name else self._directory

    def _sync_one(self, path: str) -> None:
        try:
            self._disk.sync(path)
        except (FileNotFoundError, PermissionError):
            raise  # not synced: it does not exist, or another user has it
        except OSError as error:
            # After a failed fsync the kernel may mark the pages clean: a second try proves nothing.
            raise LogCorrupt(
                f"the disk under {self._directory} failed to make Spark's checkpoint durable "
                f"({error}). This driver writes nothing more. Repair the disk and start the pipeline "
                "again"
            ) from error


def _checksum_of(name: str) -> str:
    directory, _, last = name.rpartition("/")
    return f"{directory}/.{last}.crc" if directory else f".{last}.crc"


def _is_part(found: bytes, whole: bytes) -> bool:
    """Return whether a crash left this of `whole`. Bytes that did not reach the disk read as 0."""
    return len(found) <= len(whole) and all(
        ours in (0, theirs) for ours, theirs in zip(found, whole, strict=False)
    )


def _is_whole(text: bytes) -> bool:
    """Return whether Spark wrote a file of its log to the end: a version, then lines of JSON.

    A source may write its offset in a form of its own. It counts as whole.
    """
    version, *lines = text.split(b"\n")
    if not version.startswith(b"v") or not lines or b"\0" in text:
        return False
    offsets = [line.split(b":", 1)[-1] if version == b"v2" else line for line in lines[1:]]
    return is_json(lines[0]) and all(map(is_value, offsets))
