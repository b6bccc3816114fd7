"""Logs on a real disk, and a disk that fails, for the unit tests of what is kept there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from poundlock.core.disk import Disk
from poundlock.core.log import FileLog
from poundlock.core.model import (
    Decided,
    Fingerprint,
    Finished,
    Generation,
    Namespace,
    Receipt,
    Record,
)


def generation(number: int = 1) -> Generation:
    return Generation(number, Namespace("lock", "feed"), "file:///log", None, "here:1")


def decided(batch: int) -> Decided:
    return Decided(batch, 1, 1, f"hash-{batch}", (Receipt("out", "b", 0, Fingerprint(1, 1)),), {})


def opened(path: Path, disk: Disk | None = None) -> FileLog:
    log = FileLog(path, disk=disk)
    log.load()
    return log


def written(path: Path, *records: Record) -> FileLog:
    log = opened(path)
    for record in records:
        log.append(record)
    return log


def finished_batches(count: int) -> list[Record]:
    return [record for batch in range(count) for record in (decided(batch), Finished(batch))]


def file_of(path: Path, number: int) -> Path:
    return path / f"{number:020}.json"


class SpoiledDisk(Disk):
    """A real disk whose calls can fail, before or after they take effect."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fail: Callable[[str, str], OSError | None] = lambda call, path: None
        self.after = False

    def _spoiled(self, call: str, path: str, real: Callable[[], Any]) -> Any:
        self.calls.append(call)
        error = self.fail(call, path)
        if error is not None and not self.after:
            raise error
        result = real()
        if error is not None:
            raise error
        return result

    def write(self, path: str, data: bytes, like: str | None = None) -> None:
        self._spoiled("write", path, lambda: super(SpoiledDisk, self).write(path, data, like))

    def sync(self, path: str) -> None:
        self._spoiled("sync", path, lambda: super(SpoiledDisk, self).sync(path))

    def link(self, source: str, target: str) -> None:
        self._spoiled("link", target, lambda: super(SpoiledDisk, self).link(source, target))

    def unlink(self, path: str) -> None:
        error = self.fail("unlink", path)
        if error is not None:
            raise error
        super().unlink(path)

    def read(self, path: str) -> bytes:
        return self._spoiled("read", path, lambda: super(SpoiledDisk, self).read(path))

    def names(self, path: str) -> list[str]:
        return self._spoiled("names", path, lambda: super(SpoiledDisk, self).names(path))
