"""One pipeline, one decision, five systems: Kafka, PostgreSQL, MariaDB, Valkey and OpenSearch.

The driver is killed at every step, and each server in turn between the decision and the commit. What is
in a system is asked of the system itself, by its own driver; nothing of ours takes part in judging.
"""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import psycopg
import pymysql
import pytest
import redis
from harness import Chaos, Fault, Query, assert_same

from poundlock.core.protocol import Step
from poundlock.servers import kafka, mariadb, opensearch, postgres, valkey

ROWS, ROWS_PER_BATCH = 600, 30


class Systems:
    """The five servers, seen by clients that are not ours."""

    def __init__(self, stack: ExitStack, directory: Path):
        def home(name: str) -> Path:
            made = directory / name
            made.mkdir()
            return made

        self.kafka = stack.enter_context(kafka.running(home("kafka")))
        self.postgres = stack.enter_context(postgres.running(home("postgres")))
        self.mariadb = stack.enter_context(mariadb.running(home("mariadb")))
        self.valkey = stack.enter_context(valkey.running(home("valkey")))
        self.opensearch = stack.enter_context(opensearch.running(home("opensearch")))
        self.addresses = {
            "postgres": self.postgres.address,
            "mariadb": self.mariadb.address,
            "valkey": self.valkey.address,
            "opensearch": self.opensearch.url,
        }

    @property
    def servers(self) -> dict[str, Any]:
        return {
            name: getattr(self, name)
            for name in ("kafka", "postgres", "mariadb", "valkey", "opensearch")
        }

    def sql(self, name: str) -> Any:
        if name == "postgres":
            return psycopg.connect(self.addresses[name], autocommit=True)
        url = urlsplit(self.addresses[name])
        return pymysql.connect(
            host=url.hostname, port=url.port or 3306, user=url.username,
            password=unquote(url.password or ""), database=url.path.strip("/"), autocommit=True,
        )  # fmt: skip

    def make(self, table: str) -> None:
        """Make the tables and the index."""
        for name in ("postgres", "mariadb"):
            with self.sql(name) as connection, connection.cursor() as cursor:
                cursor.execute(f"CREATE TABLE {table} (i INT, sensor VARCHAR(20), temperature INT)")
        self.ask("PUT", f"/{table}", {"settings": {"number_of_replicas": 0}})

    def rows(self, table: str) -> dict[str, Counter[tuple[int, int]]]:
        """Return number and temperature of every row that each system shows."""
        found: dict[str, Counter[tuple[int, int]]] = {}
        for name in ("postgres", "mariadb"):
            with self.sql(name) as connection, connection.cursor() as cursor:
                cursor.execute(f"SELECT i, temperature FROM {table}")
                found[name] = Counter(cursor.fetchall())
        with redis.Redis.from_url(self.addresses["valkey"]) as client:
            fields: Any = client.hgetall(table)
            found["valkey"] = Counter((int(k), int(v)) for k, v in fields.items())
        self.ask("POST", f"/{table}/_refresh")
        hits = self.ask("GET", f"/{table}/_search?size=10000")["hits"]["hits"]
        found["opensearch"] = Counter((int(h["_id"]), h["_source"]["temperature"]) for h in hits)
        return found

    def leftovers(self) -> dict[str, list[str]]:
        """Return what the systems hold prepared or staged."""
        with self.sql("postgres") as connection, connection.cursor() as cursor:
            cursor.execute("SELECT gid FROM pg_prepared_xacts")
            prepared = [row[0] for row in cursor.fetchall()]
        with self.sql("mariadb") as connection, connection.cursor() as cursor:
            cursor.execute("XA RECOVER")
            recovered = [str(row[-1]) for row in cursor.fetchall()]
        with redis.Redis.from_url(self.addresses["valkey"]) as client:
            staged = [key.decode() for key in client.scan_iter("*stage*")]
        return {"postgres": prepared, "mariadb": recovered, "valkey": staged}

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            self.opensearch.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


@pytest.fixture(scope="module")
def systems(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Systems]:
    with ExitStack() as stack:
        yield Systems(stack, tmp_path_factory.mktemp("five"))


class Five(Chaos):
    """A pipeline into five systems, judged in all of them."""

    def __init__(self, directory: Path, systems: Systems, rows: int):
        query = Query(
            "five", rows=rows, rows_per_batch=ROWS_PER_BATCH, systems=systems.addresses,
            settings={"commits_at_once": 1},
        )  # fmt: skip
        super().__init__(directory, systems.kafka.bootstrap_servers, [query])
        self.systems, self.table = systems, "t_" + self.outputs("five")[0].replace("-", "_")
        systems.make(self.table)

    def check(self) -> None:
        super().check()
        expected = Counter(
            (row.i, row.temperature) for batch in self.batches("five") for row in batch
        )
        for name, found in self.systems.rows(self.table).items():
            assert_same(name, expected, found)  # type: ignore[arg-type]
        assert self.systems.leftovers() == {"postgres": [], "mariadb": [], "valkey": []}
        kept = (self.checkpoint("five") / "poundlock" / "rows").rglob("*")
        assert {file.suffix for file in kept if file.is_file()} <= {".sent", ".aborted"}


BATCH, TAKE_OVER = {"phase": "batch"}, {"phase": "take-over"}
SINKS = ("kafka", "postgres", "mariadb", "valkey", "opensearch")

# In the order of a batch's life; what a death leaves behind is what the next line begins with.
SCRIPT = [
    Fault("took-over", match=TAKE_OVER),
    Fault("writing", match=BATCH),
    Fault("task:wrote"),
    Fault("prepared", match=BATCH),
    Fault("sweeping", match=TAKE_OVER),
    Fault("checked", match=BATCH),
    Fault("swept", match=TAKE_OVER),
    Fault("deciding", match=BATCH),
    Fault("log:Decided:aside", match=BATCH),
    Fault("log:Decided:linked", match=BATCH),
    Fault("committing", match=TAKE_OVER),
    # Between any two systems: the first have the batch, the others do not yet.
    *(Fault("committed-one", match=TAKE_OVER | {"sink": sink}) for sink in SINKS),
    Fault("committed", match=TAKE_OVER),
    Fault("finishing", match=TAKE_OVER),
    Fault("finished", match=TAKE_OVER),
    Fault("returning", match=BATCH),
    Fault("decided", match=BATCH),
    Fault("committed", match=BATCH),
    Fault("finished", match=BATCH),
]


@pytest.mark.timeout(2400)  # dozens of drivers, one after the other
def test_driver_killed_at_every_point(systems: Systems, tmp_path: Path) -> None:
    five = Five(tmp_path, systems, ROWS)
    for fault in SCRIPT:
        five.die_at({"five": fault})
    five.live().ended()
    five.check()
    assert {fault.at for fault in SCRIPT} >= {
        step.value
        for step in (Step.PREPARED, Step.DECIDED, Step.COMMITTED_ONE, Step.FINISHED, Step.SWEPT)
    }


def test_each_server_killed_between_prepare_and_commit(systems: Systems, tmp_path: Path) -> None:
    """The decision stands while a server is away; when it is back, every system has the batch."""
    five = Five(tmp_path, systems, 8 * ROWS_PER_BATCH)
    for name in SINKS:
        driver = five.start({"five": Fault("decided", "hold")})
        driver.wait_for("five", "decided")
        with down(systems, name):
            driver.release("five", "decided")
        driver.finish().ended() if name == SINKS[-1] else driver.kill()
        if name != SINKS[-1]:
            driver.finish()
    five.check()


def test_each_server_killed_before_the_decision(systems: Systems, tmp_path: Path) -> None:
    """A server that is killed after prepare and comes back still holds its branch, or all abort."""
    five = Five(tmp_path, systems, 6 * ROWS_PER_BATCH)
    for name in SINKS:
        driver = five.start({"five": Fault("prepared", "hold")})
        driver.wait_for("five", "prepared")
        with down(systems, name):
            pass
        driver.release("five", "prepared")
        driver.finish().ended() if name == SINKS[-1] else driver.kill()
        if name != SINKS[-1]:
            driver.finish()
    five.live().ended()
    five.check()


@contextmanager
def down(systems: Systems, name: str) -> Iterator[None]:
    server = systems.servers[name]
    if name == "kafka":
        server.kill(1)
        yield
        server.start(1)
    else:
        server.kill()
        yield
        server.start()
