"""The log on a real disk, used by several users: root writes for the driver, a stranger does not.

Without root there is only one user, and less is shown.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator

import pytest
from fix_log import decided, generation

from poundlock.core.log import FileLog
from poundlock.core.model import Finished

ROOT = os.geteuid() == 0
DRIVER, STRANGER = (65534, 65533) if ROOT else (os.geteuid(), os.geteuid())
GROUP = DRIVER if ROOT else os.getegid()


def as_user(uid: int, work: Callable[[], object]) -> str:
    """Run something in a child as another user. Return its error, or ''."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        error = ""
        try:
            if ROOT:
                os.setgid(uid)
                os.setuid(uid)
            work()
        except BaseException as problem:  # noqa: BLE001 (the child reports any)
            error = f"{type(problem).__name__}: {problem}"
        os.write(write, error.encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        error = pipe.read().decode()
    os.waitpid(pid, 0)
    return error


@pytest.fixture
def theirs() -> Iterator[str]:
    """The log of a driver that runs as another user."""
    with tempfile.TemporaryDirectory() as top:
        os.chmod(top, 0o755)
        place = f"{top}/checkpoint"
        os.mkdir(place)
        os.chown(place, DRIVER, GROUP)
        assert as_user(DRIVER, lambda: FileLog(f"{place}/poundlock").append(generation())) == ""
        yield f"{place}/poundlock"


def test_the_driver_can_read_what_root_wrote(theirs: str) -> None:
    mine = FileLog(theirs, create=False)
    mine.load()
    mine.append(decided(0))
    mine.put_note("audit-x", b"x")

    def read() -> None:
        log = FileLog(theirs)
        assert log.load().batches.keys() == {0} and log.notes() == {"audit-x": b"x"}
        log.append(Finished(0))

    assert as_user(DRIVER, read) == ""
    files = [os.stat(f"{theirs}/{name}") for name in os.listdir(theirs)]
    assert {(it.st_uid, it.st_gid, it.st_mode & 0o777) for it in files} == {(DRIVER, GROUP, 0o600)}


def test_a_record_that_the_driver_could_not_read_is_refused(theirs: str) -> None:
    os.chmod(theirs, 0o777)
    for name in os.listdir(theirs):
        os.chmod(f"{theirs}/{name}", 0o644)

    def write() -> None:
        log = FileLog(theirs, create=False)
        log.load()
        log.append(decided(0))

    error = as_user(STRANGER, write)
    assert (error.startswith("UsageError") and f"user {DRIVER}" in error) or not ROOT, error
    assert len(os.listdir(theirs)) == 1 or not ROOT


def test_a_driver_may_use_a_directory_of_another_user(theirs: str) -> None:
    """Its own records say whose the log is, not the directory, which root has made."""
    os.chown(theirs, os.geteuid(), os.getegid())
    os.chmod(theirs, 0o777)

    def write() -> None:
        log = FileLog(theirs)
        log.load()
        log.append(decided(0))

    assert as_user(DRIVER, write) == ""
    mine = FileLog(theirs, create=False)
    mine.load()
    mine.append(Finished(0))
    assert as_user(DRIVER, lambda: FileLog(theirs).load()) == ""
