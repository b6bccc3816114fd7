"""What the directory holds of a sink's branches: marks, and the manifest's word on each."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import pyarrow.fs as pafs

from poundlock.core.model import Namespace
from poundlock.core.naming import BranchName, parse_name
from poundlock.core.protocol import BranchState
from poundlock.core.site import reachable
from poundlock.filesystem import in_parallel, open_filesystem
from poundlock.sinks.files.manifest import DataFile, Manifest, put, uri_of
from poundlock.sinks.files.writer import ABORTED, OPEN, OURS, STAGED, UNKNOWN, ListPrint

_DATA = re.compile(r"part-(.+)-\d{5,}\.[.\w]+")


class Branches:
    """The branches in one directory. `publish` appends a record to the manifest."""

    def __init__(self, place: str, manifest: Manifest, publish: Callable[[list[DataFile]], bool]):
        self._place, self._manifest, self._publish = place, manifest, publish

    def commit(self, lists: Mapping[str, ListPrint]) -> dict[str, BranchState]:
        """Publish all complete branches in one record, and bury the others."""
        states = self._publish_complete(lists)
        states |= self._bury({name: it for name, it in lists.items() if name not in states})
        committed = (name for name, state in states.items() if state is BranchState.COMMITTED)
        self._drop(name + mark for name in committed for mark in (STAGED, OPEN))
        return states

    def _publish_complete(self, lists: Mapping[str, ListPrint]) -> dict[str, BranchState]:
        while True:
            states, dying = self._read_states(list(lists))
            over = states.keys() | dying
            staged = self.read_staged({name: it for name, it in lists.items() if name not in over})
            complete = {name: files for name, files in staged.items() if files is not None}
            record = [file for files in complete.values() for file in files]
            if not complete or self._publish(record):
                return states | dict.fromkeys(complete, BranchState.COMMITTED)

    def abort(self, names: Sequence[str]) -> dict[str, BranchState]:
        states, _ = self._read_states(names)
        return states | self._bury(dict.fromkeys(set(names).difference(states), UNKNOWN))

    def list_open(self, namespace: Namespace, sink: str) -> list[tuple[BranchName, str]]:
        """Return the branches that the manifest does not name, each as `open` or `staged`."""
        self._manifest.load()
        marked = {
            name: "staged" if STAGED in marks else "open"
            for name, marks in self._read_marks().items()
            if (name.namespace, name.sink) == (namespace, sink) and marks & {OPEN, STAGED}
        }
        named = self._manifest.named(map(str, marked))
        return [(name, state) for name, state in marked.items() if str(name) not in named]

    def newest_generation(self, namespace: Namespace, sink: str) -> int:
        """Return the newest generation that left a mark or committed files. 0 if none did."""
        self._manifest.load()
        marked = self._read_marks()
        mine = [name for name in marked if (name.namespace, name.sink) == (namespace, sink)]
        committed = self._manifest.published.generation(namespace, sink)
        return max([committed, *(name.generation for name in mine)])

    def newest_committed(self, namespace: Namespace, sink: str) -> list[BranchName]:
        """Return the branches of the newest batches whose files the manifest names."""
        self._manifest.load()
        published = map(parse_name, self._manifest.published.newest(namespace, sink))
        return [name for name in published if name is not None]

    def logs_of(self, pipeline: str, sink: str) -> frozenset[str]:
        """Return the identities of the pipeline's logs whose files the manifest names."""
        self._manifest.load()
        return self._manifest.published.logs_of(pipeline, sink)

    def prune(self, namespace: Namespace, sink: str, floor: int) -> None:
        self._manifest.load()
        old = {
            str(name): marks
            for name, marks in self._read_marks().items()
            if (name.namespace, name.sink) == (namespace, sink) and name.batch < floor
        }
        named = self._manifest.named(old)
        # A task that nobody could reach may have opened a file after its branch was buried.
        self._delete(self._list_data({n for n, marks in old.items() if ABORTED in marks} - named))
        self._drop(
            f"{name}{mark}"
            for name, marks in old.items()
            for mark in marks
            if mark == ABORTED or name in named
        )

    def first_staged(self) -> list[DataFile]:
        """Return one file of each prepared branch."""
        names = [str(name) for name, marks in self._read_marks().items() if STAGED in marks]
        staged = self.read_staged(dict.fromkeys(names, UNKNOWN))
        return [files[0] for files in staged.values() if files]

    def read_staged(self, lists: Mapping[str, ListPrint]) -> dict[str, list[DataFile] | None]:
        """Return the files of each prepared branch.

        None if a file is gone or was changed, or if their list is not the one that was written.
        """
        system, root = open_filesystem(self._place)
        names = list(lists)

        def read(name: str) -> list[DataFile] | None:
            try:
                with (
                    reachable(self._place),
                    system.open_input_stream(f"{root}/{OURS}/{name}{STAGED}") as stream,
                ):
                    found = stream.read()
                if not lists[name].fits(found):
                    return None
                files = [DataFile.parse(line) for line in found.decode().splitlines()]
            except (FileNotFoundError, ValueError, KeyError):
                return None  # deleted, or not what was written
            # Others may be able to write into this directory: a branch has no files but its own.
            return [file for file in files if branch_of(file.uri.rpartition("/")[2]) == name]

        staged = dict(zip(names, in_parallel(read, names), strict=True))
        uri = uri_of(self._place)
        expected = {
            f"{root}/{file.below(uri)}": file.size
            for files in staged.values()
            for file in files or ()
        }
        with reachable(self._place):
            found = system.get_file_info(list(expected))
        changed = {
            path
            for entry, (path, size) in zip(found, expected.items(), strict=True)
            if entry.size != size
        }

        def whole(files: list[DataFile] | None) -> bool:
            return files is not None and not any(
                f"{root}/{file.below(uri)}" in changed for file in files
            )

        return {name: files if whole(files) else None for name, files in staged.items()}

    def _read_marks(self) -> dict[BranchName, set[str]]:
        """Return the marks of each branch."""
        system, root = open_filesystem(f"{self._place}/{OURS}")
        with reachable(self._place):
            entries = system.get_file_info(pafs.FileSelector(root, allow_not_found=True))
        marks = dict[BranchName, set[str]]()
        for entry in entries:
            text, dot, kind = entry.base_name.rpartition(".")
            name = parse_name(text)
            if name is not None:
                marks.setdefault(name, set()).add(dot + kind)
        return marks

    def _read_states(self, names: Sequence[str]) -> tuple[dict[str, BranchState], set[str]]:
        """Return the state of each branch that has ended, and the branches that are half buried.

        The manifest counts more than a tombstone. If there are other marks beside a tombstone, the
        driver that left it may not have finished, so all of the burial is done again.
        """
        self._manifest.load()
        marks = {str(name): kinds for name, kinds in self._read_marks().items()}
        states, dying = dict[str, BranchState](), set[str]()
        named = self._manifest.named(names)
        for name in names:
            if name in named:
                states[name] = BranchState.COMMITTED
            elif marks.get(name) == {ABORTED}:
                states[name] = BranchState.ABORTED
            elif ABORTED in marks.get(name, ()):
                dying.add(name)
        return states, dying

    def _bury(self, lists: Mapping[str, ListPrint]) -> dict[str, BranchState]:
        """Write tombstones, make sure that nobody published meanwhile, then delete the files."""
        if not lists:
            return {}
        names = list(lists)
        system, root = open_filesystem(self._place)
        with reachable(self._place):
            system.create_dir(f"{root}/{OURS}", recursive=True)

        def mark_dead(name: str) -> None:
            for mark in (
                OPEN,
                ABORTED,
            ):  # both: a tombstone alone means that the burial is finished
                put(system, f"{root}/{OURS}/{name}{mark}", b"", self._place)

        in_parallel(mark_dead, names)
        while not self._publish([]):
            self._manifest.load()
        named = self._manifest.named(names)
        dead = [name for name in names if name not in named]
        self._delete_data({name: lists[name] for name in dead})
        self._drop(name + mark for name in dead for mark in (STAGED, OPEN))
        states = dict.fromkeys(names, BranchState.COMMITTED)
        return states | dict.fromkeys(dead, BranchState.ABORTED)

    def _delete_data(self, lists: Mapping[str, ListPrint]) -> None:
        """Delete the files of branches, wherever in the directory.

        A prepared branch names its files. For another one the directory is listed, once.
        """
        _, root = open_filesystem(self._place)
        known = self.read_staged(lists)
        uri = uri_of(self._place)
        paths = [f"{root}/{it.below(uri)}" for files in known.values() for it in files or ()]
        if any(files is None for files in known.values()):
            paths += self._list_data(set(lists))
        self._delete(dict.fromkeys(paths))

    def _list_data(self, names: set[str]) -> list[str]:
        """Return the files of branches, wherever in the directory. It is listed only for a name."""
        if not names:
            return []
        system, root = open_filesystem(self._place)
        with reachable(self._place):
            entries = system.get_file_info(
                pafs.FileSelector(root, allow_not_found=True, recursive=True)
            )
        return [it.path for it in entries if branch_of(it.base_name) in names]

    def _drop(self, marks: Iterable[str]) -> None:
        _, root = open_filesystem(f"{self._place}/{OURS}")
        self._delete(f"{root}/{mark}" for mark in marks)

    def _delete(self, paths: Iterable[str]) -> None:
        system, _ = open_filesystem(self._place)

        def delete(path: str) -> None:
            with reachable(self._place), contextlib.suppress(FileNotFoundError):
                system.delete_file(path)

        in_parallel(delete, paths)


def branch_of(file: str) -> str | None:
    """Return the name of the branch in a file's name."""
    match = _DATA.fullmatch(file)
    return match[1] if match else None
