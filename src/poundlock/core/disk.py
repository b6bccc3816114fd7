"""A local disk: the calls that make what is written there survive a crash of the machine."""

from __future__ import annotations

import contextlib
import os

from poundlock.errors import UsageError


class Disk:
    """The calls that make a local file durable. Tests replace it by a disk that loses data."""

    def make_directory(self, path: str) -> None:
        os.makedirs(path, mode=0o700, exist_ok=True)

    def write(self, path: str, data: bytes, like: str | None = None) -> None:
        """Write a new file that only its user can read: the user of the file `like`, if it exists.

        Raises `UsageError` if it cannot be given to that user. Then nothing is in it.
        """
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            if like is not None:
                with contextlib.suppress(FileNotFoundError):
                    _give(descriptor, path, os.stat(like))
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


def _give(descriptor: int, path: str, to: os.stat_result) -> None:
    # By the open file, not by its name: another user may have the directory.
    if os.fstat(descriptor).st_uid == to.st_uid:
        return
    try:
        os.fchown(descriptor, to.st_uid, to.st_gid)
    except OSError as error:
        raise UsageError(
            f"what is in {os.path.dirname(path)} belongs to user {to.st_uid}, who could not read what "
            f"this user writes ({error}). Nothing was written. Run this as user {to.st_uid}, or as root"
        ) from error
