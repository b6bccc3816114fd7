"""One pipeline, one decision, five systems: Kafka, PostgreSQL, MariaDB, Valkey and OpenSearch.

Each database gets rows in both ways: by branches that it holds, and by staging tables. Valkey gets
values and increments; an increment would show a duplicate. The driver is killed at every step, and
each server in turn between prepare and commit. The tests query each system through its own driver,
without any of our code.
"""

from __future__ import annotations

import itertools
import json
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import psycopg
import pymysql
import pytest
import redis
from expected import Row, assert_same
from harness import LIFE_TIMEOUT_S, Chaos, Fault, Query, several
from kafka_oracle import abort_transactions, open_transactions

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
            host=url.hostname,
            port=url.port or 3306,
            user=url.username,
            password=unquote(url.password or ""),
            database=url.path.strip("/"),
            autocommit=True,
        )

    def make(self, table: str) -> None:
        """Make the tables and the index."""
        columns = "(i INT, sensor VARCHAR(20), temperature INT"
        for name in ("postgres", "mariadb"):
            with self.sql(name) as connection, connection.cursor() as cursor:
                cursor.execute(f"CREATE TABLE {table} {columns})")
                cursor.execute(f"CREATE TABLE {table}_by_key {columns}, PRIMARY KEY (i))")
        self.ask("PUT", f"/{table}", {"settings": {"number_of_replicas": 0}})

    def rows(self, table: str) -> dict[str, Counter[tuple[int, int]]]:
        """Return number and temperature of every row that each sink shows."""
        found: dict[str, Counter[tuple[int, int]]] = {}
        for name in ("postgres", "mariadb"):
            with self.sql(name) as connection, connection.cursor() as cursor:
                for sink, kind in ((name, ""), (f"{name}-by-key", "_by_key")):
                    cursor.execute(f"SELECT i, temperature FROM {table}{kind}")
                    found[sink] = Counter(cursor.fetchall())
        with redis.Redis.from_url(self.addresses["valkey"]) as client:
            fields: Any = client.hgetall(table)
            found["valkey"] = Counter((int(k), int(v)) for k, v in fields.items())
        self.ask("POST", f"/{table}/_refresh")
        hits = self.ask("GET", f"/{table}/_search?size=10000")["hits"]["hits"]
        found["opensearch"] = Counter((int(h["_id"]), h["_source"]["temperature"]) for h in hits)
        return found

    def sums(self, table: str) -> Counter[str]:
        """Return the sum of the increments of each sensor."""
        with redis.Redis.from_url(self.addresses["valkey"]) as client:
            fields: Any = client.hgetall(f"{table}_sums")
            return Counter({key.decode(): int(value) for key, value in fields.items()})

    def held(self) -> dict[str, list[Any]]:
        """Return what the servers hold as prepared or staged, by sink."""
        with self.sql("postgres") as connection, connection.cursor() as cursor:
            cursor.execute("SELECT gid FROM pg_prepared_xacts")
            prepared = [row[0] for row in cursor.fetchall()]
            cursor.execute(
                "SELECT schemaname || '.' || tablename FROM pg_tables "
                "WHERE tablename LIKE 'staged%'"
            )
            staged = [row[0] for row in cursor.fetchall()]
        with self.sql("mariadb") as connection, connection.cursor() as cursor:
            cursor.execute("XA RECOVER")
            recovered = list(cursor.fetchall())
            cursor.execute("SHOW TABLES LIKE '%stage%'")
            aside = [row[0] for row in cursor.fetchall()]
        with redis.Redis.from_url(self.addresses["valkey"]) as client:
            keys = [key.decode() for key in client.scan_iter("*:poundlock.*")]
            open_ = [name for key in keys if key.endswith(".open") for name in client.smembers(key)]
            rows = [key for key in keys if not key.endswith((".open", ".witness", ".logs"))]
        sums = [key for key in rows if "_sums}" in key]
        return {
            "postgres": prepared,
            "postgres-by-key": staged,
            "mariadb": recovered,
            "mariadb-by-key": aside,
            "valkey": [key for key in rows if key not in sums],
            "valkey-sums": sums,
            "valkey, listed": open_,
        }

    def lose(self) -> None:
        """Abort everything that is held, without the knowledge of any driver."""
        held = self.held()
        with self.sql("postgres") as connection, connection.cursor() as cursor:
            for gid in held["postgres"]:
                cursor.execute(f"ROLLBACK PREPARED '{gid}'")
            for table in held["postgres-by-key"]:
                cursor.execute(f"DROP TABLE {table}")
        with self.sql("mariadb") as connection, connection.cursor() as cursor:
            for number, first, second, data in held["mariadb"]:
                text = data.decode()
                gtrid, bqual = text[:first], text[first : first + second]
                cursor.execute(f"XA ROLLBACK '{gtrid}','{bqual}',{number}")
            for table in held["mariadb-by-key"]:
                cursor.execute(f"DROP TABLE {table}")
        with redis.Redis.from_url(self.addresses["valkey"]) as client:
            for key in held["valkey"] + held["valkey-sums"]:
                assert client.delete(key)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            self.opensearch.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


@pytest.fixture
def systems(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Systems]:
    """Private servers, because at the end nothing may be left in them."""
    with ExitStack() as stack:
        yield Systems(stack, tmp_path_factory.mktemp("five"))


class Five(Chaos):
    """A pipeline into five systems, and the checks of its output in each."""

    def __init__(self, directory: Path, systems: Systems, rows: int):
        query = Query(
            "five",
            rows=rows,
            rows_per_batch=ROWS_PER_BATCH,
            systems=systems.addresses,
            settings={"commits_at_once": 1},
            source={"group": f"five-{uuid.uuid4().hex[:8]}"},
        )
        super().__init__(directory, systems.kafka.bootstrap_servers, [query])
        self.systems, self.table = systems, "t_" + self.outputs("five")[0].replace("-", "_")
        systems.make(self.table)

    def kept(self) -> list[Path]:
        """Return the rows for OpenSearch that wait beside the log."""
        files = (self.checkpoint("five") / "poundlock" / "rows").rglob("*")
        witnesses = (".sent", ".aborted")
        return [file for file in files if file.is_file() and file.suffix not in witnesses]

    def held(self) -> dict[str, list[Any]]:
        kafka = open_transactions(self.servers, self.outputs("five"))
        return {"kafka": list(kafka), **self.systems.held(), "opensearch": self.kept()}

    def lose(self) -> None:
        assert abort_transactions(self.servers, self.outputs("five"))
        self.systems.lose()
        for file in self.kept():
            file.unlink()
        held = self.held()
        held.pop("valkey, listed")  # the list is not updated yet
        assert not any(held.values()), held

    def check(self) -> None:
        super().check()
        expected = counted(self.batches("five"))
        for name, found in self.systems.rows(self.table).items():
            assert_same(name, expected, found)  # type: ignore[arg-type]
        assert self.systems.sums(self.table) == summed(self.batches("five"))
        assert not any(self.held().values()), self.held()

    def show_the_newest(self) -> set[str]:
        """Return the sinks to which the last batch is committed, completely or partly."""
        *before, newest = self.batches("five")
        rows = counted([newest])
        shown = {name for name, found in self.systems.rows(self.table).items() if found & rows}
        if self.systems.sums(self.table) != summed(before):
            shown.add("valkey-sums")
        # Kafka is checked by its transactions, because committed rows stay hidden behind an older
        # transaction in the same partition that is still open.
        [*_, decided] = [it for it in self.log("five") if it["kind"] == "Decided"]
        branches = [receipt for receipt in decided["receipts"] if receipt["sink"] == "kafka"]
        open_ = open_transactions(self.servers, self.outputs("five"))
        if len(open_) < len(branches):
            shown.add("kafka")
        if not open_:
            [values], [rows] = (
                self.visible("five").values(),
                self.expected("five", [newest]).values(),
            )
            assert rows <= values
        return shown

    def check_underway(self, pipeline: str) -> None:
        """Check that a finished batch is in every system, and an undecided one in none."""
        super().check_underway(pipeline)
        batches, log = self.batches(pipeline), self.log(pipeline)
        finished = sum(record["kind"] == "Finished" for record in log)
        decided = sum(record["kind"] == "Decided" for record in log)
        least, most = counted(batches[:finished]), counted(batches[:decided])
        for name, found in self.systems.rows(self.table).items():
            assert least <= found <= most, f"{name}: {least - found} {found - most}"
        sums = self.systems.sums(self.table)
        assert sums in (summed(batches[:finished]), summed(batches[:decided]))


def counted(batches: Sequence[Sequence[Row]]) -> Counter[tuple[int, int]]:
    return Counter((row.i, row.temperature) for batch in batches for row in batch)


def summed(batches: Sequence[Sequence[Row]]) -> Counter[str]:
    sums = Counter[str]()
    for row in itertools.chain(*batches):
        sums[row.sensor] += row.temperature
    return sums


def at(point: str, phase: str, **facts: str) -> Fault:
    return Fault(point, match={"phase": phase} | facts)


BATCH, TAKE_OVER = "batch", "take-over"
SERVERS = ("kafka", "postgres", "mariadb", "valkey", "opensearch")
# In the order of the pipeline.
SINKS = (
    *("kafka", "postgres", "postgres-by-key", "mariadb", "mariadb-by-key"),
    *("valkey", "valkey-sums", "opensearch"),
)
# The branch that expires first is committed first; then the names of the branches decide.
ORDER = (
    *("kafka", "mariadb-by-key", "mariadb", "opensearch", "postgres-by-key", "postgres"),
    *("valkey-sums", "valkey"),
)
PREPARED, DECIDED = at("prepared", BATCH), at("decided", BATCH)
COMMITS = [at("committed-one", TAKE_OVER, sink=sink) for sink in ORDER]

# In the order of a batch's steps. Each line starts from the state that the previous kill left.
SCRIPT: list[Fault | list[Fault]] = [
    at("taking-over", TAKE_OVER),
    at("took-over", TAKE_OVER),
    at("entered", BATCH),
    at("writing", BATCH),
    # In a task, between any two systems: the first have prepared, the others have not.
    *(Fault("task:prepared", match={"sink": it}) for it in ("kafka", "mariadb", "valkey-sums")),
    PREPARED,
    at("sweeping", TAKE_OVER),
    at("sweep:aborted-one", TAKE_OVER, sink="mariadb"),
    at("checked", BATCH),
    at("swept", TAKE_OVER),
    at("deciding", BATCH),
    at("log:Decided:aside", BATCH),
    at("log:Decided:linked", BATCH),
    at("committing", TAKE_OVER),
    # Between any two systems: the first have the batch, the others do not yet.
    *COMMITS,
    at("committed", TAKE_OVER),
    at("finishing", TAKE_OVER),
    at("finished", TAKE_OVER),
    at("handing-back", BATCH),
    at("handed-back", BATCH),
    at("returning", BATCH),
    # Decided, and then lost in every system.
    DECIDED,
    at("repairing", BATCH),
    at("log:Repaired:aside", BATCH),
    at("repaired", BATCH),
    # The second gate, without a crash before it.
    at("committed-one", BATCH, sink="mariadb"),
    at("committed", BATCH),
    at("finished", BATCH),
    # A no vote in one system.
    [Fault("task:prepared", "reject", match={"sink": "mariadb"}), at("aborted", BATCH)],
]


@pytest.mark.timeout(2400)  # dozens of drivers, one after the other
def test_output_is_exact_when_the_driver_is_killed_at_every_point(
    systems: Systems, tmp_path: Path
) -> None:
    five = Five(tmp_path, systems, ROWS)
    for fault in SCRIPT:
        five.die_at({"five": fault})
        if fault in COMMITS:
            assert five.show_the_newest() == set(ORDER[: COMMITS.index(fault) + 1])  # type: ignore[arg-type]
        if fault == PREPARED:  # proves that the checks would see an open branch
            assert all(five.held().values()), five.held()
        if fault == DECIDED:
            five.lose()
    five.live().ended()
    five.check()
    died_at = {fault.at for line in SCRIPT for fault in several(line)}
    without_state = {step.value for step in Step} - {"draining", "drained"}
    assert without_state <= died_at
    assert {"Decided", "Repaired", "Finished"} <= {record["kind"] for record in five.log("five")}


def test_output_is_exact_when_each_server_is_killed_before_commit(
    systems: Systems, tmp_path: Path
) -> None:
    """The decision stays valid while a server is down. When it is back, the same driver commits."""
    five = Five(tmp_path, systems, 8 * ROWS_PER_BATCH)
    faults = [
        fault
        for batch, name in enumerate(SERVERS)
        for fault in (
            Fault("decided", "hold", match={"batch": batch}, name=f"decided-{batch}"),
            # The two branches are tried once each, so the third time is a retry.
            Fault(
                "committed-one",
                "note",
                nth=3,
                match={"batch": batch, "sink": name},
                name=f"waits-{batch}",
            ),
        )
    ]
    driver = five.start({"five": faults})
    for batch, name in enumerate(SERVERS):
        driver.wait_for("five", f"decided-{batch}")
        with down(systems, name):
            driver.release("five", f"decided-{batch}")
            driver.wait_for(
                "five", f"waits-{batch}", 2 * LIFE_TIMEOUT_S
            )  # Kafka's client is patient
    driver.finish().ended()
    five.check()
    assert [record["kind"] for record in five.log("five")].count("Generation") == 1


def test_output_is_exact_when_each_server_is_killed_before_decision(
    systems: Systems, tmp_path: Path
) -> None:
    """A server that is killed after prepare and comes back still holds its branch, or all abort."""
    five = Five(tmp_path, systems, 6 * ROWS_PER_BATCH)
    driver = five.start(
        {
            "five": [
                Fault("prepared", "hold", match={"batch": batch}, name=f"prepared-{batch}")
                for batch in range(len(SERVERS))
            ]
        }
    )
    for batch, name in enumerate(SERVERS):
        driver.wait_for("five", f"prepared-{batch}")
        with down(systems, name):
            pass
        driver.release("five", f"prepared-{batch}")
    driver.finish().ended()
    five.check()
    log = five.log("five")
    assert [record["kind"] for record in log].count("Generation") == 1
    assert max(record["attempt"] for record in log if record["kind"] == "Decided") <= 2


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
