"""Compiles a pattern to a graph of states and arrows, as Flink's NFA compiler does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from poundlock.stream.pattern import All, Contiguity, Not, Pattern, Repeat, Stage, Test

TRUE = All()

# The actions of an arrow. An arrow that proceeds uses no row.
TAKE, IGNORE, PROCEED = "take", "ignore", "proceed"
# The kinds of state. A match in a pending state is complete once its time is over.
_NORMAL, FINAL, PENDING, STOP = "normal", "final", "pending", "stop"


@dataclass(eq=False)
class State:
    """A state of the graph."""

    stage: str
    kind: str = _NORMAL
    gap: int | None = None
    arrows: list[Arrow] = field(default_factory=list)

    def arrow(self, action: str, target: State, guard: Test) -> None:
        self.arrows.append(Arrow(action, target, guard))

    def copy(self, arrows: Sequence[Arrow]) -> State:
        made = State(self.stage, self.kind, self.gap)
        for arrow in arrows:
            made.arrow(arrow.action, made if arrow.target is self else arrow.target, arrow.guard)
        return made


@dataclass(eq=False)
class Arrow:
    """An arrow from one state to another, which a row follows if the guard holds."""

    action: str
    target: State
    guard: Test


@dataclass(eq=False)
class _Place:
    """A stage with its neighbours and its group."""

    stage: Stage
    before: Sequence[Stage]
    following: Stage | None
    group: _Place | None
    first: bool = True  # of a group: whether its first repetition is being built

    @property
    def condition(self) -> Test:
        return self.stage.condition or TRUE

    @property
    def heads(self) -> _Place | None:
        """The group whose first stage this is."""
        return self.group if not self.before else None

    def take(self) -> Test:
        return self._unless_stopped(self.condition)

    def always(self) -> Test:
        return self._unless_stopped(TRUE)

    def ignore(self) -> Test | None:
        """Return the condition to ignore a row before the stage; None: never."""
        group, contiguity = self.heads, self.stage.contiguity
        if group:
            contiguity = group.stage.contiguity if group.first else group.stage.inner
        return self._ignore(contiguity)

    def inner_ignore(self) -> Test | None:
        """Return the condition to ignore a row between two rows of the stage; None: never."""
        group = self.heads
        return self._ignore(group.stage.inner if group else self.stage.inner)

    def nots(self) -> Iterator[Stage]:
        """Yield the negative stages that apply until this one."""
        for stage in reversed(self.before):
            if stage.contiguity is Contiguity.NOT_FOLLOWED:
                yield stage
            elif not stage.optional:
                return

    def _ignore(self, contiguity: Contiguity) -> Test | None:
        if contiguity is Contiguity.STRICT:
            return None
        return self._unless_stopped(TRUE if contiguity is Contiguity.ANY else Not(self.condition))

    def _unless_stopped(self, test: Test) -> Test:
        stop = self.group and self.group.stage.stop
        return _unless(stop, test)


def _unless(stop: Test | None, test: Test) -> Test:
    return All((Not(stop), test)) if stop else test


class Graph:
    """Builds the states of a pattern from its end, since each points to those after it."""

    def __init__(self, pattern: Pattern) -> None:
        self._timed = pattern.length is not None
        self._stops: dict[str, State] = {}
        self._before_greedy: dict[State, State] = {}
        self.start = self._chain(pattern.stages, State("", FINAL), None, None)

    def _chain(
        self, stages: Sequence[Stage], sink: State, following: Stage | None, group: _Place | None
    ) -> State:
        for at in range(len(stages) - 1, -1, -1):
            stage = stages[at]
            place = _Place(stage, stages[:at], following, group)
            if stage.contiguity is Contiguity.NOT_FOLLOWED:
                # Elsewhere it is a condition of the edges after it.
                if (self._timed or stage.gap) and sink.kind == FINAL:
                    sink = self._not_followed(place)
            elif stage.contiguity is Contiguity.NOT_NEXT:
                sink = self._not_next(place, sink)
            else:
                sink = self._positive(place, sink)
            following = stage
        return sink

    def _not_followed(self, place: _Place) -> State:
        """Return the state of a match that completes if no such row comes before its time is over."""
        state = State(place.stage.name, PENDING, place.stage.gap)
        self._add_stop(state, place.stage, place.group)
        state.arrow(IGNORE, state, Not(place.take()))
        return state

    def _not_next(self, place: _Place, sink: State) -> State:
        state = State(place.stage.name, gap=place.stage.gap)
        # At the end of a pattern, a row that does not fit is ignored and completes the match.
        action = IGNORE if sink.kind == FINAL else PROCEED
        state.arrow(action, sink, Not(place.take()))
        self._add_stop(state, place.stage, place.group)
        return state

    def _positive(self, place: _Place, sink: State) -> State:
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

    def _add_stop(self, state: State, stage: Stage, group: _Place | None) -> None:
        """Let a row of a negative stage end the partial matches in a state."""
        take = _Place(stage, (), None, group).take()
        if stage.name not in self._stops:
            self._stops[stage.name] = stop = State(stage.name, STOP)
            stop.arrow(TAKE, stop, take)
        state.arrow(PROCEED, self._stops[stage.name], take)

    def _add_stops(self, place: _Place, state: State) -> None:
        for stage in place.nots():
            self._add_stop(state, stage, place.group)

    def _add_following_stop(self, place: _Place, state: State) -> None:
        stage = place.following
        if stage and stage.contiguity is Contiguity.NOT_FOLLOWED:
            self._add_stop(state, stage, place.group)

    def _without_nots(self, place: _Place, sink: State) -> State:
        """Return a state without the stops of negative stages before an optional one.

        Those stages apply only until the optional stage has a row.
        """
        nots = {stage.name for stage in place.nots()}
        if not nots or not place.stage.optional:
            return sink
        arrows: list[Arrow] = []
        for arrow in sink.arrows:
            target = arrow.target
            if arrow.action == PROCEED:
                if target.kind == STOP and target.stage in nots:
                    continue
                if target.kind != STOP:
                    target = self._without_nots(place, target)
            arrows.append(Arrow(arrow.action, target, arrow.guard))
        return sink.copy(arrows)

    def _times(self, place: _Place, sink: State, proceed: State) -> State:
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
        sink: State,
        proceed: State | None,
        take: Test,
        ignore: Test | None,
        *,
        optional: bool,
    ) -> State:
        if place.stage.group:
            head = self._chain(place.stage.group, sink, place.following, place)
            if optional and proceed:
                head.arrow(PROCEED, proceed, place.always())
            return head
        state = State(place.stage.name, gap=place.stage.gap)
        sink = self._without_nots(place, sink)
        state.arrow(TAKE, sink, take)
        if optional and proceed:
            self._proceed(place, state, proceed)
        if ignore:
            group, passed = place.heads, state
            if optional or (group and group.first and group.stage.optional):
                # A state without the arrow that proceeds, so that no match is found twice.
                passed = State(place.stage.name, gap=place.stage.gap)
                passed.arrow(TAKE, sink, take)
                passed.arrow(IGNORE, passed, ignore)
                self._add_stops(place, passed)
            state.arrow(IGNORE, passed, ignore)
        return state

    def _loop(self, place: _Place, sink: State) -> State:
        if place.stage.group:
            round_over = State("")
            head = self._chain(place.stage.group, round_over, place.following, place)
            head.arrow(PROCEED, sink, place.always())
            round_over.arrow(PROCEED, head, place.always())
            return head
        stop = place.stage.stop
        ignore = place.inner_ignore()
        ignore = _unless(stop, ignore) if ignore else None
        take = _unless(stop, place.take())
        state = State(place.stage.name)
        if place.stage.greedy:
            if stop:
                self._before_greedy[sink] = sink.copy(sink.arrows)
            self._proceed(place, state, sink)
            _not_while(sink, place.take())
        else:
            state.arrow(PROCEED, sink, place.always())
        state.arrow(TAKE, state, take)
        self._add_following_stop(place, state)
        if ignore:
            passed = State(place.stage.name)
            passed.arrow(TAKE, state, take)
            passed.arrow(IGNORE, passed, ignore)
            state.arrow(IGNORE, passed, ignore)
            self._add_following_stop(place, passed)
        return state

    def _proceed(self, place: _Place, state: State, target: State) -> None:
        """Let a stage proceed. A greedy stage proceeds freely once its `until` condition holds."""
        stop = place.stage.stop
        if place.stage.greedy and stop:
            free = self._before_greedy.get(target, target)
            state.arrow(PROCEED, free, All((place.always(), stop)))
            state.arrow(PROCEED, target, All((place.always(), Not(stop))))
        else:
            state.arrow(PROCEED, target, place.always())


def _not_while(state: State, take: Test) -> None:
    """Reserve the rows that a greedy stage would take: a state after it may not use them."""
    for arrow in state.arrows:
        arrow.guard = All((arrow.guard, Not(take)))
