"""Patterns against an oracle that tries every choice of rows, over every way to cut the stream.

The oracle knows nothing of states: it writes a pattern out as plain sequences of single stages, one for
each number of times that a stage may occur, and looks at all increasing choices of rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from poundlock.stream.matching import MatchOperator
from poundlock.stream.operator import Event, Page
from poundlock.stream.pattern import (
    Contiguity,
    Pattern,
    Repeat,
    Stage,
    begin,
    no_skip,
    skip_past_last_event,
    skip_to_first,
    skip_to_last,
    skip_to_next,
)
from poundlock.stream.rows import row_type
from poundlock.stream.times import Clock

Item = row_type(("n", "kind", "size"))
LETTERS = "abc"
FOREVER = 10**6


# Random patterns and streams.


def fits(kinds: str) -> Callable[[Any], bool]:
    return lambda row: row.kind in kinds


def grows(kinds: str) -> Callable[[Any, Any], bool]:
    """Return a condition on earlier rows: at least as large as the first row of the first stage."""

    def test(row: Any, earlier: Any) -> bool:
        return row.kind in kinds and all(row.size >= first.size for first in earlier["s0"][:1])

    return test


@st.composite
def streams(draw: st.DrawFn) -> list[list[Event]]:
    """Draw rows by batch as they arrive: out of order, but never late."""
    kinds = draw(st.text(LETTERS + "d", max_size=9))
    time, events = 0, []
    for n, kind in enumerate(kinds):
        time += 100 * draw(st.integers(0, 3))  # far enough apart that not all matches end at once
        size = draw(st.integers(0, 2))
        lag = 100 * draw(st.integers(0, 6))
        events.append((time + lag, Event(time, Item((n, kind, size)))))
    events.sort(key=lambda each: each[0])
    batches: list[list[Event]] = [[]]
    for _, event in events:
        if draw(st.booleans()):
            batches.append([])
        batches[-1].append(event)
    return batches


skips = st.sampled_from(
    [no_skip(), skip_to_next(), skip_past_last_event(), skip_to_first("s0"), skip_to_last("s0")]
)


@st.composite
def patterns(draw: st.DrawFn, *, plain: bool) -> Pattern:
    """Draw a pattern; if `plain`, one that the oracle can write as sequences of single stages."""
    pattern = begin("s0", no_skip() if plain else draw(skips))
    size, timed = draw(st.integers(1, 3)), draw(st.booleans())
    for at in range(size):
        kinds = draw(st.sampled_from(["a", "b", "c", "ab", "bc", "abc"]))
        if at:
            pattern = draw(negatives(pattern, at))
            how = draw(st.sampled_from(["next", "followed_by", "followed_by_any"]))
            pattern = getattr(pattern, how)(f"s{at}")
        looks = at and draw(st.booleans())
        pattern = pattern.where(grows(kinds) if looks else fits(kinds))
        pattern = draw(quantifiers(pattern, plain=plain))
    last = pattern.stages[-1]
    if timed:
        pattern = pattern.within(draw(st.integers(1, 8)) / 10)
        if last.repeat is Repeat.ONCE and not last.optional and draw(st.booleans()):
            pattern = pattern.not_followed_by("never").where(fits(draw(st.sampled_from("abc"))))
    return pattern


@st.composite
def negatives(draw: st.DrawFn, pattern: Pattern, at: int) -> Pattern:
    last = pattern.stages[-1]
    how = draw(st.sampled_from(["", "", "not_followed_by", "not_next"]))
    # After a repeating stage, `not_next` ends all its rounds, unlike in a plain sequence.
    # After one with a range, Flink forgets `not_followed_by` after it has skipped a row.
    ranged = last.low != last.high if how == "not_followed_by" else last.repeat is not Repeat.ONCE
    if not how or last.optional or ranged:
        return pattern
    return getattr(pattern, how)(f"not{at}").where(fits(draw(st.sampled_from("abc"))))


def odd_if_optional(stages: tuple[Stage, ...]) -> bool:
    """Return whether Flink, and so Poundlock, differs from the sequences with and without the stage.

    After `not_next` at the end, the row before is tested against the forbidden condition. And rows
    that are forbidden before the first of two optional stages are also forbidden before the second.
    """
    *before, _ = stages
    if not before:
        return False
    nots = [stage.contiguity is Contiguity.NOT_FOLLOWED for stage in before]
    return before[-1].contiguity is Contiguity.NOT_NEXT or (before[-1].optional and any(nots))


@st.composite
def quantifiers(draw: st.DrawFn, pattern: Pattern, *, plain: bool) -> Pattern:
    kind = draw(st.sampled_from(["once", "once", "optional", "times", "loop"]))
    may_be_optional = not (plain and odd_if_optional(pattern.stages)) and not (
        len(pattern.stages) > 1 and pattern.stages[-2].greedy
    )
    if kind == "times":
        low = draw(st.integers(1, 2))
        pattern = pattern.times(low, low + draw(st.integers(0, 2)))
    elif kind == "loop":
        pattern = pattern.times_or_more(draw(st.integers(1, 2)))
        if not plain and draw(st.booleans()):
            pattern = pattern.until(fits(draw(st.sampled_from("abcd"))))
    if kind in ("times", "loop"):
        inner = draw(st.sampled_from(["", "consecutive", "allow_combinations"]))
        pattern = getattr(pattern, inner)() if inner else pattern
        if not plain and inner != "allow_combinations" and draw(st.booleans()):
            pattern = pattern.greedy()
    if may_be_optional and (kind == "optional" or (kind != "once" and draw(st.booleans()))):
        pattern = pattern.optional()
    return pattern


# The oracle.


class Step(NamedTuple):
    """A single stage, with the rows that may and may not come before it."""

    stage: Stage
    contiguity: Contiguity
    not_next: tuple[Stage, ...]
    not_before: tuple[Stage, ...]


def sequences(pattern: Pattern, rows: int) -> Iterator[tuple[list[Step], Stage | None]]:
    """Yield the sequences of a pattern, each with the pattern's last negative stage."""
    stages = pattern.stages
    positive = [at for at, stage in enumerate(stages) if not stage.contiguity.negative]
    trailing = stages[-1] if stages[-1].contiguity.negative else None
    choices = []
    for at in positive:
        stage = stages[at]
        high = rows if stage.repeat is Repeat.LOOP else stage.high
        choices.append([*([0] if stage.optional else []), *range(stage.low, high + 1)])
    for counts in product(*choices):
        steps: list[Step] = []
        nexts: tuple[Stage, ...] = ()
        befores: tuple[Stage, ...] = ()
        for at, stage in enumerate(stages):
            if stage.contiguity is Contiguity.NOT_NEXT:
                nexts += (stage,)
            elif stage.contiguity is Contiguity.NOT_FOLLOWED:
                befores += (stage,)
            else:
                count = counts[positive.index(at)]
                after = stages[at + 1] if at + 1 < len(stages) else None
                # Rows that must not follow a repeating stage must not come between its rows either.
                between = (after,) if after and after.contiguity is Contiguity.NOT_FOLLOWED else ()
                for number in range(count):
                    if number:
                        steps.append(Step(stage, stage.inner, (), between))
                    else:
                        steps.append(Step(stage, stage.contiguity, nexts, befores))
                if count:
                    nexts, befores = (), ()
        if steps:
            yield steps, trailing


def oracle(pattern: Pattern, events: list[Event]) -> Counter[tuple[tuple[str, int], ...]]:
    found: Counter[tuple[tuple[str, int], ...]] = Counter()

    def holds(stage: Stage, at: int, chosen: list[tuple[str, int]]) -> bool:
        function: Any = stage.condition
        row = events[at].row
        if not function.earlier:
            return function.call(row)
        earlier = {
            name: [events[i].row for n, i in chosen if n == name] for name in pattern.names()
        }
        return function.call(row, earlier)

    def search(steps: list[Step], trailing: Stage | None, chosen: list[tuple[str, int]]) -> None:
        if len(chosen) == len(steps):
            began, last = events[chosen[0][1]].time, chosen[-1][1]
            over = began + (pattern.length or FOREVER)
            if trailing and any(
                holds(trailing, at, chosen)
                for at in range(last + 1, len(events))
                if events[at].time < over
            ):
                return
            if events[last].time < over:
                found[tuple(sorted((name, events[at].row.n) for name, at in chosen))] += 1
            return
        step, first = steps[len(chosen)], not chosen
        start = 0 if first else chosen[-1][1] + 1
        ends = len(chosen) + 1 == len(steps) and trailing is None
        for at in range(start, len(events)):
            fits_here = holds(step.stage, at, chosen)
            refused = not first and (
                any(holds(stage, at, chosen) for stage in step.not_before)
                or (at == start and any(holds(stage, at, chosen) for stage in step.not_next))
            )
            # A row that completes a match does so even if it is also a forbidden row.
            allowed = not refused or (ends and not (at == start and step.not_next))
            if fits_here and allowed:
                search(steps, trailing, [*chosen, (step.stage.name, at)])
            if first:
                continue
            if refused or step.contiguity is Contiguity.STRICT:
                return
            if step.contiguity is Contiguity.RELAXED and fits_here:
                return

    for steps, trailing in sequences(pattern, len(events)):
        search(steps, trailing, [])
    return found


# The runs.


def match(rows: dict[str, list[Any]], ctx: Any) -> tuple[Any, ...]:
    return ([[name, row.n] for name in rows for row in rows[name]], ctx.timestamp)


def run(
    pattern: Pattern, batches: list[list[Event]], *, partial: bool = True
) -> dict[str, list[Any]]:
    """Run batches through pages, each with the latest watermark that makes no row late."""
    timed_out = ("partial", match, ("rows", "at")) if partial and pattern.length else None
    outputs: dict[str, list[Any]] = {}
    data: bytes | None = None
    for at in range(len(batches) + 1):
        rows = sorted(batches[at] if at < len(batches) else [], key=lambda event: event.time)
        rest = [event.time for batch in batches[at:] for event in batch]
        clock = Clock(min(rest) - 1 if rest else FOREVER)
        # A new operator for each batch, because Spark keeps none between tasks.
        operator = MatchOperator(
            pattern, columns=Item._fields, select=match, fields=("rows", "at"), timed_out=timed_out
        )
        done = Page(operator, data, clock).run({("k",): rows} if rows else {})
        data = done.data if done.data != b"" else data
        assert operator.late_dropped == 0
        for name, emitted in done.outputs.items():
            outputs.setdefault(name, []).extend(emitted)
    return outputs


def in_order(batches: list[list[Event]]) -> list[Event]:
    return sorted((event for batch in batches for event in batch), key=lambda event: event.time)


@settings(max_examples=200, deadline=None)
@given(patterns(plain=True), streams())
def test_a_pattern_finds_every_allowed_match(pattern, batches):
    main = run(pattern, batches, partial=False).get("main", [])
    found = Counter(tuple(sorted(map(tuple, rows))) for rows, _ in main)
    assert found == oracle(pattern, in_order(batches))


@settings(max_examples=150, deadline=None)
@given(patterns(plain=False), streams())
def test_the_result_does_not_depend_on_how_the_stream_is_split(pattern, batches):
    events = in_order(batches)
    found = run(pattern, batches)
    assert found == run(pattern, [events]) == run(pattern, [[event] for event in events])
    # Nor on whether the partial matches that timed out are reported.
    assert found.get("main") == run(pattern, [events], partial=False).get("main")
