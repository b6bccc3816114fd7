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
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import chain, count
from operator import itemgetter
from typing import Any, Final, NamedTuple

from poundlock.errors import UsageError
from poundlock.stream.graph import IGNORE, STOP, TAKE
from poundlock.stream.machine import Machine, Plan
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
        time = min(
            time, END - 1
        )  # the very last watermark is END, and so is a time that never comes
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
        self, state: int, plan: Plan, event: tuple[int, int, Any], added: Any, complete: list[Node]
    ) -> None:
        """Do the same to every partial match in a state."""
        number, time, kept = event
        nodes = self._nodes(state)
        if not plan.stays or plan.stops:
            self._clear(state)
        for action, stage, target, _, final in plan.edges:
            if action == TAKE:
                made = [(n[0], n[1], number, time, stage, kept, n) for n in nodes]
            elif action == IGNORE and target != state:
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
        plan: Plan,
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
                if action == STOP:
                    stopped = True
                    continue
                if action == TAKE:
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
