"""What the server holds of a sink's branches: staged rows, a set of open branches, and a witness."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from poundlock.core.model import Namespace, Receipt
from poundlock.core.naming import BranchName, parse_name, to_forget
from poundlock.errors import GuaranteeBroken, Rejected
from poundlock.sinks.redis.client import ABORT, MOVE, STAGE, Client, as_pairs, as_text
from poundlock.sinks.redis.types import Shape

_FIELDS_AT_ONCE = 1000  # of the witness, in one command
_BEGUN = ("committed", "moving")  # what the witness says of a branch whose move has begun
_DAY_MS = 24 * 3600 * 1000


def own_witness(tag: str, branch: str) -> str:
    """Return the witness of a branch that is moved without a decision."""
    return f"{_staged(tag, branch)}.witness"


class Branches:
    """The branches of one sink. `tag` is the hash tag of the target and of all keys here."""

    def __init__(self, client: Client, sink: str, tag: str):
        self._client, self._sink, self._tag = client, sink, tag

    def stage(self, name: BranchName, chunk: str, rows: bytes, own: str | None) -> str:
        """Stage a chunk of a branch's rows. Return the identity of the witness.

        With a witness of its own, the branch is in no list and expires after a day, because no sweep
        would find it.
        """
        witness, open_ = self._keys(name.namespace, self._tag)
        keys = [own or witness, open_, _staged(self._tag, str(name))]
        arguments = [str(name), secrets.token_hex(8), chunk, rows, _DAY_MS if own else ""]
        with self._client.errors(f"staging rows of {name}"):
            identity, *over = map(as_text, self._client.run(STAGE, keys, arguments))
        if over:
            raise Rejected(f"{name} is {over[0]} already", sink=self._sink)
        return identity

    def check(self, receipts: Sequence[Receipt]) -> list[str]:
        """Return the script's answer for each branch. Change nothing."""
        return self._run("check", receipts)

    def move(self, receipts: Sequence[Receipt], own: str | None = None) -> list[str]:
        """Move the branches of each batch to the target. Return the script's answer for each."""
        if own is None:
            self._record_logs(receipts)
        answers = self._run("move", receipts, own)
        stuck = [
            receipt
            for receipt, answer in zip(receipts, answers, strict=True)
            if answer == "moving" and own is None
        ]
        if stuck:
            raise self._half_moved(stuck)
        return answers

    def _record_logs(self, receipts: Sequence[Receipt]) -> None:
        """Record the identity of the log before the move. A search through all keys would be slow."""
        places = {
            (Shape.from_json(str(receipt.handle["shape"])).tag, _parse(receipt.id).namespace)
            for receipt in receipts
        }
        for tag, namespace in places:
            key = self._logs(namespace.pipeline, tag)
            with self._client.errors("recording the log"):
                self._client.execute("SADD", key, namespace.identity, key=key)

    def logs_of(self, pipeline: str) -> frozenset[str]:
        """Return the identities of the pipeline's logs of which branches were moved, or nearly."""
        key = self._logs(pipeline, self._tag)
        with self._client.errors("reading the pipeline's logs"):
            return frozenset(map(as_text, self._client.execute("SMEMBERS", key, key=key)))

    def _logs(self, pipeline: str, tag: str) -> str:
        return f"{{{tag}}}:poundlock.{pipeline}.{self._sink}.logs"

    def _run(self, mode: str, receipts: Sequence[Receipt], own: str | None = None) -> list[str]:
        """Run the script, once for all branches of a batch that have the same shape.

        `own` is a witness in place of the sink's.
        """
        groups: dict[tuple[Namespace, int, str], list[tuple[Receipt, BranchName]]] = {}
        for receipt in receipts:
            name = _parse(receipt.id)
            shape = str(receipt.handle["shape"])
            groups.setdefault((name.namespace, name.batch, shape), []).append((receipt, name))
        answers: dict[str, str] = {}
        for (namespace, _, shape_json), branches in groups.items():
            shape = Shape.from_json(shape_json)
            witness, open_ = self._keys(namespace, shape.tag)
            witness = own or witness
            keys = [witness, open_, shape.target or witness]
            keys += [_staged(shape.tag, receipt.id) for receipt, _ in branches]
            arguments: list[Any] = [mode, shape_json]
            for receipt, name in branches:
                handle = receipt.handle
                arguments += [receipt.id, name.batch, handle["witness"], handle["chunks"]]
                arguments.append(receipt.fingerprint.rows)
            with self._client.errors(f"{mode} of {branches[0][0].id}"):
                found = self._client.run(MOVE, keys, arguments)
            for (receipt, _), answer in zip(branches, found, strict=True):
                answers[receipt.id] = as_text(answer)
        return [answers[receipt.id] for receipt in receipts]

    def _half_moved(self, receipts: Sequence[Receipt]) -> GuaranteeBroken:
        ids = [receipt.id for receipt in receipts]
        tag = Shape.from_json(str(receipts[0].handle["shape"])).tag
        witness, _ = self._keys(_parse(ids[0]).namespace, tag)
        staged = ", ".join(_staged(tag, id_) for id_ in ids)
        command = " ".join(["HSET", witness, *(f"{id_} committed" for id_ in ids)])
        return GuaranteeBroken(
            f"branch {ids[0]}: a script failed half-way while it moved the rows, so some of them are "
            f"at the target and some are not. Compare the target with the staged rows ({staged}), "
            f"correct it, confirm that with '{command}', and start the pipeline again",
            sink=self._sink,
        )

    def abort(self, ids: Sequence[str]) -> list[str]:
        """Drop branches for good, except committed ones. Return the witness's word for each."""
        by_namespace: dict[Namespace, list[str]] = {}
        for id_ in ids:
            by_namespace.setdefault(_parse(id_).namespace, []).append(id_)
        answers: dict[str, str] = {}
        for namespace, members in by_namespace.items():
            keys = list(self._keys(namespace, self._tag))
            keys += [_staged(self._tag, id_) for id_ in members]
            with self._client.errors(f"abort of {members[0]}"):
                found = self._client.run(ABORT, keys, [secrets.token_hex(8), *members])
            answers |= zip(members, map(as_text, found), strict=True)
        return [answers[id_] for id_ in ids]

    def drop_own(self, branch: str, own: str) -> None:
        """Delete a branch with a witness of its own. Without that no late move can succeed."""
        staged = _staged(self._tag, branch)
        with self._client.errors(f"dropping {branch}"):
            self._client.execute("UNLINK", staged, own, key=staged)

    def list_open(self, namespace: Namespace) -> list[BranchName]:
        _, open_ = self._keys(namespace, self._tag)
        with self._client.errors("listing the open branches"):
            return _names(self._client.execute("SMEMBERS", open_, key=open_))

    def list_witnessed(self, namespace: Namespace) -> list[BranchName]:
        witness, _ = self._keys(namespace, self._tag)
        with self._client.errors("reading the witness"):
            return _names(self._client.execute("HKEYS", witness, key=witness))

    def list_committed(self, namespace: Namespace) -> list[BranchName]:
        """Return the branches that were moved, or half moved."""
        witness, _ = self._keys(namespace, self._tag)
        with self._client.errors("reading the witness"):
            found = as_pairs(self._client.execute("HGETALL", witness, key=witness))
        return _names(name for name, word in found.items() if word in _BEGUN)

    def prune(self, namespace: Namespace, floor: int) -> None:
        witness, _ = self._keys(namespace, self._tag)
        begun = self.list_committed(namespace)
        over = set(self.list_witnessed(namespace)).difference(begun)
        # The newest of each stays: an aborted one does not prove what was committed.
        old = [str(name) for names in (begun, over) for name in to_forget(names, floor)]
        if not old:
            return
        with self._client.errors("deleting old witnesses"):
            # The floor first: a branch below it that is neither witnessed nor staged is unknown.
            self._client.execute("HSET", witness, "floor", floor, key=witness)
            for start in range(0, len(old), _FIELDS_AT_ONCE):
                fields = old[start : start + _FIELDS_AT_ONCE]
                self._client.execute("HDEL", witness, *fields, key=witness)

    def _keys(self, namespace: Namespace, tag: str) -> tuple[str, str]:
        """Return the keys of the witness and of the set of open branches."""
        prefix = f"{{{tag}}}:poundlock.{namespace.pipeline}.{namespace.identity}.{self._sink}"
        return f"{prefix}.witness", f"{prefix}.open"


def _staged(tag: str, branch: str) -> str:
    return f"{{{tag}}}:{branch}"


def _parse(branch: str) -> BranchName:
    name = parse_name(branch)
    assert name is not None
    return name


def _names(fields: Any) -> list[BranchName]:
    found = (parse_name(as_text(field)) for field in fields)
    return [name for name in found if name is not None]
