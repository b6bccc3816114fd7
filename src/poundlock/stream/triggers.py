"""When a window gives its result: Flink's triggers, and how to write one's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from poundlock.errors import UsageError
from poundlock.stream.operator import Key
from poundlock.stream.rows import Row
from poundlock.stream.times import Domain, Duration, milliseconds
from poundlock.stream.windows import GlobalWindow, Window, at_least_one


class TriggerResult(Enum):
    """What a trigger wants: to fire is to give a result, to purge is to forget the rows."""

    CONTINUE = (False, False)
    FIRE = (True, False)
    PURGE = (False, True)
    FIRE_AND_PURGE = (True, True)

    def __init__(self, fires: bool, purges: bool) -> None:
        self.fires = fires
        self.purges = purges


CONTINUE = TriggerResult.CONTINUE
FIRE = TriggerResult.FIRE
PURGE = TriggerResult.PURGE
FIRE_AND_PURGE = TriggerResult.FIRE_AND_PURGE


class Pane:
    """A window of a key, and the two times at which it is looked at."""

    __slots__ = ("_key", "_mark", "window")

    def __init__(self, key: Key, mark: Any, window: Window | GlobalWindow) -> None:
        self._key = key
        self._mark = mark
        self.window = window

    @property
    def watermark(self) -> int:
        return self._key.clock.watermark

    @property
    def now(self) -> int:
        return self._key.clock.now


class Context(Pane):
    """What a trigger sees of a window of a key: times, timers, and a state of its own.

    `state` is plain data. It is kept as long as the window, or until it is empty.
    """

    __slots__ = ("state",)

    def __init__(self, key: Key, mark: Any, window: Window | GlobalWindow, state: dict[str, Any]):
        super().__init__(key, mark, window)
        self.state = state

    def set_timer(self, time: int, domain: Domain = Domain.EVENT) -> None:
        """Have the trigger's `on_timer` called for this window; once, if set twice."""
        self._key.set_timer(time, self._mark, domain)

    def delete_timer(self, time: int, domain: Domain = Domain.EVENT) -> None:
        """Forget a timer, if it is set. The one that ends the window stays."""
        self._key.delete_timer(time, self._mark, domain)

    def part(self, name: str) -> Context:
        """Return a context for a trigger inside this one, with a state apart from the others'."""
        return Context(self._key, self._mark, self.window, self.state.setdefault(name, {}))


class Trigger(ABC):
    """Decides when a window fires. Subclass it for one's own; it keeps nothing but `context.state`."""

    domains: frozenset[Domain] = frozenset()  # which timers it sets

    @abstractmethod
    def on_element(self, time: int, row: Row, context: Context) -> TriggerResult:
        """Say what a row that was just added to the window leads to."""

    def on_timer(self, time: int, domain: Domain, context: Context) -> TriggerResult:
        """Say what a timer of the window leads to: one that was set here, or its very end."""
        return CONTINUE

    def can_merge(self) -> bool:
        """Return whether it works with session windows; then it has `on_merge`."""
        return False

    def on_merge(self, context: Context, merged: Sequence[Mapping[str, Any]]) -> None:  # noqa: B027
        """Set up the window that others became. `merged` has their states; timers are set anew."""

    def clear(self, context: Context) -> None:  # noqa: B027
        """Called when a window is gone. Its timers and state go by themselves."""


@dataclass(frozen=True)
class EventTime(Trigger):
    """Fires when the watermark passes the end of the window, and at every late row after that."""

    domains = frozenset({Domain.EVENT})

    def on_element(self, time: int, row: Row, context: Context) -> TriggerResult:
        if context.window.max_time <= context.watermark:
            return FIRE
        context.set_timer(context.window.max_time)
        return CONTINUE

    def on_timer(self, time: int, domain: Domain, context: Context) -> TriggerResult:
        on_time = domain is Domain.EVENT and time == context.window.max_time
        return FIRE if on_time else CONTINUE

    def can_merge(self) -> bool:
        return True

    def on_merge(self, context: Context, merged: Sequence[Mapping[str, Any]]) -> None:
        # Past its end, the row that caused the merge fires it: a timer would do so twice.
        if context.window.max_time > context.watermark:
            context.set_timer(context.window.max_time)


@dataclass(frozen=True)
class ProcessingTime(Trigger):
    """Fires when the clock passes the end of the window."""

    domains = frozenset({Domain.PROCESSING})

    def on_element(self, time: int, row: Row, context: Context) -> TriggerResult:
        context.set_timer(context.window.max_time, Domain.PROCESSING)
        return CONTINUE

    def on_timer(self, time: int, domain: Domain, context: Context) -> TriggerResult:
        return FIRE if domain is Domain.PROCESSING else CONTINUE

    def can_merge(self) -> bool:
        return True

    def on_merge(self, context: Context, merged: Sequence[Mapping[str, Any]]) -> None:
        if context.window.max_time > context.now:
            context.set_timer(context.window.max_time, Domain.PROCESSING)


@dataclass(frozen=True)
class OnCount(Trigger):
    """Fires at every `size` rows of the window."""

    size: int

    def on_element(self, time: int, row: Row, context: Context) -> TriggerResult:
        state = context.state
        rows = state.get("rows", 0) + 1
        if rows >= self.size:
            state.pop("rows", None)
            return FIRE
        state["rows"] = rows
        return CONTINUE

    def can_merge(self) -> bool:
        return True

    def on_merge(self, context: Context, merged: Sequence[Mapping[str, Any]]) -> None:
        if rows := sum(state.get("rows", 0) for state in merged):
            context.state["rows"] = rows


@dataclass(frozen=True)
class CountOrTimeout(Trigger):
    """Fires at `size` rows, or when the first of them has waited for `timeout`.

    What is left when the window ends fires then.
    """

    size: int
    timeout: int
    domain: Domain

    def __post_init__(self) -> None:
        object.__setattr__(self, "domains", frozenset({self.domain}))

    def on_element(self, time: int, row: Row, context: Context) -> TriggerResult:
        state = context.state
        rows = state["rows"] = state.get("rows", 0) + 1
        if rows >= self.size:
            self.clear(context)
            return FIRE
        if rows == 1:
            first = time if self.domain is Domain.EVENT else context.now
            state["due"] = first + self.timeout
            context.set_timer(state["due"], self.domain)
        return CONTINUE

    def on_timer(self, time: int, domain: Domain, context: Context) -> TriggerResult:
        if not context.state:
            return CONTINUE
        self.clear(context)
        return FIRE

    def can_merge(self) -> bool:
        return True

    def on_merge(self, context: Context, merged: Sequence[Mapping[str, Any]]) -> None:
        if waiting := [state for state in merged if state]:
            context.state["rows"] = sum(state["rows"] for state in waiting)
            context.state["due"] = min(state["due"] for state in waiting)
            context.set_timer(context.state["due"], self.domain)

    def clear(self, context: Context) -> None:
        if "due" in context.state:
            context.delete_timer(context.state["due"], self.domain)
        context.state.clear()


@dataclass(frozen=True)
class Continuous(Trigger):
    """Fires at every whole multiple of `interval`, and at the window's end if that is of its domain."""

    interval: int
    domain: Domain

    def __post_init__(self) -> None:
        object.__setattr__(self, "domains", frozenset({self.domain}))

    def on_element(self, time: int, row: Row, context: Context) -> TriggerResult:
        last = context.window.max_time
        if self.domain is Domain.EVENT:
            if last <= context.watermark:
                return FIRE
            context.set_timer(last)
        if "due" not in context.state:
            first = time if self.domain is Domain.EVENT else context.now
            self._next(first - first % self.interval, context)
        return CONTINUE

    def on_timer(self, time: int, domain: Domain, context: Context) -> TriggerResult:
        if domain is not self.domain:
            return CONTINUE
        if time == context.window.max_time:
            return FIRE
        if context.state.get("due") == time:
            self._next(time, context)
            return FIRE
        return CONTINUE

    def _next(self, time: int, context: Context) -> None:
        if self.domain is Domain.PROCESSING:
            # Intervals that passed since the last batch fire once: no row came in between.
            time = max(time, context.now - context.now % self.interval)
        due, end = time + self.interval, context.window.max_time
        if self.domain is Domain.EVENT or end > context.now:  # else the end is of another clock
            due = min(due, end)
        context.state["due"] = due
        context.set_timer(due, self.domain)

    def can_merge(self) -> bool:
        return True

    def on_merge(self, context: Context, merged: Sequence[Mapping[str, Any]]) -> None:
        if dues := [state["due"] for state in merged if "due" in state]:
            context.state["due"] = min(dues)
            context.set_timer(context.state["due"], self.domain)


@dataclass(frozen=True)
class EarlyAndLate(Trigger):
    """Fires when the watermark passes the end, by `early` before that and by `late` after it."""

    early: Trigger | None
    late: Trigger | None

    def __post_init__(self) -> None:
        inner = [each.domains for each in (self.early, self.late) if each]
        object.__setattr__(self, "domains", frozenset({Domain.EVENT}).union(*inner))

    def on_element(self, time: int, row: Row, context: Context) -> TriggerResult:
        last = context.window.max_time
        if last > context.watermark:
            context.set_timer(last)
            return self._ask(
                "early", context, lambda early, part: early.on_element(time, row, part)
            )
        if self.late and context.state.get("fired"):
            return self._ask("late", context, lambda late, part: late.on_element(time, row, part))
        # The window's first row came late: it fires as the rest would have on time.
        self._fired(context)
        return FIRE

    def on_timer(self, time: int, domain: Domain, context: Context) -> TriggerResult:
        if context.state.get("fired"):
            return self._ask("late", context, lambda late, part: late.on_timer(time, domain, part))
        if domain is Domain.EVENT and time == context.window.max_time:
            self._clear("early", context)
            self._fired(context)
            return FIRE
        return self._ask("early", context, lambda early, part: early.on_timer(time, domain, part))

    def can_merge(self) -> bool:
        return all(each.can_merge() for each in (self.early, self.late) if each)

    def on_merge(self, context: Context, merged: Sequence[Mapping[str, Any]]) -> None:
        late = context.window.max_time <= context.watermark
        if late:
            self._fired(context)
        else:
            context.set_timer(context.window.max_time)
        name = "late" if late else "early"
        states = [state[name] for state in merged if name in state]
        self._ask(name, context, lambda inner, part: inner.on_merge(part, states))

    def clear(self, context: Context) -> None:
        self._clear("early", context)
        self._clear("late", context)

    def _fired(self, context: Context) -> None:
        if self.late:  # else every late row fires, and nothing needs to be known
            context.state["fired"] = True

    def _clear(self, name: str, context: Context) -> None:
        self._ask(name, context, lambda inner, part: inner.clear(part))
        context.state.pop(name, None)

    def _ask(
        self, name: str, context: Context, call: Callable[[Trigger, Context], Any]
    ) -> TriggerResult:
        inner: Trigger | None = getattr(self, name)
        if inner is None:
            return CONTINUE
        part = context.part(name)
        result = call(inner, part)
        if not part.state:
            del context.state[name]
        return result


@dataclass(frozen=True)
class Delta(Trigger):
    """Fires when a row differs from the one that fired last by more than `threshold`."""

    threshold: float
    function: Callable[[Row, Row], float]

    def on_element(self, time: int, row: Row, context: Context) -> TriggerResult:
        last = context.state.get("last")
        if last is None:
            context.state["last"] = list(row)
            return CONTINUE
        if self.function(type(row)(last), row) > self.threshold:
            context.state["last"] = list(row)
            return FIRE
        return CONTINUE


@dataclass(frozen=True)
class Purging(Trigger):
    """Does as another trigger does, and forgets the rows whenever that fires."""

    inner: Trigger

    def __post_init__(self) -> None:
        object.__setattr__(self, "domains", self.inner.domains)

    def on_element(self, time: int, row: Row, context: Context) -> TriggerResult:
        result = self.inner.on_element(time, row, context)
        return FIRE_AND_PURGE if result.fires else result

    def on_timer(self, time: int, domain: Domain, context: Context) -> TriggerResult:
        result = self.inner.on_timer(time, domain, context)
        return FIRE_AND_PURGE if result.fires else result

    def can_merge(self) -> bool:
        return self.inner.can_merge()

    def on_merge(self, context: Context, merged: Sequence[Mapping[str, Any]]) -> None:
        self.inner.on_merge(context, merged)

    def clear(self, context: Context) -> None:
        self.inner.clear(context)


def event_time() -> Trigger:
    """Fire when the watermark passes the end of the window, then at every late row it allows."""
    return EventTime()


def processing_time() -> Trigger:
    """Fire when the clock passes the end of the window."""
    return ProcessingTime()


def on_count(size: int) -> Trigger:
    """Fire at every `size` rows of a window. Rows left when it ends are not given."""
    return OnCount(at_least_one(size, "size"))


def count_or_timeout(size: int, timeout: Duration, domain: Domain = Domain.PROCESSING) -> Trigger:
    """Fire at `size` rows, or when the first row since the last firing has waited for `timeout`."""
    return CountOrTimeout(
        at_least_one(size, "size"), milliseconds(timeout, "timeout", least=1), _domain(domain)
    )


def continuous(interval: Duration, domain: Domain = Domain.EVENT) -> Trigger:
    """Fire at every `interval` while the window is open, whether or not rows came.

    In processing time, over windows of event time, it does not fire at the window's end: use
    `early_and_late(early=continuous(...))` for that.
    """
    return Continuous(milliseconds(interval, "interval", least=1), _domain(domain))


def early_and_late(early: Trigger | None = None, late: Trigger | None = None) -> Trigger:
    """Fire when the watermark passes the end, by `early` before that and by `late` after it.

    Without `late`, every late row fires.
    """
    return EarlyAndLate(early and _trigger(early, "early"), late and _trigger(late, "late"))


def delta(threshold: float, function: Callable[[Row, Row], float]) -> Trigger:
    """Fire when `function(last, row)` is above `threshold`; `last` is the row that fired last.

    At the start it is the window's first row.
    """
    if not callable(function):
        raise UsageError(
            f"function={function!r}: give a function of two rows that returns a number"
        )
    return Delta(threshold, function)


def purging(trigger: Trigger) -> Trigger:
    """Do as another trigger does, and forget the rows whenever that fires."""
    return Purging(_trigger(trigger, "trigger"))


def _trigger(value: Any, what: str) -> Trigger:
    if not isinstance(value, Trigger):
        raise UsageError(f"{what}={value!r}: give a trigger, such as on_count(100)")
    return value


def _domain(value: Any) -> Domain:
    if not isinstance(value, Domain):
        raise UsageError(f"domain={value!r}: give Domain.EVENT or Domain.PROCESSING")
    return value
