"""A disk that keeps only what was synced, and a network store that keeps everything.

The disk keeps only what POSIX promises: a file's content survives a crash of the machine if the file
was synced, its name if the directory was. The rest survives or not, as the schedule says.
"""

from __future__ import annotations

from collections.abc import Callable

from poundlock.core.checkpoint import FileCheckpoint
from poundlock.core.disk import Disk
from poundlock.core.log import NumberTaken, TransactionLog, record_numbers

Effect = Callable[[str, Callable[[], object]], object]

ROOT = "/model"


class File:
    __slots__ = ("data", "synced")

    def __init__(self, data: bytes):
        self.data = data
        self.synced: bytes | None = None


class SimDisk:
    """One machine's disk. `live` is what its processes see, `kept` what a crash leaves."""

    def __init__(self) -> None:
        self.live: dict[str, File | None] = {"/": None, ROOT: None}  # None: a directory
        self.kept: dict[str, File | None] = dict(self.live)
        self.doomed: set[str] = set()  # names whose sync failed; later syncs skip them

    def make_directory(self, path: str) -> None:
        while path not in self.live:
            self.live[path] = None
            path = _parent(path)

    def write(self, path: str, data: bytes) -> None:
        self.live[path] = File(data)

    def sync(self, path: str) -> None:
        file = self._there(path)
        if file is not None:
            file.synced = file.data
            return
        for name in {*self.live, *self.kept} - self.doomed:
            if _parent(name) == path:
                if name in self.live:
                    self.kept[name] = self.live[name]
                else:
                    del self.kept[name]

    def fail_to_sync(self, path: str) -> None:
        """Mark dirty data as clean without writing it to the disk."""
        if self._there(path) is None:
            inside = (n for n in self.live if _parent(n) == path and n not in self.kept)
            self.doomed.update(inside)

    def link(self, source: str, target: str) -> None:
        file = self._there(source)
        if target in self.live:
            raise FileExistsError(target)
        self.live[target] = file

    def unlink(self, path: str) -> None:
        self._there(path)
        del self.live[path]

    def rename(self, source: str, target: str) -> None:
        self.live[target] = self._there(source)
        del self.live[source]

    def keep_all(self, path: str) -> None:
        """Make all below a directory durable."""
        for name, file in self.live.items():
            if name.startswith(path):
                self.kept[name] = file
                if file is not None:
                    file.synced = file.data
        for name in [n for n in self.kept if n.startswith(path) and n not in self.live]:
            del self.kept[name]

    def read(self, path: str) -> bytes:
        file = self._there(path)
        assert file is not None
        return file.data

    def names(self, path: str) -> list[str]:
        self._there(path)
        return [name.rpartition("/")[2] for name in self.live if _parent(name) == path]

    def _there(self, path: str) -> File | None:
        if path not in self.live:
            raise FileNotFoundError(path)
        return self.live[path]

    def crash(self, arg: int) -> None:
        """Lose unsynced data. 0: all of it; 1: none of it; otherwise: a varying part."""
        after = dict(self.kept)
        for turn, name in enumerate({**self.live, **self.kept}):
            survives = arg == 1 or (arg > 1 and (arg >> turn % 3) & 1)
            if survives and name not in self.doomed:
                if name in self.live:
                    after[name] = self.live[name]
                else:
                    after.pop(name, None)
        while lost := [name for name in after if _parent(name) not in after]:
            for name in lost:
                del after[name]
        for file in filter(None, after.values()):
            if arg != 1:
                file.data = file.synced if file.synced is not None else file.data[: 40 * (arg % 3)]
            file.synced = file.data
        self.live, self.kept, self.doomed = dict(after), after, set()


def _parent(path: str) -> str:
    return path.rpartition("/")[0] or "/"


class DriverDisk(Disk):
    """The disk as one process sees it: every call is an effect and can fail."""

    def __init__(self, disk: SimDisk, effect: Effect, published: Callable[[int, bytes], None]):
        self._disk, self._effect, self._published = disk, effect, published

    def rename(self, source: str, target: str) -> None:
        self._effect("rename", lambda: self._disk.rename(source, target))

    def below(self, path: str) -> list[str]:
        start, live = f"{path}/", self._disk.live
        return [
            name[len(start) :] for name in live if name.startswith(start) and live[name] is not None
        ]

    def make_directory(self, path: str) -> None:
        self._effect("mkdir", lambda: self._disk.make_directory(path))

    def write(self, path: str, data: bytes, like: str | None = None) -> None:
        self._effect("write", lambda: self._disk.write(path, data))

    def sync(self, path: str) -> None:
        try:
            self._effect("sync", lambda: self._disk.sync(path))
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self._disk.fail_to_sync(path)
            raise

    def link(self, source: str, target: str) -> None:
        def effect() -> None:
            self._disk.link(source, target)
            for number in record_numbers([target.rpartition("/")[2]]):
                self._published(number, self._disk.read(target))

        self._effect("link", effect)

    def unlink(self, path: str) -> None:
        self._effect("unlink" if path.endswith(".tmp") else "del", lambda: self._disk.unlink(path))

    def read(self, path: str) -> bytes:
        data = self._effect("read", lambda: self._disk.read(path))
        assert isinstance(data, bytes)
        return data

    def names(self, path: str) -> list[str]:
        names = self._effect("names", lambda: self._disk.names(path))
        assert isinstance(names, list)
        return names


def checkpoint_on(disk: SimDisk, root: str, effect: Effect) -> FileCheckpoint:
    """Return Spark's checkpoint as a driver's own code sees it. Its effects have names of their own."""

    def named(label: str, request: Callable[[], object]) -> object:
        return effect(f"checkpoint-{label}", request)

    return FileCheckpoint(root, disk=DriverDisk(disk, named, lambda number, data: None))


class RemoteLog(TransactionLog):
    """The log in an object store: durable at once, but requests get lost, late and repeated."""

    settle_tries = 3

    def __init__(
        self,
        records: dict[int, bytes],
        uri: str,
        effect: Effect,
        published: Callable[[int, bytes], None],
        *,
        swallows: bool,
        clock: Callable[[], float],
    ):
        super().__init__(uri, clock=clock)
        self._records, self._effect, self._published = records, effect, published
        self._swallows = swallows  # as Spark's own checkpoint manager on S3A
        self._notes = dict[str, bytes]()

    def _create(self, number: int, data: bytes) -> None:
        def effect() -> bool:
            if number in self._records:
                return False
            self._records[number] = data
            self._published(number, data)
            return True

        if not self._effect("put", effect) and not self._swallows:
            raise NumberTaken

    def _read(self, number: int) -> bytes | None:
        data = self._effect("get", lambda: self._records.get(number))
        assert data is None or isinstance(data, bytes)
        return data

    def _numbers(self) -> list[int]:
        numbers = self._effect("list", lambda: list(self._records))
        assert isinstance(numbers, list)
        return numbers

    def _delete(self, number: int) -> None:
        self._effect("del", lambda: self._records.pop(number, None))

    def put_note(self, name: str, data: bytes) -> None:
        self._notes[name] = data

    def notes(self) -> dict[str, bytes]:
        return dict(self._notes)
