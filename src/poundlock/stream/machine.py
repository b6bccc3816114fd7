"""The NFA of a pattern: for each state, its edges and the conditions to test.

The conditions of a state form a decision tree, which grows as rows need it. Each leaf is a plan: what
a row with these answers does to the partial matches in the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from poundlock.errors import UsageError
from poundlock.stream.graph import (
    FINAL,
    IGNORE,
    PENDING,
    PROCEED,
    STOP,
    TAKE,
    TRUE,
    Arrow,
    Graph,
    State,
)
from poundlock.stream.pattern import All, Column, Either, Function, Not, Pattern, Test
from poundlock.stream.rows import row_type

_FALSE = Not(TRUE)
_column = tuple.__getitem__

# Targets that are no state to move to.
NOWHERE: Final = -1  # the match is complete, or stopped
STAY: Final = -2  # the partial match stays where it is


class _Edge(NamedTuple):
    """What a row can do to a partial match in a state. Proceed arrows are followed already."""

    action: str
    stage: int
    target: int
    guard: Test
    final: Test  # whether the match is complete then


class Plan:
    """What one row does to the partial matches in a state."""

    def __init__(self, edges: Sequence[tuple[_Edge, Any, Any]], state: int, compiled: Any) -> None:
        # Whether a condition reads earlier rows, so that each partial match must be tested.
        self.asks = any(
            guard is not True or final not in (True, False) for _, guard, final in edges
        )
        self.edges = [
            (edge.action, edge.stage, edge.target, compiled(guard), compiled(final))
            for edge, guard, final in edges
        ]
        self.stops = any(edge.action == STOP for edge, *_ in edges)
        self.stays = any(edge.target == STAY for edge, *_ in edges)
        # Nothing happens: the partial matches in the state stay, or none starts.
        self.idle = not self.asks and ((self.stays and len(edges) == 1) or not (edges or state))


@dataclass(slots=True, eq=False)
class _Branch:
    """A node of a state's decision tree: a condition to test, or a plan."""

    known: dict[Test, bool]  # the answers that lead here
    leaf: int  # the condition's number; -1: there is a plan
    plan: Plan | None
    yes: _Branch | None = None
    no: _Branch | None = None


class Machine:
    """The NFA of a pattern over rows with these columns."""

    def __init__(
        self, pattern: Pattern, columns: Sequence[str], *, timed_out: bool = False
    ) -> None:
        pattern.check()
        if unbound := pattern.expressions():
            raise UsageError(
                f"the condition {unbound[0]!r} is in SQL: bind it to a column first, with bind()"
            )
        self.names = pattern.names()
        self.length = pattern.length or 0
        self.skip = pattern.skip
        self.timed_out = timed_out
        self._columns = {name: place for place, name in enumerate(columns)}
        missing = [name for name in pattern.columns() if name not in self._columns]
        if missing:
            raise UsageError(f"there is no column {missing[0]!r}: there are {', '.join(columns)}")
        # Rows are kept without the columns that only hold the results of conditions.
        helpers = set(pattern.columns())
        self.visible = tuple(name for name in columns if name not in helpers)
        self._places = [self._columns[name] for name in self.visible] if helpers else None
        self.row = row_type(tuple(columns))
        self.kept = row_type(self.visible)
        self.leaves: list[Callable[[Any], Any]] = []
        self._leaf_of: dict[Test, int] = {}
        self._flatten(Graph(pattern).start)

    def keep(self, row: Any) -> Any:
        """Return a row as a match keeps it."""
        return row if self._places is None else self.kept([row[at] for at in self._places])

    def _flatten(self, start: State) -> None:
        """Number the states in which a partial match can wait, and list the edges of each."""
        order: dict[State, int] = {start: 0}
        queue = [start]
        self.edges: list[list[_Edge]] = []
        while queue:
            state = queue.pop(0)
            edges: list[_Edge] = []
            for source, arrow, guard in _reached(state):
                target = arrow.target
                if arrow.action == IGNORE and state is start:
                    continue
                if target not in order and target.kind not in (FINAL, STOP):
                    order[target] = len(order)
                    queue.append(target)
                edges.append(self._edge(source, arrow, guard, state, order))
            self.edges.append(edges)
        self.pending = [state.kind == PENDING for state in order]
        self.gaps = [state.gap or 0 for state in order]
        self.trees: list[_Branch] = [self._grow(state, {}) for state in range(len(order))]

    def _edge(
        self, source: State, arrow: Arrow, guard: Test, state: State, order: dict[State, int]
    ) -> _Edge:
        action = STOP if arrow.target.kind == STOP else arrow.action
        target = order.get(arrow.target, NOWHERE)
        if action == TAKE:
            final = TRUE if target == NOWHERE else _final(arrow.target)
            return _Edge(action, self.names.index(source.stage), target, guard, final)
        final = TRUE if action == IGNORE and target == NOWHERE else _FALSE
        return _Edge(action, 0, STAY if arrow.target is state else target, guard, final)

    def _grow(self, state: int, known: dict[Test, bool]) -> _Branch:
        """Return the branch of the next condition to test in a state, or of the plan."""
        edges: list[tuple[_Edge, Any, Any]] = []
        for edge in self.edges[state]:
            guard = _resolved(edge.guard, known)
            if guard is False:
                continue
            final = _resolved(edge.final, known)
            for test in (guard, final):
                if leaf := _first_simple(test):
                    return _Branch(known, self._leaf(leaf), None)
            edges.append((edge, guard, final))
        return _Branch(known, -1, Plan(edges, state, self._compiled))

    def branch(self, state: int, branch: _Branch, *, answer: bool) -> _Branch:
        """Return the branch that an answer leads to. It is made when the answer first occurs."""
        leaf = next(test for test, at in self._leaf_of.items() if at == branch.leaf)
        grown = self._grow(state, {**branch.known, leaf: answer})
        if answer:
            branch.yes = grown
        else:
            branch.no = grown
        return grown

    def _leaf(self, test: Function | Column) -> int:
        if test not in self._leaf_of:
            self._leaf_of[test] = len(self.leaves)
            if isinstance(test, Column):
                self.leaves.append(lambda row, at=self._columns[test.name]: _column(row, at))
            else:
                self.leaves.append(test.call)
        return self._leaf_of[test]

    def _compiled(self, test: Any) -> Any:
        """Return a test that reads earlier rows as a function of the row and the earlier rows."""
        if test is True or test is False:
            return test
        match test:
            case Function(call, _):
                return call
            case Not(part):
                inner = self._compiled(part)
                return lambda row, earlier: not inner(row, earlier)
            case All(parts):
                every = [self._compiled(part) for part in parts]
                return lambda row, earlier: all(part(row, earlier) for part in every)
            case Either(parts):
                some = [self._compiled(part) for part in parts]
                return lambda row, earlier: any(part(row, earlier) for part in some)
        raise AssertionError(test)


def _reached(state: State) -> Iterator[tuple[State, Arrow, Test]]:
    """Yield the arrows that take or ignore a row, each with the guards on the way to it."""
    stack: list[tuple[State, tuple[State, ...], Test]] = [(state, (), TRUE)]
    while stack:
        current, path, guard = stack.pop()
        for arrow in current.arrows:
            both = All((guard, arrow.guard))
            if arrow.action != PROCEED:
                yield current, arrow, both
            elif arrow.target not in path:  # a group of optional stages proceeds to itself
                stack.append((arrow.target, (*path, current), both))


def _final(state: State, path: tuple[State, ...] = ()) -> Test:
    """Return the condition for a match in this state to be complete without another row."""
    ways: list[Test] = []
    for arrow in state.arrows:
        if arrow.action == PROCEED and arrow.target not in path:
            target = arrow.target
            rest = TRUE if target.kind == FINAL else _final(target, (*path, state))
            ways.append(All((arrow.guard, rest)))
    return Either(tuple(ways)) if ways else _FALSE


def _resolved(test: Test, known: dict[Test, bool]) -> Any:
    """Return True or False if the answer is known, else the part that is not."""
    match test:
        case Not(part):
            inner = _resolved(part, known)
            return not inner if isinstance(inner, bool) else Not(inner)
        case All(parts) | Either(parts):
            decides = isinstance(test, Either)  # the value of a part that settles the whole
            rest: list[Test] = []
            for part in parts:
                value = _resolved(part, known)
                if value is decides:
                    return decides
                if not isinstance(value, bool):
                    rest.append(value)
            if not rest:
                return not decides
            return rest[0] if len(rest) == 1 else type(test)(tuple(rest))
        case _:
            return known.get(test, test)


def _first_simple(test: Any) -> Function | Column | None:
    """Return the first condition in a test that reads the row alone."""
    match test:
        case Function(_, earlier):
            return None if earlier else test
        case Column():
            return test
        case Not(part):
            return _first_simple(part)
        case All(parts) | Either(parts):
            return next(filter(None, map(_first_simple, parts)), None)
        case _:
            return None
