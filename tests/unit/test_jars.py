"""The lock file and the cache of jars. A fake replaces Ivy, so nothing here uses the network."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path

import pytest

from poundlock.errors import Unavailable, UsageError
from poundlock.jvm import jars

CONTENT = {"g:one:1": b"first", "g:two:2-rc.1": b"second"}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Repository:
    """Replaces Ivy: puts its jars where Ivy would put them."""

    def __init__(self, content: dict[str, bytes]):
        self.content = dict(content)
        self.asked: list[list[str]] = []

    def __call__(self, wanted, downloads: Path, *, transitive, on_jar) -> Path:
        self.asked.append([jar.coordinate for jar in wanted])
        time.sleep(0.3)  # long enough for a second thread to arrive
        arrived = downloads / "arrived"
        for jar in wanted:
            if jar.coordinate in self.content:
                (arrived / jar.file).parent.mkdir(parents=True, exist_ok=True)
                (arrived / jar.file).write_bytes(self.content[jar.coordinate])
                on_jar()
        return arrived


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Repository:
    """An empty cache, a lock with one set named `set`, and a repository with all its jars."""
    lock = tmp_path / "jars.lock"
    lines = [f"{coordinate} {sha256(content)}" for coordinate, content in CONTENT.items()]
    lock.write_text("[set]\n" + "\n".join(lines) + "\n")
    repository = Repository(CONTENT)
    monkeypatch.setattr(jars, "LOCK", lock)
    monkeypatch.setattr(jars, "_ivy", repository)
    monkeypatch.setenv("POUNDLOCK_CACHE", str(tmp_path / "cache"))
    return repository


def in_cache() -> list[str]:
    return sorted(path.name for path in jars.cache().rglob("*") if path.is_file())


# --- the lock ---


def test_the_lock_is_read_as_sets():
    text = f"# comment\n\n[a]\ng:x:1 {'0' * 64}\n[b]\n g:y:2-1 {'1' * 64}  # why\n[empty]\n"
    assert jars.read_lock(text) == {
        "a": [jars.Jar("g", "x", "1", "0" * 64)],
        "b": [jars.Jar("g", "y", "2-1", "1" * 64)],
        "empty": [],
    }


@pytest.mark.parametrize(
    "line",
    [
        "g:x:1",  # no hash
        f"g:x:1 {'0' * 63}",  # a truncated hash
        f"g:x {'0' * 64}",  # no version
        f"g:x:1 {'0' * 64} more",
    ],
)
def test_a_bad_line_of_the_lock_is_refused(line):
    with pytest.raises(UsageError, match="group:artifact:version"):
        jars.read_lock(f"[a]\n{line}\n")


def test_a_jar_before_any_set_is_refused():
    with pytest.raises(UsageError, match="Line 1 of"):
        jars.read_lock(f"g:x:1 {'0' * 64}\n")


def test_the_shipped_lock_has_every_set_and_no_excluded_jar():
    sets = jars.read_lock(jars.LOCK.read_text())
    assert sets.keys() == jars.ROOTS.keys()
    for name, roots in jars.ROOTS.items():
        coordinates = [jar.coordinate for jar in sets[name]]
        assert len(coordinates) == len(set(coordinates))
        assert {*roots.resolved, *roots.alone} <= set(coordinates)
        assert not {it.rpartition(":")[0] for it in coordinates} & set(roots.unneeded)


def test_an_unknown_set_is_refused_with_the_known_ones(repository):
    with pytest.raises(UsageError, match="no set of jars named 'sets'; there are: set"):
        jars.paths("sets")


# --- the cache ---


def test_a_missing_jar_is_fetched_only_once(repository):
    assert jars.missing("set")
    files = jars.paths("set")
    assert [file.read_bytes() for file in files] == [b"first", b"second"]
    assert [file.name for file in files] == ["one-1.jar", "two-2-rc.1.jar"]
    assert not jars.missing("set")
    assert jars.paths("set") == files
    assert len(repository.asked) == 1
    assert in_cache() == [".lock", "one-1.jar", "two-2-rc.1.jar"]  # no temporary file is left


def test_a_jar_that_changed_in_the_cache_is_fetched_again(repository):
    _, second = jars.paths("set")
    second.write_bytes(b"secand")
    assert [jar.coordinate for jar in jars.missing("set")] == ["g:two:2-rc.1"]
    assert jars.paths("set")[1].read_bytes() == b"second"
    assert repository.asked[1] == ["g:two:2-rc.1"]


@pytest.mark.parametrize("false", [b"evil", b"", None])
def test_a_jar_with_a_wrong_hash_never_enters_the_cache(repository, false):
    repository.content["g:two:2-rc.1"] = false
    if false is None:
        del repository.content["g:two:2-rc.1"]
    with pytest.raises(Unavailable, match=r"g:two:2-rc\.1 arrived with SHA-256") as caught:
        jars.paths("set")
    assert sha256(b"second") in str(caught.value)
    assert in_cache() == [".lock", "one-1.jar"]  # the good jar is kept, the other deleted


def test_a_jar_is_verified_before_its_name_appears(tmp_path):
    """A reader never sees part of a jar, because the last step is a rename."""
    jar = jars.Jar("g", "one", "1", sha256(b"first"))
    (tmp_path / "arrived/g/one").mkdir(parents=True)
    (tmp_path / "arrived" / jar.file).write_bytes(b"first")
    inode = (tmp_path / "arrived" / jar.file).stat().st_ino
    jars.publish([jar], tmp_path / "arrived", tmp_path / "cache")
    assert (tmp_path / "cache" / jar.file).stat().st_ino == inode


def test_a_jar_with_a_wrong_hash_is_deleted_from_the_download_folder(tmp_path):
    jar = jars.Jar("g", "one", "1", sha256(b"first"))
    (tmp_path / "arrived/g/one").mkdir(parents=True)
    (tmp_path / "arrived" / jar.file).write_bytes(b"evil")
    with pytest.raises(Unavailable):
        jars.publish([jar], tmp_path / "arrived", tmp_path / "cache")
    assert not (tmp_path / "arrived" / jar.file).exists()


def test_two_threads_fetch_a_jar_only_once(repository, monkeypatch):
    meet = threading.Barrier(2)
    missing, seen = jars.missing, threading.local()

    def both_find_it_missing(name):
        found = missing(name)
        if not hasattr(seen, "it"):
            seen.it = True
            meet.wait(timeout=10)
        return found

    monkeypatch.setattr(jars, "missing", both_find_it_missing)
    results = []
    threads = [threading.Thread(target=lambda: results.append(jars.paths("set"))) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(results) == 2
    assert len(repository.asked) == 1


# --- Ivy itself, replaced by a script ---


@pytest.fixture
def ivy(tmp_path, monkeypatch):
    """A Java that records its arguments, prints the content of `says`, and fails."""
    home = tmp_path / "jdk"
    (home / "bin").mkdir(parents=True)
    (home / "release").write_text('JAVA_VERSION="17.0.1"\n')
    script = home / "bin" / "java"
    script.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/called\ncat {tmp_path}/says\nexit 1\n')
    script.chmod(0o755)
    (tmp_path / "says").write_text("")
    monkeypatch.setenv("JAVA_HOME", str(home))
    monkeypatch.setenv("POUNDLOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("POUNDLOCK_IVY_SETTINGS", raising=False)
    return tmp_path


def test_a_failed_fetch_reports_the_cause_and_keeps_its_files(ivy):
    (ivy / "says").write_text(":: resolving\n\tmodule not found: g#x;1\nfoo\n")
    with pytest.raises(Unavailable, match=r"not found: g#x;1(.|\n)*POUNDLOCK_IVY_SETTINGS"):
        jars.paths("spark-kafka")
    assert (jars.cache() / ".ivy").is_dir()


def test_our_settings_name_no_host_and_exclude_transitive_jars(ivy):
    with pytest.raises(Unavailable):
        jars.paths("spark-kafka")
    settings = (jars.cache() / ".ivy" / "ivysettings.xml").read_text()
    module = (jars.cache() / ".ivy" / "ivy.xml").read_text()
    assert "://" not in settings + module
    assert module.count("<dependency ") == module.count('transitive="false"') == 4


def test_settings_of_the_user_replace_ours(ivy, monkeypatch):
    monkeypatch.setenv("POUNDLOCK_IVY_SETTINGS", "/mine/ivysettings.xml")
    with pytest.raises(Unavailable):
        jars.paths("spark-kafka")
    assert "-settings /mine/ivysettings.xml" in (ivy / "called").read_text()


def test_the_cache_is_under_home_unless_configured(monkeypatch):
    monkeypatch.delenv("POUNDLOCK_CACHE", raising=False)
    assert jars.cache() == Path(os.path.expanduser("~/.cache/poundlock/jars"))
