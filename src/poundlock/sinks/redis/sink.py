"""Redis and Valkey: rows into hashes, keys, lists, streams and counters, exactly once.

    {TAG}:NAME                                          a branch: its rows, staged in chunks
    {TAG}:poundlock.PIPELINE.IDENTITY.SINK.open         the names of all staged branches
    {TAG}:poundlock.PIPELINE.IDENTITY.SINK.witness      how each branch ended: committed or aborted

A task stages its rows under a key of the branch. After the decision one script moves the branches of
the batch to their target and writes the witness, in one step that the server persists completely or
not at all. So even an increment happens once. TAG puts all keys of a sink into one slot of a cluster.

Below exactly-once the task moves its branch itself. Its witness is then a key of its own,
{TAG}:NAME.witness. It makes a repeat of that one command harmless, and is deleted with the branch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from poundlock.core.model import Branch, Namespace, Receipt, Stray, checked_name
from poundlock.core.naming import derive_sink_name
from poundlock.core.participant import (
    Column,
    Commitment,
    MissingOrder,
    Participant,
    Semantic,
    Writer,
)
from poundlock.core.protocol import BranchState, LogState
from poundlock.core.reach import Address
from poundlock.errors import NotAuthorised, PoundlockError, UsageError
from poundlock.sinks.redis.branches import Branches
from poundlock.sinks.redis.client import Client, address_of, as_pairs, as_text
from poundlock.sinks.redis.types import parse_options, project
from poundlock.sinks.redis.writer import RedisWriter

_OLDEST = (6, 2)
_SETTINGS = ("appendonly", "appendfsync", "maxmemory", "maxmemory-policy", "proto-max-bulk-len")
_LONGEST = 512 << 20  # bytes of a value, unless proto-max-bulk-len was changed

_STATES = {state.value: state for state in BranchState}  # the scripts answer with these words
_WHY_NOT = {  # a branch cannot be committed. Other answers of the script are reasons themselves.
    "prepared": None,
    "committed": "it is committed already",
    "aborted": "it was aborted",
    "moving": "a script failed half-way through it",
    "no witness": "its witness is gone",
}


class Redis(Participant):
    """A Redis or Valkey server, or a cluster. One of these shapes:

        Redis(hash="h", field="id", value="v")       HSET h ID V
        Redis(key="id", prefix="p:")                 HSET p:ID with a field for each other column
        Redis(key="id", prefix="p:", value="v")      SET p:ID V
        Redis(list="l", value="v")                   RPUSH l V
        Redis(stream="s")                            XADD s * with a field for each column
        Redis(counter="c", value="n")                INCRBY c N

    Args:
        url: `redis://user:password@host:port/0`, `rediss://` or `unix://`; best as `env:NAME`.
        name: The sink's name in its pipeline; the target's by default.
        value: A column, or "json" for the whole row as JSON.
        operation: "increment" adds to fields of a hash or to keys, in place of setting them.
        order_by: An integer, date or timestamp column. If several rows of a batch have the same
            field or key, the greatest wins; without it, any one of them.
        expire: Seconds that a key lives after a write; only with `key`.
        semantic: "exactly_once", "at_least_once" or "none".
        timeout: Seconds to wait for an answer.

    A null deletes the field or the key. For a list or an increment it makes the row a bad row.
    """

    system = "Redis"
    commitment = Commitment.STAGED
    after_restore = ""

    def __init__(
        self,
        *,
        url: str,
        name: str | None = None,
        hash: str | None = None,
        field: str | None = None,
        key: str | None = None,
        value: str | None = None,
        list: str | None = None,
        stream: str | None = None,
        counter: str | None = None,
        prefix: str = "",
        operation: str = "set",
        order_by: str | None = None,
        expire: float | None = None,
        semantic: str | Semantic = Semantic.EXACTLY_ONCE,
        timeout: float = 60.0,
    ):
        self.shape, self._roles = parse_options(
            {"hash": hash, "key": key, "list": list, "stream": stream, "counter": counter},
            {
                "field": field,
                "value": value,
                "prefix": prefix,
                "order_by": order_by,
                "expire": expire,
            },
            operation,
        )
        label = derive_sink_name(self.shape.target or prefix or "keys")[:63]
        self.name = checked_name("sink name", name or label or "redis")
        self.semantic = Semantic(semantic)
        self.timeout = timeout
        self.longest = _LONGEST
        self._url = url
        self._client: Client | None = None

    def __repr__(self) -> str:
        return f"Redis({self.shape.kind}, {self.shape.target or self.shape.prefix!r})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_client": None}

    @property
    def client(self) -> Client:
        if self._client is None:
            self._client = Client(self._url, self.timeout, self.name)
        return self._client

    @property
    def branches(self) -> Branches:
        return Branches(self.client, self.name, self.shape.tag)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None

    # Before anything starts.

    def project(self, columns: Mapping[str, Column]) -> dict[str, str]:
        projection = project(self.shape, self._roles, columns)
        projection.check(self.name)
        return projection.expressions

    def addresses(self) -> Sequence[Address]:
        return address_of(self._url)

    def missing_order(self) -> MissingOrder | None:
        key, shape = self._roles.key, self.shape
        if key is None or shape.adds or shape.order:
            return None
        return MissingOrder([key], "order_by", refuses=False)

    def preflight(self) -> list[str]:
        client, shape = self.client, self.shape
        here = f"{{{shape.tag}}}"
        with client.errors("checking the server"):
            _check_version(client, here, self.name)
            if client.clustered:
                self._check_slots(client)
            if as_text(client.execute("ROLE", key=here)[0]) not in ("master", "primary"):
                raise UsageError(
                    "the server is a replica, which accepts no writes: name the primary in url",
                    sink=self.name,
                )
            kind = "none" if shape.many else as_text(client.execute("TYPE", shape.target, key=here))
        needed = {"hash_set": "hash", "hash_add": "hash", "counter": "string"}
        fitting = needed.get(shape.kind, shape.kind)
        if kind not in ("none", fitting):
            raise UsageError(
                f"key {shape.target!r} is of type {kind}, but the sink needs {fitting}. Use another "
                "key, or delete that one",
                sink=self.name,
            )
        warnings, longest = _check_settings(client, here)
        self.longest = longest or _LONGEST
        return warnings

    def _check_slots(self, client: Client) -> None:
        shape = self.shape
        if shape.many and not re.search(r"\{[^}]+\}", shape.prefix):
            raise UsageError(
                "the server is a cluster, where one step can change only keys of one slot. Give the "
                f"keys a common hash tag: prefix='{{{shape.prefix.strip(':') or self.name}}}:'",
                sink=self.name,
            )
        key = shape.prefix if shape.many else shape.target
        if client.slot(key) != client.slot(f"{{{shape.tag}}}:"):
            raise UsageError(
                f"the braces in {key!r} are not a hash tag that the sink's own keys can share: use a "
                "name without braces, or with one pair of braces around some letters",
                sink=self.name,
            )

    # In a task.

    def dead_letters(self, dead_letters: pa.RecordBatch) -> pa.RecordBatch:
        if self.shape.kind == "stream":
            return dead_letters.rename_columns([f".{name}" for name in dead_letters.schema.names])
        if self.shape.kind != "list":
            raise UsageError(
                "dead letters need list= or stream=: use one of them for this sink", sink=self.name
            )
        texts = [json.dumps(dead_letter).encode() for dead_letter in dead_letters.to_pylist()]
        return pa.RecordBatch.from_pydict({"value": pa.array(texts, pa.binary())})

    def begin(self, branch: Branch) -> Writer:
        return RedisWriter(self, branch)

    # On the driver.

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        return [_WHY_NOT.get(answer, answer) for answer in self.branches.check(receipts)]

    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        return [_STATES[answer] for answer in self.branches.move(receipts)]

    def find(self, namespace: Namespace) -> list[Stray]:
        return [
            Stray(self.name, str(name), name.generation, "staged")
            for name in self.branches.list_open(namespace)
        ]

    def abort(self, strays: Sequence[Stray]) -> list[BranchState]:
        answers = self.branches.abort([stray.id for stray in strays])
        return [_STATES.get(answer, BranchState.NO_WITNESS) for answer in answers]

    def newest_generation(self, namespace: Namespace) -> int:
        names = self.branches.list_witnessed(namespace) + self.branches.list_open(namespace)
        return max((name.generation for name in names), default=0)

    def committed_beyond(self, state: LogState) -> str | None:
        assert state.generation is not None
        names = self.branches.list_committed(state.generation.namespace)
        return state.first_unexplained(self.name, ((name.batch, str(name)) for name in names))

    def newest_batch(self, namespace: Namespace) -> int | None:
        return max((it.batch for it in self.branches.list_committed(namespace)), default=None)

    def logs_of(self, pipeline: str) -> frozenset[str]:
        return self.branches.logs_of(pipeline)

    def prune(self, namespace: Namespace, floor: int) -> None:
        self.branches.prune(namespace, floor)


def _check_version(client: Client, key: str, sink: str) -> None:
    info = client.execute("INFO", "server", key=key)
    version = str(info.get("redis_version", ""))  # Valkey has one too, of the Redis that it equals
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1]), int(numbers[2])) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise UsageError(
            f"the server is Redis {version}, but the sink needs {oldest} or later, or Valkey",
            sink=sink,
        )


def _check_settings(client: Client, key: str) -> tuple[list[str], int | None]:
    """Return warnings, and the maximum length of a value if the server shows it."""
    try:
        with client.errors("reading the configuration"):
            found: dict[str, str] = {}
            for name in _SETTINGS:
                found |= as_pairs(client.execute("CONFIG", "GET", name, key=key))
    except PoundlockError as error:
        if not isinstance(error, NotAuthorised) and "unknown command" not in str(error):
            raise
        warning = (
            "the server does not show its configuration: make sure that it has appendonly yes, "
            "appendfsync always and maxmemory-policy noeviction"
        )
        return [warning], None
    warnings: list[str] = []
    if found.get("appendonly") != "yes":
        warnings.append(
            "appendonly is off: acknowledged writes are lost when the server stops. Set "
            "appendonly yes and appendfsync always"
        )
    elif found.get("appendfsync") != "always":
        warnings.append(
            f"appendfsync is {found.get('appendfsync')}: a crash of the machine loses the last "
            "second of acknowledged writes. Set appendfsync always"
        )
    policy = found.get("maxmemory-policy", "")
    if policy.startswith("allkeys") and found.get("maxmemory", "0") != "0":
        warnings.append(
            f"maxmemory-policy is {policy}: the server may drop staged rows, which are then "
            "replayed, and witnesses, which stops the pipeline. Set maxmemory-policy noeviction"
        )
    longest = found.get("proto-max-bulk-len")
    return warnings, int(longest) if longest else None
