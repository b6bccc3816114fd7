"""Patterns of rows, stage by stage, as in Flink's CEP.

    begin("hot").where(lambda row: row.celsius > 90)
        .followed_by("hotter").where(lambda row, earlier: row.celsius > earlier["hot"][0].celsius)
        .within("10 seconds")

A pattern is immutable. Every call returns a new pattern.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from poundlock.errors import UsageError
from poundlock.stream.times import Duration, milliseconds


@dataclass(frozen=True)
class Function:
    """A condition in Python. `earlier`: it also reads the rows matched so far."""

    call: Callable[..., Any]
    earlier: bool

    def __hash__(self) -> int:  # some callable objects are not hashable
        return id(type(self.call)) if type(self.call).__hash__ is None else hash(self.call)


@dataclass(frozen=True)
class Expression:
    """A condition in SQL. Spark evaluates it before the rows get here: see `Pattern.bind`."""

    sql: str


@dataclass(frozen=True)
class Column:
    """A condition whose result is a column of the row."""

    name: str


@dataclass(frozen=True)
class All:
    """True if all parts are true. Without parts, always true."""

    parts: tuple[Test, ...] = ()


@dataclass(frozen=True)
class Either:
    """True if a part is true."""

    parts: tuple[Test, ...]


@dataclass(frozen=True)
class Not:
    """True if the part is not true."""

    part: Test


Test = Function | Expression | Column | All | Either | Not
Condition = Callable[..., Any] | str | Function | Expression | Column


class Contiguity(Enum):
    """Which rows may come between a stage and the one before it."""

    STRICT = "next"  # none
    RELAXED = "followed_by"  # rows that do not match
    ANY = "followed_by_any"  # any rows, even those that match
    NOT_NEXT = "not_next"
    NOT_FOLLOWED = "not_followed_by"

    @property
    def negative(self) -> bool:
        return self in (Contiguity.NOT_NEXT, Contiguity.NOT_FOLLOWED)


class Repeat(Enum):
    """How often a stage occurs."""

    ONCE = "once"
    TIMES = "times"  # from `low` to `high` times
    LOOP = "loop"  # `low` times or more


@dataclass(frozen=True)
class Stage:
    """One part of a pattern: a name and a condition, or a group of stages."""

    name: str  # empty for a group
    contiguity: Contiguity
    group: tuple[Stage, ...] = ()
    condition: Test | None = None
    repeat: Repeat = Repeat.ONCE
    low: int = 1
    high: int = 1
    inner: Contiguity = Contiguity.RELAXED  # between the rows of a stage that repeats
    optional: bool = False
    greedy: bool = False
    stop: Test | None = None  # `until`
    gap: int | None = None  # milliseconds since the row before: `within(..., since="previous")`

    @property
    def title(self) -> str:
        return f"stage {self.name!r}" if self.name else "the group"


@dataclass(frozen=True)
class Skip:
    """A skip strategy: which other matches a match discards."""

    kind: str
    stage: str | None = None


def no_skip() -> Skip:
    """Every possible match is found."""
    return Skip("no_skip")


def skip_to_next() -> Skip:
    """A match discards the others that start with the same row."""
    return Skip("skip_to_next")


def skip_past_last_event() -> Skip:
    """A match discards those that start before its end."""
    return Skip("skip_past_last_event")


def skip_to_first(stage: str) -> Skip:
    """A match discards those that start before its first row of `stage`."""
    return Skip("skip_to_first", stage)


def skip_to_last(stage: str) -> Skip:
    """A match discards those that start before its last row of `stage`."""
    return Skip("skip_to_last", stage)


def begin(first: str | Pattern, skip: Skip | None = None) -> Pattern:
    """Start a pattern with a stage of this name, or with a pattern as a group."""
    skip = no_skip() if skip is None else skip
    if not isinstance(skip, Skip):
        raise UsageError(
            f"skip={skip!r}: give a skip strategy, such as no_skip() or skip_to_next()"
        )
    return Pattern((), skip=skip)._then(first, Contiguity.STRICT)


@dataclass(frozen=True)
class Pattern:
    """A sequence of stages, with a time limit and a skip strategy. Start one with `begin`."""

    stages: tuple[Stage, ...]
    skip: Skip = no_skip()  # noqa: RUF009
    length: int | None = None  # milliseconds from the first row, exclusive: `within`

    def next(self, stage: str | Pattern) -> Pattern:
        """Add a stage whose row comes directly after the one before."""
        return self._then(stage, Contiguity.STRICT)

    def followed_by(self, stage: str | Pattern) -> Pattern:
        """Add a stage. Rows before it that do not match it are ignored."""
        return self._then(stage, Contiguity.RELAXED)

    def followed_by_any(self, stage: str | Pattern) -> Pattern:
        """Add a stage. Every later row that matches it gives another match."""
        return self._then(stage, Contiguity.ANY)

    def not_next(self, stage: str) -> Pattern:
        """Require that the row directly after does not match this stage."""
        return self._then(stage, Contiguity.NOT_NEXT)

    def not_followed_by(self, stage: str) -> Pattern:
        """Require that no row matches this stage until the next stage, or the end of `within`."""
        return self._then(stage, Contiguity.NOT_FOLLOWED)

    def where(self, condition: Condition) -> Pattern:
        """Add a condition that a row must meet in addition to the previous ones.

        It is SQL, a function of the row, or a function of the row and the rows matched so far.
        """
        test, last = _test(condition), self._condition()
        return self._with(condition=test if last is None else All((last, test)))

    def or_where(self, condition: Condition) -> Pattern:
        """Add a condition that a row may meet instead of the previous ones."""
        test, last = _test(condition), self._condition()
        return self._with(condition=test if last is None else Either((last, test)))

    def times(self, low: int, high: int | None = None) -> Pattern:
        """Let the stage occur `low` times, or from `low` to `high` times."""
        high = low if high is None else high
        if not _whole(low) or not _whole(high) or high < max(1, low) or low < 0:
            raise UsageError(
                f"times({low}, {high}): give whole numbers, at least 1, the lower one first"
            )
        optional = self._last.optional or low == 0
        return self._repeated(Repeat.TIMES, low=max(1, low), high=high, optional=optional)

    def one_or_more(self) -> Pattern:
        """Let the stage occur at least once."""
        return self.times_or_more(1)

    def times_or_more(self, low: int) -> Pattern:
        """Let the stage occur at least `low` times."""
        if not _whole(low) or low < 1:
            raise UsageError(f"times_or_more({low}): give a whole number of at least 1")
        return self._repeated(Repeat.LOOP, low=low, high=low)

    def optional(self) -> Pattern:
        """Let matches leave the stage out."""
        last = self._last
        if last.contiguity.negative:
            raise UsageError(
                f"optional: {last.title} is negative and cannot be optional: leave optional() out"
            )
        if last.optional:
            raise UsageError(f"optional: {last.title} is optional already: call optional() once")
        if len(self.stages) > 1 and self.stages[-2].greedy:
            raise UsageError(
                f"optional: {last.title} comes after a greedy stage and cannot be optional: leave "
                "out either greedy() or optional()"
            )
        return self._with(optional=True)

    def greedy(self) -> Pattern:
        """Let the stage take as many rows as possible before the next stage."""
        last = self._check_repeats("greedy")
        if last.group:
            raise UsageError("greedy: a group cannot be greedy: make a single stage greedy")
        if last.inner is Contiguity.ANY:
            raise UsageError(
                f"greedy: {last.title} allows combinations and cannot be greedy: choose one"
            )
        return self._with(greedy=True)

    def consecutive(self) -> Pattern:
        """Allow no other rows between the rows of a stage that repeats."""
        return self._set_inner("consecutive", Contiguity.STRICT)

    def allow_combinations(self) -> Pattern:
        """Allow any rows between the rows of a stage that repeats, even rows that match it."""
        last = self._last
        if last.greedy:
            raise UsageError(
                f"allow_combinations: {last.title} is greedy and cannot allow combinations: choose "
                "one"
            )
        return self._set_inner("allow_combinations", Contiguity.ANY)

    def until(self, condition: Condition) -> Pattern:
        """End a stage that repeats without limit at the first row that meets the condition."""
        last = self._last
        if last.repeat is not Repeat.LOOP:
            raise UsageError(
                f"until: {last.title} does not repeat without limit: call one_or_more() or "
                "times_or_more(n) first"
            )
        if last.stop is not None:
            raise UsageError(f"until: {last.title} has a condition already: call until() once")
        return self._with(stop=_test(condition))

    def within(self, duration: Duration, *, since: str = "first") -> Pattern:
        """Limit the time from a match's first row to its last: it must be shorter than this.

        With since="previous", limit the time from the previous row to that of the last stage.
        """
        length = milliseconds(duration, "within", least=1)
        if since == "first":
            return replace(self, length=min(length, self.length or length))
        if since != "previous":
            raise UsageError(f"since={since!r}: give 'first' or 'previous'")
        if len(self.stages) == 1:
            raise UsageError(
                "within since the previous row: the first stage has no previous row: use it on a later "
                "stage"
            )
        if self._last.repeat is not Repeat.ONCE or self._last.group:
            raise UsageError(
                f"within since the previous row: {self._last.title} repeats or is a group: use it on a "
                "single stage"
            )
        return self._with(gap=length)

    def expressions(self) -> list[str]:
        """Return the conditions in SQL, each once, in the order of their stages."""
        leaves = _leaves(self._tests())
        return list(dict.fromkeys(t.sql for t in leaves if isinstance(t, Expression)))

    def columns(self) -> list[str]:
        """Return the columns that conditions are bound to, each once."""
        return list(dict.fromkeys(t.name for t in _leaves(self._tests()) if isinstance(t, Column)))

    def bind(self, columns: Mapping[str, str]) -> Pattern:
        """Return the pattern with its conditions in SQL replaced by the columns of their results."""
        missing = [sql for sql in self.expressions() if sql not in columns]
        if missing:
            raise UsageError(
                f"no column is given for the condition {missing[0]!r}: add one to bind()"
            )
        return replace(self, stages=tuple(_bound(stage, columns) for stage in self.stages))

    def names(self) -> list[str]:
        """Return the names of the stages that can have rows, in order."""
        return [s.name for s in _flat(self.stages) if not s.contiguity.negative]

    def gaps(self) -> list[int]:
        """Return the time limits since a previous row, in milliseconds."""
        return [stage.gap for stage in _flat(self.stages) if stage.gap]

    def check(self) -> None:
        """Raise `UsageError` for mistakes that only the whole pattern shows."""
        last = self.stages[-1]
        if last.contiguity is Contiguity.NOT_FOLLOWED and not (self.length or last.gap):
            raise UsageError(
                f"the pattern ends with not_followed_by({last.name!r}) and has no time limit: say "
                "until when nothing may follow, with within(...)"
            )
        before = self.stages[-2] if len(self.stages) > 1 else last
        if last.contiguity is before.contiguity is Contiguity.NOT_FOLLOWED:
            raise UsageError(
                "the pattern ends with two calls of not_followed_by: join their conditions with "
                "or_where"
            )
        if self.skip.stage is not None and self.skip.stage not in self.names():
            raise UsageError(
                f"{self.skip.kind}({self.skip.stage!r}): no stage of this name has rows: choose from "
                + ", ".join(self.names())
            )
        if self.length and max(self.gaps(), default=0) > self.length:
            raise UsageError(
                "the time limit of a stage is longer than that of the whole pattern: shorten "
                "within(..., since='previous')"
            )

    @property
    def _last(self) -> Stage:
        return self.stages[-1]

    def _with(self, **changes: Any) -> Pattern:
        return replace(self, stages=(*self.stages[:-1], replace(self._last, **changes)))

    def _then(self, what: str | Pattern, contiguity: Contiguity) -> Pattern:
        last = self.stages[-1] if self.stages else None
        if last and contiguity.negative and last.optional:
            raise UsageError(
                f"{contiguity.value}: {last.title} before it is optional: use two patterns, one with "
                "it and one without"
            )
        before = last and last.contiguity
        if (before, contiguity) == (Contiguity.NOT_FOLLOWED, Contiguity.NOT_NEXT):
            raise UsageError(
                f"not_next: {self._last.title} before it is negative too, and would have no effect: "
                "swap them"
            )
        if isinstance(what, Pattern):
            stage = _group(what, contiguity)
        elif isinstance(what, str) and what:
            stage = Stage(what, contiguity)
        else:
            raise UsageError(f"{what!r} cannot name a stage: give a text, or a pattern as a group")
        used = {each.name for each in _flat(self.stages)}
        for name in (each.name for each in _flat((stage,))):
            if name in used:
                raise UsageError(f"the name {name!r} is used twice: give each stage its own")
        return replace(self, stages=(*self.stages, stage))

    def _condition(self) -> Test | None:
        if self._last.group:
            raise UsageError("a group has no condition of its own: give one to its stages")
        return self._last.condition

    def _repeated(self, repeat: Repeat, **changes: Any) -> Pattern:
        last = self._last
        if last.contiguity.negative:
            raise UsageError(
                f"{last.title} was added with not_next() or not_followed_by() and cannot repeat: leave "
                "out times(...) or one_or_more()"
            )
        if last.repeat is not Repeat.ONCE:
            raise UsageError(f"{last.title} repeats already: give the number of times only once")
        if last.gap:
            raise UsageError(
                f"{last.title} has within(..., since='previous') and cannot repeat: leave out "
                "one of them"
            )
        return self._with(repeat=repeat, **changes)

    def _check_repeats(self, what: str) -> Stage:
        if self._last.repeat is Repeat.ONCE:
            raise UsageError(
                f"{what}: {self._last.title} does not repeat: call times(...) or one_or_more() first"
            )
        return self._last

    def _set_inner(self, what: str, inner: Contiguity) -> Pattern:
        last = self._check_repeats(what)
        if last.inner is not Contiguity.RELAXED:
            raise UsageError(
                f"{what}: {last.title} is consecutive or allows combinations already: choose one"
            )
        return self._with(inner=inner)

    def _tests(self) -> Iterator[Test]:
        for stage in _flat(self.stages, groups=True):
            for test in (stage.condition, stage.stop):
                if test is not None:
                    yield test


def _group(pattern: Pattern, contiguity: Contiguity) -> Stage:
    if contiguity.negative:
        raise UsageError(
            f"{contiguity.value}: a group cannot be negative: give the name of a stage"
        )
    if pattern.stages[-1].contiguity is Contiguity.NOT_FOLLOWED:
        raise UsageError("a group cannot end with not_followed_by: put it after the group")
    if pattern.length or pattern.skip != no_skip():
        raise UsageError("a group cannot have within or skip: give them to the whole pattern")
    return Stage("", contiguity, group=pattern.stages)


def _flat(stages: tuple[Stage, ...], *, groups: bool = False) -> Iterator[Stage]:
    """Yield the stages that have names, and with `groups` also the groups."""
    for stage in stages:
        yield from _flat(stage.group, groups=groups)
        if groups or not stage.group:
            yield stage


def _leaves(tests: Iterator[Test]) -> Iterator[Test]:
    for test in tests:
        if isinstance(test, All | Either):
            yield from _leaves(iter(test.parts))
        elif isinstance(test, Not):
            yield from _leaves(iter((test.part,)))
        else:
            yield test


def _bound(stage: Stage, columns: Mapping[str, str]) -> Stage:
    def test(one: Test) -> Test:
        match one:
            case Expression(sql):
                return Column(columns[sql])
            case All(parts) | Either(parts):
                return type(one)(tuple(map(test, parts)))
            case Not(part):
                return Not(test(part))
            case _:
                return one

    return replace(
        stage,
        group=tuple(_bound(each, columns) for each in stage.group),
        condition=None if stage.condition is None else test(stage.condition),
        stop=None if stage.stop is None else test(stage.stop),
    )


def _whole(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def _test(condition: Condition) -> Test:
    if isinstance(condition, Function | Expression | Column):
        return condition
    if isinstance(condition, str) and condition.strip():
        return Expression(condition.strip())
    if callable(condition):
        return Function(condition, _wants_earlier(condition))
    raise UsageError(f"{condition!r} is not a condition: give a function of the row, or SQL")


def _wants_earlier(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some functions written in C have no signature
        return False
    required = [
        each
        for each in parameters
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if len(required) > 2 or any(each.kind is each.KEYWORD_ONLY for each in required):
        raise UsageError(
            f"the condition {getattr(function, '__name__', function)!r} takes {len(required)} "
            "arguments: take the row, or the row and the earlier rows"
        )
    return len(required) == 2
