"""The driver's half of an SQL sink: the class of a branch's mode handles it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from poundlock.core.model import Namespace, Receipt, Stray
from poundlock.core.participant import Participant, Semantic
from poundlock.core.protocol import BranchState, LogState
from poundlock.core.site import Site
from poundlock.sinks.sql.receipts import mode_of
from poundlock.sinks.sql.witness import Witness


class Branches(Protocol):
    """The branches of one mode. The methods are those of `Participant`."""

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]: ...

    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]: ...

    def abort(self, strays: Sequence[Stray]) -> list[BranchState]: ...

    def find(self, namespace: Namespace) -> list[Stray]: ...

    def newest_generation(self, namespace: Namespace) -> int:
        """Return the highest generation of the open branches; 0 if there are none."""
        ...


class SqlSink(Participant):
    """A sink whose branches end in a witness table."""

    after_restore = ""
    speculates = False  # Spark may run two attempts of a task at the same time
    _tasks: int | None = None  # how many Spark runs at once, if known

    @property
    @abstractmethod
    def witness(self) -> Witness: ...

    @property
    @abstractmethod
    def branches(self) -> Branches: ...

    @abstractmethod
    def lend(self) -> AbstractContextManager[Any]:
        """Lend a connection, and translate the driver's errors."""

    def attach(self, site: Site) -> None:
        self._tasks, self.speculates = site.tasks_at_once, site.speculation

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        return self.branches.check(receipts)

    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        return self.branches.commit(receipts)

    def find(self, namespace: Namespace) -> list[Stray]:
        return self.branches.find(namespace)

    def abort(self, strays: Sequence[Stray]) -> list[BranchState]:
        return self.branches.abort(strays)

    def open_place(self) -> str:
        """Return the identity of the witness table: who has it can end the branches that it proves."""
        with self.lend() as link:
            if self.semantic is Semantic.EXACTLY_ONCE:
                return self.witness.ensure(link)
            return self.witness.identity(link) or ""

    def newest_generation(self, namespace: Namespace) -> int:
        with self.lend() as link:
            over = self.witness.newest_generation(link, namespace)
        return max(over, self.branches.newest_generation(namespace))

    def committed_beyond(self, state: LogState) -> str | None:
        with self.lend() as link:
            return self.witness.committed_beyond(link, state)

    def newest_batch(self, namespace: Namespace) -> int | None:
        with self.lend() as link:
            return self.witness.newest_batch(link, namespace)

    def logs_of(self, pipeline: str) -> frozenset[str]:
        with self.lend() as link:
            return self.witness.logs_of(link, pipeline)


class BranchesByMode:
    """The branches of a sink. The mode is the one in the receipt: the sink's may have changed since."""

    def __init__(self, by_mode: Mapping[str, Branches], default: str):
        self._by_mode, self._default = by_mode, default

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        return self._each(receipts, lambda branches, mine: branches.check(mine))

    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        return self._each(receipts, lambda branches, mine: branches.commit(mine))

    def abort(self, strays: Sequence[Stray]) -> list[BranchState]:
        return self._each(strays, lambda branches, mine: branches.abort(mine))

    def find(self, namespace: Namespace) -> list[Stray]:
        return [stray for it in self._by_mode.values() for stray in it.find(namespace)]

    def newest_generation(self, namespace: Namespace) -> int:
        return max(it.newest_generation(namespace) for it in self._by_mode.values())

    def _each(
        self,
        items: Sequence[Receipt] | Sequence[Stray],
        call: Callable[[Branches, list[Any]], list[Any]],
    ) -> list[Any]:
        """Give the items of each mode to its class in one call. Return the answers in their order."""
        answers: list[Any] = [None] * len(items)
        for mode, branches in self._by_mode.items():
            places = [
                place for place, item in enumerate(items) if mode_of(item, self._default) == mode
            ]
            if places:
                found = call(branches, [items[place] for place in places])
                for place, answer in zip(places, found, strict=True):
                    answers[place] = answer
        return answers
