"""A local disk: the calls that make what is written there survive a crash of the machine."""

from __future__ import annotations

import os


class Disk:
    """The calls that make a local file durable. Tests replace it by a disk that loses data."""

    def make_directory(self, path: str) -> None:
        os.makedirs(path, mode=0o700, exist_ok=True)

    def write(self, path: str, data: bytes) -> None:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)

    def sync(self, path: str) -> None:
        """Make a file's content, or a directory's entries, survive a crash of the machine."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def link(self, source: str, target: str) -> None:
        os.link(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def rename(self, source: str, target: str) -> None:
        os.replace(source, target)

    def read(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    def names(self, path: str) -> list[str]:
        return os.listdir(path)

    def below(self, path: str) -> list[str]:
        """Return the paths of all files below a directory, relative to it."""
        return [
            os.path.relpath(os.path.join(directory, name), path)
            for directory, _, names in os.walk(path)
            for name in names
        ]
