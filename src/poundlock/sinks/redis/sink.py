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
from poundlock.core.participant import Column, Commitment, Participant, Semantic, Writer
from poundlock.core.protocol import BranchState
from poundlock.errors import UsageError
from poundlock.sinks.redis.branches import Branches
from poundlock.sinks.redis.client import Client, as_text
from poundlock.sinks.redis.settings import check_settings, check_version
from poundlock.sinks.redis.types import parse_options, project
from poundlock.sinks.redis.writer import RedisWriter

_LONGEST = 512 << 20  # bytes of a value, unless proto-max-bulk-len was changed

_STATES = {
    "committed": BranchState.COMMITTED,
    "aborted": BranchState.ABORTED,
    "no witness": BranchState.NO_WITNESS,
    "prepared": BranchState.PREPARED,
}
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
        label = re.sub(r"[^A-Za-z0-9_-]+", "-", self.shape.target or prefix or "keys").strip("-_")
        self.name = checked_name("sink name", name or label[:63] or "redis")
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

    def preflight(self) -> list[str]:
        client, shape = self.client, self.shape
        here = f"{{{shape.tag}}}"
        with client.errors("checking the server"):
            check_version(client, here, self.name)
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
        warnings, longest = check_settings(client, here)
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

    def prune(self, namespace: Namespace, floor: int) -> None:
        self.branches.prune(namespace, floor)
