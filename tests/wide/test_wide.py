"""One decision over thousands of branches in Kafka and PostgreSQL, and a driver killed after it.

`make wide` runs it. It is no part of `make test`, because it takes a quarter of an hour on two cores.
`WIDE_PARTITIONS` makes it narrower.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

import oracle
from poundlock.core.log import FileLog
from poundlock.servers import kafka, postgres

PARTITIONS = int(os.environ.get("WIDE_PARTITIONS", "3000"))
ROWS = 2 * PARTITIONS
PATIENCE_S = 3600  # ends a run that hangs; it measures nothing
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def cluster() -> Iterator[kafka.Cluster]:
    # A broker aborts after this time what it finds open, however long the batch takes.
    long = {"transaction.max.timeout.ms": "3600000"}
    with kafka.running(properties=long, heap_mb=1024) as running:
        yield running


@pytest.fixture(scope="module")
def database() -> Iterator[postgres.Postgres]:
    with postgres.running(max_prepared_transactions=PARTITIONS + 50) as running:
        yield running


def drive(file: Path, **config: object) -> tuple[int, list[dict[str, object]]]:
    """Run a driver to its end. Return its exit status and the steps that it reported."""
    file.write_text(json.dumps(config))
    with subprocess.Popen(
        [sys.executable, str(HERE / "wide_job.py"), str(file)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as driver:
        assert driver.stdout is not None
        steps = []
        for line in driver.stdout:
            if line.startswith('{"step"'):
                steps.append(json.loads(line))
                print(line, end="", flush=True)
        return driver.wait(PATIENCE_S), steps


def test_a_wide_batch_recovers_exactly_after_its_driver_was_killed(
    cluster: kafka.Cluster, database: postgres.Postgres, tmp_path: Path
) -> None:
    seen = oracle.Kafka(cluster.client_settings())
    source, target = seen.create(partitions=2), seen.create(partitions=4)
    values = [str(number) for number in range(ROWS)]
    seen.produce(source, values)
    config: dict[str, object] = {
        "master": "local[4]",
        "partitions": PARTITIONS,
        "servers": cluster.bootstrap_servers,
        "dsn": database.dsn(),
        "source": source,
        "target": target,
        "checkpoint": str(tmp_path / "checkpoint"),
    }
    with psycopg.connect(database.dsn(), autocommit=True) as connection:

        def ask(query: str) -> list[int]:
            return [row[0] for row in connection.execute(query).fetchall()]  # type: ignore[arg-type]

        connection.execute("CREATE TABLE wide (number int)")
        status, steps = drive(tmp_path / "first.json", kill_at="decided", **config)
        assert status == -signal.SIGKILL, steps
        assert steps[-1]["step"] == "decided"

        # One decision names every branch. All are open, and no reader sees a row.
        state = FileLog(str(tmp_path / "checkpoint" / "poundlock")).load()
        [history] = state.batches.values()
        held = [receipt.sink for receipt in history.receipts]
        assert {name: held.count(name) for name in set(held)} == {
            "kafka": PARTITIONS,
            "postgres": PARTITIONS,
        }
        assert ask("SELECT count(*) FROM pg_prepared_xacts") == [PARTITIONS]
        assert ask("SELECT count(*) FROM wide") == [0]
        assert len(seen.transactions(r"poundlock\..*")) == PARTITIONS
        assert seen.values(target) == {}

        began = time.monotonic()
        status, steps = drive(tmp_path / "second.json", **config)
        assert status == 0, steps
        print(f"recovered in {time.monotonic() - began:.0f} s", flush=True)
        assert [step["step"] for step in steps].count("decided") == 0, "it was not written again"

        assert ask("SELECT count(*) FROM pg_prepared_xacts") == [0]
        assert sorted(ask("SELECT number FROM wide")) == list(range(ROWS))
        assert seen.values(target) == dict.fromkeys(values, 1)
        assert seen.transactions(r"poundlock\..*") == {}
