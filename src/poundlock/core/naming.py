"""How branches are called in systems that take any name: spelled and read in one place.

    poundlock.PIPELINE.IDENTITY.GENERATION.SINK.BATCH.ATTEMPT.TASK

The name alone says whose the branch is, so that a system which lists its open branches can be swept
without a register of ours. No part contains a dot. At most 196 bytes, which PostgreSQL allows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from poundlock.core.model import Branch, Namespace

PREFIX = "poundlock"
_SPELLED = re.compile(
    rf"{PREFIX}\.([\w-]+)\.([0-9a-f]+)\.(\d+)\.([\w-]+)\.(\d+)\.(\d+)\.(\d+)", re.ASCII
)

_OWNED = re.compile(rf"{PREFIX}\.([\w-]+)\.([0-9a-f]+)\.", re.ASCII)


@dataclass(frozen=True, slots=True)
class BranchName:
    """What a branch's name says."""

    namespace: Namespace
    generation: int
    sink: str
    batch: int
    attempt: int
    task_attempt: int

    def __str__(self) -> str:
        space = self.namespace
        return (
            f"{PREFIX}.{space.pipeline}.{space.identity}.{self.generation}.{self.sink}."
            f"{self.batch}.{self.attempt}.{self.task_attempt}"
        )


def name_of(branch: Branch) -> BranchName:
    """Name a branch. No two branches of one namespace and sink ever get the same name."""
    transaction = branch.transaction
    return BranchName(
        transaction.namespace,
        transaction.generation,
        branch.sink,
        transaction.batch,
        transaction.attempt,
        branch.task_attempt,
    )


def parse_name(text: str) -> BranchName | None:
    """Read a branch's name; None if it is not one of ours."""
    match = _SPELLED.fullmatch(text)
    if match is None:
        return None
    pipeline, identity, generation, sink, batch, attempt, task_attempt = match.groups()
    return BranchName(
        Namespace(pipeline, identity),
        int(generation),
        sink,
        int(batch),
        int(attempt),
        int(task_attempt),
    )


def derive_sink_name(target: str) -> str:
    """Return a sink's default name: its target's, without the characters that no name may have."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", target).strip("-_")


def to_forget(names: Iterable[BranchName], floor: int) -> list[BranchName]:
    """Choose the names of batches below a floor, but not the last of all.

    It tells which generation was the newest, also where a sink had no rows for long.
    """
    ordered = sorted(names, key=lambda it: (it.generation, it.batch, it.attempt, it.task_attempt))
    return [name for name in ordered[:-1] if name.batch < floor]


def owner_of(text: str) -> Namespace | None:
    """Read the namespace off any name of ours, Kafka's transactional ids included."""
    match = _OWNED.match(text)
    return Namespace(match[1], match[2]) if match else None
