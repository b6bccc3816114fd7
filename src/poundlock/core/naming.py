"""The names of branches in systems that accept any name.

    poundlock.PIPELINE.IDENTITY.GENERATION.SINK.BATCH.ATTEMPT.TASK

The name alone identifies the owner, so a sweep needs only the system's list of open branches. No part
contains a dot. A name has at most 196 bytes, which PostgreSQL allows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from poundlock.core.model import Branch, Namespace

PREFIX = "poundlock"
_FULL_NAME = re.compile(
    rf"{PREFIX}\.([\w-]+)\.([0-9a-f]+)\.(\d+)\.([\w-]+)\.(\d+)\.(\d+)\.(\d+)", re.ASCII
)

_OWNER = re.compile(rf"{PREFIX}\.([\w-]+)\.([0-9a-f]+)\.", re.ASCII)


@dataclass(frozen=True, slots=True)
class BranchName:
    """The parts of a branch's name."""

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
    """Return the name of a branch. It is unique within the namespace and sink."""
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
    """Parse a branch's name. Return None for any other text."""
    match = _FULL_NAME.fullmatch(text)
    if match is None:
        return None
    pipeline, identity, generation, sink, *numbers = match.groups()
    return BranchName(Namespace(pipeline, identity), int(generation), sink, *map(int, numbers))


def derive_sink_name(target: str) -> str:
    """Return a sink's default name: its target's, without the characters that no name may have."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", target).strip("-_")


def to_forget(names: Iterable[BranchName], floor: int) -> list[BranchName]:
    """Choose the names of batches below a floor, except the newest name.

    The newest name is the record of the newest generation, even if a sink had no rows for a long time.
    """
    ordered = sorted(names, key=lambda it: (it.generation, it.batch, it.attempt, it.task_attempt))
    return [name for name in ordered[:-1] if name.batch < floor]


def owner_of(text: str) -> Namespace | None:
    """Return the namespace in a branch's name or in a Kafka transactional id, None for other text."""
    match = _OWNER.match(text)
    return Namespace(match[1], match[2]) if match else None
