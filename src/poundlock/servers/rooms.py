"""Directories that a server can use if root starts it, although the server runs as `nobody`.

A server may not pass through root's private directories, where a home, a test's scratch directory and
the cache often are. A directory below one is a link to a room in `ROOMS`, where every user can pass but
only its owner can look around. A room ends with its link. If the program does not run as root, the
directories are ordinary ones.
"""

from __future__ import annotations

import json
import os
import pwd
import secrets
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

from poundlock import ownership
from poundlock.errors import UsageError

USER = "nobody"
ROOMS = Path("/var/lib/poundlock")
_PASSABLE = 0o711


def user() -> pwd.struct_passwd:
    return pwd.getpwnam(USER)


def home_mode() -> int:
    """Return the mode of a server's home. Root's can be passed through; its files are private."""
    return _PASSABLE if os.geteuid() == 0 else ownership.PRIVATE


def reachable(path: Path) -> bool:
    """Say whether `USER` can pass through every directory above a path, and above what it links to."""
    both = {path.absolute(), path.resolve()}
    return all(_passable(parent) for name in both for parent in name.parents)


def hand_over(directory: Path) -> Path:
    """Create a directory that only the demoted server may read, and make it own all of the content.

    Returns the path by which the server finds it.
    """
    place = _place(directory)
    if os.geteuid() == 0:
        owner = user()
        _give(place, owner.pw_uid, owner.pw_gid)
    return place


def show(directory: Path) -> Path:
    """Create a directory that the demoted server may read but not change; see `hand_over`."""
    place = _place(directory)
    if os.geteuid() == 0:
        _give(place, 0, user().pw_gid, directories=0o750, files=0o640)
    return place


def delete(path: Path) -> None:
    """Delete a file, a link, or a directory with its content, which may be in a room."""
    if path.is_symlink():
        room = Path(os.readlink(path))
        if _belongs(room, path):
            shutil.rmtree(room, ignore_errors=True)
            _note(room).unlink(missing_ok=True)
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def delete_home(home: Path) -> None:
    """Delete the home of a server, with its rooms."""
    if home.is_dir():
        for entry in list(home.iterdir()):
            delete(entry)
    shutil.rmtree(home, ignore_errors=True)


def root() -> Path:
    """Return the directory of all rooms, which belongs to root."""
    try:
        return ownership.own_directory(ROOMS, _PASSABLE)
    except OSError as error:
        raise UsageError(
            f"{ROOMS} cannot be created ({error}). Servers that root starts run as {USER} and keep "
            "their data there: make it writable, or run this command as an ordinary user"
        ) from error


def _place(directory: Path) -> Path:
    directory.parent.mkdir(parents=True, exist_ok=True)
    if os.geteuid() != 0 or (not directory.is_symlink() and reachable(directory)):
        directory.mkdir(exist_ok=True, mode=0o700)
        return directory
    with ownership.locked(root() / "lock"):
        _delete_deserted()
        if directory.is_symlink():
            room = Path(os.readlink(directory))
            if not _belongs(room, directory):
                raise UsageError(
                    f"{directory} is a link to {room}, which is not the server's own directory. "
                    "Find out who made it. Then delete it, or choose another directory"
                )
            return room
        room = ROOMS / secrets.token_hex(8)
        _note(room).write_text(_note_of(directory))
        if directory.exists():  # an earlier version left it in its place
            shutil.move(directory, room)
        else:
            room.mkdir(mode=0o700)
        directory.symlink_to(room)
        return room


def _note(room: Path) -> Path:
    """Return the file that names the link to a room."""
    return room.with_name(room.name + ".of")


def _belongs(room: Path, link: Path) -> bool:
    try:
        return room.parent == ROOMS and _read_note(_note(room))[0] == link.absolute()
    except OSError:
        return False


def _note_of(link: Path) -> str:
    """Return the text of a note: the link, and which directories are above it."""
    link = link.absolute()
    above = {str(parent): _identity(parent) for parent in link.parents}
    return json.dumps({"link": str(link), "above": above})


def _read_note(note: Path) -> tuple[Path, dict[str, list[int]]]:
    text = note.read_text()
    if not text.startswith("{"):  # of an earlier version, which knew only the link
        return Path(text), {}
    found = json.loads(text)
    return Path(found["link"]), found["above"]


def _identity(directory: Path) -> list[int]:
    found = directory.stat()
    return [found.st_dev, found.st_ino]


def _delete_deserted() -> None:
    """Delete rooms whose link was deleted, such as those of a test's scratch directory."""
    for note in ROOMS.glob("*.of"):
        room, (link, above) = note.with_suffix(""), _read_note(note)
        if _is_deleted(link, room, above):
            shutil.rmtree(room, ignore_errors=True)
            note.unlink()


def _is_deleted(link: Path, room: Path, above: Mapping[str, list[int]]) -> bool:
    """Return whether a link is known to be gone, and not only out of sight.

    Its file system may not be mounted. So what is left of the directories above it must be the ones
    that were there, and on the file system of the link.
    """
    if link.is_symlink():
        return os.readlink(link) != str(room)
    left = next((parent for parent in link.parents if parent.is_dir()), None)
    parent = above.get(str(link.parent))
    if left is None or parent is None:
        return False
    now = _identity(left)
    return now == above.get(str(left)) and now[0] == parent[0]


def _passable(directory: Path) -> bool:
    try:
        found = directory.stat()
    except FileNotFoundError:
        return True  # whoever creates it decides
    owner = user()
    if found.st_uid == owner.pw_uid:
        return bool(found.st_mode & stat.S_IXUSR)
    if found.st_gid == owner.pw_gid:
        return bool(found.st_mode & stat.S_IXGRP)
    return bool(found.st_mode & stat.S_IXOTH)


def _give(place: Path, uid: int, gid: int, *, directories: int = 0, files: int = 0) -> None:
    """Change the owner of a tree, and the modes if they are given.

    It goes by open directories. By path, the server's user could put a link in the way.
    """
    for _, names, others, directory in os.fwalk(place, follow_symlinks=False):
        os.fchown(directory, uid, gid)
        if directories:
            os.fchmod(directory, directories)
        for name in (*names, *others):
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
                continue  # it may be somebody else's file
            os.chown(name, uid, gid, dir_fd=directory, follow_symlinks=False)
            if files and stat.S_ISREG(found.st_mode):
                os.chmod(name, files, dir_fd=directory)
