"""Redis and Valkey: rows into hashes, keys, lists, streams and counters, exactly once.

    {TAG}:NAME                                          a branch: its rows, staged in chunks
    {TAG}:poundlock.PIPELINE.IDENTITY.SINK.open         the names of all staged branches
    {TAG}:poundlock.PIPELINE.IDENTITY.SINK.witness      what became of each: committed or aborted

A task writes its rows aside, under a key of the branch's own. After the decision one script moves the
branches of the batch to their target and writes the witness, in one step that the server either
persists whole or not at all: so even an increment happens once. TAG puts all keys of a sink into one
slot of a cluster.

Without exactly once the task moves its branch itself. The witness is then the branch's own,
{TAG}:NAME.witness, which keeps a repeat of that one command harmless, and goes with the branch.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from poundlock.core.model import (
    Branch,
    Fingerprint,
    Namespace,
    Receipt,
    Stray,
    checked_name,
)
from poundlock.core.naming import BranchName, name_of, parse_name, to_forget
from poundlock.core.participant import (
    Column,
    Commitment,
    Participant,
    PreparedBranch,
    Semantic,
    Writer,
)
from poundlock.core.protocol import BranchState
from poundlock.errors import (
    BadRow,
    GuaranteeBroken,
    PoundlockError,
    Rejected,
    UsageError,
)
from poundlock.sinks.redis.client import ABORT, MOVE, STAGE, Client, as_text
from poundlock.sinks.redis.pack import as_bytes, chunks
from poundlock.sinks.redis.settings import check_settings, check_version
from poundlock.sinks.redis.shape import Shape, chosen, project

pc: Any = pyarrow.compute  # made at run time: no type checker knows what is in it
logger = logging.getLogger("poundlock")

_CHUNK = 1 << 19  # bytes: few round trips, and no command that keeps others waiting
_LONGEST = 512 << 20  # bytes of a value, unless somebody changed proto-max-bulk-len
_HEAD = 5  # bytes before each value of a chunk, and before the chunk
_AT_ONCE = 1000  # fields of the witness in one command
_DAY_MS = 24 * 3600 * 1000  # how long a dead task's rows stay that nobody sweeps

_STATES = {
    "committed": BranchState.COMMITTED,
    "aborted": BranchState.ABORTED,
    "no witness": BranchState.NO_WITNESS,
    "prepared": BranchState.PREPARED,
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
        operation: "increment" adds instead, to fields of a hash or to keys.
        order_by: An integer, date or timestamp column. Of several rows of a batch for one field or
            key the greatest wins; without it, any one of them.
        expire: Seconds that a key lives after it was last written; for `key` alone.
        semantic: "exactly_once", "at_least_once" or "none".
        timeout: Seconds to wait for an answer.

    Null deletes: the field, or the key. Where there is nothing to delete (a list, an increment) it
    makes a bad row.
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
        self.shape, self._wanted = chosen(
            hash=hash, field=field, key=key, value=value, list=list, stream=stream,
            counter=counter, prefix=prefix, operation=operation, order_by=order_by, expire=expire,
        )  # fmt: skip
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

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None

    # Before anything starts.

    def project(self, columns: Mapping[str, Column]) -> dict[str, str]:
        found, problems = project(self.shape, self._wanted, columns)
        if problems:
            has = ", ".join(f"{name} {column.type}" for name, column in columns.items())
            raise UsageError(
                f"the frame does not fit: {'; '.join(problems)}. It has {has}", sink=self.name
            )
        return found

    def preflight(self) -> list[str]:
        client, shape = self.client, self.shape
        here = f"{{{shape.tag}}}"
        with client.errors("looking at the server"):
            check_version(client, here, self.name)
            if client.clustered:
                self._check_slots(client)
            if as_text(client.ask("ROLE", key=here)[0]) not in ("master", "primary"):
                raise UsageError(
                    "the server is a replica, which takes no writes: name the primary in url",
                    sink=self.name,
                )
            kind = "none" if shape.many else as_text(client.ask("TYPE", shape.target, key=here))
        needed = {"hash_set": "hash", "hash_add": "hash", "counter": "string"}
        fitting = needed.get(shape.kind, shape.kind)
        if kind not in ("none", fitting):
            raise UsageError(
                f"key {shape.target!r} is of type {kind}, but the sink needs {fitting}. Take another "
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
                "the server is a cluster, where one step can only touch keys of one slot. Give the "
                f"keys a common hash tag: prefix='{{{shape.prefix.strip(':') or self.name}}}:'",
                sink=self.name,
            )
        key = shape.prefix if shape.many else shape.target
        if client.slot(key) != client.slot(f"{{{shape.tag}}}:"):
            raise UsageError(
                f"the braces in {key!r} make no hash tag that our own keys could share: take a name "
                "without braces, or with one pair of them around some letters",
                sink=self.name,
            )

    # In a task.

    def dead_letters(self, dead_letters: pa.RecordBatch) -> pa.RecordBatch:
        if self.shape.kind == "stream":
            return dead_letters.rename_columns([f".{name}" for name in dead_letters.schema.names])
        if self.shape.kind != "list":
            raise UsageError("dead letters go to a list or a stream", sink=self.name)
        texts = [json.dumps(dead_letter).encode() for dead_letter in dead_letters.to_pylist()]
        return pa.RecordBatch.from_pydict({"value": pa.array(texts, pa.binary())})

    def begin(self, branch: Branch) -> Writer:
        return RedisWriter(self, branch)

    # On the driver.

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        answers = self._run("check", receipts)
        told = {
            "prepared": None,
            "committed": "it is committed already",
            "aborted": "it was aborted",
            "moving": "a script failed half-way through it",
            "no witness": "its witness is gone",
        }
        return [told.get(answers[receipt.id], answers[receipt.id]) for receipt in receipts]

    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        answers = self._run("move", receipts)
        stuck = [receipt for receipt in receipts if answers[receipt.id] == "moving"]
        if stuck:
            raise self._half_way(stuck)
        return [_STATES[answers[receipt.id]] for receipt in receipts]

    def _half_way(self, stuck: Sequence[Receipt]) -> GuaranteeBroken:
        ids = [receipt.id for receipt in stuck]
        name = parse_name(ids[0])
        assert name is not None
        tag = Shape.from_json(str(stuck[0].handle["shape"])).tag
        witness, _ = self._keys(name.namespace, tag)
        staged = ", ".join(_staged(tag, id_) for id_ in ids)
        cure = " ".join(["HSET", witness, *(f"{id_} committed" for id_ in ids)])
        return GuaranteeBroken(
            f"branch {ids[0]}: a script failed half-way while it moved the rows, so some of them are "
            f"at the target and some are not. Compare the target with the staged rows ({staged}), put "
            f"it right, say so by '{cure}', and start the pipeline again",
            sink=self.name,
        )

    def _run(
        self, mode: str, receipts: Sequence[Receipt], own: str | None = None
    ) -> dict[str, str]:
        """Put the receipts before the script: all of a batch that were written alike, at once.

        `own` is a witness besides the sink's.
        """
        alike: dict[tuple[Namespace, int, str], list[tuple[Receipt, BranchName]]] = {}
        for receipt in receipts:
            name = parse_name(receipt.id)
            assert name is not None
            shape = str(receipt.handle["shape"])
            alike.setdefault((name.namespace, name.batch, shape), []).append((receipt, name))
        answers: dict[str, str] = {}
        for (namespace, _, spelled), branches in alike.items():
            shape = Shape.from_json(spelled)
            witness, open_ = self._keys(namespace, shape.tag)
            witness = own or witness
            keys = [witness, open_, shape.target or witness]
            keys += [_staged(shape.tag, receipt.id) for receipt, _ in branches]
            arguments: list[Any] = [mode, spelled]
            for receipt, name in branches:
                handle = receipt.handle
                arguments += [receipt.id, name.batch, handle["witness"], handle["chunks"]]
                arguments.append(receipt.fingerprint.rows)
            doing = f"{mode} of {branches[0][0].id}"
            with self.client.errors(doing):
                found = self.client.run(MOVE, keys, arguments)
            for (receipt, _), answer in zip(branches, found, strict=True):
                answers[receipt.id] = as_text(answer)
        return answers

    def find(self, namespace: Namespace) -> list[Stray]:
        return [
            Stray(self.name, str(name), name.generation, "staged") for name in self._open(namespace)
        ]

    def _open(self, namespace: Namespace) -> list[BranchName]:
        _, open_ = self._keys(namespace, self.shape.tag)
        with self.client.errors("looking for open branches"):
            return _mine(self.client.ask("SMEMBERS", open_, key=open_))

    def abort(self, strays: Sequence[Stray]) -> list[BranchState]:
        states: dict[str, BranchState] = {}
        by_namespace: dict[Namespace, list[str]] = {}
        for stray in strays:
            name = parse_name(stray.id)
            assert name is not None
            by_namespace.setdefault(name.namespace, []).append(stray.id)
        for namespace, ids in by_namespace.items():
            keys = [*self._keys(namespace, self.shape.tag)]
            keys += [_staged(self.shape.tag, id_) for id_ in ids]
            with self.client.errors(f"abort of {ids[0]}"):
                found = self.client.run(ABORT, keys, [secrets.token_hex(8), *ids])
            for id_, answer in zip(ids, found, strict=True):
                states[id_] = _STATES.get(as_text(answer), BranchState.NO_WITNESS)
        return [states[stray.id] for stray in strays]

    def newest_generation(self, namespace: Namespace) -> int:
        names = [*self._witnessed(namespace), *self._open(namespace)]
        return max((name.generation for name in names), default=0)

    def prune(self, namespace: Namespace, floor: int) -> None:
        witness, _ = self._keys(namespace, self.shape.tag)
        old = [str(name) for name in to_forget(self._witnessed(namespace), floor)]
        if not old:
            return
        with self.client.errors("forgetting old witnesses"):
            # The floor first: a branch that is neither witnessed nor staged is unknown below it.
            self.client.ask("HSET", witness, "floor", floor, key=witness)
            for start in range(0, len(old), _AT_ONCE):
                self.client.ask("HDEL", witness, *old[start : start + _AT_ONCE], key=witness)

    def _witnessed(self, namespace: Namespace) -> list[BranchName]:
        witness, _ = self._keys(namespace, self.shape.tag)
        with self.client.errors("reading the witness"):
            return _mine(self.client.ask("HKEYS", witness, key=witness))

    def _keys(self, namespace: Namespace, tag: str) -> tuple[str, str]:
        """Return the keys of the witness and of the list of open branches."""
        ours = f"{{{tag}}}:poundlock.{namespace.pipeline}.{namespace.identity}.{self.name}"
        return f"{ours}.witness", f"{ours}.open"


class RedisWriter(Writer):
    """Packs rows and stages them."""

    def __init__(self, sink: Redis, branch: Branch):
        self._sink, self._name = sink, name_of(branch)
        self._began_at = time.time()
        self._shape: Shape | None = None
        self._names: list[str] = []
        self._witness = ""
        self._rows = self._chunks = 0
        # Without exactly once nobody sweeps: the branch has keys of its own alone.
        self._own: str | None = None
        if sink.semantic is not Semantic.EXACTLY_ONCE:
            self._own = f"{_staged(sink.shape.tag, str(self._name))}.witness"

    def write(self, rows: pa.RecordBatch) -> None:
        if self._shape is None:
            amounts = self._sink.shape.adds and not pa.types.is_integer(
                rows.schema.field("value").type
            )
            self._shape = self._sink.shape.of(rows.schema.names, floats=amounts)
            self._names = [f".{name}" for name in self._shape.fields] or ["value"]
            self._names = ["key"] * self._shape.keyed + self._names + ["order"] * self._shape.order
        self._check(self._shape, rows)
        columns = [as_bytes(rows.column(name)) for name in self._names]
        self._check_lengths(columns)
        mark = "?" if any(column.null_count for column in columns) else ""
        for count, chunk in chunks(columns, _CHUNK):
            self._stage(count, chunk, mark)

    def _stage(self, count: int, chunk: bytes, mark: str) -> None:
        sink, tag = self._sink, self._sink.shape.tag
        witness, open_ = sink._keys(self._name.namespace, tag)
        keys = [self._own or witness, open_, _staged(tag, str(self._name))]
        life = _DAY_MS if self._own else ""
        fresh = secrets.token_hex(8)
        arguments = [str(self._name), fresh, f"{self._chunks}{mark}:{count}", chunk, life]
        with sink.client.errors(f"staging rows of {self._name}"):
            witness, *over = map(as_text, sink.client.run(STAGE, keys, arguments))
        if over:
            raise Rejected(f"{self._name} is {over[0]} already: it is over", sink=sink.name)
        if self._witness not in ("", witness):
            raise Rejected(
                "the witness was deleted while rows were staged: somebody emptied the database, or "
                "the server evicts keys. Set maxmemory-policy noeviction",
                sink=sink.name,
            )
        self._witness = witness
        self._rows += count
        self._chunks += 1

    def _check(self, shape: Shape, rows: pa.RecordBatch) -> None:
        """Refuse what the move could not do."""
        bad: dict[int, str] = {}

        def refuse(which: Any, reason: str) -> None:
            for index in np.flatnonzero(np.asarray(which)):
                bad.setdefault(int(index), reason)

        if shape.keyed:
            refuse(rows.column("key").is_null(), "the key is null")
        if shape.order:
            refuse(rows.column("order").is_null(), "the column of order_by is null")
        if shape.adds or shape.kind == "list":
            value = rows.column("value")
            refuse(value.is_null(), "the value is null")
            if pa.types.is_floating(value.type):
                finite = pc.fill_null(pc.is_finite(value), True)
                refuse(pc.invert(finite), "the value is not a finite number")
        if shape.kind == "stream":
            empty = np.ones(len(rows), bool)
            for name in self._names:
                empty &= np.asarray(rows.column(name).is_null())
            refuse(empty, "every column is null")
        self._refuse(bad)

    def _check_lengths(self, columns: Sequence[pa.Array]) -> None:
        # A row is staged whole: all of it must fit into one value.
        lengths = [np.asarray(pc.fill_null(pc.binary_length(it), 0)) + _HEAD for it in columns]
        long = np.flatnonzero(np.add.reduce(lengths) + _HEAD > self._sink.longest)
        reason = (
            f"the row is longer than the server's proto-max-bulk-len, {self._sink.longest} bytes"
        )
        self._refuse({int(row): reason for row in long})

    def _refuse(self, bad: Mapping[int, str]) -> None:
        if bad:
            first = min(bad)
            raise BadRow(
                f"{len(bad)} rows cannot be written, the first because {bad[first]}",
                sink=self._sink.name,
                rows=bad,
            )

    def prepare(self) -> PreparedBranch | None:
        assert self._shape is not None
        handle = {
            "shape": self._shape.to_json(),
            "witness": self._witness,
            "chunks": self._chunks,
        }
        id_ = str(self._name)
        if self._sink.semantic is Semantic.EXACTLY_ONCE:
            return PreparedBranch(id_, handle, began_at=self._began_at, expires_at=None)
        receipt = Receipt(self._sink.name, id_, 0, Fingerprint(self._rows), handle)
        try:
            answer = self._sink._run("move", [receipt], self._own)[id_]
            if answer != "committed":
                raise Rejected(f"the rows were not written: {answer}", sink=self._sink.name)
            self.abort()  # only its witness is left, and whether that goes does not matter
        except PoundlockError as error:
            if self._sink.semantic is not Semantic.NONE:
                raise
            logger.warning("sink %s: rows were lost, as semantic NONE allows: %s",
                           self._sink.name, error)  # fmt: skip
        return None

    def abort(self) -> None:
        try:
            if self._own:
                self._drop_own()
            elif self._chunks:
                self._sink.abort([Stray(self._sink.name, str(self._name), 0, "staged")])
        except PoundlockError as error:
            left = "ends within a day" if self._own else "is left to the sweep"
            logger.warning("sink %s: %s %s: %s",
                           self._sink.name, self._name, left, error)  # fmt: skip

    def _drop_own(self) -> None:
        """Leave nothing of a branch that is not swept. Without its witness no late move finds it."""
        client, staged = self._sink.client, _staged(self._sink.shape.tag, str(self._name))
        with client.errors(f"dropping {self._name}"):
            client.ask("UNLINK", staged, self._own, key=staged)


def _staged(tag: str, branch: str) -> str:
    return f"{{{tag}}}:{branch}"


def _mine(fields: Any) -> list[BranchName]:
    found = (parse_name(as_text(field)) for field in fields)
    return [name for name in found if name is not None]
