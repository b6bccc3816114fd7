"""The matcher: a pattern becomes states and edges, and a key's rows are taken through them.

The states, their edges and the order of events follow Flink's NFA. What is our own is how they are
kept:

- A partial match is the last node of a chain: each node is a row that was taken, and points to the
  node before. Partial matches with a common past share it.
- The partial matches that wait in a state are kept by their start, so that those whose time is over
  are at the front. One row is tried against a state, not against each partial match in it: only
  conditions that look at earlier rows are asked for each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain, count
from operator import itemgetter
from typing import Any, Final, NamedTuple

from poundlock.errors import UsageError
from poundlock.stream.pattern import (
    All,
    Column,
    Contiguity,
    Either,
    Function,
    Not,
    Pattern,
    Repeat,
    Stage,
    Test,
)
from poundlock.stream.rows import row_type
from poundlock.stream.times import END

# A node: a row that a partial match has taken. The first two are those of the match's first row.
START: Final = 0  # its number
BEGAN: Final = 1  # its time
ID: Final = 2
TIME: Final = 3
STAGE: Final = 4
ROW: Final = 5
PARENT: Final = 6
Node = tuple[int, int, int, int, int, Any, Any]

_by_start = itemgetter(START)
_parent = itemgetter(PARENT)
_column = tuple.__getitem__

_TRUE = All()
_FALSE = Not(_TRUE)

# What an arrow does with the row.
_TAKE, _IGNORE, _PROCEED = "take", "ignore", "proceed"
# What a state is.
_NORMAL, _FINAL, _PENDING, _STOP = "normal", "final", "pending", "stop"


class _State:
    """A state while the graph is built."""

    def __init__(self, stage: str, kind: str = _NORMAL, gap: int | None = None) -> None:
        self.stage = stage
        self.kind = kind
        self.gap = gap
        self.arrows: list[_Arrow] = []

    def arrow(self, action: str, target: _State, guard: Test) -> None:
        self.arrows.append(_Arrow(action, target, guard))

    def copy(self, arrows: Sequence[_Arrow]) -> _State:
        made = _State(self.stage, self.kind, self.gap)
        for arrow in arrows:
            made.arrow(arrow.action, made if arrow.target is self else arrow.target, arrow.guard)
        return made


class _Arrow:
    def __init__(self, action: str, target: _State, guard: Test) -> None:
        self.action = action
        self.target = target
        self.guard = guard


class _Place:
    """A stage with its surroundings."""

    def __init__(
        self, stage: Stage, before: Sequence[Stage], following: Stage | None, group: _Place | None
    ) -> None:
        self.stage = stage
        self.before = before
        self.following = following
        self.group = group
        self.first = True  # of a group: whether its first round is being built

    @property
    def condition(self) -> Test:
        return self.stage.condition or _TRUE

    @property
    def heads(self) -> _Place | None:
        """The group that this is the first stage of."""
        return self.group if not self.before else None

    def take(self) -> Test:
        return self._unless_stopped(self.condition)

    def always(self) -> Test:
        return self._unless_stopped(_TRUE)

    def ignore(self) -> Test | None:
        """Return when a row may be passed over before the stage; None: never."""
        group, contiguity = self.heads, self.stage.contiguity
        if group:
            contiguity = group.stage.contiguity if group.first else group.stage.inner
        return self._ignore(contiguity)

    def inner_ignore(self) -> Test | None:
        """Return when a row may be passed over between two of the stage."""
        group = self.heads
        return self._ignore(group.stage.inner if group else self.stage.inner)

    def nots(self) -> Iterator[Stage]:
        """Give the negative stages that hold up to this one."""
        for stage in reversed(self.before):
            if stage.contiguity is Contiguity.NOT_FOLLOWED:
                yield stage
            elif not stage.optional:
                return

    def _ignore(self, contiguity: Contiguity) -> Test | None:
        if contiguity is Contiguity.STRICT:
            return None
        return self._unless_stopped(_TRUE if contiguity is Contiguity.ANY else Not(self.condition))

    def _unless_stopped(self, test: Test) -> Test:
        stop = self.group and self.group.stage.stop
        return _unless(stop, test)


def _unless(stop: Test | None, test: Test) -> Test:
    return All((Not(stop), test)) if stop else test


class _Graph:
    """Builds the states of a pattern from its end: each points to those after it."""

    def __init__(self, pattern: Pattern) -> None:
        self._timed = pattern.length is not None
        self._stops: dict[str, _State] = {}
        self._before_greedy: dict[_State, _State] = {}
        self.start = self._chain(pattern.stages, _State("", _FINAL), None, None)

    def _chain(
        self, stages: Sequence[Stage], sink: _State, following: Stage | None, group: _Place | None
    ) -> _State:
        for at in range(len(stages) - 1, -1, -1):
            stage = stages[at]
            place = _Place(stage, stages[:at], following, group)
            if stage.contiguity is Contiguity.NOT_FOLLOWED:
                # Elsewhere it is a condition of the edges after it.
                if (self._timed or stage.gap) and sink.kind == _FINAL:
                    sink = self._waiting(place)
            elif stage.contiguity is Contiguity.NOT_NEXT:
                sink = self._refusing(place, sink)
            else:
                sink = self._positive(place, sink)
            following = stage
        return sink

    def _waiting(self, place: _Place) -> _State:
        """A match that is complete if nothing comes until its time is over."""
        state = _State(place.stage.name, _PENDING, place.stage.gap)
        state.arrow(_PROCEED, self._stop(place.stage, place.take()), place.take())
        state.arrow(_IGNORE, state, Not(place.take()))
        return state

    def _refusing(self, place: _Place, sink: _State) -> _State:
        state = _State(place.stage.name, gap=place.stage.gap)
        # At the end of a pattern the row itself decides: it is passed over, and the match is complete.
        action = _IGNORE if sink.kind == _FINAL else _PROCEED
        state.arrow(action, sink, Not(place.take()))
        state.arrow(_PROCEED, self._stop(place.stage, place.take()), place.take())
        return state

    def _positive(self, place: _Place, sink: _State) -> _State:
        stage = place.stage
        if stage.repeat is Repeat.LOOP:
            place.first = False
            loop = self._loop(place, self._without_nots(place, sink))
            state = self._times(place, loop, sink)
        elif stage.repeat is Repeat.TIMES:
            state = self._times(place, sink, sink)
        else:
            state = self._single(
                place, sink, sink, place.take(), place.ignore(), optional=stage.optional
            )
        self._add_stops(place, state)
        return state

    def _stop(self, stage: Stage, take: Test) -> _State:
        if stage.name not in self._stops:
            self._stops[stage.name] = state = _State(stage.name, _STOP)
            state.arrow(_TAKE, state, take)
        return self._stops[stage.name]

    def _add_stops(self, place: _Place, state: _State) -> None:
        for stage in place.nots():
            take = _Place(stage, (), None, place.group).take()
            state.arrow(_PROCEED, self._stop(stage, take), take)

    def _add_following_stop(self, place: _Place, state: _State) -> None:
        stage = place.following
        if stage and stage.contiguity is Contiguity.NOT_FOLLOWED:
            take = _Place(stage, (), None, place.group).take()
            state.arrow(_PROCEED, self._stop(stage, take), take)

    def _without_nots(self, place: _Place, sink: _State) -> _State:
        """Return a state without the stops of negative stages before an optional one.

        Once the optional stage has a row, what must not come before it may come after it.
        """
        nots = {stage.name for stage in place.nots()}
        if not nots or not place.stage.optional:
            return sink
        arrows: list[_Arrow] = []
        for arrow in sink.arrows:
            target = arrow.target
            if arrow.action == _PROCEED:
                if target.kind == _STOP and target.stage in nots:
                    continue
                if target.kind != _STOP:
                    target = self._without_nots(place, target)
            arrows.append(_Arrow(arrow.action, target, arrow.guard))
        return sink.copy(arrows)

    def _times(self, place: _Place, sink: _State, proceed: _State) -> _State:
        stage = place.stage
        place.first = False
        inner = place.inner_ignore()
        inner = _unless(stage.stop, inner) if inner else None
        take = _unless(stage.stop, place.take())
        if stage.greedy and stage.low != stage.high:
            _not_while(sink, take)
        state = sink
        for _ in range(stage.low, stage.high):
            state = self._single(place, state, proceed, take, inner, optional=True)
            self._add_following_stop(place, state)
        for _ in range(stage.low - 1):
            state = self._single(place, state, None, take, inner, optional=False)
            self._add_following_stop(place, state)
        place.first = True
        return self._single(place, state, proceed, take, place.ignore(), optional=stage.optional)

    def _single(
        self,
        place: _Place,
        sink: _State,
        proceed: _State | None,
        take: Test,
        ignore: Test | None,
        *,
        optional: bool,
    ) -> _State:
        if place.stage.group:
            head = self._chain(place.stage.group, sink, place.following, place)
            if optional and proceed:
                head.arrow(_PROCEED, proceed, place.always())
            return head
        state = _State(place.stage.name, gap=place.stage.gap)
        sink = self._without_nots(place, sink)
        state.arrow(_TAKE, sink, take)
        if optional and proceed:
            self._proceed(place, state, proceed)
        if ignore:
            group, passed = place.heads, state
            if optional or (group and group.first and group.stage.optional):
                # A state of its own, without the way on: so that each way is gone once.
                passed = _State(place.stage.name, gap=place.stage.gap)
                passed.arrow(_TAKE, sink, take)
                passed.arrow(_IGNORE, passed, ignore)
                self._add_stops(place, passed)
            state.arrow(_IGNORE, passed, ignore)
        return state

    def _loop(self, place: _Place, sink: _State) -> _State:
        if place.stage.group:
            round_over = _State("")
            head = self._chain(place.stage.group, round_over, place.following, place)
            head.arrow(_PROCEED, sink, place.always())
            round_over.arrow(_PROCEED, head, place.always())
            return head
        stop = place.stage.stop
        ignore = place.inner_ignore()
        ignore = _unless(stop, ignore) if ignore else None
        take = _unless(stop, place.take())
        state = _State(place.stage.name)
        if place.stage.greedy:
            if stop:
                self._before_greedy[sink] = sink.copy(sink.arrows)
            self._proceed(place, state, sink)
            _not_while(sink, place.take())
        else:
            state.arrow(_PROCEED, sink, place.always())
        state.arrow(_TAKE, state, take)
        self._add_following_stop(place, state)
        if ignore:
            passed = _State(place.stage.name)
            passed.arrow(_TAKE, state, take)
            passed.arrow(_IGNORE, passed, ignore)
            state.arrow(_IGNORE, passed, ignore)
            self._add_following_stop(place, passed)
        return state

    def _proceed(self, place: _Place, state: _State, target: _State) -> None:
        """Add the way on from a stage. A greedy one that was stopped need not wait for more."""
        stop = place.stage.stop
        if place.stage.greedy and stop:
            free = self._before_greedy.get(target, target)
            state.arrow(_PROCEED, free, All((place.always(), stop)))
            state.arrow(_PROCEED, target, All((place.always(), Not(stop))))
        else:
            state.arrow(_PROCEED, target, place.always())


def _not_while(state: _State, take: Test) -> None:
    """Let no edge of a state be gone by a row that a greedy stage before it would take."""
    for arrow in state.arrows:
        arrow.guard = All((arrow.guard, Not(take)))


class _Edge(NamedTuple):
    """What a row can do to a partial match in a state, proceeding as far as it may."""

    action: str
    stage: int
    target: int
    guard: Test
    final: Test  # whether a row that is taken can also complete the match


class _Plan:
    """What one row does to every partial match in a state."""

    def __init__(self, edges: Sequence[tuple[_Edge, Any, Any]], state: int, compiled: Any) -> None:
        self.asks = any(
            guard is not True or final not in (True, False) for _, guard, final in edges
        )
        self.edges = [
            (edge.action, edge.stage, edge.target, compiled(guard), compiled(final))
            for edge, guard, final in edges
        ]
        self.stops = any(edge.action == _STOP for edge, *_ in edges)
        self.stays = any(e.action == _IGNORE and e.target == state for e, *_ in edges)
        # Nothing happens: the partial matches in the state wait on, or none is started.
        self.idle = not self.asks and ((self.stays and len(edges) == 1) or not (edges or state))


class _Branch:
    """A node of a state's decision tree: a condition to ask, or at the end a plan."""

    __slots__ = ("known", "leaf", "no", "plan", "yes")

    def __init__(self, known: dict[Test, bool], leaf: int, plan: _Plan | None) -> None:
        self.known = known
        self.leaf = leaf
        self.plan = plan
        self.yes: _Branch | None = None
        self.no: _Branch | None = None


class Machine:
    """A pattern made ready to run over rows with these columns."""

    def __init__(
        self, pattern: Pattern, columns: Sequence[str], *, timed_out: bool = False
    ) -> None:
        pattern.check()
        if unbound := pattern.expressions():
            raise UsageError(f"the condition {unbound[0]!r} is in SQL: bind it to a column first")
        self.names = pattern.names()
        self.length = pattern.length or 0
        self.skip = pattern.skip
        self.timed_out = timed_out
        self._columns = {name: place for place, name in enumerate(columns)}
        missing = [name for name in pattern.columns() if name not in self._columns]
        if missing:
            raise UsageError(f"there is no column {missing[0]!r}, only {', '.join(columns)}")
        # Rows are kept without the columns that only hold conditions.
        helpers = set(pattern.columns())
        self.visible = tuple(name for name in columns if name not in helpers)
        self._places = [self._columns[name] for name in self.visible] if helpers else None
        self.row = row_type(tuple(columns))
        self.kept = row_type(self.visible)
        self.leaves: list[Callable[[Any], Any]] = []
        self._leaf_of: dict[Test, int] = {}
        self._flatten(_Graph(pattern).start)

    def keep(self, row: Any) -> Any:
        """Return a row as it is kept in a match."""
        return row if self._places is None else self.kept([row[at] for at in self._places])

    def _flatten(self, start: _State) -> None:
        """Number the states that a partial match can wait in, and give each its edges."""
        order: dict[_State, int] = {start: 0}
        queue = [start]
        self.edges: list[list[_Edge]] = []
        while queue:
            state = queue.pop(0)
            edges: list[_Edge] = []
            for source, arrow, guard in _reached(state):
                target = arrow.target
                if arrow.action == _IGNORE and state is start:
                    continue
                if target not in order and target.kind not in (_FINAL, _STOP):
                    order[target] = len(order)
                    queue.append(target)
                action = _STOP if target.kind == _STOP else arrow.action
                final = _final(target) if action == _TAKE else _FALSE
                stage = self.names.index(source.stage) if action == _TAKE else 0
                edges.append(_Edge(action, stage, order.get(target, -1), guard, final))
            self.edges.append(edges)
        self.pending = [state.kind == _PENDING for state in order]
        self.gaps = [state.gap or 0 for state in order]
        self.trees: list[_Branch] = [self._grow(state, {}) for state in range(len(order))]

    def _grow(self, state: int, known: dict[Test, bool]) -> _Branch:
        """Return the next condition to ask of a row in a state, given what is known of it."""
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
        return _Branch(known, -1, _Plan(edges, state, self._compiled))

    def branch(self, state: int, branch: _Branch, *, answer: bool) -> _Branch:
        """Return where an answer leads, which is worked out when it is first given."""
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
        """Return a test that depends on earlier rows as a function of the row and those."""
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


def _reached(state: _State) -> Iterator[tuple[_State, _Arrow, Test]]:
    """Give the arrows that take or ignore a row, with all that must hold on the way to them."""
    stack: list[tuple[_State, tuple[_State, ...], Test]] = [(state, (), _TRUE)]
    while stack:
        current, path, guard = stack.pop()
        for arrow in current.arrows:
            both = All((guard, arrow.guard))
            if arrow.action != _PROCEED:
                yield current, arrow, both
            elif arrow.target not in path:  # a group of optional stages proceeds to itself
                stack.append((arrow.target, (*path, current), both))


def _final(state: _State, path: tuple[_State, ...] = ()) -> Test:
    """Return when a match in a state is complete without a further row."""
    ways: list[Test] = []
    for arrow in state.arrows:
        if arrow.action == _PROCEED and arrow.target not in path:
            target = arrow.target
            rest = _TRUE if target.kind == _FINAL else _final(target, (*path, state))
            ways.append(All((arrow.guard, rest)))
    return Either(tuple(ways)) if ways else _FALSE


def _resolved(test: Test, known: dict[Test, bool]) -> Any:
    """Return True or False if it is known, else what remains to be asked."""
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
    """Return the first condition in a test that looks at the row alone."""
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


class Earlier:
    """The rows that a partial match has so far: `earlier["stage"]` is a list, oldest first."""

    __slots__ = ("_names", "_node", "_rows")

    def __init__(self, node: Node | None, names: Sequence[str]) -> None:
        self._node = node
        self._names = names
        self._rows: dict[str, list[Any]] | None = None

    def __getitem__(self, name: str) -> list[Any]:
        if self._rows is None:
            self._rows = rows_of(self._node, self._names)
        if name not in self._rows and name not in self._names:
            raise UsageError(f"earlier[{name!r}]: the pattern has {', '.join(self._names)}")
        return self._rows.get(name, [])


def rows_of(node: Node | None, names: Sequence[str]) -> dict[str, list[Any]]:
    """Return the rows of a match by stage, in the order they came."""
    path: list[Node] = []
    while node is not None:
        path.append(node)
        node = node[PARENT]
    rows: dict[str, list[Any]] = {}
    for taken in reversed(path):
        rows.setdefault(names[taken[STAGE]], []).append(taken[ROW])
    return rows


def _path(node: Node) -> list[int]:
    """Return what tells a partial match from all others in its state, its first row first."""
    path: list[int] = []
    each: Node | None = node
    while each is not None:
        path += (each[STAGE], each[ID])
        each = each[PARENT]
    return path[::-1]


def by_row(columns: Sequence[Sequence[Any]], row: Callable[..., Any], size: int) -> Iterable[Any]:
    """Return the rows that are kept by column."""
    return map(row, zip(*columns, strict=True)) if columns else [row(())] * size


class Found(NamedTuple):
    """A match, or a partial match whose time is over, by its last node."""

    node: Node
    time: int


class Matcher:
    """The partial matches of one key, while its rows are worked on.

    `advance` and `feed` put what they find into `matches` and `timed_out`.
    """

    def __init__(self, machine: Machine, state: dict[str, Any] | None = None) -> None:
        self._machine = machine
        self.matches: list[Found] = []
        self.timed_out: list[Found] = []
        self._next_id = 0
        # By state: runs of nodes, each in the order of their starts.
        self._runs: list[list[deque[Node]]] = [[] for _ in machine.edges]
        # The runs by the start of their first node, if anything depends on who started first.
        self._skips = machine.skip.kind != "no_skip"
        self._ordered = bool(machine.length) or self._skips
        # Whether nobody is told of a partial match whose time is over.
        self._silent = not (
            machine.timed_out or any(machine.pending) or any(machine.gaps) or self._skips
        )
        self._fronts: list[tuple[int, int, int, deque[Node]]] = []
        self._gaps: list[tuple[int, int]] = []  # when a gap may end, and in which state
        self._gap_ends: set[tuple[int, int]] = set()  # the same, to have each once
        self._tie = count()
        self._due = END  # nothing is over before
        self._complete: list[Node] = []  # matches that wait for partial ones that started before
        if state:
            self._load(state)

    def next_due(self) -> int:
        """Return when the next partial match's time is over, or END if none has a limit."""
        due = self._gaps[0][0] if self._gaps else END
        if self._machine.length and (front := self._front()):
            due = min(due, front[3][0][BEGAN] + self._machine.length)
        return due

    def advance(self, time: int) -> None:
        """Give up what cannot be completed any more at this time, or complete what waited for it."""
        if self._silent and self._due <= time:
            self._forget(time)
        while self._due <= time:
            self._due = at = self.next_due()
            if at <= time:
                self._expire(at)

    def feed(self, times: Iterable[int], rows: Iterable[Any]) -> None:
        """Take rows through all states, in order of time."""
        machine, runs = self._machine, self._runs
        leaves, trees, keep = machine.leaves, list(enumerate(machine.trees)), machine.keep
        silent = self._silent
        # If nobody is told of those whose time is over, they go when it pays, or before they matter.
        slack = machine.length // 16 if silent else 0
        number = self._next_id - 1
        for time, row in zip(times, rows, strict=True):
            if self._due + slack <= time:
                self.advance(time)
            number += 1
            answers: dict[int, Any] = {}
            added: list[tuple[int, list[Node]]] = []
            complete: list[Node] = []
            for state, branch in trees:
                if state and not runs[state]:
                    continue
                while (leaf := branch.leaf) >= 0:
                    if leaf in answers:
                        answer = answers[leaf]
                    else:
                        answer = answers[leaf] = leaves[leaf](row)
                    step = branch.yes if answer else branch.no
                    branch = step or machine.branch(state, branch, answer=bool(answer))
                plan: Any = branch.plan
                if plan.idle:
                    continue
                if silent and self._due <= time:
                    self._forget(time)
                if plan.asks:
                    self._each(state, plan, (number, time, row), added, complete)
                elif state:
                    self._all(state, plan, (number, time, keep(row)), added, complete)
                else:
                    for _, stage, target, _, final in plan.edges:
                        node = (number, time, number, time, stage, keep(row), None)
                        if target >= 0:
                            added.append((target, [node]))
                        if final or target < 0:
                            complete.append(node)
            for state, nodes in added:
                self._add(state, nodes)
            if complete:
                self._settle(complete, time)
        self._next_id = number + 1

    def _all(
        self, state: int, plan: _Plan, event: tuple[int, int, Any], added: Any, complete: list[Node]
    ) -> None:
        """Do the same to every partial match in a state."""
        number, time, kept = event
        nodes = self._nodes(state)
        if not plan.stays or plan.stops:
            self._clear(state)
        for action, stage, target, _, final in plan.edges:
            if action == _TAKE:
                made = [(n[0], n[1], number, time, stage, kept, n) for n in nodes]
            elif action == _IGNORE and target != state:
                made = nodes
            else:
                continue
            if target >= 0 and not plan.stops:
                added.append((target, made))
            if final or target < 0:
                complete.extend(made)

    def _each(
        self,
        state: int,
        plan: _Plan,
        event: tuple[int, int, Any],
        added: Any,
        complete: list[Node],
    ) -> None:
        """Ask for every partial match in a state what a row does to it."""
        number, time, row = event
        names, kept = self._machine.names, self._machine.keep(row)
        nodes: list[Any] = self._nodes(state) if state else [None]
        staying: list[Node] = []
        moved: dict[int, list[Node]] = {}
        for node in nodes:
            earlier = Earlier(node, names)
            going: list[tuple[int, Node]] = []
            stopped = False
            for action, stage, target, guard, final in plan.edges:
                if guard is not True and not guard(row, earlier):
                    continue
                if action == _STOP:
                    stopped = True
                    continue
                if action == _TAKE:
                    start, began = (node[0], node[1]) if node else (number, time)
                    made = (start, began, number, time, stage, kept, node)
                else:
                    made = node
                if target < 0 or final is True or (final and final(row, earlier)):
                    complete.append(made)
                if target >= 0:
                    going.append((target if made is not node or target != state else -1, made))
            if stopped:
                continue
            for target, made in going:
                if target < 0:
                    staying.append(made)
                else:
                    moved.setdefault(target, []).append(made)
        if state and len(staying) != len(nodes):
            self._clear(state)
            if staying:
                added.append((state, staying))
        added.extend(moved.items())

    def _nodes(self, state: int) -> list[Node]:
        runs = self._runs[state]
        nodes = list(chain.from_iterable(runs))
        if len(runs) > 1:
            nodes.sort(key=_by_start)
        return nodes

    def _clear(self, state: int) -> None:
        for run in self._runs[state]:
            run.clear()  # its front is found to be gone when it is next looked at
        self._runs[state] = []

    def _add(self, state: int, nodes: list[Node]) -> None:
        if not nodes:
            return
        runs, first = self._runs[state], nodes[0]
        if runs and runs[-1] and runs[-1][-1][START] <= first[START]:
            runs[-1].extend(nodes)
        else:
            run = deque(nodes)
            runs.append(run)
            if self._ordered:
                self._front()  # forgets runs that are gone, which are the oldest
                heappush(self._fronts, (first[START], next(self._tie), state, run))
        machine = self._machine
        if machine.length and first[BEGAN] + machine.length < self._due:
            self._due = first[BEGAN] + machine.length
        if gap := machine.gaps[state]:
            for end in {(node[TIME] + gap, state) for node in nodes} - self._gap_ends:
                self._gap_ends.add(end)
                heappush(self._gaps, end)
                self._due = min(self._due, end[0])

    def _front(self) -> tuple[int, int, int, deque[Node]] | None:
        """Return the run whose first node started first."""
        fronts = self._fronts
        while fronts:
            start, _, state, run = front = fronts[0]
            if run and run[0][START] == start:
                return front
            heappop(fronts)
            if run:
                heappush(fronts, (run[0][START], next(self._tie), state, run))
            else:
                self._runs[state] = [each for each in self._runs[state] if each]
        return None

    def _forget(self, time: int) -> None:
        """Drop those whose time is over, in silence."""
        latest = time - self._machine.length
        while (front := self._front()) and front[3][0][BEGAN] <= latest:
            run = front[3]
            while run and run[0][BEGAN] <= latest:
                run.popleft()
        self._due = self.next_due()

    def _expire(self, at: int) -> None:
        """End those whose time is over at an instant, as if the clock had stopped there.

        However far the clock has jumped, the result is the same as if it had gone step by step.
        """
        machine, over = self._machine, []
        while self._gaps and self._gaps[0][0] <= at:
            end = heappop(self._gaps)
            self._gap_ends.remove(end)
            state = end[1]
            latest = at - machine.gaps[state]
            nodes = self._nodes(state)
            staying = [node for node in nodes if node[TIME] > latest]
            if len(staying) != len(nodes):
                over.extend((node, state) for node in nodes if node[TIME] <= latest)
                self._clear(state)
                self._add(state, staying)
        latest = at - machine.length
        while machine.length and (front := self._front()) and front[3][0][BEGAN] <= latest:
            _, _, state, run = front
            while run and run[0][BEGAN] <= latest:
                over.append((run.popleft(), state))
        complete: list[Node] = []
        for node, state in sorted(over, key=lambda each: (_path(each[0]), each[1])):
            if machine.pending[state]:
                complete.append(node)
            elif machine.timed_out:
                self.timed_out.append(Found(node, at))
        self._settle(complete, at)

    def _settle(self, complete: list[Node], time: int) -> None:
        """Give the matches that are complete, in the order they started, and skip what they skip."""
        complete.sort(key=_by_start)
        if not self._skips:
            self.matches.extend(Found(node, time) for node in complete)
            return
        waiting = self._complete
        waiting.extend(complete)
        waiting.sort(key=_by_start)
        while waiting:
            front = self._front()
            if front and front[0] < waiting[0][START]:
                return  # one that started before may still be completed, and go first
            node = waiting.pop(0)
            self.matches.append(Found(node, time))
            limit = self._skipped(node)
            waiting[:] = [each for each in waiting if each[START] >= limit]
            while (front := self._front()) and front[0] < limit:
                run = front[3]
                while run and run[0][START] < limit:
                    run.popleft()

    def _skipped(self, node: Node) -> int:
        """Return the first row that others may have started with after this match."""
        skip = self._machine.skip
        if skip.kind == "skip_to_next":
            return node[START] + 1
        if skip.kind == "skip_past_last_event":
            return node[ID] + 1
        names, found = self._machine.names, 0
        each: Node | None = node
        while each is not None:
            if names[each[STAGE]] == skip.stage:
                found = each[ID]
                if skip.kind == "skip_to_last":
                    break
            each = each[PARENT]
        return found

    def dump(self) -> dict[str, Any] | None:
        """Return all that must last as plain data, each row and node once; None: nothing."""
        if not self._complete and not any(map(any, self._runs)):
            return None
        order: list[Node] = []
        places: dict[int, int] = {}
        waiting = [
            [state, *_placed(self._nodes(state), order, places)]
            for state, runs in enumerate(self._runs)
            if any(runs)
        ]
        complete = _placed(self._complete, order, places)
        events = {node[ID]: node for node in order}
        event_of = {number: at for at, number in enumerate(events)}
        # By column: far fewer values to write than a list for each row and node.
        return {
            "next": self._next_id,
            "ids": list(events),
            "times": [node[TIME] for node in events.values()],
            "rows": list(map(list, zip(*(node[ROW] for node in events.values()), strict=True))),
            "events": [event_of[node[ID]] for node in order],
            "stages": [node[STAGE] for node in order],
            "parents": [-1 if node[PARENT] is None else places[id(node[PARENT])] for node in order],
            "waiting": waiting,
            "complete": complete,
        }

    def _load(self, state: dict[str, Any]) -> None:
        rows = by_row(state["rows"], self._machine.kept, len(state["ids"]))
        events = list(zip(state["ids"], state["times"], rows, strict=True))
        nodes: list[Node] = []
        for event, stage, parent in zip(
            state["events"], state["stages"], state["parents"], strict=True
        ):
            number, time, row = events[event]
            if parent < 0:
                nodes.append((number, time, number, time, stage, row, None))
            else:
                before = nodes[parent]
                nodes.append((before[0], before[1], number, time, stage, row, before))
        self._next_id = state["next"]
        self._complete = [nodes[at] for at in state["complete"]]
        for at, *waiting in state["waiting"]:
            if at >= len(self._runs):
                raise UsageError(
                    "the pattern has changed since its state was written: start afresh"
                )
            self._add(at, [nodes[each] for each in waiting])


def _placed(nodes: list[Node], order: list[Node], places: dict[int, int]) -> list[int]:
    """Return the places of nodes in `order`, where each comes once and after the one before it."""
    if not any(map(_parent, nodes)) and places.keys().isdisjoint(map(id, nodes)):
        # Most wait with their first row alone.
        found = list(range(len(order), len(order) + len(nodes)))
        places.update(zip(map(id, nodes), found, strict=True))
        order.extend(nodes)
        return found
    found = []
    for node in nodes:
        if id(node) not in places:
            path: list[Node] = []
            each: Node | None = node[PARENT]
            while each is not None and id(each) not in places:
                path.append(each)
                each = each[PARENT]
            while path:
                places[id(path[-1])] = len(order)
                order.append(path.pop())
            places[id(node)] = len(order)
            order.append(node)
        found.append(places[id(node)])
    return found
