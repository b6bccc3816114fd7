"""The server that the tests of the MySQL sink run on: MariaDB or, with POUNDLOCK_TEST_MYSQLD, MySQL.

Debian has MySQL in its unstable suite alone, where versions come and go. So it is no part of
`make test`: `make mysql` fetches one, and runs the tests on it.
"""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from urllib.parse import quote

from poundlock.servers import mariadb
from poundlock.servers.demote import demoted
from poundlock.servers.node import private

_GIVEN = os.environ.get("POUNDLOCK_TEST_MYSQLD")
IS_MARIADB = _GIVEN is None

# As it comes, with a binary log, but small.
_VARIABLES = {
    "local_infile": "1",
    "innodb_buffer_pool_size": "96M",
    "innodb_redo_log_capacity": "128M",
    "innodb_use_native_aio": "0",
    "max_allowed_packet": "64M",
    "mysqlx": "0",
    "secure_file_priv": "NULL",
}


class MySQLServer(mariadb.MariaDBServer):
    """What to run; see `base.Server`."""

    def program(self, data: Path) -> list[str]:
        assert _GIVEN is not None
        server = Path(_GIVEN).absolute()
        home = server.parent / "root" / "usr"
        return [
            *(str(server), "--no-defaults", f"--basedir={home}", f"--datadir={data}"),
            *(f"--lc-messages-dir={home / 'share' / 'mysql'}", f"--tmpdir={data}"),
        ]

    def format(self, data: Path) -> None:
        command = demoted([*self.program(data), "--initialize-insecure"])
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=data)
        assert done.returncode == 0, done.stdout + done.stderr

    def init(self, password: str) -> str:
        account = f"'{mariadb.USER}'@'%'"
        return (
            f"CREATE DATABASE IF NOT EXISTS {mariadb.DATABASE};\n"
            f"CREATE USER IF NOT EXISTS {account} IDENTIFIED BY '{password}';\n"
            f"GRANT ALL PRIVILEGES ON *.* TO {account} WITH GRANT OPTION;\n"
        )

    def command(self, home: Path, node: str) -> list[str]:
        named = {
            "bind_address": "127.0.0.1",
            "port": (home / "port").read_text(),
            # Another at each start: it takes a process that was killed a moment ago for its owner.
            "socket": f"{secrets.token_hex(4)}.sock",
            "pid_file": "mysql.pid",
            "init_file": str((home / "private").resolve() / "init.sql"),
        }
        options = {**_VARIABLES, **self.variables, **named}.items()
        return demoted(
            [
                *self.program((home / "data").resolve()),
                *(f"--{key}={value}" for key, value in options),
            ]
        )


class MySQL(mariadb.MariaDB):
    """A running MySQL. It asks for the password itself when it meets an account for the first time.

    So it must be verified. Its own certificates name no host.
    """

    @property
    def address(self) -> str:
        authority = self.directory / "data" / "ca.pem"
        return f"{super().address}?ssl_mode=VERIFY_CA&ssl_ca={quote(str(authority))}"


def running(
    directory: Path | str | None = None, *, variables: Mapping[str, str] | None = None
) -> AbstractContextManager[mariadb.MariaDB]:
    """A private server; see `mariadb.running`."""
    if IS_MARIADB:
        return mariadb.running(directory, variables=variables)
    server = MySQLServer(variables or {})
    return private(MySQL, server, directory)
