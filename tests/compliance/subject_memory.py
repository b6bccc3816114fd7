"""The reference sink: a system in this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from poundlock.compliance import Subject
from poundlock.core.model import Receipt
from poundlock.core.participant import Participant
from poundlock.core.protocol import BranchState
from poundlock.sinks import Memory
from poundlock.sinks.memory import MemorySystem

_TAKES_ALL = "It takes any value of any row, however often."
_NO_SERVER = "There is no server, and no disk."

NOT_APPLICABLE: Mapping[str, str] = {
    **dict.fromkeys(["wrong_columns", "wrong_type", "null", "too_long"], _TAKES_ALL),
    **dict.fromkeys(["duplicate_key", "key_in_two_tasks", "no_room"], _TAKES_ALL),
    **dict.fromkeys(["wrong_password", "lost_connection", "full_disk"], _NO_SERVER),
    "killed_task": "It is a part of the process that would be killed.",
}


_SYSTEMS: dict[str, MemorySystem] = {}


class Sink(Memory):
    """Copies share the system, because it represents a server, which is not copied."""

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"server": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__ |= state | {"server": _SYSTEMS[str(state["key"])]}


class MemorySubject(Subject):
    has_server = False
    prunes = False  # its memory ends with its process

    def sink(self, name: str = "out") -> Participant:
        key = f"{name}-{len(_SYSTEMS)}"
        made = Sink(name, _SYSTEMS.setdefault(key, MemorySystem()))
        made.key = key  # type: ignore[attr-defined]
        return made

    def again(self, sink: Participant) -> Participant:
        return sink

    def rows(self, numbers: Sequence[int]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pydict({"number": list(numbers)})

    def visible(self, sink: Participant) -> Counter[int]:
        return Counter(row["number"] for row in sink.server.visible)  # type: ignore[attr-defined]

    def open(self, sink: Participant) -> set[str]:
        branches = sink.server.branches  # type: ignore[attr-defined]
        return {id_ for id_, held in branches.items() if held.state is BranchState.PREPARED}

    @contextmanager
    def killed(self) -> Iterator[None]:
        yield

    def lose(self, sink: Participant, receipt: Receipt) -> None:
        sink.server.branches[receipt.id].state = BranchState.ABORTED  # type: ignore[attr-defined]


@contextmanager
def started(directory: Path) -> Iterator[Subject]:
    yield MemorySubject()
