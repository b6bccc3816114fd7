"""The graph of a pattern: states and arrows, as Flink's compiler makes them of its patterns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from poundlock.stream.pattern import All, Contiguity, Not, Pattern, Repeat, Stage, Test

TRUE = All()

# What an arrow does with the row.
TAKE, IGNORE, PROCEED = "take", "ignore", "proceed"
# What a state is.
_NORMAL, FINAL, PENDING, STOP = "normal", "final", "pending", "stop"


class State:
    """A state while the graph is built."""

    def __init__(self, stage: str, kind: str = _NORMAL, gap: int | None = None) -> None:
        self.stage = stage
        self.kind = kind
        self.gap = gap
        self.arrows: list[Arrow] = []

    def arrow(self, action: str, target: State, guard: Test) -> None:
        self.arrows.append(Arrow(action, target, guard))

    def copy(self, arrows: Sequence[Arrow]) -> State:
        made = State(self.stage, self.kind, self.gap)
        for arrow in arrows:
            made.arrow(arrow.action, made if arrow.target is self else arrow.target, arrow.guard)
        return made


class Arrow:
    def __init__(self, action: str, target: State, guard: Test) -> None:
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
        return self.stage.condition or TRUE

    @property
    def heads(self) -> _Place | None:
        """The group that this is the first stage of."""
        return self.group if not self.before else None

    def take(self) -> Test:
        return self._unless_stopped(self.condition)

    def always(self) -> Test:
        return self._unless_stopped(TRUE)

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
        return self._unless_stopped(TRUE if contiguity is Contiguity.ANY else Not(self.condition))

    def _unless_stopped(self, test: Test) -> Test:
        stop = self.group and self.group.stage.stop
        return _unless(stop, test)


def _unless(stop: Test | None, test: Test) -> Test:
    return All((Not(stop), test)) if stop else test


class Graph:
    """Builds the states of a pattern from its end: each points to those after it."""

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
                    sink = self._waiting(place)
            elif stage.contiguity is Contiguity.NOT_NEXT:
                sink = self._refusing(place, sink)
            else:
                sink = self._positive(place, sink)
            following = stage
        return sink

    def _waiting(self, place: _Place) -> State:
        """A match that is complete if nothing comes until its time is over."""
        state = State(place.stage.name, PENDING, place.stage.gap)
        state.arrow(PROCEED, self._stop(place.stage, place.take()), place.take())
        state.arrow(IGNORE, state, Not(place.take()))
        return state

    def _refusing(self, place: _Place, sink: State) -> State:
        state = State(place.stage.name, gap=place.stage.gap)
        # At the end of a pattern the row itself decides: it is passed over, and the match is complete.
        action = IGNORE if sink.kind == FINAL else PROCEED
        state.arrow(action, sink, Not(place.take()))
        state.arrow(PROCEED, self._stop(place.stage, place.take()), place.take())
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

    def _stop(self, stage: Stage, take: Test) -> State:
        if stage.name not in self._stops:
            self._stops[stage.name] = state = State(stage.name, STOP)
            state.arrow(TAKE, state, take)
        return self._stops[stage.name]

    def _add_stops(self, place: _Place, state: State) -> None:
        for stage in place.nots():
            take = _Place(stage, (), None, place.group).take()
            state.arrow(PROCEED, self._stop(stage, take), take)

    def _add_following_stop(self, place: _Place, state: State) -> None:
        stage = place.following
        if stage and stage.contiguity is Contiguity.NOT_FOLLOWED:
            take = _Place(stage, (), None, place.group).take()
            state.arrow(PROCEED, self._stop(stage, take), take)

    def _without_nots(self, place: _Place, sink: State) -> State:
        """Return a state without the stops of negative stages before an optional one.

        Once the optional stage has a row, what must not come before it may come after it.
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
                # A state of its own, without the way on: so that each way is gone once.
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
        """Add the way on from a stage. A greedy one that was stopped need not wait for more."""
        stop = place.stage.stop
        if place.stage.greedy and stop:
            free = self._before_greedy.get(target, target)
            state.arrow(PROCEED, free, All((place.always(), stop)))
            state.arrow(PROCEED, target, All((place.always(), Not(stop))))
        else:
            state.arrow(PROCEED, target, place.always())


def _not_while(state: State, take: Test) -> None:
    """Let no edge of a state be gone by a row that a greedy stage before it would take."""
    for arrow in state.arrows:
        arrow.guard = All((arrow.guard, Not(take)))
