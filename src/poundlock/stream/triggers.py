"""Triggers, as in Flink: they decide when a window emits its result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from poundlock.errors import UsageError
from poundlock.stream.evictors import delta_function
from poundlock.stream.operator import Key
from poundlock.stream.rows import Row
from poundlock.stream.times import Domain, Duration, milliseconds
from poundlock.stream.windows import GlobalWindow, Window, at_least_one


class TriggerResult(Enum):
    """A trigger's decision. To fire is to emit the result, to purge is to delete the rows."""

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
    """A window of one key, with the two times of the batch."""

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
    """What a trigger sees of a pane: times, timers, and the trigger's own state.

    `state` is plain data. It lasts as long as the window.
    """

    __slots__ = ("state",)

    def __init__(self, key: Key, mark: Any, window: Window | GlobalWindow, state: dict[str, Any]):
        super().__init__(key, mark, window)
        self.state = state

    def set_timer(self, time: int, domain: Domain = Domain.EVENT) -> None:
        """Set a timer, which calls the trigger's `on_timer` for this window. Equal timers are one."""
        self._key.set_timer(time, self._mark, domain)

    def delete_timer(self, time: int, domain: Domain = Domain.EVENT) -> None:
        """Delete a timer, if it is set. The cleanup timer of the window stays."""
        self._key.delete_timer(time, self._mark, domain)

    def part(self, name: str) -> Context:
        """Return a context for an inner trigger, with its own state."""
        return Context(self._key, self._mark, self.window, self.state.setdefault(name, {}))


class Trigger(ABC):
    """Decides when a window fires. Subclass it to write your own. Its only state is `context.state`."""

    domains: frozenset[Domain] = frozenset()  # the kinds of timers that it sets

    @abstractmethod
    def on_element(self, time: int, row: Row, context: Context) -> TriggerResult:
        """Decide after a row was added to the window."""

    def on_timer(self, time: int, domain: Domain, context: Context) -> TriggerResult:
        """Decide when a timer of this trigger is due, or the window's cleanup timer."""
        return CONTINUE

    def can_merge(self) -> bool:
        """Return whether it works with session windows. If so, it has `on_merge`."""
        return False

    def on_merge(self, context: Context, merged: Sequence[Mapping[str, Any]]) -> None:  # noqa: B027
        """Set the state and timers of a merged window. `merged` has the states of its parts."""

    def clear(self, context: Context) -> None:  # noqa: B027
        """Called when a window ends. Its timers and state are deleted afterwards."""


class _MergingTrigger(Trigger):
    def can_merge(self) -> bool:
        return True


@dataclass(frozen=True)
class EventTime(_MergingTrigger):
    """Fires when the watermark passes the end of the window, then at every late row."""

    domains = frozenset({Domain.EVENT})

    def on_element(self, time: int, row: Row, context: Context) -> TriggerResult:
        if context.window.max_time <= context.watermark:
            return FIRE
        context.set_timer(context.window.max_time)
        return CONTINUE

    def on_timer(self, time: int, domain: Domain, context: Context) -> TriggerResult:
        on_time = domain is Domain.EVENT and time == context.window.max_time
        return FIRE if on_time else CONTINUE

    def on_merge(self, context: Context, merged: Sequence[Mapping[str, Any]]) -> None:
        # After its end, the row that caused the merge fires the window: a timer would fire it again.
        if context.window.max_time > context.watermark:
            context.set_timer(context.window.max_time)


@dataclass(frozen=True)
class ProcessingTime(_MergingTrigger):
    """Fires when processing time passes the end of the window."""

    domains = frozenset({Domain.PROCESSING})

    def on_element(self, time: int, row: Row, context: Context) -> TriggerResult:
        context.set_timer(context.window.max_time, Domain.PROCESSING)
        return CONTINUE

    def on_timer(self, time: int, domain: Domain, context: Context) -> TriggerResult:
        return FIRE if domain is Domain.PROCESSING else CONTINUE

    def on_merge(self, context: Context, merged: Sequence[Mapping[str, Any]]) -> None:
        if context.window.max_time > context.now:
            context.set_timer(context.window.max_time, Domain.PROCESSING)


@dataclass(frozen=True)
class OnCount(_MergingTrigger):
    """Fires after every `size` rows of the window."""

    size: int

    def on_element(self, time: int, row: Row, context: Context) -> TriggerResult:
        state = context.state
        rows = state.get("rows", 0) + 1
        if rows >= self.size:
            state.pop("rows", None)
            return FIRE
        state["rows"] = rows
        return CONTINUE

    def on_merge(self, context: Context, merged: Sequence[Mapping[str, Any]]) -> None:
        if rows := sum(state.get("rows", 0) for state in merged):
            context.state["rows"] = rows


@dataclass(frozen=True)
class CountOrTimeout(_MergingTrigger):
    """Fires after `size` rows, or `timeout` after the first of them."""

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
class Continuous(_MergingTrigger):
    """Fires at every multiple of `interval`, and at the window's end if both have the same clock."""

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
            self._set_next(first - first % self.interval, context)
        return CONTINUE

    def on_timer(self, time: int, domain: Domain, context: Context) -> TriggerResult:
        if domain is not self.domain:
            return CONTINUE
        if time == context.window.max_time:
            return FIRE
        if context.state.get("due") == time:
            self._set_next(time, context)
            return FIRE
        return CONTINUE

    def _set_next(self, time: int, context: Context) -> None:
        if self.domain is Domain.PROCESSING:
            # Several intervals since the last batch fire once: no row came in between.
            time = max(time, context.now - context.now % self.interval)
        due, end = time + self.interval, context.window.max_time
        # In processing time, an end that is not in the future belongs to event time.
        if self.domain is Domain.EVENT or end > context.now:
            due = min(due, end)
        context.state["due"] = due
        context.set_timer(due, self.domain)

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
            return self._call(
                "early", context, lambda inner, part: inner.on_element(time, row, part)
            )
        if self.late and context.state.get("fired"):
            return self._call(
                "late", context, lambda inner, part: inner.on_element(time, row, part)
            )
        # The window's first row is late: it fires the window.
        self._mark_fired(context)
        return FIRE

    def on_timer(self, time: int, domain: Domain, context: Context) -> TriggerResult:
        fired = context.state.get("fired")
        if not fired and domain is Domain.EVENT and time == context.window.max_time:
            self._clear("early", context)
            self._mark_fired(context)
            return FIRE
        name = "late" if fired else "early"
        return self._call(name, context, lambda inner, part: inner.on_timer(time, domain, part))

    def can_merge(self) -> bool:
        return all(each.can_merge() for each in (self.early, self.late) if each)

    def on_merge(self, context: Context, merged: Sequence[Mapping[str, Any]]) -> None:
        late = context.window.max_time <= context.watermark
        if late:
            self._mark_fired(context)
        else:
            context.set_timer(context.window.max_time)
        name = "late" if late else "early"
        states = [state[name] for state in merged if name in state]
        self._call(name, context, lambda inner, part: inner.on_merge(part, states))

    def clear(self, context: Context) -> None:
        self._clear("early", context)
        self._clear("late", context)

    def _mark_fired(self, context: Context) -> None:
        if self.late:  # else every late row fires, so this need not be kept
            context.state["fired"] = True

    def _clear(self, name: str, context: Context) -> None:
        self._call(name, context, lambda inner, part: inner.clear(part))
        context.state.pop(name, None)

    def _call(
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
    """Fires when a row differs from the row that fired last by more than `threshold`."""

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
    """Fires when another trigger fires, and then deletes the window's rows."""

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
    """Fire when the watermark passes the end of the window, then at every late row."""
    return EventTime()


def processing_time() -> Trigger:
    """Fire when processing time passes the end of the window."""
    return ProcessingTime()


def on_count(size: int) -> Trigger:
    """Fire after every `size` rows of a window. Rows that are left at its end give no result."""
    return OnCount(at_least_one(size, "size"))


def count_or_timeout(size: int, timeout: Duration, domain: Domain = Domain.PROCESSING) -> Trigger:
    """Fire after `size` rows, or `timeout` after the first row since the last firing.

    At the window's end, fire for the rows that are left.
    """
    return CountOrTimeout(
        at_least_one(size, "size"), milliseconds(timeout, "timeout", least=1), _domain(domain)
    )


def continuous(interval: Duration, domain: Domain = Domain.EVENT) -> Trigger:
    """Fire at every `interval` while the window is open, with or without new rows.

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
    """Fire when `function(last, row)` is above `threshold`.

    `last` is the row that fired last, or at first the window's first row.
    """
    return Delta(threshold, delta_function(function))


def purging(trigger: Trigger) -> Trigger:
    """Fire when another trigger fires, and then delete the window's rows."""
    return Purging(_trigger(trigger, "trigger"))


def _trigger(value: Any, what: str) -> Trigger:
    if not isinstance(value, Trigger):
        raise UsageError(f"{what}={value!r}: give a trigger, such as on_count(100)")
    return value


def _domain(value: Any) -> Domain:
    if not isinstance(value, Domain):
        raise UsageError(f"domain={value!r}: give Domain.EVENT or Domain.PROCESSING")
    return value
