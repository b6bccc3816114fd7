"""MariaDB: one node that listens on the loopback interface only.

    with mariadb.running() as server:          # private, ends with the block
        server.url, server.address
        server.kill(); server.start()

`mariadb_binaries` finds or fetches the binaries.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from poundlock.servers import base, mariadb_binaries, rooms
from poundlock.servers.demote import demoted
from poundlock.servers.node import Node, lasting, private

NAME = "mariadb"
USER, DATABASE = "poundlock", "poundlock"

# Durable, and with LOAD DATA LOCAL, the fastest way to send rows. Without a binary log, because
# MariaDB's XA does not survive a crash if it is on.
_VARIABLES = {
    "innodb_flush_log_at_trx_commit": "1",
    "local_infile": "1",
    "skip_log_bin": "",
    "innodb_buffer_pool_size": "96M",
    "innodb_log_file_size": "96M",
    "innodb_use_native_aio": "0",  # often not available in containers
    "max_allowed_packet": "64M",
    "character_set_server": "utf8mb4",
    "skip_name_resolve": "",
}


@dataclass(frozen=True)
class MariaDBServer:
    """What to run; see `base.Server`."""

    variables: Mapping[str, str] = field(default_factory=dict)

    name = NAME
    nodes = ("1",)
    port_names = ("client",)
    stop_timeout = base.STOP_TIMEOUT

    @property
    def options(self) -> Mapping[str, Any]:
        return {"nodes": 1}

    def url(self, ports: Mapping[str, int]) -> str:
        return f"mysql://{USER}@127.0.0.1:{ports['client']}/{DATABASE}"

    def prepare(self, home: Path, ports: Mapping[str, int]) -> None:
        data = home / "data"
        self.program(data)  # fetch the binaries before creating anything
        if not (home / "password").exists():
            base.write_private(home / "password", secrets.token_hex(16))
        if not (home / "formatted").exists():
            rooms.delete(data)
            self.format(rooms.hand_over(data))
            (home / "formatted").touch()
        base.write_private(home / "port", str(ports["client"]))
        private = home / "private"  # the server reads it; not below its data
        rooms.hand_over(private)
        base.write_private(private / "init.sql", self.init((home / "password").read_text()))
        rooms.hand_over(private)
        rooms.hand_over(data)

    def program(self, data: Path) -> list[str]:
        """Return the beginning of a command line."""
        return mariadb_binaries.find().command(data)

    def format(self, data: Path) -> None:
        """Create the system tables as MariaDB's install script does."""
        binaries = mariadb_binaries.find()
        script = "CREATE DATABASE mysql;\nUSE mysql;\n" + binaries.system_tables()
        settings = {
            "bootstrap": "",
            "log_warnings": "0",
            "max_allowed_packet": "8M",
            "innodb_use_native_aio": "0",
            "innodb_log_file_size": _VARIABLES["innodb_log_file_size"],
        }
        command = demoted([*binaries.command(data), *_options(settings)])
        problem = f"MariaDB could not create its data in {data}"
        base.run_tool(command, problem, input=script, cwd=data)

    def init(self, password: str) -> str:
        """Return the SQL that the server runs at every start before it listens.

        It leaves our account as the only one.
        """
        account = f"'{USER}'@'127.0.0.1'"
        return (
            f"CREATE DATABASE IF NOT EXISTS {DATABASE} CHARACTER SET utf8mb4;\n"
            f"CREATE USER IF NOT EXISTS {account} IDENTIFIED BY '{password}';\n"
            f"ALTER USER {account} IDENTIFIED BY '{password}';\n"
            f"GRANT ALL PRIVILEGES ON *.* TO {account} WITH GRANT OPTION;\n"
            "DELETE FROM mysql.global_priv WHERE User IN ('', 'root');\n"
            "FLUSH PRIVILEGES;\n"
        )

    def command(self, home: Path, node: str) -> list[str]:
        own = {
            "bind_address": "127.0.0.1",
            "port": (home / "port").read_text(),
            "socket": "mariadb.sock",  # in the data directory, so the path may have any length
            "pid_file": "mariadb.pid",
            "init_file": str((home / "private").resolve() / "init.sql"),
        }
        given = {key.replace("-", "_"): value for key, value in self.variables.items()}
        merged = _VARIABLES | given | own
        if "log_bin" in given:
            del merged["skip_log_bin"]
        return demoted([*self.program((home / "data").resolve()), *_options(merged)])

    def probe(self, home: Path, ports: Mapping[str, int], nodes: Sequence[str]) -> None:
        url = _with_password(self.url(ports), home)
        pymysql = base.import_client("mysql", "pymysql")
        connection = pymysql.connect(**connect_arguments(url), connect_timeout=2, read_timeout=5)
        with closing(connection), connection.cursor() as cursor:
            cursor.execute("SELECT 1")


class MariaDB(Node):
    """A running MariaDB."""

    @property
    def address(self) -> str:
        return _with_password(self.url, self.directory)

    def connect_arguments(self) -> dict[str, Any]:
        """Return what pymysql needs to connect."""
        return connect_arguments(self.address)


def running(
    directory: Path | str | None = None, *, variables: Mapping[str, str] | None = None
) -> AbstractContextManager[MariaDB]:
    """Run a private server; see `node.private`.

    `variables` are system variables, which override ours: `{"log_bin": "binlog"}`.
    """
    server = MariaDBServer(variables or {})
    return private(MariaDB, server, directory)


def up(directory: Path | str | None = None) -> MariaDB:
    """Start the server that outlives the program, if it is not running; see `base.home_of`."""
    return lasting(MariaDB, MariaDBServer(), directory)


def connect_arguments(url: str) -> dict[str, Any]:
    """Return what pymysql needs to connect to an address with a password."""
    parts = urlsplit(url)
    return {
        "host": parts.hostname or "127.0.0.1",
        "port": parts.port or 3306,
        "user": unquote(parts.username or ""),
        "password": unquote(parts.password or ""),
        "database": unquote(parts.path.lstrip("/")),
    }


def _with_password(url: str, home: Path) -> str:
    return url.replace(f"{USER}@", f"{USER}:{(home / 'password').read_text()}@", 1)


def _options(variables: Mapping[str, str]) -> list[str]:
    return [
        f"--{key.replace('_', '-')}" + (f"={value}" if value else "")
        for key, value in variables.items()
    ]
