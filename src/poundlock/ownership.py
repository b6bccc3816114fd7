"""Directories and files that no other user can change, for what a program later trusts.

The paths of caches, locks and servers' data are known in advance. In a directory that others can write
to, another user could have put files or links there first.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Generator
from pathlib import Path

from poundlock.errors import UsageError

# Modes of directories.
PRIVATE = 0o700
READABLE = 0o755
_WRITABLE_BY_OTHERS = 0o022


def own_directory(path: Path, mode: int = PRIVATE) -> Path:
    """Create a directory of this user, or check that an existing one is, and give it this mode.

    Raises `UsageError` if it is a link, belongs to another user than root, or can be written by others:
    then nothing in it can be trusted.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(parents=True, mode=mode)
    # What is checked is what is changed: the path may be replaced in between.
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except PermissionError as error:
        raise UsageError(f"{path} cannot be opened ({error}). {_CURE}") from error
    except OSError as error:
        raise UsageError(f"{path} is not a directory, or is a link ({error}). {_CURE}") from error
    try:
        found = os.fstat(directory)
        _check(path, found)
        if stat.S_IMODE(found.st_mode) != mode and found.st_uid == os.geteuid():
            os.fchmod(directory, mode)
    finally:
        os.close(directory)
    return path


def check_own(path: Path) -> None:
    """Check that a path is no link, belongs to this user or root, and others cannot write to it."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise UsageError(f"{path} is a link, so it cannot be trusted. {_CURE}")
    _check(path, found)


def open_own(path: Path, flags: int) -> int:
    """Open a file of this user, and create it if it is missing. A link is not followed."""
    try:
        file = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"{path} cannot be opened, or is a link ({error}). {_CURE}") from error
    try:
        _check(path, os.fstat(file))
    except BaseException:
        os.close(file)
        raise
    return file


@contextlib.contextmanager
def locked(path: Path) -> Generator[None]:
    """Hold an exclusive lock on a file. Its content is not changed."""
    file = open_own(path, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


_CURE = "Find out who made it. Then delete it, or choose another directory"


def _check(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in (os.geteuid(), 0):
        raise UsageError(
            f"{path} belongs to user {found.st_uid}, not to user {os.geteuid()}, who runs this "
            f"program, so it cannot be trusted. {_CURE}"
        )
    if found.st_mode & _WRITABLE_BY_OTHERS:
        raise UsageError(
            f"{path} can be written by other users (mode {stat.S_IMODE(found.st_mode):o}), so it "
            f"cannot be trusted. {_CURE}"
        )
