"""State of process functions: declared as attributes, with a value for each key.

    class Counter(ProcessFunction):
        seen = ValueState(default=0)
        kinds = MapState(ttl="1 hour")

A declaration is also the handle. An operator gives its function copies of the handles (`attach`), so
that two functions of one class share nothing. A `Scope` points the handles at the current key.

A key's state has each value under the attribute's name. With a time to live, each value, list element
and map entry is kept as `[time, value]`. A page is the keys of one part of an operator, which are
read and written together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from copy import copy
from typing import Any

from poundlock.errors import StateExpired, UsageError
from poundlock.stream.operator import Key
from poundlock.stream.rows import Row, row_type, shaped
from poundlock.stream.times import BEGINNING, END, Domain, Duration, milliseconds

TTL = "__ttl__"  # the tag of the timer that removes what has expired
_ABSENT: Any = object()


class _Nowhere:
    """Replaces the state while there is no key. Every use of it raises an error."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self[name]

    def __getitem__(self, name: str) -> Any:
        raise UsageError(
            "state was used where there is no key: use it only in the methods that take a row or a "
            "timer, through the attribute of the function"
        )

    def __contains__(self, name: str) -> bool:
        return self[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self[name]


_NOWHERE: Any = _Nowhere()


class Scope:
    """The current key and time, which the state handles read."""

    __slots__ = ("_armed", "_key", "_state", "domain", "now", "timestamp", "watermark")

    timestamp: int  # of the row or the timer
    watermark: int
    now: int
    domain: str | None  # in a timer, its clock

    def __init__(self) -> None:
        self._key = self._state = _NOWHERE
        self._armed: dict[Domain, int] = {}  # the times of the timers that remove expired state
        self.timestamp = self.watermark = BEGINNING
        self.now = 0
        self.domain = None

    def _enter(self, key: Key) -> None:
        self._key, self._state = key, key.state
        self.watermark, self.now = key.clock
        self.domain = None
        if self._armed:
            self._armed = {}

    def _leave(self) -> None:
        self._key = self._state = _NOWHERE

    def _time(self, domain: Domain) -> int:
        """Return the current time for a time to live. In event time, each row advances it."""
        if domain is Domain.PROCESSING:
            return self.now
        if self.domain == Domain.PROCESSING.value:
            return self.watermark
        return max(self.timestamp, self.watermark)

    def _arm(self, domain: Domain, time: int) -> None:
        """Ensure that a timer removes expired state. There is one timer, which may be early."""
        key, at = self._key, self._armed.get(domain)
        if at is None:
            at = next((each.time for each in key.timers(domain) if each.tag == TTL), END)
        if time < at:
            key.delete_timer(at, TTL, domain)
            key.set_timer(time, TTL, domain)
            at = time
        self._armed[domain] = at


class State(ABC):
    """The base of all kinds of state, with the options that they share.

    `fields`: the columns of a `Row` that is kept, which is stored without its names.
    `ttl`: the time to live. It starts when a value is written; with `refresh="on_read_and_write"` it
    starts again when the value is read.
    `time`: the clock of the time to live, "processing" or "event". In event time, a value is expired
    for rows that are at least `ttl` later than the row that wrote it. Once the watermark is that late,
    it is expired for all rows.
    `expired`: "hide" treats an expired value as absent; "error" raises `StateExpired` when it is read.
    A timer removes hidden values, even if no more rows come for the key. With "error" an expired value
    stays until it is written or cleared.
    """

    name = "state"
    _scope = Scope()  # until an operator gives another

    def __init__(
        self,
        *,
        fields: Sequence[str] | None = None,
        ttl: Duration | None = None,
        refresh: str = "on_write",
        expired: str = "hide",
        time: str = "processing",
    ) -> None:
        self._fields = tuple(fields) if fields else None
        self._restore(self._fields)  # raises for duplicate columns
        _one_of("refresh", refresh, ("on_write", "on_read_and_write"))
        _one_of("expired", expired, ("hide", "error"))
        _one_of("time", time, tuple(each.value for each in Domain))
        self._ttl: Any = None if ttl is None else milliseconds(ttl, "ttl", least=1)
        self._on_read = refresh == "on_read_and_write"
        self._error = expired == "error"
        self._domain = Domain(time)

    @property
    def expires(self) -> Domain | None:
        """The clock of the time to live, if there is one."""
        return None if self._ttl is None else self._domain

    @property
    def swept(self) -> Domain | None:
        """The clock of the timer that removes expired values, if there is one."""
        return None if self._error else self.expires

    def clear(self) -> None:
        self._put(None)

    def _put(self, living: Any) -> None:
        """Replace the state. If it is empty, remove it, so that the key can be deleted."""
        if living:
            self._scope._state[self.name] = living
        else:
            self._scope._state.pop(self.name, None)

    @abstractmethod
    def sweep(self, now: int) -> int | None:
        """Remove expired values. Return when the next one expires."""

    def _stamp(self, value: Any) -> Any:
        """Return a value as it is stored: a row as a list, and the time if there is a TTL."""
        if self._fields is not None and value is not None:
            value = list(shaped(value, self._fields))
        elif isinstance(value, Row):
            raise UsageError(
                f"state {self.name!r} cannot keep a row without losing its column names: declare it "
                f"with fields={value._fields!r}, or keep row.as_dict()"
            )
        if self._ttl is None:
            return value
        now = self._scope._time(self._domain)
        if not self._error:
            self._scope._arm(self._domain, now + self._ttl)
        return [now, value]

    def _restore(self, value: Any) -> Any:
        """Return a stored value as user code sees it."""
        if self._fields is None or value is None:
            return value
        return row_type(self._fields)(value)

    def _living(self, stamped: list[Any]) -> bool:
        """Return whether a stored `[time, value]` is alive, and refresh it if reads do."""
        now, until = self._scope._time(self._domain), self._until(stamped)
        if until <= now:
            if self._error:
                raise StateExpired(
                    f"state {self.name!r} was read {now - until} ms after it expired: clear it or "
                    "write it first, or declare it with expired='hide'"
                )
            return False
        if self._on_read and now > stamped[0]:
            stamped[0] = now
        return True

    def _until(self, stamped: list[Any]) -> int:
        return stamped[0] + self._ttl


def _one_of(what: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise UsageError(f"{what}={value!r}: give {' or '.join(map(repr, allowed))}")


class _Single(State):
    """State that is one value."""

    def _read(self) -> Any:
        """Return the value, or `_ABSENT`."""
        state = self._scope._state
        value = state.get(self.name, _ABSENT)
        if value is _ABSENT:
            return _ABSENT
        if self._ttl is not None:
            if not self._living(value):
                del state[self.name]
                return _ABSENT
            value = value[1]
        return self._restore(value)

    def _write(self, value: Any) -> None:
        self._scope._state[self.name] = self._stamp(value)

    def _before(self) -> Any:
        """Return the value before an addition. Remove an expired one without an error."""
        if self._ttl is not None:
            self.sweep(self._scope._time(self._domain))
        return self._read()

    def sweep(self, now: int) -> int | None:
        stamped = self._scope._state.get(self.name)
        if stamped is None:
            return None
        until = self._until(stamped)
        if until > now:
            return until
        self.clear()
        return None


class ValueState(_Single):
    """One value per key: read and write `.value`."""

    def __init__(self, *, default: Any = None, **options: Any) -> None:
        super().__init__(**options)
        if isinstance(default, list | dict | set | bytearray):
            raise UsageError(
                f"default={default!r} is mutable, so all keys would share it: use ListState or "
                "MapState, or set the value when it is None"
            )
        self.default = default

    @property
    def value(self) -> Any:
        value = self._read()
        return self.default if value is _ABSENT else value

    @value.setter
    def value(self, value: Any) -> None:
        if value is None and self.default is None:
            self.clear()  # reads are the same, and the key can be deleted
        else:
            self._write(value)


class ReducingState(_Single):
    """The values added so far, combined by `function(one, other)`."""

    def __init__(self, function: Callable[[Any, Any], Any], **options: Any) -> None:
        super().__init__(**options)
        if not callable(function):
            raise UsageError(f"function={function!r}: give a function that takes two arguments")
        self._function = function

    def add(self, value: Any) -> None:
        before = self._before()
        self._write(value if before is _ABSENT else self._function(before, value))

    def get(self) -> Any:
        """Return the combined value, or None if no value was added."""
        value = self._read()
        return None if value is _ABSENT else value


class AggregatingState(_Single):
    """The values added so far, as the accumulator of an `Aggregate`."""

    def __init__(self, aggregate: Any, **options: Any) -> None:
        super().__init__(**options)
        for name in ("create", "add", "result"):
            if not hasattr(aggregate, name):
                raise UsageError(f"aggregate={aggregate!r} has no {name}: give an Aggregate")
        self._aggregate = aggregate

    def add(self, value: Any) -> None:
        before = self._before()
        if before is _ABSENT:
            before = self._aggregate.create()
        self._write(self._aggregate.add(before, value))

    def get(self) -> Any:
        """Return the result, or None if nothing was added."""
        value = self._read()
        return None if value is _ABSENT or value is None else self._aggregate.result(value)


class ListState(State):
    """A list of values per key, in the order of their addition."""

    def add(self, value: Any) -> None:
        value = self._stamp(value)
        self._scope._state.setdefault(self.name, []).append(value)

    def add_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.add(value)

    def update(self, values: Iterable[Any]) -> None:
        """Replace all values by these."""
        self._put([self._stamp(value) for value in values])

    def __iter__(self) -> Iterator[Any]:
        return map(self._restore, self._read())

    def __len__(self) -> int:
        return len(self._read())

    def _read(self) -> list[Any]:
        values = self._scope._state.get(self.name, [])
        if self._ttl is None:
            return values
        living = [stamped for stamped in values if self._living(stamped)]
        self._put(living)
        return [value for _, value in living]

    def sweep(self, now: int) -> int | None:
        values = self._scope._state.get(self.name, ())
        living = [stamped for stamped in values if self._until(stamped) > now]
        self._put(living)
        return min(map(self._until, living), default=None)


class MapState(State, MutableMapping[Any, Any]):
    """A dictionary per key. Loops run over a copy, so that they may change the state."""

    def __getitem__(self, key: Any) -> Any:
        value = self.get(key, _ABSENT)
        if value is _ABSENT:
            raise KeyError(key)
        return value

    def get(self, key: Any, default: Any = None) -> Any:
        entries = self._scope._state.get(self.name)
        if entries is None or key not in entries:
            return default
        value = entries[key]
        if self._ttl is not None:
            if not self._living(value):
                del self[key]
                return default
            value = value[1]
        return self._restore(value)

    def __contains__(self, key: Any) -> bool:
        return self.get(key, _ABSENT) is not _ABSENT

    def __setitem__(self, key: Any, value: Any) -> None:
        self._scope._state.setdefault(self.name, {})[key] = self._stamp(value)

    def __delitem__(self, key: Any) -> None:
        entries = dict(self._scope._state.get(self.name, {}))
        del entries[key]
        self._put(entries)

    def remove(self, key: Any) -> None:
        """Remove a key, if it exists."""
        if key in self._scope._state.get(self.name, ()):
            del self[key]

    def items(self) -> list[tuple[Any, Any]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return [(key, self._restore(value)) for key, value in self._read().items()]

    def keys(self) -> list[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return list(self._read())

    def values(self) -> list[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return [self._restore(value) for value in self._read().values()]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._read())

    def _read(self) -> dict[Any, Any]:
        entries = self._scope._state.get(self.name, {})
        if self._ttl is None:
            return entries
        living = {key: stamped for key, stamped in entries.items() if self._living(stamped)}
        self._put(living)
        return {key: value for key, (_, value) in living.items()}

    def sweep(self, now: int) -> int | None:
        entries = self._scope._state.get(self.name, {})
        living = {key: each for key, each in entries.items() if self._until(each) > now}
        self._put(living)
        return min(map(self._until, living.values()), default=None)


class OperatorListState(ListState):
    """A list that belongs to no key. Each page of keys has one, which its keys share."""

    def __init__(self, *, fields: Sequence[str] | None = None) -> None:
        super().__init__(fields=fields)


class BroadcastState(MapState):
    """A dictionary that every key can read and that only broadcast rows can change.

    Each page of keys has a copy. The copies are equal because all pages get the same broadcast rows.
    """

    writable = False

    def __init__(self, *, fields: Sequence[str] | None = None) -> None:
        super().__init__(fields=fields)

    def _stamp(self, value: Any) -> Any:
        self._check()
        return super()._stamp(value)

    def _put(self, living: Any) -> None:
        self._check()
        super()._put(living)

    def _check(self) -> None:
        if not self.writable:
            raise UsageError(
                f"broadcast state {self.name!r} was changed while the rows of one key were processed, "
                "so its copies would differ: change it only in process_broadcast"
            )


class UnionListState(ListState):
    """Not supported. On a restore, Flink gives each task the lists of all tasks."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise UsageError(
            "union list state is not supported: a page of keys is restored alone and sees only its "
            "own list. Use BroadcastState for what every key must see, or OperatorListState for a list "
            "per page"
        )


def attach(function: Any, scope: Scope, page: Scope) -> list[State]:
    """Give a function its own handles for the states that it declares, and return them.

    States are attributes of the class or set in `__init__`, and have the attribute's name. States that
    belong to no key use the scope of the page.
    """
    declared: dict[str, Any] = {}
    for kind in reversed(type(function).__mro__):
        declared.update(vars(kind))
    declared.update(vars(function))
    handles: list[State] = []
    for name, state in declared.items():
        if isinstance(state, State):
            handle = copy(state)
            handle.name = name
            handle._scope = page if isinstance(state, BroadcastState | OperatorListState) else scope
            setattr(function, name, handle)
            handles.append(handle)
    return handles
