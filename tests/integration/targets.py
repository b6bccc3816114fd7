"""Empty targets in real systems, with their rows as the systems return them."""

from __future__ import annotations

import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import opensearchpy
import psycopg
import pyarrow.parquet
import pymysql
import pytest
import redis

import oracle
from poundlock import sinks
from poundlock.core.participant import Participant

SYSTEMS = ("Kafka", "PostgreSQL", "PostgreSQL, staged", "MariaDB", "Redis", "OpenSearch", "Files")


@dataclass(frozen=True)
class Target:
    """A target of one column, `value`, whose values are texts."""

    make: Callable[..., Participant]  # takes other options of the sink
    read: Callable[[], Sequence[str]]
    backup: Callable[[str], Callable[[], None]] | None = (
        None  # by pipeline; returns what restores it
    )

    def assert_exact(self, expected: Sequence[str]) -> None:
        assert Counter(self.read()) == Counter(expected)


def create(system: str, request: pytest.FixtureRequest, place: Path) -> Target:
    """Create an empty target in a system; its server is the one that all tests share."""
    name = f"t{uuid.uuid4().hex[:12]}"
    match system:
        case "Kafka":
            kafka: oracle.Kafka = request.getfixturevalue("kafka")
            topic = request.getfixturevalue("topic")(partitions=2)
            return Target(
                lambda **options: sinks.Kafka(topic, bootstrap_servers=kafka.servers, **options),
                lambda: list(kafka.values(topic).elements()),
            )
        case "PostgreSQL" | "PostgreSQL, staged":
            server = request.getfixturevalue("postgres_server")
            mode: dict[str, Any] = {"mode": "staged" if system.endswith("staged") else "prepared"}

            def ask(statement: str) -> list[Any]:
                with psycopg.connect(server.dsn(), autocommit=True) as connection:
                    cursor = connection.execute(statement)  # type: ignore[arg-type]
                    return cursor.fetchall() if cursor.description else []

            ask(f"CREATE TABLE {name} (value text)")
            return Target(
                lambda **options: sinks.Postgres(name, dsn=server.dsn(), **mode | options),
                lambda: [value for (value,) in ask(f"SELECT value FROM {name}")],
                lambda pipeline: _tables(ask, name, "poundlock.witness", pipeline),
            )
        case "MariaDB":
            return _mariadb(request.getfixturevalue("mariadb_server"), name)
        case "Redis":
            url = request.getfixturevalue("valkey_server").address
            client: Any = redis.Redis.from_url(url, decode_responses=True)
            return Target(
                lambda **options: sinks.Redis(list=name, value="value", url=url, **options),
                lambda: client.lrange(name, 0, -1),
                lambda pipeline: _keys(
                    redis.Redis.from_url(url), [name, f"*poundlock.{pipeline}.*"]
                ),
            )
        case "OpenSearch":
            return _opensearch(request.getfixturevalue("opensearch_server").url, name)
        case _:
            files = place / "files"
            return Target(
                lambda **options: sinks.Files(str(files), **options),
                lambda: _files(files),
                lambda _: _directory(files),
            )


def _mariadb(server: Any, name: str) -> Target:
    def ask(statement: str) -> list[Any]:
        with pymysql.connect(**server.connect_arguments(), autocommit=True) as connection:
            cursor = connection.cursor()
            cursor.execute(statement)
            return list(cursor.fetchall())

    ask(f"CREATE TABLE {name} (value text)")
    return Target(
        lambda **options: sinks.MySQL(name, url=server.address, **options),
        lambda: [value for (value,) in ask(f"SELECT value FROM {name}")],
        lambda pipeline: _tables(ask, name, "poundlock_witness", pipeline),
    )


def _tables(
    ask: Callable[[str], Any], target: str, witness: str, pipeline: str
) -> Callable[[], None]:
    """Copy what a backup has of one pipeline: its target, and its rows in the witness table."""
    ours = f"{witness} WHERE pipeline = '{pipeline}'"
    ask(f"CREATE TABLE {target}_backup AS SELECT * FROM {target}")
    ask(f"CREATE TABLE {target}_witness AS SELECT * FROM {ours}")

    def restore() -> None:
        for table, whole in ((f"{target}_backup", target), (f"{target}_witness", ours)):
            ask(f"DELETE FROM {whole}")
            ask(f"INSERT INTO {whole.split()[0]} SELECT * FROM {table}")

    return restore


def _opensearch(url: str, name: str) -> Target:
    client = opensearchpy.OpenSearch([url])
    client.indices.create(index=name)

    def read() -> list[str]:
        client.indices.refresh(index=name)
        found = client.search(index=name, body={"size": 1000})
        return [hit["_source"]["value"] for hit in found["hits"]["hits"]]

    return Target(lambda **options: sinks.OpenSearch(name, url=url, id="value", **options), read)


def _keys(client: Any, patterns: Sequence[str]) -> Callable[[], None]:
    def find() -> set[bytes]:
        return {key for pattern in patterns for key in client.keys(pattern)}

    copies = {key: client.dump(key) for key in find()}

    def restore() -> None:
        for key in find():
            client.delete(key)
        for key, copy in copies.items():
            client.restore(key, 0, copy)

    return restore


def _directory(place: Path) -> Callable[[], None]:
    copy = shutil.copytree(place, place.with_name("backup"))

    def restore() -> None:
        shutil.rmtree(place)
        shutil.copytree(copy, place)

    return restore


def _files(place: Path) -> list[str]:
    """Return the rows of the files that Spark's own manifest lists."""
    published: dict[str, None] = {}
    for entry in sorted((place / "_spark_metadata").glob("[0-9]*")):
        for line in entry.read_text().splitlines()[1:]:
            path = line.split('"path":"', 1)[1].split('"', 1)[0]
            published[path.removeprefix("file://")] = None
    rows: list[str] = []
    for path in published:
        rows += pyarrow.parquet.read_table(path).column("value").to_pylist()
    return rows
