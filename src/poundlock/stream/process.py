"""Process functions: a method for rows and one for timers, with state and timers for each key.

    class TemperatureRise(ProcessFunction):
        outputs = {"main": "id string, message string"}
        last = ValueState()

        def process(self, row, ctx):
            if self.last.value is not None and row.celsius > self.last.value:
                ctx.set_event_timer(ctx.timestamp + 10_000)
            self.last.value = row.celsius

        def on_timer(self, time, ctx):
            yield ctx.key.id, "it has been rising"

A method emits rows with `ctx.emit(row, output)`. It can also return one row (a row, tuple or
dictionary) or a list of rows, or yield rows. Those go to the main output.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from datetime import datetime
from types import GeneratorType, MappingProxyType
from typing import Any, NamedTuple

from poundlock.errors import PoundlockError, UsageError
from poundlock.stream.operator import MAIN, Event, Key, Operator, Timer, user_error
from poundlock.stream.rows import Row, row_type
from poundlock.stream.state import TTL, BroadcastState, Scope, attach
from poundlock.stream.times import Domain, from_datetime


class Runtime(NamedTuple):
    """What a function gets in `open`."""

    operator: str
    outputs: Mapping[str, Sequence[str]]  # the columns of each output
    key_fields: Sequence[str]


class Context(Scope):
    """The context of the current row or timer. It is the same object for all of them.

    `key`: the key's columns. `timestamp`: of the row or timer, in milliseconds. `watermark`, `now`: the
    two times of the batch. `domain`: in `on_timer`, the timer's clock. `broadcast`: the broadcast
    state by name.
    """

    __slots__ = ("_allowed", "broadcast", "emit", "key")

    key: Row
    emit: Callable[..., None]  # emit(row, output="main")
    broadcast: dict[str, BroadcastState]

    def __init__(self, allowed: frozenset[Domain]) -> None:
        super().__init__()
        self._allowed = allowed
        self.broadcast = {}

    def set_event_timer(self, time: int | datetime) -> None:
        """Set a timer: `on_timer` is called when the watermark reaches `time`."""
        self._set(time, Domain.EVENT)

    def set_processing_timer(self, time: int | datetime) -> None:
        """Set a timer: `on_timer` is called when the time of a batch reaches `time`."""
        self._set(time, Domain.PROCESSING)

    def delete_event_timer(self, time: int | datetime) -> None:
        """Forget a timer, if it is set."""
        self._key.delete_timer(_milliseconds(time), None, Domain.EVENT)

    def delete_processing_timer(self, time: int | datetime) -> None:
        """Forget a timer, if it is set."""
        self._key.delete_timer(_milliseconds(time), None, Domain.PROCESSING)

    def _set(self, time: int | datetime, domain: Domain) -> None:
        if domain not in self._allowed:
            raise UsageError(
                f"a timer of {domain.value} time was set without a declaration: write "
                f'`timers = "{domain.value}"`, or `timers = ("event", "processing")`, in the class of '
                "the function"
            )
        self._key.set_timer(_milliseconds(time), None, domain)


class BroadcastContext(NamedTuple):
    """The context of a broadcast row, which belongs to no key."""

    timestamp: int
    broadcast: Mapping[str, BroadcastState]

    def __getattr__(self, name: str) -> Any:
        raise UsageError(
            f"a broadcast row has no ctx.{name}: it belongs to no key. Store its content in broadcast "
            "state, and use it in process"
        )


def _milliseconds(time: int | datetime) -> int:
    if isinstance(time, datetime):
        return from_datetime(time)
    try:
        return operator.index(time)
    except TypeError:
        raise UsageError(
            f"a timer was set for {time!r}: give whole milliseconds since 1970, or a datetime"
        ) from None


class _Function:
    """The base of all process functions."""

    outputs: Mapping[str, str | Sequence[str]] = MappingProxyType({})
    """The columns of each output, as DDL text or names. There must be a `main`."""

    schema: str | Sequence[str] | None = None
    """The columns of the main output, if it is the only one."""

    timers: str | Sequence[str] | None = None
    """The kinds of timers that it sets: "event", "processing" or both. Default: the flow's own time."""

    _methods: Sequence[str] = ()  # the method for each input

    def open(self, runtime: Runtime) -> None:
        """Called once in a task, before any row. State cannot be used yet."""

    def close(self) -> None:
        """Called once in a task, at its end."""

    def on_timer(self, time: int, ctx: Context) -> Any:
        """Take a timer that is due."""
        raise UsageError(
            f"{type(self).__name__} set a timer and has no on_timer: add on_timer(self, time, ctx)"
        )


class ProcessFunction(_Function, ABC):
    """A function of each row of a key, with state and timers."""

    _methods = ("process",)

    @abstractmethod
    def process(self, row: Row, ctx: Context) -> Any:
        """Take a row."""


class CoProcessFunction(_Function, ABC):
    """A function of two inputs with the same key, which share state and timers.

    Within a batch, the rows of both inputs are merged in order of time.
    """

    _methods = ("process_1", "process_2")

    @abstractmethod
    def process_1(self, row: Row, ctx: Context) -> Any:
        """Take a row of the first input."""

    @abstractmethod
    def process_2(self, row: Row, ctx: Context) -> Any:
        """Take a row of the second input."""


class BroadcastProcessFunction(_Function, ABC):
    """A function of each row of a key, and of broadcast rows, which are for every key.

    It declares `BroadcastState`, which only `process_broadcast` may change. A batch's broadcast rows
    come before its other rows; Flink guarantees no order between them.
    """

    _methods = ("process",)

    @abstractmethod
    def process(self, row: Row, ctx: Context) -> Any:
        """Take a row of a key. `ctx.broadcast["name"]` can be read."""

    @abstractmethod
    def process_broadcast(self, row: Row, ctx: BroadcastContext) -> None:
        """Take a broadcast row, once for each page of keys. `ctx.broadcast["name"]` can be changed.

        There is no key. The only time is `ctx.timestamp`. Nothing can be emitted.
        """


def declared_outputs(function: _Function) -> dict[str, str | Sequence[str]]:
    """Return the columns of each output that the function declares, the main output first."""
    kind = type(function).__name__
    outputs = dict(function.outputs)
    if function.schema is not None:
        if outputs:
            raise UsageError(f"{kind} has both `outputs` and `schema`: keep one of them")
        return {MAIN: function.schema}
    if MAIN not in outputs:
        raise UsageError(
            f"{kind} does not declare the columns of its main output: write `outputs = "
            '{"main": "id string, ..."}` in the class'
        )
    return {MAIN: outputs.pop(MAIN), **outputs}


class ProcessOperator(Operator):
    """Runs a process function. `outputs`: the columns of each. `domain`: the flow's own time."""

    takes: type[_Function] = ProcessFunction

    def __init__(
        self,
        name: str,
        function: _Function,
        outputs: Mapping[str, Sequence[str]],
        domain: Domain,
        key_fields: Sequence[str],
    ) -> None:
        if not isinstance(function, self.takes):
            raise UsageError(
                f"operator {name!r} was given {function!r}: give an instance of a subclass of "
                f"{self.takes.__name__}"
            )
        self.name = name
        self.outputs = {each: tuple(fields) for each, fields in outputs.items()}
        self._key_fields = tuple(key_fields)
        row_type(self._key_fields)  # raises for duplicate columns
        # A copy, as one instance may be given to two operators, and each needs its own handles.
        self._function = function = copy(function)
        allowed = _declared_timers(function, domain)
        self._context = Context(allowed)
        self._page = Scope()
        states = attach(function, self._context, self._page)
        for each in states:
            if isinstance(each, BroadcastState):
                self._context.broadcast[each.name] = each
        self._swept = [each for each in states if each.swept]
        expires = {each.expires for each in states if each.expires}
        self.domains = allowed | frozenset(each.swept for each in self._swept if each.swept)
        if domain is Domain.PROCESSING and Domain.EVENT in allowed | expires:
            raise UsageError(
                f"operator {name!r}: {type(function).__name__} uses event time, but the flow has "
                "none: give the flow an event time, or use processing time"
            )

    def open(self) -> None:
        try:
            self._function.open(Runtime(self.name, self.outputs, self._key_fields))
        except Exception as error:
            raise self._failure("open", error) from error

    def close(self) -> None:
        try:
            self._function.close()
        except Exception as error:
            raise self._failure("close", error) from error

    def on_rows(self, key: Key, events: Sequence[Event]) -> None:
        function, ctx = self._function, self._enter(key)
        methods = [getattr(function, each) for each in function._methods]
        at = 0
        try:
            for time, row, at in events:
                ctx.timestamp = time
                result = methods[at](row, ctx)
                if result is not None:
                    for made in rows_of(result):
                        key.emit(made)
        except PoundlockError:
            raise
        except Exception as error:
            raise self._failure(function._methods[at], error) from error
        self._leave(key)

    def on_timer(self, key: Key, timer: Timer, domain: Domain) -> None:
        ctx = self._enter(key)
        if timer.tag == TTL:
            self._sweep(key, domain)
            return
        ctx.timestamp, ctx.domain = timer.time, domain.value
        try:
            result = self._function.on_timer(timer.time, ctx)
            for made in rows_of(result):
                key.emit(made)
        except PoundlockError:
            raise
        except Exception as error:
            raise self._failure("on_timer", error) from error
        self._leave(key)

    def _enter(self, key: Key) -> Context:
        ctx = self._context
        ctx._enter(key)
        ctx.key = row_type(self._key_fields)(key.value)
        ctx.emit = key.emit
        self._page._state = key.shared
        return ctx

    def _leave(self, key: Key) -> None:
        """Delete the expiry timers of a key without state, so that the key can be deleted."""
        if self._swept and not key.state:
            for domain in self.domains:
                for timer in key.timers(domain):
                    if timer.tag == TTL:
                        key.delete_timer(timer.time, TTL, domain)

    def _sweep(self, key: Key, domain: Domain) -> None:
        """Remove expired state, and set a timer for the state that expires next."""
        now = key.clock.of(domain)
        times = [each.sweep(now) for each in self._swept if each.swept is domain]
        left = [time for time in times if time is not None]
        if left:
            key.set_timer(min(left), TTL, domain)

    def _failure(self, method: str, error: Exception) -> PoundlockError:
        return user_error(f"{type(self._function).__name__}.{method}", error)


class CoProcessOperator(ProcessOperator):
    """Runs a function of two inputs: `Event.input` is 0 or 1."""

    takes = CoProcessFunction


class BroadcastProcessOperator(ProcessOperator):
    """Runs a function of keyed rows and broadcast rows, which arrive in `on_broadcast`."""

    takes = BroadcastProcessFunction
    _function: BroadcastProcessFunction

    def on_broadcast(self, shared: dict[str, Any], event: Event) -> None:
        self._context._leave()
        self._page._state = shared
        states = self._context.broadcast
        for state in states.values():
            state.writable = True
        try:
            self._function.process_broadcast(event.row, BroadcastContext(event.time, states))
        except PoundlockError:
            raise
        except Exception as error:
            raise self._failure("process_broadcast", error) from error
        finally:
            for state in states.values():
                state.writable = False


def _declared_timers(function: _Function, domain: Domain) -> frozenset[Domain]:
    timers = function.timers
    if timers is None:
        # With timers of processing time, Spark runs batches without end. So declare them only for a
        # function that has an on_timer.
        sets_none = type(function).on_timer is _Function.on_timer
        return frozenset() if sets_none and domain is Domain.PROCESSING else frozenset({domain})
    try:
        return frozenset(map(Domain, [timers] if isinstance(timers, str) else timers))
    except ValueError:
        raise UsageError(
            f'{type(function).__name__} has timers = {timers!r}: write "event", "processing", or both '
            "in a tuple"
        ) from None


_MANY = (GeneratorType, list)
_ONE = (tuple, str, bytes, Mapping)


def rows_of(result: Any) -> Iterable[Any]:
    """Return the rows in the result of a user's function: None, one row, or an iterable of rows."""
    if isinstance(result, _MANY):  # first, because it is common and fast to test
        return result
    if result is None:
        return ()
    if isinstance(result, _ONE) or not isinstance(result, Iterable):
        return (result,)
    return result
