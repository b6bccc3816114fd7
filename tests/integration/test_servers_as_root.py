"""Servers that root starts have none of root's rights, wherever root keeps its files.

The scratch directory of the tests can be entered by its owner alone, as can root's home. For another
user than root the same tests hold: nothing changes then.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from poundlock import ownership
from poundlock.errors import UsageError
from poundlock.servers import (
    base,
    demote,
    kafka,
    mariadb,
    opensearch,
    postgres,
    programs,
    rooms,
    valkey,
)
from poundlock.servers.node import Node

Start = Callable[[Path], AbstractContextManager[Node]]
KINDS: dict[str, Start] = {
    "kafka": lambda home: kafka.running(home, security="SASL_SSL", brokers=2),
    "postgres": postgres.running,
    "mariadb": mariadb.running,
    "valkey": valkey.running,
    "opensearch": opensearch.running,
}


@pytest.fixture
def private(tmp_path: Path) -> Path:
    place = tmp_path / "private"
    place.mkdir(mode=0o700)
    return place


def family(pid: int) -> list[int]:
    """Return a process and its descendants."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += family(int(child))
    return found


def rights(pid: int) -> dict[str, set[str]]:
    """Return the users, the groups and the capabilities of a process, as the kernel reports them."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pairs = [line.split(":", 1) for line in lines]
    names = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapAmb")
    return {name: set(value.split()) for name, value in pairs if name in names}


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_has_none_of_roots_rights(
    kind: str, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "valkey":  # as in an environment below root's home
        program = shutil.copy(valkey.binary(), private / "valkey-server")
        monkeypatch.setenv("POUNDLOCK_VALKEY_BIN", str(program))
    with KINDS[kind](private / "home") as server:
        state = base.State.load(private / "home")
        assert state is not None and state.processes
        for process in state.processes.values():
            for pid in family(process.pid):
                has = rights(pid)
                for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
                    assert {int(bits, 16) for bits in has[name]} == {0}, (name, has)
                assert "0" not in has["Uid"] | has["Gid"], has
                assert os.geteuid() != 0 or not has["Groups"], has
        server.kill()
        server.start()  # it finds its data again
    base.down(private / "home", wipe=True)
    assert [entry.name for entry in (private / "home").iterdir()] == ["lock"]


def test_a_room_ends_with_its_link(private: Path) -> None:
    kept, wiped, forgotten = private / "kept", private / "wiped", private / "forgotten"
    places = [rooms.hand_over(directory) for directory in (kept, wiped, forgotten)]
    for place in places:
        (place / "row").write_text("1")
    rooms.delete(wiped)
    if forgotten.is_symlink():
        forgotten.unlink()  # as if the scratch directory of a test was deleted
    else:
        shutil.rmtree(forgotten)
    assert rooms.hand_over(kept) == places[0], "the same one again"
    assert (kept / "row").read_text() == "1"
    assert [place.exists() for place in places] == [True, False, False]
    rooms.delete(kept)
    assert not kept.exists() and not places[0].exists()


@pytest.mark.parametrize("hidden", [".", "server"])
def test_a_room_outlives_a_link_that_is_out_of_sight(private: Path, hidden: str) -> None:
    """The file system of the link is not mounted yet; its mount point is another directory."""
    home = private / "fs" / "server"
    home.mkdir(parents=True)
    place = rooms.hand_over(home / "data")
    (place / "row").write_text("1")
    mount, aside = (private / "fs" / hidden).resolve(), private / "unmounted"
    mount.rename(aside)
    mount.mkdir()
    rooms.delete(rooms.hand_over(private / "other"))
    mount.rmdir()
    aside.rename(mount)
    assert rooms.hand_over(home / "data") == place and (home / "data" / "row").read_text() == "1"
    rooms.delete(home / "data")


def test_data_of_an_earlier_version_is_kept(private: Path) -> None:
    (private / "data").mkdir()
    (private / "data" / "row").write_text("1")
    place = rooms.hand_over(private / "data")
    assert (place / "row").read_text() == (private / "data" / "row").read_text() == "1"
    assert rooms.reachable(place) or os.geteuid() != 0
    assert place.stat().st_uid != 0 or os.geteuid() != 0
    rooms.delete(private / "data")


def test_a_link_that_another_made_is_not_followed(private: Path) -> None:
    (private / "elsewhere").mkdir()
    (private / "elsewhere" / "row").write_text("1")
    (private / "data").symlink_to(private / "elsewhere")
    if os.geteuid() == 0:
        with pytest.raises(UsageError, match="is a link to"):
            rooms.hand_over(private / "data")
    rooms.delete(private / "data")
    assert (private / "elsewhere" / "row").exists()
    assert not (private / "data").is_symlink()


def test_a_file_with_two_names_is_not_given_away(private: Path) -> None:
    """The server's user could have made a link to a file of root's in its data."""
    (private / "secret").write_text("x")
    place = rooms.hand_over(private / "data")
    os.link(private / "secret", private / "link")
    shutil.move(private / "link", place / "link")
    before = (private / "secret").stat()
    rooms.hand_over(private / "data")
    assert (private / "secret").stat().st_uid == before.st_uid
    rooms.delete(private / "data")


def test_a_program_that_the_server_cannot_reach_is_refused_by_name(private: Path) -> None:
    program = Path(shutil.copy("/bin/true", private / "server"))
    if os.geteuid() == 0:
        with pytest.raises(UsageError, match=f"{program} cannot be reached by the user nobody"):
            demote.demoted([str(program)])
    else:
        assert demote.demoted([str(program)]) == [str(program)]


# Programs.


@pytest.fixture
def cache(private: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POUNDLOCK_CACHE", str(private / "cache"))
    monkeypatch.setattr(rooms, "ROOMS", private / "rooms")
    monkeypatch.setattr(programs, "_verified", set())
    return private


def fill(place: Path) -> None:
    (place / "bin").mkdir(parents=True)
    (place / "bin" / "server").write_text("good")
    (place / "bin" / "server").chmod(0o775)
    (place / "bin" / "link").symlink_to("server")


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("change", ["content", "more", "less", "mode", "link"])
def test_what_was_unpacked_is_unpacked_again_if_it_has_changed(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = programs.unpacked("thing", fill)
    seen = programs.digest(place)
    server, link = place / "bin" / "server", place / "bin" / "link"
    assert server.stat().st_mode & 0o777 == 0o755, "every user may run it, and nobody change it"
    if change == "content":
        server.write_text("evil")
    elif change == "more":
        (place / "bin" / "libc.so.6").write_text("evil")
    elif change == "less":
        server.unlink()
    elif change == "mode":
        server.chmod(0o777)
    else:
        link.unlink()
        link.symlink_to("/bin/sh")
    monkeypatch.setattr(programs, "_verified", set())  # another process
    assert programs.found("thing") is None
    assert programs.unpacked("thing", fill) == place
    assert programs.digest(place) == seen and server.read_text() == "good"
    assert programs.found("thing") == place


@pytest.mark.usefixtures("cache")
def test_an_interrupted_unpacking_leaves_nothing_that_is_used() -> None:
    def interrupted(place: Path) -> None:
        fill(place)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        programs.unpacked("thing", interrupted)
    assert programs.found("thing") is None
    assert (programs.unpacked("thing", fill) / "bin" / "server").read_text() == "good"


@pytest.mark.usefixtures("cache")
def test_programs_that_others_can_change_are_refused() -> None:
    programs.unpacked("thing", fill)
    programs.directory().chmod(0o777)
    with pytest.raises(UsageError, match="can be written by other users"):
        programs.unpacked("thing", fill)


def test_a_copy_is_made_only_if_it_is_needed(cache: Path) -> None:
    ownership.own_directory(cache / "deep", ownership.PRIVATE)
    program = Path(shutil.copy("/bin/true", cache / "deep" / "server"))
    found = programs.reachable_file(program)
    assert found.read_bytes() == program.read_bytes()
    assert (found == program) == (os.geteuid() != 0)
    assert programs.reachable_file(Path("/bin/true")) == Path("/bin/true")
