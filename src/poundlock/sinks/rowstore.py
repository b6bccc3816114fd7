"""Rows stored beside the log, for systems that cannot hold a branch themselves.

    ROWS/SINK/.NAME.tmp       a branch that is being written, or was when its task died
    ROWS/SINK/NAME.arrow      a prepared branch: an Arrow file, whose end proves that it is complete
    ROWS/SINK/NAME.sent       the witness that it was sent
    ROWS/SINK/NAME.aborted    the witness that it was not sent, and never will be

Tasks write the rows, and after the decision other tasks send them. They can be on any file system that
pyarrow can write to: local disks that all machines share, S3, GCS, Azure, HDFS.
"""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeGuard

import pyarrow as pa
import pyarrow.fs as pafs

from poundlock.core.mismatch import moved_target
from poundlock.core.model import Branch, Json, Namespace, Receipt, Stray
from poundlock.core.naming import BranchName, name_of, parse_name, to_forget
from poundlock.core.participant import Column, Participant, PreparedBranch, Writer
from poundlock.core.protocol import BranchState, LogState
from poundlock.core.site import Site, reachable
from poundlock.errors import InDoubt, PermanentlyRefused, PoundlockError, Unavailable, UsageError
from poundlock.filesystem import in_parallel, open_filesystem, sync

_UNFINISHED, _STORED, _SENT, _ABORTED = ".tmp", ".arrow", ".sent", ".aborted"
_STATES = {
    _STORED: BranchState.PREPARED,
    _SENT: BranchState.COMMITTED,
    _ABORTED: BranchState.ABORTED,
}


class RowStore:
    """The stored rows of one sink: a directory. It can be pickled."""

    def __init__(self, uri: str):
        self.uri = uri.rstrip("/")

    def write(self, name: str) -> RowStoreWriter:
        return RowStoreWriter(self, name)

    def read(self, name: str) -> Iterator[pa.RecordBatch]:
        """Read a branch's rows. A truncated file is detected by its missing end."""
        system, root = self._open()
        file = f"{root}/{name}{_STORED}"
        with reachable(self.uri), system.open_input_file(file) as stream:
            try:
                rows = pa.ipc.open_file(stream)
            except pa.ArrowInvalid as error:
                raise InDoubt(
                    f"the rows stored in {file} are damaged ({error}). None of them was sent. Delete "
                    "the file and start the pipeline again: the batch is decided, and will be run again"
                ) from error
            yield from (rows.get_batch(index) for index in range(rows.num_record_batches))

    def states(self) -> dict[str, BranchState]:
        """Return the state of each branch. A witness counts more than the rows."""
        files = self.list_files()
        states: dict[str, BranchState] = {}
        for suffix in (_STORED, _ABORTED, _SENT):
            for file in files:
                if file.endswith(suffix) and not file.startswith("."):
                    states[file.removesuffix(suffix)] = _STATES[suffix]
        return states

    def unfinished(self) -> list[str]:
        """Return the branches that are being written, or were when their tasks died."""
        return [
            file[1:].removesuffix(_UNFINISHED)
            for file in self.list_files()
            if file.startswith(".") and file.endswith(_UNFINISHED)
        ]

    def list_files(self) -> list[str]:
        system, root = self._open()
        with reachable(self.uri):
            found = system.get_file_info(pafs.FileSelector(root, allow_not_found=True))
        return [entry.base_name for entry in found]

    def settle(self, names: Iterable[str], *, sent: bool) -> None:
        """Write the witness of each branch, then delete its rows.

        In this order, or a crash could lose both. The branches are settled in parallel. All are tried.
        """
        system, root = self._open()

        def settle(name: str) -> None:
            witness = f"{name}{_SENT if sent else _ABORTED}"
            try:
                self._put(system, f"{root}/{witness}")
            except Unavailable:
                if not self._rename(system, f"{root}/{name}{_STORED}", f"{root}/{witness}"):
                    raise
            for file in _rows_of(name):
                self._delete_one(system, f"{root}/{file}")

        in_parallel(settle, names)

    def _rename(self, system: Any, old: str, new: str) -> bool:
        """Rename the rows' file to the witness. On a full disk this needs no space.

        Without a witness, rows that were sent would be sent again and again. This works only on a local
        file system: the others copy a file to rename it.
        """
        if not isinstance(system, pafs.LocalFileSystem):
            return False
        try:
            with reachable(self.uri):
                system.move(old, new)
                sync(system, new)
        except FileNotFoundError:
            return False
        return True

    def drop(self, names: Iterable[str]) -> None:
        """Delete the rows of branches, finished or not, without a witness."""
        self.delete(*(file for name in names for file in _rows_of(name)))

    def delete(self, *files: str) -> None:
        system, root = self._open()
        in_parallel(lambda file: self._delete_one(system, f"{root}/{file}"), files)

    def _delete_one(self, system: Any, path: str) -> None:
        with reachable(self.uri), contextlib.suppress(FileNotFoundError):
            system.delete_file(path)

    def _put(self, system: Any, path: str) -> None:
        with reachable(self.uri):
            system.open_output_stream(path).close()
            sync(system, path)

    def _open(self) -> tuple[Any, str]:
        """Return the file system and the directory in it. Create the directory if it is missing."""
        system, root = open_filesystem(self.uri)
        with reachable(self.uri):
            system.create_dir(root, recursive=True)
        return system, root


def _rows_of(name: str) -> list[str]:
    """Return the files of a branch's rows, finished and not."""
    return [f"{name}{_STORED}", f".{name}{_UNFINISHED}"]


class RowStoreWriter:
    """Writes one branch under a temporary name, and renames it when it is complete."""

    def __init__(self, store: RowStore, name: str):
        self._system, root = store._open()
        self._temporary, self._final = f"{root}/.{name}{_UNFINISHED}", f"{root}/{name}{_STORED}"
        self._uri = store.uri
        with reachable(self._uri):
            self._stream = self._system.open_output_stream(self._temporary)
        self._arrow: Any = None

    def write(self, rows: pa.RecordBatch) -> None:
        with reachable(self._uri):
            if self._arrow is None:
                self._arrow = pa.ipc.new_file(self._stream, rows.schema)
            self._arrow.write_batch(rows)

    def finish(self) -> None:
        with reachable(self._uri):
            if self._arrow is not None:
                self._arrow.close()
            self._stream.close()
            sync(self._system, self._temporary)
            self._system.move(self._temporary, self._final)
            sync(self._system, self._final)

    def abort(self) -> None:
        with contextlib.suppress(Exception):
            self._stream.close()
        with contextlib.suppress(Exception):
            self._system.delete_file(self._temporary)


class StoredBranches(Participant):
    """A participant whose branches are stored beside the log and sent after the decision."""

    _row_store: RowStore | None = None
    _site: Site | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_site": None}

    def target(self) -> dict[str, Json]:
        """Return where the rows go, as receipts record it. A word that is not known is None."""
        return {}

    def _check_target(self, receipts: Sequence[Receipt]) -> None:
        """Raise `LogMismatch` if the sink's options now lead elsewhere: a batch has one target."""
        states = self.row_store.states()
        waiting = [it for it in receipts if states.get(it.id) is BranchState.PREPARED]
        for word, here in self.target().items():
            for receipt in waiting:
                there = receipt.handle.get(word)
                if None not in (here, there) and here != there:
                    raise moved_target(receipt, word, there, here)

    @abstractmethod
    def send(self, name: BranchName, rows: Iterator[pa.RecordBatch]) -> None:
        """Send one branch, in a task. It may be sent again. Raises `Unavailable` to be retried."""

    def attach(self, site: Site) -> None:
        self._site = site
        self._row_store = RowStore(f"{site.rows_uri}/{self.name}")

    @property
    def row_store(self) -> RowStore:
        if self._row_store is None:
            raise UsageError("the sink is not part of a pipeline yet", sink=self.name)
        return self._row_store

    def project(self, columns: Mapping[str, Column]) -> dict[str, str]:
        return {name: column.sql for name, column in columns.items()}

    def begin(self, branch: Branch) -> Writer:
        return StoredWriter(self.row_store, branch, self.target())

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        states = self.row_store.states()
        return [
            None if states.get(receipt.id) is BranchState.PREPARED else "its stored rows are gone"
            for receipt in receipts
        ]

    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        assert self._site is not None
        states = self.row_store.states()
        self._check_target(receipts)
        waiting = [r.id for r in receipts if states.get(r.id) is BranchState.PREPARED]
        answers = self._site.spread(partial(_send, self), waiting)
        sent = [name for name, error in zip(waiting, answers, strict=True) if error is None]
        self.row_store.settle(sent, sent=True)
        states |= dict.fromkeys(sent, BranchState.COMMITTED)
        failed = {name: it for name, it in zip(waiting, answers, strict=True) if it is not None}
        if failed:
            raise _first(failed)
        # Someone deleted the rows. Whether they were sent is unknown. But a system that receives rows
        # after the decision accepts repeats, so a replay may take their place.
        gone = {r.id for r in receipts} - set(states)
        self.row_store.settle(gone, sent=False)
        states |= dict.fromkeys(gone, BranchState.ABORTED)
        return [states[receipt.id] for receipt in receipts]

    def find(self, namespace: Namespace) -> list[Stray]:
        stored = [name for name, state in self._mine(namespace) if state is BranchState.PREPARED]
        parsed = (parse_name(name) for name in self.row_store.unfinished())
        unfinished = [name for name in parsed if self._is_mine(name, namespace)]
        return [
            Stray(self.name, str(name), name.generation, state)
            for state, names in (("stored", stored), ("unfinished", unfinished))
            for name in names
        ]

    def abort(self, strays: Sequence[Stray]) -> list[BranchState]:
        states = self.row_store.states()
        dead = [it.id for it in strays if states.get(it.id) is not BranchState.COMMITTED]
        self.row_store.settle(dead, sent=False)
        states |= dict.fromkeys(dead, BranchState.ABORTED)
        return [states[stray.id] for stray in strays]

    def newest_generation(self, namespace: Namespace) -> int:
        return max((name.generation for name, _ in self._mine(namespace)), default=0)

    def committed_beyond(self, state: LogState) -> str | None:
        assert state.generation is not None
        mine = self._mine(state.generation.namespace)
        sent = ((it.batch, str(it)) for it, found in mine if found is BranchState.COMMITTED)
        return state.first_unexplained(self.name, sent)

    def logs_of(self, pipeline: str) -> frozenset[str]:
        """Look among the stored rows, in case that they were not deleted together with the log."""
        states = self.row_store.states()
        sent = (parse_name(name) for name, it in states.items() if it is BranchState.COMMITTED)
        return frozenset(
            name.namespace.identity
            for name in sent
            if name and (name.namespace.pipeline, name.sink) == (pipeline, self.name)
        )

    def prune(self, namespace: Namespace, floor: int) -> None:
        states = dict(self._mine(namespace))
        old = [
            str(name)
            for ended in (BranchState.COMMITTED, BranchState.ABORTED)  # the newest of each stays
            for name in to_forget((it for it in states if states[it] is ended), floor)
        ]
        # The witnesses last: rows without one would count as waiting.
        self.row_store.delete(*(file for name in old for file in _rows_of(name)))
        self.row_store.delete(*(f"{name}{suffix}" for name in old for suffix in (_SENT, _ABORTED)))

    def _mine(self, namespace: Namespace) -> list[tuple[BranchName, BranchState]]:
        found = ((parse_name(name), state) for name, state in self.row_store.states().items())
        return [(name, state) for name, state in found if self._is_mine(name, namespace)]

    def _is_mine(self, name: BranchName | None, namespace: Namespace) -> TypeGuard[BranchName]:
        return name is not None and (name.namespace, name.sink) == (namespace, self.name)


class StoredWriter(Writer):
    """The task's half of a stored branch. A sink that checks rows extends it."""

    def __init__(self, store: RowStore, branch: Branch, target: Mapping[str, Json]):
        self._name, self._target = str(name_of(branch)), target
        self._began_at = time.time()
        self._file = store.write(self._name)

    def write(self, rows: pa.RecordBatch) -> None:
        self._file.write(rows)

    def prepare(self) -> PreparedBranch | None:
        self._file.finish()
        return PreparedBranch(self._name, self._target, began_at=self._began_at, expires_at=None)

    def abort(self) -> None:
        self._file.abort()


def _send(sink: StoredBranches, name: str) -> PoundlockError | None:
    """Return an error rather than raise it, because the other branches are sent all the same."""
    parsed = parse_name(name)
    assert parsed is not None
    try:
        sink.send(parsed, sink.row_store.read(name))
    except PoundlockError as error:
        return error
    except FileNotFoundError as error:
        return Unavailable(f"the stored rows of {name} are gone ({error.strerror})")
    except Exception as error:  # noqa: BLE001 (a user's code, or a damaged file: the others go on)
        return InDoubt(
            f"branch {name} could not be sent ({type(error).__name__}). Its batch is decided and "
            "its rows are stored: correct the cause and start the pipeline again"
        )
    return None


def _first(failed: Mapping[str, PoundlockError]) -> PoundlockError:
    """Choose the error to raise: a temporary one if there is any, so that the rest is tried again."""
    errors = list(failed.values())
    error = next((it for it in errors if isinstance(it, Unavailable)), errors[0])
    if isinstance(error, PermanentlyRefused):
        error.branches = [name for name, it in failed.items() if isinstance(it, PermanentlyRefused)]
    return error
