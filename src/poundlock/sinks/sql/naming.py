"""The id of a branch in an SQL system: the branch's name and its task.

It has the task, so that a retry finds what an earlier attempt of its task has prepared.
"""

from __future__ import annotations

from dataclasses import dataclass

from poundlock.core.model import Branch, Namespace
from poundlock.core.naming import BranchName, name_of, parse_name
from poundlock.errors import UsageError

_LONGEST = 199  # bytes: what PostgreSQL allows for a prepared transaction


@dataclass(frozen=True, slots=True)
class BranchId:
    """A branch's name and its task."""

    name: BranchName
    task: int

    def __str__(self) -> str:
        return f"{self.name}/{self.task}"

    def belongs_to(self, namespace: Namespace, sink: str) -> bool:
        return (self.name.namespace, self.name.sink) == (namespace, sink)

    def precedes(self, other: BranchId) -> bool:
        """Whether this is an earlier attempt of the same task, in the same attempt at the batch."""
        mine, its = self.name, other.name
        same = (
            mine.namespace,
            mine.generation,
            mine.sink,
            mine.batch,
            mine.attempt,
            self.task,
        ) == (*(its.namespace, its.generation, its.sink, its.batch, its.attempt, other.task),)
        return same and mine.task_attempt < its.task_attempt


def id_of(branch: Branch) -> BranchId:
    """Return the id of a branch. Raises `UsageError` if it is too long."""
    made = BranchId(name_of(branch), branch.task)
    if len(str(made).encode()) > _LONGEST:
        raise UsageError(
            f"the branch id {made} is longer than {_LONGEST} bytes: give the pipeline or the sink a "
            "shorter name"
        )
    return made


def parse_id(text: str) -> BranchId | None:
    """Read the id of a branch; None if the text is not one."""
    spelled, _, task = text.partition("/")
    name = parse_name(spelled)
    return None if name is None or not task.isdecimal() else BranchId(name, int(task))


def read_id(text: str) -> BranchId:
    """Read the id of a branch. Raises `UsageError` if the text is not one."""
    found = parse_id(text)
    if found is None:
        raise UsageError(f"{text!r} is not the id of a branch")
    return found
