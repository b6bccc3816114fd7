"""The server for the tests of the Redis sink, and its fixtures."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest
import redis

from poundlock.core.model import Branch, Fingerprint, Namespace, Receipt, Transaction
from poundlock.core.protocol import BranchState
from poundlock.servers import valkey
from poundlock.sinks import Redis

SPACE = Namespace.new("trial", 1_700_000_000, 1)
DONE, LOST = BranchState.COMMITTED, BranchState.ABORTED


@pytest.fixture(scope="session")
def redis_server() -> Iterator[valkey.Valkey]:
    with valkey.running() as node:
        yield node


@pytest.fixture
def redis_client(redis_server: valkey.Valkey) -> Iterator[Any]:
    client = redis.Redis.from_url(redis_server.address, decode_responses=True)
    client.flushall()
    yield client
    client.close()


@pytest.fixture
def make_redis(redis_server: valkey.Valkey, redis_client: Any) -> Any:
    return lambda **options: Redis(url=redis_server.address, name="out", **options)


def branch(task: int = 0, *, batch: int = 0, tolerant: bool = False) -> Branch:
    return Branch(Transaction(SPACE, 1, batch, 1), "out", task, task, tolerant=tolerant)


def stage_rows(sink: Redis, rows: Any, task: int = 0, batch: int = 0) -> Receipt:
    rows = rows if isinstance(rows, pa.RecordBatch) else pa.RecordBatch.from_pydict(rows)
    writer = pickle.loads(pickle.dumps(sink)).begin(branch(task, batch=batch))
    writer.write(rows)
    prepared = writer.prepare()
    fingerprint = Fingerprint(len(rows), 0)
    receipt = Receipt("out", prepared.id, task, fingerprint, prepared.handle)
    return Receipt.from_json(receipt.to_json())


def list_leftovers(redis_client: Any) -> set[str]:
    """Return the keys of the sink except its witnesses."""
    return {
        key for key in redis_client.keys("*poundlock*") if not key.endswith((".witness", ".logs"))
    }


def create_user(
    redis_server: valkey.Valkey, redis_client: Any, *commands: str, keys: Sequence[str] = ("*",)
) -> str:
    """Give a user only these rights. Return the address for it."""
    rights = {"reset_keys": True, "keys": keys, "commands": ["-@all", *commands]}
    redis_client.acl_setuser("app", enabled=True, passwords=["+pw"], **rights)
    return redis_server.url.replace("//", "//app:pw@")
