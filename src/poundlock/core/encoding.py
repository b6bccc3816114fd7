"""The form of the log's records: JSON.

A batch may have thousands of receipts, and the log holds hundreds of batches. So receipts are columns
with what all have in common only once. Of a finished batch only the ids are still asked for. So a
record has two parts: the body, with the ids and the plain values of the handles, and the rest of the
receipts, which only a commit needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from itertools import groupby
from typing import Any

from poundlock.core.model import (
    Bound,
    Compacted,
    Decided,
    Fingerprint,
    Finished,
    FinishedBatch,
    Generation,
    Json,
    Namespace,
    Opened,
    OperatorDecided,
    OperatorDecision,
    Place,
    Receipt,
    Record,
    Repaired,
    Scalar,
    Withdrawn,
)


@dataclass(frozen=True, slots=True)
class BranchIds:
    """The ids of branches of one sink, with the plain values of their handles."""

    sink: str
    ids: Sequence[str]
    same: Mapping[str, Scalar]  # what all handles have in common
    each: Mapping[str, Sequence[Scalar]]  # the other values, one per id

    def identities(self) -> Iterator[tuple[str, tuple[tuple[str, Scalar], ...]]]:
        """Yield each id with the `Receipt.identity` of its branch."""
        if not self.each:
            shared = tuple(sorted(self.same.items()))
            yield from ((id_, shared) for id_ in self.ids)
            return
        names = sorted([*self.same, *self.each])
        columns = [self.each.get(name) or [self.same[name]] * len(self.ids) for name in names]
        for id_, *values in zip(self.ids, *columns, strict=True):
            yield id_, tuple(zip(names, values, strict=True))


def record_to_json(record: Record) -> tuple[dict[str, Json], list[Json]]:
    """Convert a record to its body and the rest of its receipts. `record_from_json` is the inverse.

    The body has the record's fields by name, and its kind.
    """
    rest = list[Json]()
    body: dict[str, Any] = {it.name: getattr(record, it.name) for it in fields(record)}
    match record:
        case Generation():
            namespace: Namespace = body.pop("namespace")
            body |= {"pipeline": namespace.pipeline, "identity": namespace.identity}
        case Decided():
            body["receipts"], rest = _receipts_to_json(record.receipts)
            body["totals"] = {sink: value.to_json() for sink, value in record.totals.items()}
            body["cut"] = dict(record.cut)
        case Repaired():
            body["receipts"], rest = _receipts_to_json(record.receipts)
            body["lost"] = [list(key) for key in record.lost]
        case OperatorDecided():
            body["operator_decision"] = record.operator_decision.value
            body["sinks"] = list(record.sinks)
        case Compacted():
            body["generation"], _ = record_to_json(record.generation)
            body["places"] = [list(astuple(place)) for place in record.places]
            if record.carried is not None:
                body["carried"] = [_carried_to_json(it) for it in record.carried]
        case Opened():
            body["places"] = [list(astuple(place)) for place in record.places]
        case Bound() | Finished() | Withdrawn():
            pass
    return {"kind": type(record).__name__, **body}, rest


def record_from_json(data: Mapping[str, Any], rest: Sequence[Any] | None = ()) -> Record:
    """Build a record, without its receipts and its plan if `rest` is None.

    A KeyError, TypeError or ValueError means a damaged record.
    """
    match data["kind"]:
        case "Generation":
            namespace = Namespace(data["pipeline"], data["identity"])
            return Generation(data["number"], namespace, data["uri"], data["query"], data["owner"])
        case "Bound":
            return Bound(data["query"])
        case "Decided":
            return Decided(
                batch=data["batch"],
                attempt=data["attempt"],
                generation=data["generation"],
                offsets=data["offsets"],
                receipts=_receipts_from_json(data["receipts"], rest),
                totals={
                    sink: Fingerprint.from_json(value) for sink, value in data["totals"].items()
                },
                cut=data.get("cut", {}),
                plan=None if rest is None else data.get("plan"),
            )
        case "Repaired":
            return Repaired(
                batch=data["batch"],
                generation=data["generation"],
                lost=tuple((sink, id_) for sink, id_ in data["lost"]),
                receipts=_receipts_from_json(data["receipts"], rest),
            )
        case "OperatorDecided":
            return OperatorDecided(
                data["batch"],
                OperatorDecision(data["operator_decision"]),
                tuple(data["sinks"]),
                data["by"],
            )
        case "Withdrawn":
            return Withdrawn(data["batch"], data["offsets"], data["by"])
        case "Finished":
            return Finished(data["batch"])
        case "Compacted":
            generation = record_from_json(data["generation"])
            if not isinstance(generation, Generation):
                raise TypeError("a compaction record must carry its generation")
            places = tuple(Place(*place) for place in data.get("places", ()))
            carried = data.get("carried")
            if carried is not None:
                carried = tuple(_carried_from_json(it) for it in carried)
            return Compacted(data["floor"], data["batch_floor"], generation, places, carried)
        case "Opened":
            return Opened(tuple(Place(*place) for place in data["places"]))
        case kind:
            raise ValueError(f"unknown kind of record {kind!r}")


def _carried_to_json(batch: FinishedBatch) -> dict[str, Json]:
    decided, _ = record_to_json(batch.decided)
    let_go, _ = _receipts_to_json(batch.let_go)
    decisions: dict[str, Json] = {k: it.value for k, it in batch.operator_decisions.items()}
    return {"decided": decided, "operator_decisions": decisions, "let_go": let_go}


def _carried_from_json(data: Mapping[str, Any]) -> FinishedBatch:
    decided = record_from_json(data["decided"], None)
    if not isinstance(decided, Decided):
        raise TypeError("a batch that is carried must have its decision")
    return FinishedBatch(
        replace(
            decided,
            receipts=_last_uses(branch_ids(data["decided"])),
            plan=data["decided"].get("plan"),
        ),
        {sink: OperatorDecision(it) for sink, it in data["operator_decisions"].items()},
        _last_uses(branch_ids({"receipts": data["let_go"]})),
    )


def _last_uses(parts: Iterable[BranchIds]) -> tuple[Receipt, ...]:
    return tuple(
        last_use_receipt(part.sink, id_, identity)
        for part in parts
        for id_, identity in part.identities()
    )


def last_use_receipt(sink: str, id: str, identity: Iterable[tuple[str, Scalar]]) -> Receipt:
    """Return what `FinishedBatch` holds of a receipt."""
    return Receipt(sink, id, 0, Fingerprint(), dict(identity))


def branch_ids(data: Mapping[str, Any]) -> tuple[BranchIds, ...]:
    """Return the ids in the body of a record."""
    return tuple(
        BranchIds(
            it["sink"], [it["prefix"] + suffix for suffix in it["ids"]], it["same"], it["each"]
        )
        for it in data.get("receipts", ())
    )


def _receipts_to_json(receipts: Iterable[Receipt]) -> tuple[list[Json], list[Json]]:
    ids, rest = list[Json](), list[Json]()
    for (sink, system, plain, other), group in groupby(receipts, _shape):
        run = list(group)
        names = [receipt.id for receipt in run]
        prefix = _common_prefix(min(names), max(names))
        ids.append(
            {
                "sink": sink,
                "system": system,
                "prefix": prefix,
                "ids": [name[len(prefix) :] for name in names],
                **_columns([{key: receipt.handle[key] for key in plain} for receipt in run]),
            }
        )
        rest.append(
            {
                "votes": _columns([_vote(receipt) for receipt in run]),
                "handles": _columns(
                    [{key: receipt.handle[key] for key in other} for receipt in run]
                ),
            }
        )
    return ids, rest


def _receipts_from_json(ids: Sequence[Any], rest: Sequence[Any] | None) -> tuple[Receipt, ...]:
    if rest is None:
        return ()
    return tuple(
        Receipt(
            sink=names["sink"],
            id=names["prefix"] + id_,
            task=vote["task"],
            fingerprint=Fingerprint.from_json(vote),
            handle=plain | other,
            began_at=vote["began_at"],
            expires_at=vote["expires_at"],
            system=names["system"],
        )
        for names, more in zip(ids, rest, strict=True)
        for id_, plain, vote, other in zip(
            names["ids"],
            _rows(names, len(names["ids"])),
            _rows(more["votes"], len(names["ids"])),
            _rows(more["handles"], len(names["ids"])),
            strict=True,
        )
    )


def _common_prefix(first: str, last: str) -> str:
    length = next(
        (at for at, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), None
    )
    return first if length is None else first[:length]


def _shape(receipt: Receipt) -> tuple[str, str, tuple[str, ...], tuple[str, ...]]:
    """Return what receipts must have in common to share columns."""
    plain = tuple(name for name, _ in receipt.identity)
    other = tuple(sorted(receipt.handle.keys() - plain))
    return receipt.sink, receipt.system, plain, other


def _vote(receipt: Receipt) -> dict[str, Json]:
    return {
        "task": receipt.task,
        **receipt.fingerprint.to_json(),
        "began_at": receipt.began_at,
        "expires_at": receipt.expires_at,
    }


def _columns(rows: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    same, each = dict[str, Json](), dict[str, Json]()
    for name, first in rows[0].items():
        column = [row[name] for row in rows]
        # True equals 1 in Python, but not in JSON.
        if all(value == first and repr(value) == repr(first) for value in column):
            same[name] = first
        else:
            each[name] = column
    return {"same": same, "each": each}


def _rows(columns: Mapping[str, Any], count: int) -> Iterator[dict[str, Any]]:
    same, each = columns["same"], columns["each"]
    if not each:
        return (dict(same) for _ in range(count))
    return (
        same | dict(zip(each, values, strict=True)) for values in zip(*each.values(), strict=True)
    )
