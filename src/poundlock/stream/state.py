"""State that a function declares and uses as attributes: plain data of the key that is worked on.

    class Counter(ProcessFunction):
        seen = ValueState(default=0)
        kinds = MapState(ttl="1 hour")

A declaration is also the handle. An operator gives its function copies of them (`attach`), so that two
functions of one class have nothing in common, and points them all at the current key, by a `Scope`.

What is kept is the bare value under the attribute's name; with a time to live, `[time, value]` for each
value, list element and map entry.
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
    """Stands where a key's state will be, and says so to whoever comes too early."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self[name]

    def __getitem__(self, name: str) -> Any:
        raise UsageError(
            "state was used where there is no key: use it in the methods that take a row or a timer, "
            "through the attribute of the function"
        )

    def __contains__(self, name: str) -> bool:
        return self[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self[name]


_NOWHERE: Any = _Nowhere()


class Scope:
    """What state handles look at now: the key that is worked on, and the time."""

    __slots__ = ("_armed", "_key", "_state", "domain", "now", "timestamp", "watermark")

    timestamp: int  # of the row or the timer
    watermark: int
    now: int
    domain: str | None  # the clock of the timer that is handled

    def __init__(self) -> None:
        self._key = self._state = _NOWHERE
        self._armed: dict[Domain, int] = {}  # when the key is woken to remove what expires
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
        """Return the time that a time to live goes by. In event time the rows themselves move it."""
        if domain is Domain.PROCESSING:
            return self.now
        if self.domain == Domain.PROCESSING.value:
            return self.watermark
        return max(self.timestamp, self.watermark)

    def _arm(self, domain: Domain, time: int) -> None:
        """See that the key is woken to remove what expires: by one timer, which may come too early."""
        key, at = self._key, self._armed.get(domain)
        if at is None:
            at = next((each.time for each in key.timers(domain) if each.tag == TTL), END)
        if time < at:
            key.delete_timer(at, TTL, domain)
            key.set_timer(time, TTL, domain)
            at = time
        self._armed[domain] = at


class State(ABC):
    """What all kinds of state share: a name, the columns of a row that is kept, and a time to live.

    `fields`: a `Row` is kept without the names of its columns. Give them, and it is a row again.
    `ttl`: how long after it was written a value is expired, or with `refresh="on_read_and_write"` read.
    `time`: by which clock, "processing" or "event". In event time a value is expired for a row that is
    `ttl` or more later than the one that wrote it, and for all once the watermark is.
    `expired`: "hide" one as if it had never been, or raise `StateExpired` ("error") when one is read.
    What is hidden is also removed, by a timer of our own, from a key that has gone silent. With "error"
    it stays until it is written or cleared, or nobody would be told.
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
        self._given(self._fields)  # two columns of one name are found here
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
        """The clock of the timer that removes what has expired, if there is one."""
        return None if self._error else self.expires

    def clear(self) -> None:
        self._put(None)

    def _put(self, living: Any) -> None:
        """Keep this and nothing else. A key that keeps nothing can be forgotten."""
        if living:
            self._scope._state[self.name] = living
        else:
            self._scope._state.pop(self.name, None)

    @abstractmethod
    def sweep(self, now: int) -> int | None:
        """Remove what has expired. Return when the next will."""

    def _stamped(self, value: Any) -> Any:
        """Return a value as it is kept: a row as the list of its values, which is short as bytes.

        With a time to live, also when that began.
        """
        if self._fields is not None and value is not None:
            value = list(shaped(value, self._fields))
        elif isinstance(value, Row):
            raise UsageError(
                f"state {self.name!r} was given a row, whose names would be lost: declare it with "
                f"fields={value._fields!r}, or keep row.as_dict()"
            )
        if self._ttl is None:
            return value
        now = self._scope._time(self._domain)
        if not self._error:
            self._scope._arm(self._domain, now + self._ttl)
        return [now, value]

    def _given(self, value: Any) -> Any:
        """Return a kept value as the user sees it."""
        if self._fields is None or value is None:
            return value
        return row_type(self._fields)(value)

    def _living(self, stamped: list[Any]) -> bool:
        """Say whether a kept `[time, value]` may be read, and note that it was."""
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
        return self._given(value)

    def _write(self, value: Any) -> None:
        self._scope._state[self.name] = self._stamped(value)

    def _before(self) -> Any:
        """Return the value that another is to be added to. An expired one is replaced, not read."""
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
                f"default={default!r} could be changed, and with it every key's: use ListState or "
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
            self.clear()  # nothing would be read differently, and the key can be forgotten
        else:
            self._write(value)


class ReducingState(_Single):
    """The values added so far, made one by `function(one, other)`."""

    def __init__(self, function: Callable[[Any, Any], Any], **options: Any) -> None:
        super().__init__(**options)
        if not callable(function):
            raise UsageError(f"function={function!r}: give a function of two values")
        self._function = function

    def add(self, value: Any) -> None:
        before = self._before()
        self._write(value if before is _ABSENT else self._function(before, value))

    def get(self) -> Any:
        """Return what the values have become, or None if there are none."""
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
    """Many values per key, in the order in which they were added."""

    def add(self, value: Any) -> None:
        value = self._stamped(value)
        self._scope._state.setdefault(self.name, []).append(value)

    def add_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.add(value)

    def update(self, values: Iterable[Any]) -> None:
        """Put these values in the place of all that there were."""
        self._put([self._stamped(value) for value in values])

    def __iter__(self) -> Iterator[Any]:
        return map(self._given, self._read())

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
    """A dictionary per key. What it returns for a loop is a copy: it may be changed meanwhile."""

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
        return self._given(value)

    def __contains__(self, key: Any) -> bool:
        return self.get(key, _ABSENT) is not _ABSENT

    def __setitem__(self, key: Any, value: Any) -> None:
        self._scope._state.setdefault(self.name, {})[key] = self._stamped(value)

    def __delitem__(self, key: Any) -> None:
        entries = dict(self._scope._state.get(self.name, {}))
        del entries[key]
        self._put(entries)

    def remove(self, key: Any) -> None:
        """Forget a key, if it is there."""
        if key in self._scope._state.get(self.name, ()):
            del self[key]

    def items(self) -> list[tuple[Any, Any]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return [(key, self._given(value)) for key, value in self._read().items()]

    def keys(self) -> list[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return list(self._read())

    def values(self) -> list[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return [self._given(value) for value in self._read().values()]

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
    """Values that belong to no key: each page of keys has a list of its own, which its keys share."""

    def __init__(self, *, fields: Sequence[str] | None = None) -> None:
        super().__init__(fields=fields)


class BroadcastState(MapState):
    """A dictionary that every key sees and that only broadcast rows change.

    Each page of keys holds a copy. They are the same because each page is given the same rows.
    """

    writable = False

    def __init__(self, *, fields: Sequence[str] | None = None) -> None:
        super().__init__(fields=fields)

    def _stamped(self, value: Any) -> Any:
        self._check()
        return super()._stamped(value)

    def _put(self, living: Any) -> None:
        self._check()
        super()._put(living)

    def _check(self) -> None:
        if not self.writable:
            raise UsageError(
                f"broadcast state {self.name!r} was changed by the rows of one key, and its copies "
                "would differ: change it in process_broadcast alone"
            )


class UnionListState(ListState):
    """Refused: Flink hands the lists of all tasks to each one when it restores."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise UsageError(
            "union list state cannot be had: a page of keys is restored on its own and sees only its "
            "own list. Use BroadcastState for what every key must see, or OperatorListState for a list "
            "per page"
        )


def attach(function: Any, scope: Scope, page: Scope) -> list[State]:
    """Give a function handles of its own for the states it declares, and return them.

    They are declared in the class or set in `__init__`, and are named as the attribute is. Those that
    belong to no key look at the page.
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
