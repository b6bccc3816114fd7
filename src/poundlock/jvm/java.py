"""Finds a Java that can run Spark, Ivy and the local servers."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from poundlock.errors import UsageError

MINIMUM = 17

# The command that installs Java without a desktop, by package manager.
_INSTALL = {
    "apt-get": "sudo apt-get install openjdk-17-jre-headless",
    "dnf": "sudo dnf install java-17-openjdk-headless",
    "zypper": "sudo zypper install java-17-openjdk-headless",
    "pacman": "sudo pacman -S jre17-openjdk-headless",
    "apk": "sudo apk add openjdk17-jre-headless",
    "brew": "brew install openjdk@17",
}


def executable() -> Path:
    """Return the `java` to run: that of JAVA_HOME if it is set, otherwise the one on PATH."""
    home = os.environ.get("JAVA_HOME")
    if home:
        java = Path(home) / "bin" / "java"
        if not os.access(java, os.X_OK):
            raise UsageError(
                f"JAVA_HOME is {home}, but there is no bin/java in it. Set JAVA_HOME to the directory "
                f"of a Java {MINIMUM} or newer, or unset it to use the Java on PATH"
            )
    else:
        found = shutil.which("java")
        if found is None:
            raise UsageError(f"there is no Java on PATH. {_advice()}")
        # Resolved, because the other tools of this Java are in its directory, not in that of a link.
        java = Path(found).resolve()
    version = _major_version(java)
    if version < MINIMUM:
        raise UsageError(
            f"{java} is Java {version}, but Java {MINIMUM} or newer is needed. {_advice()}"
        )
    return java


def tool(name: str) -> Path:
    """Return another program of the same Java, such as `keytool`."""
    path = executable().with_name(name)
    if not os.access(path, os.X_OK):
        raise UsageError(f"the Java at {executable()} has no {name}. {_advice()}")
    return path


@dataclass(frozen=True)
class ClassArchive:
    """Classes that a JVM has parsed. Later JVMs map the archive and start in half the time.

    The first JVM of a kind writes the archive when it ends. A JVM ignores an archive that does not
    match it or is incomplete: the header with the magic number is written last.
    """

    file: Path

    @classmethod
    def of(cls, classpath: Sequence[Path], directory: Path) -> ClassArchive:
        """Return the archive for this JVM and these files. Others have archives of their own."""
        parts = [str(executable()), str(executable().stat().st_mtime_ns)]
        parts += [f"{file} {file.stat().st_mtime_ns}" for file in classpath]
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        return cls(directory / f"{digest[:16]}.jsa")

    def flags(self, *, record: bool) -> list[str]:
        """Return flags that use the archive, or that write it at the end if `record` is true."""
        try:
            # No link is followed, and no pipe is waited for.
            number = os.open(self.file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(number, "rb") as stream:
                complete = any(stream.read(4) or b"")
        except OSError:
            complete = False
        if complete:
            return [f"-XX:SharedArchiveFile={self.file}"]
        if not record:
            return []
        self.file.parent.mkdir(parents=True, exist_ok=True)
        return [f"-XX:ArchiveClassesAtExit={self.file}"]


def _advice() -> str:
    command = next((text for name, text in _INSTALL.items() if shutil.which(name)), None)
    if command is None:
        return f"Install a Java {MINIMUM} or newer and set JAVA_HOME to its directory"
    return f"Install one with: {command}   (or set JAVA_HOME to another one)"


@lru_cache
def _major_version(java: Path) -> int:
    """Read the version from the `release` file, or ask the JVM, which takes much longer."""
    try:
        text = (java.resolve().parents[1] / "release").read_text()
        found = re.search(r'JAVA_VERSION="([^"]+)"', text)
    except OSError:
        found = None
    if not found:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
        found = re.search(r'version "([^"]+)"', answer.stderr)
    if not found:
        raise UsageError(f"{java} reports no version, so it may not be Java. {_advice()}")
    numbers = re.findall(r"\d+", found[1])
    # Up to Java 8, the version is written as 1.8.
    return int(numbers[1] if numbers[0] == "1" and len(numbers) > 1 else numbers[0])
