"""The programs of servers: where every server can run them, and unchanged since they were unpacked.

A program below root's private directories is copied, because a server that root starts runs as another
user. The hash of what was unpacked is kept beside it. If it differs, the program is unpacked again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from poundlock import ownership
from poundlock.jvm import jars
from poundlock.servers import rooms

_verified: set[tuple[Path, str]] = set()  # by this process


def directory() -> Path:
    """Return the directory of programs. Only this user or root can change what is in it."""
    place = jars.cache().parent / "programs"
    if os.geteuid() == 0 and not rooms.reachable(place):
        place = rooms.root() / "programs"
    return ownership.own_directory(place, ownership.READABLE)


def unpacked(name: str, unpack: Callable[[Path], None]) -> Path:
    """Return the directory of this name, which `unpack` fills if it is missing or was changed."""
    parent = directory()
    with ownership.locked(parent / ".lock"):
        return _whole(parent / name) or _unpack(parent / name, unpack)


def found(name: str) -> Path | None:
    """Return the directory of this name if it was unpacked and is unchanged."""
    parent = directory()
    with ownership.locked(parent / ".lock"):
        return _whole(parent / name)


def reachable_file(file: Path) -> Path:
    """Return a program that a server can run: the file itself, or a verified copy of it."""
    if os.geteuid() != 0 or rooms.reachable(file):
        return file
    digest = _file_digest(file)
    return unpacked(f"file-{digest[:32]}", lambda place: _copy(file, place)) / file.name


def java_command(name: str, *flags: str, record: bool = False) -> list[str]:
    """Return a command line as `jars.java_command` does, with jars that the server can read.

    `record` keeps the classes of the JVM, where only the server's user can change them.
    """
    files = jars.paths(name)
    if os.geteuid() != 0 or all(map(rooms.reachable, files)):
        archives = None if os.geteuid() != 0 else rooms.hand_over(rooms.root() / "classes")
        return jars.java_command(name, *flags, record=record, archives=archives)
    sums = hashlib.sha256("\n".join(jar.sha256 for jar in jars.locked(name)).encode()).hexdigest()
    place = unpacked(f"{name}-{sums[:12]}", lambda place: _copy_jars(files, place))
    copies = [place / file.name for file in files]
    archives = rooms.hand_over(rooms.root() / "classes")
    return jars.java_command(name, *flags, record=record, files=copies, archives=archives)


def _copy(file: Path, place: Path) -> None:
    place.mkdir()
    shutil.copyfile(file, place / file.name)
    (place / file.name).chmod(0o755)


def _copy_jars(files: Sequence[Path], place: Path) -> None:
    place.mkdir()
    for file in files:
        shutil.copyfile(file, place / file.name)


def _whole(place: Path) -> Path | None:
    """Return a directory if its content has the hash that was written when it was unpacked."""
    try:
        expected = _seal(place).read_text()
    except FileNotFoundError:
        return None
    if (place, expected) not in _verified:
        ownership.check_own(place)
        if digest(place) != expected:
            return None
        _verified.add((place, expected))
    return place


def _unpack(place: Path, unpack: Callable[[Path], None]) -> Path:
    """Unpack into a temporary directory and rename it. The hash comes last, as the sign of a whole."""
    _seal(place).unlink(missing_ok=True)
    shutil.rmtree(place, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".") as temporary:
        new = Path(temporary) / "new"
        unpack(new)
        _make_readable(new)
        content = digest(new)
        os.replace(new, place)
    new = _seal(place).with_suffix(".new")
    new.write_text(content)
    os.replace(new, _seal(place))
    return place


def _seal(place: Path) -> Path:
    return place.with_name(f"{place.name}.sha256")


def _make_readable(place: Path) -> None:
    """Let every user read and run the files, and nobody but the owner change them."""
    for path in (place, *place.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            path.chmod(0o755)
        elif stat.S_ISREG(mode):
            path.chmod(0o755 if mode & stat.S_IXUSR else 0o644)


def digest(place: Path) -> str:
    """Return a hash of a tree: of names, kinds, modes and contents."""
    whole = hashlib.sha256()
    for path in sorted((place, *place.rglob("*"))):
        mode = path.lstat().st_mode
        content = ""
        if stat.S_ISLNK(mode):
            content, mode = os.readlink(path), stat.S_IFLNK
        elif stat.S_ISREG(mode):
            content = _file_digest(path)
        whole.update(
            f"{path.relative_to(place)}\0{mode:o}\0{content}\n".encode(errors="surrogateescape")
        )
    return whole.hexdigest()


def _file_digest(file: Path) -> str:
    one = hashlib.sha256()
    with open(file, "rb") as stream:
        while block := stream.read(1 << 20):
            one.update(block)
    return one.hexdigest()
