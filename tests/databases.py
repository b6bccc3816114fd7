"""PostgreSQL and MariaDB by their own drivers, and `poundlock txn` with them in its view."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psycopg
import pymysql
from click.testing import CliRunner, Result

from poundlock.cli import poundlock
from poundlock.servers import mariadb, postgres


class Databases:
    """Two servers, and a pipeline's `checkpoint`; `options` are more of them for `txn`."""

    def __init__(
        self, pg: postgres.Postgres, maria: mariadb.MariaDB, checkpoint: Path, *options: str
    ):
        self.pg, self.maria, self.checkpoint = pg, maria, checkpoint
        self._where = [
            *("--log", str(checkpoint), "--postgres", "env:TRIAL_DSN", "--mysql", "env:TRIAL_URL"),
            *options,
        ]

    def execute_pg(self, statement: str) -> list[Any]:
        with psycopg.connect(self.pg.address, autocommit=True) as connection:
            cursor = connection.execute(statement)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    def execute_maria(self, statement: str) -> list[Any]:
        connection = pymysql.connect(**self.maria.connect_arguments(), autocommit=True)
        with connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall())

    def call(self, *arguments: str, **elsewhere: str) -> Result:
        """Run `poundlock txn`, with other addresses where they are given."""
        secrets = {"TRIAL_DSN": self.pg.address, "TRIAL_URL": self.maria.address} | elsewhere
        result = CliRunner().invoke(poundlock, ["txn", *arguments, *self._where], env=secrets)
        for secret in secrets.values():
            assert secret not in result.output
        return result

    def txn(self, *arguments: str) -> Any:
        result = self.call(*arguments, "--json")
        assert result.exit_code == 0, (result.output, result.exception)
        return json.loads(result.stdout)
