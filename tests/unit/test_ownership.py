"""Directories, files and locks in places where another user may have been first."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from poundlock import ownership
from poundlock.errors import UsageError
from poundlock.servers import base


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_directory_is_made_private_and_stays_so(tmp_path: Path) -> None:
    place = ownership.own_directory(tmp_path / "a" / "b")
    assert mode(place) == 0o700
    place.chmod(0o755)
    assert mode(ownership.own_directory(place)) == 0o700
    assert mode(ownership.own_directory(place, ownership.READABLE)) == 0o755


def test_a_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(UsageError, match=r"can be written by other users \(mode 777\)"):
        ownership.own_directory(tmp_path / "open")


def test_a_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs").mkdir()
    if os.geteuid() == 0:
        os.chown(tmp_path / "theirs", 12345, 12345)
    else:  # only root can give a directory away
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(UsageError, match=r"theirs belongs to user \d+, not to user"):
        ownership.own_directory(tmp_path / "theirs")


@pytest.mark.parametrize("target", ["directory", "missing"])
def test_a_link_in_place_of_a_directory_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / target)
    with pytest.raises(UsageError, match="link is not a directory, or is a link"):
        ownership.own_directory(tmp_path / "link")
    assert not (tmp_path / "missing").exists()


def test_a_lock_does_not_follow_a_link(tmp_path: Path) -> None:
    """The file behind the link was emptied before."""
    (tmp_path / "precious").write_text("content")
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(UsageError, match="lock cannot be opened, or is a link"), base.locked(home):
        pass
    assert (tmp_path / "precious").read_text() == "content"


def test_a_lock_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    inside: list[str] = []

    def other() -> None:
        with ownership.locked(tmp_path / "lock"):
            inside.append("other")

    thread = threading.Thread(target=other)
    with ownership.locked(tmp_path / "lock"):
        thread.start()
        thread.join(0.2)
        inside.append("first")
    thread.join()
    assert inside == ["first", "other"]
    assert mode(tmp_path / "lock") == 0o600
