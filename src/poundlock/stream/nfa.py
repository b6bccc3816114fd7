"""The matcher: runs the rows of one key through the NFA of a pattern.

The states, their edges and the order of events follow Flink's NFA. The storage differs:

- A partial match is the last node of a chain. Each node is a row that the match took, and points to
  the node before it. Partial matches with a common beginning share nodes.
- Each state keeps its partial matches in order of their start, so expired ones are at the front. A
  row is tested once per state, not once per partial match. Only conditions that read earlier rows
  are evaluated for each partial match.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import chain, count
from operator import itemgetter
from typing import Any, Final, NamedTuple

from poundlock.errors import UsageError
from poundlock.stream.graph import IGNORE, STOP, TAKE
from poundlock.stream.machine import NOWHERE, STAY, Machine, Plan
from poundlock.stream.times import END

# The fields of a node. The first two belong to the first row of the match.
START: Final = 0  # the row's number
BEGAN: Final = 1  # the row's time
ID: Final = 2
TIME: Final = 3
STAGE: Final = 4
ROW: Final = 5
PARENT: Final = 6
Node = tuple[int, int, int, int, int, Any, Any]

Run = deque[Node]  # nodes of one state, in order of their start

_by_start = itemgetter(START)
_parent = itemgetter(PARENT)


class Earlier:
    """The rows of a partial match so far: `earlier["stage"]` is a list, oldest first."""

    __slots__ = ("_names", "_node", "_rows")

    def __init__(self, node: Node | None, names: Sequence[str]) -> None:
        self._node = node
        self._names = names
        self._rows: dict[str, list[Any]] | None = None

    def __getitem__(self, name: str) -> list[Any]:
        if self._rows is None:
            self._rows = group_rows(self._node, self._names)
        if name not in self._rows and name not in self._names:
            raise UsageError(
                f"earlier[{name!r}] names no stage: the pattern has {', '.join(self._names)}"
            )
        return self._rows.get(name, [])


def group_rows(node: Node | None, names: Sequence[str]) -> dict[str, list[Any]]:
    """Return the rows of a match by stage, oldest first."""
    rows: dict[str, list[Any]] = {}
    for each in reversed(_chain(node)):
        rows.setdefault(names[each[STAGE]], []).append(each[ROW])
    return rows


def _chain(node: Node | None) -> list[Node]:
    """Return a node and all nodes before it, the newest first."""
    nodes: list[Node] = []
    while node is not None:
        nodes.append(node)
        node = node[PARENT]
    return nodes


def _identity(node: Node) -> list[int]:
    """Return the rows and stages of a partial match, first row first: unique in its state."""
    return [value for each in reversed(_chain(node)) for value in (each[ID], each[STAGE])]


def rows_from_columns(
    columns: Sequence[Sequence[Any]], row: Callable[..., Any], size: int
) -> Iterable[Any]:
    """Return rows that are stored by column."""
    return map(row, zip(*columns, strict=True)) if columns else [row(())] * size


class Finding(NamedTuple):
    """A match, or a partial match that timed out, by its last node."""

    node: Node
    time: int


class Matcher:
    """The partial matches of one key, while its rows are processed.

    `advance` and `feed` append to `matches` and `timed_out`.
    """

    def __init__(self, machine: Machine, state: dict[str, Any] | None = None) -> None:
        self._machine = machine
        self.matches: list[Finding] = []
        self.timed_out: list[Finding] = []
        self._next_id = 0
        self._runs: list[list[Run]] = [[] for _ in machine.edges]  # by state
        self._skips = machine.skip.kind != "no_skip"
        # Whether the order of starts over all states matters. If so, `_heap` has every run.
        self._ordered = bool(machine.length) or self._skips
        self._heap: list[tuple[int, int, int, Run]] = []  # (start, tie, state, run)
        self._tie = count()
        # Whether expired partial matches can be dropped without any output or effect.
        self._drops = not (
            machine.timed_out or any(machine.pending) or any(machine.gaps) or self._skips
        )
        self._gaps: list[tuple[int, int]] = []  # a heap of (when a gap may end, state)
        self._gap_ends: set[tuple[int, int]] = set()  # the entries of `_gaps`
        self._due = END  # nothing expires before this time
        self._complete: list[Node] = []  # matches that wait for partial ones with an earlier start
        if state:
            self._load(state)

    def next_due(self) -> int:
        """Return when the next partial match expires, or END if none can."""
        due = self._gaps[0][0] if self._gaps else END
        if self._machine.length and (first := self._first_run()):
            due = min(due, first[3][0][BEGAN] + self._machine.length)
        return due

    def advance(self, time: int) -> None:
        """Expire the partial matches that are over at this time."""
        time = min(time, END - 1)  # the final watermark is END, which also stands for "never"
        if self._drops and self._due <= time:
            self._drop_expired(time)
        while self._due <= time:
            self._due = at = self.next_due()
            if at <= time:
                self._expire(at)

    def feed(self, times: Iterable[int], rows: Iterable[Any]) -> None:
        """Process rows, in order of time."""
        machine, runs = self._machine, self._runs
        leaves, trees = machine.leaves, list(enumerate(machine.trees))
        # Dropping can be delayed until it pays, but not past the next row that has an effect.
        slack = machine.length // 16 if self._drops else 0
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
                if not plan.idle:
                    self._apply(state, plan, (number, time, row), added, complete)
            for state, nodes in added:
                self._add(state, nodes)
            if complete:
                self._settle(complete, time)
        self._next_id = number + 1

    def _apply(
        self, state: int, plan: Plan, event: tuple[int, int, Any], added: Any, complete: list[Node]
    ) -> None:
        """Do what a plan says to the partial matches in a state. State 0 starts new ones."""
        number, time, row = event
        if self._drops and self._due <= time:
            self._drop_expired(time)
        kept = self._machine.keep(row)
        if plan.asks:
            self._move_each(state, plan, event, kept, added, complete)
        elif state:
            self._move_all(state, plan, (number, time, kept), added, complete)
        else:
            for _, stage, target, _, final in plan.edges:
                node = (number, time, number, time, stage, kept, None)
                if target >= 0:
                    added.append((target, [node]))
                if final:
                    complete.append(node)

    def _move_all(
        self, state: int, plan: Plan, event: tuple[int, int, Any], added: Any, complete: list[Node]
    ) -> None:
        """Move all partial matches in a state alike."""
        number, time, kept = event
        nodes = self._nodes(state)
        if not plan.stays or plan.stops:
            self._clear(state)
        for action, stage, target, _, final in plan.edges:
            if action == TAKE:
                made = [(n[0], n[1], number, time, stage, kept, n) for n in nodes]
            elif action == IGNORE and target != STAY:
                made = nodes
            else:
                continue
            if target >= 0 and not plan.stops:
                added.append((target, made))
            if final:
                complete.extend(made)

    def _move_each(
        self,
        state: int,
        plan: Plan,
        event: tuple[int, int, Any],
        kept: Any,
        added: Any,
        complete: list[Node],
    ) -> None:
        """Test the conditions for each partial match in a state, and move it."""
        number, time, row = event
        names = self._machine.names
        nodes: list[Any] = self._nodes(state) if state else [None]
        moved: dict[int, list[Node]] = {}  # by target
        for node in nodes:
            earlier = Earlier(node, names)
            going: list[tuple[int, Node]] = []
            stopped = False
            for action, stage, target, guard, final in plan.edges:
                if guard is not True and not guard(row, earlier):
                    continue
                if action == STOP:
                    stopped = True
                    continue
                made = node
                if action == TAKE:
                    start, began = (node[0], node[1]) if node else (number, time)
                    made = (start, began, number, time, stage, kept, node)
                if final is True or (final and final(row, earlier)):
                    complete.append(made)
                if target != NOWHERE:
                    going.append((target, made))
            if not stopped:
                for target, made in going:
                    moved.setdefault(target, []).append(made)
        staying = moved.pop(STAY, [])
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
            run.clear()  # `_first_run` removes its entry in the heap
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
                self._first_run()  # removes the entries of runs that are empty now
                heappush(self._heap, (first[START], next(self._tie), state, run))
        machine = self._machine
        if machine.length and first[BEGAN] + machine.length < self._due:
            self._due = first[BEGAN] + machine.length
        if gap := machine.gaps[state]:
            for end in {(node[TIME] + gap, state) for node in nodes} - self._gap_ends:
                self._gap_ends.add(end)
                heappush(self._gaps, end)
                self._due = min(self._due, end[0])

    def _first_run(self) -> tuple[int, int, int, Run] | None:
        """Return the heap's entry of the run with the earliest start."""
        heap = self._heap
        while heap:
            start, _, state, run = first = heap[0]
            if run and run[0][START] == start:
                return first
            heappop(heap)
            if run:
                heappush(heap, (run[0][START], next(self._tie), state, run))
            else:
                self._runs[state] = [each for each in self._runs[state] if each]
        return None

    def _drop_expired(self, time: int) -> None:
        """Drop the partial matches that are over, without any output."""
        latest = time - self._machine.length
        while (first := self._first_run()) and first[3][0][BEGAN] <= latest:
            run = first[3]
            while run and run[0][BEGAN] <= latest:
                run.popleft()
        self._due = self.next_due()

    def _expire(self, at: int) -> None:
        """End the partial matches that are over at this instant.

        The caller goes from one instant to the next, so a jump of the clock changes no result.
        """
        machine, over = self._machine, self._end_gaps(at)
        latest = at - machine.length
        while machine.length and (first := self._first_run()) and first[3][0][BEGAN] <= latest:
            _, _, state, run = first
            while run and run[0][BEGAN] <= latest:
                over.append((run.popleft(), state))
        complete: list[Node] = []
        for node, state in sorted(over, key=lambda each: (_identity(each[0]), each[1])):
            if machine.pending[state]:
                complete.append(node)
            elif machine.timed_out:
                self.timed_out.append(Finding(node, at))
        self._settle(complete, at)

    def _end_gaps(self, at: int) -> list[tuple[Node, int]]:
        """Remove and return the partial matches whose last row is too long ago, with their state."""
        over: list[tuple[Node, int]] = []
        while self._gaps and self._gaps[0][0] <= at:
            end = heappop(self._gaps)
            self._gap_ends.remove(end)
            state = end[1]
            latest = at - self._machine.gaps[state]
            nodes = self._nodes(state)
            staying = [node for node in nodes if node[TIME] > latest]
            if len(staying) != len(nodes):
                over.extend((node, state) for node in nodes if node[TIME] <= latest)
                self._clear(state)
                self._add(state, staying)
        return over

    def _settle(self, complete: list[Node], time: int) -> None:
        """Report complete matches in order of their start, and discard what they skip."""
        complete.sort(key=_by_start)
        if not self._skips:
            self.matches.extend(Finding(node, time) for node in complete)
            return
        waiting = self._complete
        waiting.extend(complete)
        waiting.sort(key=_by_start)
        while waiting:
            first = self._first_run()
            if first and first[0] < waiting[0][START]:
                return  # a partial match with an earlier start may still complete, and goes first
            node = waiting.pop(0)
            self.matches.append(Finding(node, time))
            limit = self._skip_limit(node)
            waiting[:] = [each for each in waiting if each[START] >= limit]
            while (first := self._first_run()) and first[0] < limit:
                run = first[3]
                while run and run[0][START] < limit:
                    run.popleft()

    def _skip_limit(self, node: Node) -> int:
        """Return the first row with which other matches may start after this one."""
        skip = self._machine.skip
        if skip.kind == "skip_to_next":
            return node[START] + 1
        if skip.kind == "skip_past_last_event":
            return node[ID] + 1
        names = self._machine.names
        ids = [each[ID] for each in _chain(node) if names[each[STAGE]] == skip.stage] or [0]
        return ids[0] if skip.kind == "skip_to_last" else ids[-1]

    def dump(self) -> dict[str, Any] | None:
        """Return the state as plain data, each row and node once. None: there is nothing to keep."""
        if not self._complete and not any(map(any, self._runs)):
            return None
        order: list[Node] = []
        places: dict[int, int] = {}
        waiting = [
            [state, *_place_nodes(self._nodes(state), order, places)]
            for state, runs in enumerate(self._runs)
            if any(runs)
        ]
        complete = _place_nodes(self._complete, order, places)
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
        rows = rows_from_columns(state["rows"], self._machine.kept, len(state["ids"]))
        events = list(zip(state["ids"], state["times"], rows, strict=True))
        nodes: list[Node] = []
        for event, stage, parent in zip(
            state["events"], state["stages"], state["parents"], strict=True
        ):
            number, time, row = events[event]
            before = None if parent < 0 else nodes[parent]
            if before is None:
                nodes.append((number, time, number, time, stage, row, None))
            else:
                nodes.append((before[START], before[BEGAN], number, time, stage, row, before))
        self._next_id = state["next"]
        self._complete = [nodes[at] for at in state["complete"]]
        for at, *waiting in state["waiting"]:
            if at >= len(self._runs):
                raise UsageError(
                    "the pattern has changed since its state was written: start with a new checkpoint"
                )
            self._add(at, [nodes[each] for each in waiting])


def _place_nodes(nodes: list[Node], order: list[Node], places: dict[int, int]) -> list[int]:
    """Append nodes to `order`, each once and after its parent. Return their places in it."""
    if not any(map(_parent, nodes)) and places.keys().isdisjoint(map(id, nodes)):
        # The usual case: partial matches of one row each.
        new = list(range(len(order), len(order) + len(nodes)))
        places.update(zip(map(id, nodes), new, strict=True))
        order.extend(nodes)
        return new
    for node in nodes:
        path: list[Node] = []
        each: Node | None = node
        while each is not None and id(each) not in places:
            path.append(each)
            each = each[PARENT]
        for each in reversed(path):
            places[id(each)] = len(order)
            order.append(each)
    return [places[id(node)] for node in nodes]
