"""Which Java is chosen, and the error if there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from poundlock.errors import UsageError
from poundlock.jvm import java


def fake_java(home: Path, version: str | None, prints: str = "") -> Path:
    """A directory that looks like a Java. It has a `release` file, or prints its version."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{prints}' >&2\n")
    program.chmod(0o755)
    if version:
        (home / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')
    return program


@pytest.mark.parametrize("version", ["17", "17.0.15", "21.0.8", "25"])
def test_java_home_has_priority(tmp_path, monkeypatch, version):
    program = fake_java(tmp_path / "jdk", version)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jdk"))
    assert java.executable() == program


def test_java_on_path_is_used_with_its_links_resolved(tmp_path, monkeypatch):
    program = fake_java(tmp_path / "jdk", "17.0.1")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(program)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert java.executable() == program


@pytest.mark.parametrize(
    ("release", "prints", "major"),
    [("11.0.2", "", 11), ("1.8.0_402", "", 8), (None, 'java version "1.8.0_402"', 8)],
)
def test_an_old_java_is_refused_with_its_version(tmp_path, monkeypatch, release, prints, major):
    fake_java(tmp_path, release, prints)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(UsageError, match=f"is Java {major}, but Java 17 or newer is needed"):
        java.executable()


def test_a_missing_java_is_reported_with_the_install_command(tmp_path, monkeypatch):
    apt = tmp_path / "apt-get"
    apt.write_text("")
    apt.chmod(0o755)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="apt-get install openjdk-17-jre-headless"):
        java.executable()


def test_a_wrong_java_home_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(UsageError, match="no bin/java in it"):
        java.executable()


def test_a_class_archive_is_recorded_once_and_then_used(tmp_path, monkeypatch):
    fake_java(tmp_path / "jdk", "17")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jdk"))
    jar = tmp_path / "a.jar"
    jar.write_bytes(b"")
    archive = java.ClassArchive.of([jar], tmp_path / "classes")
    assert archive.flags(record=False) == []
    assert archive.flags(record=True) == [f"-XX:ArchiveClassesAtExit={archive.file}"]
    archive.file.write_bytes(bytes(4096))  # as a JVM that was killed while writing leaves it
    assert archive.flags(record=True) == [f"-XX:ArchiveClassesAtExit={archive.file}"]
    archive.file.write_bytes(b"\xa8\xba\x0b\xf0")
    assert archive.flags(record=True) == [f"-XX:SharedArchiveFile={archive.file}"]
