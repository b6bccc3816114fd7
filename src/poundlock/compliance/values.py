"""Values of each of Spark's types: their extremes, and more that Hypothesis makes.

A value is written down so that Python can hold all of them, and none is equal to another:

    string            its bytes, which need not be UTF-8
    date              days since 1970
    timestamp         microseconds since 1970; of timestamp_ntz, as if it were in UTC
    intervals         microseconds, or months
    array, map        a list, and a list of pairs
    struct            a dictionary
    variant           its JSON text
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import json
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

D = decimal.Decimal
SECOND, DAY = 1_000_000, 86_400_000_000
_EPOCH = dt.date(1970, 1, 1).toordinal()
FIRST_DAY, LAST_DAY = dt.date.min.toordinal() - _EPOCH, dt.date.max.toordinal() - _EPOCH
FIRST_TIME, LAST_TIME = FIRST_DAY * DAY, (LAST_DAY + 1) * DAY - 1
# Zones whose offsets change, had seconds long ago, or are no whole hours.
ZONES = ("Europe/Berlin", "America/New_York", "Asia/Kolkata")


def at(text: str) -> int:
    """Return the microseconds of a time in UTC."""
    return (dt.datetime.fromisoformat(text) - dt.datetime(1970, 1, 1)) // dt.timedelta(0, 0, 1)


def on(text: str) -> int:
    return dt.date.fromisoformat(text).toordinal() - _EPOCH


# --- types ---


@dataclass(frozen=True)
class Type:
    """One of Spark's types, with its own extremes. The parts of a nested type are in `parts`."""

    name: str  # boolean, int, ..., array, map, struct
    parts: Mapping[str, Type] = field(default_factory=dict)
    precision: int = 0  # of a decimal
    scale: int = 0

    @property
    def ddl(self) -> str:
        """The type of the column in the file that Spark reads."""
        inner = list(self.parts.values())
        if self.name == "array":
            return f"array<{inner[0].ddl}>"
        if self.name == "map":
            return f"map<{inner[0].ddl},{inner[1].ddl}>"
        if self.name == "struct":
            return f"struct<{','.join(f'{name}:{it.ddl}' for name, it in self.parts.items())}>"
        if self.name == "decimal":
            return f"decimal({self.precision},{self.scale})"
        return {"variant": "string", "time": "bigint"}.get(self.name, self.name)

    @property
    def has_time(self) -> bool:
        """Whether it is or contains a date or a time, whose text may depend on the time zone."""
        own = self.name in ("date", "timestamp", "timestamp_ntz")
        return own or any(it.has_time for it in self.parts.values())

    def arrow(self, *, plain: bool) -> pa.DataType:
        """Return the Arrow type; if `plain`, the one that takes values as they are written here."""
        inner = [it.arrow(plain=plain) for it in self.parts.values()]
        if self.name == "array":
            return pa.list_(inner[0])
        if self.name == "map":
            return pa.map_(*inner)
        if self.name == "struct":
            return pa.struct(list(zip(self.parts, inner, strict=True)))
        if self.name == "decimal":
            return pa.decimal128(self.precision, self.scale)
        types = _PLAIN if plain else {**_PLAIN, **_ARROW}
        return types[self.name]

    def normal(self, value: Any) -> Any:
        """Return a form that is equal for equal values only: NaN equals itself, and 0.0 not -0.0."""
        if value is None:
            return None
        inner = list(self.parts.values())
        if self.name == "array":
            return [inner[0].normal(it) for it in value]
        if self.name == "map":
            pairs = [(inner[0].normal(key), inner[1].normal(it)) for key, it in value]
            return sorted(pairs, key=repr)
        if self.name == "struct":
            return {name: it.normal(value.get(name)) for name, it in self.parts.items()}
        if self.name in ("float", "double"):
            return "NaN" if math.isnan(value) else struct.pack(">d", value)
        if self.name == "decimal":
            return f"{value:f}"
        if self.name == "variant":
            return value.value if isinstance(value, Parsed) else _numbers(read_json(value))
        return value

    def of_json(self, found: Any) -> Any:
        """Return the value that JSON text has, as `read_json` gives it."""
        if found is None:
            return None
        inner = list(self.parts.values())
        if self.name == "array":
            return [inner[0].of_json(it) for it in found]
        if self.name == "map":
            return [(inner[0].of_json(key), inner[1].of_json(it)) for key, it in found.items()]
        if self.name == "struct":
            return {name: it.of_json(found.get(name)) for name, it in self.parts.items()}
        if self.name == "variant":
            return Parsed(_numbers(found))
        return self.of_text(str(found) if not isinstance(found, bool) else str(found).lower())

    def of_text(self, text: str) -> Any:
        """Return the value that a plain text has, as Spark writes it."""
        if self.name == "boolean":
            return {"true": True, "false": False}[text]
        if self.name in ("float", "double"):
            words = {"Infinity": "inf", "-Infinity": "-inf"}
            number = float(words.get(text, text))
            return single(number) if self.name == "float" else number
        if self.name == "decimal":
            return D(text)
        if self.name in _INTEGERS:
            return int(text)
        if self.name == "string":
            return text.encode("utf-8", "surrogateescape")
        if self.name == "date":
            return days_of(text)
        if self.name in ("timestamp", "timestamp_ntz"):
            return micros_of(text, zoned=self.name == "timestamp")
        if self.name == "binary":  # as in JSON
            return base64.b64decode(text, validate=True)
        if self.name.startswith("interval"):
            return interval_of(text)
        raise NotImplementedError(self.name)


def single(number: float) -> float:
    """Round a number to the nearest float, as a reader of a float does."""
    try:
        return struct.unpack("f", struct.pack("f", number))[0]
    except OverflowError:
        return math.copysign(math.inf, number)


class Number(str):
    """A number of JSON as it was written."""


def read_json(text: str | bytes) -> Any:
    """Read JSON without rounding: a number stays text, as a `Number`."""
    return json.loads(text, parse_float=Number, parse_int=Number)


@dataclass(frozen=True)
class Parsed:
    """A variant that was read."""

    value: Any


def _numbers(found: Any) -> Any:
    """Return what `read_json` gave, with decimals for numbers."""
    if isinstance(found, Mapping):
        return {name: _numbers(it) for name, it in found.items()}
    if isinstance(found, list):
        return [_numbers(it) for it in found]
    return D(found) if isinstance(found, Number) else found


_INTEGERS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
_PLAIN: Mapping[str, pa.DataType] = {
    "boolean": pa.bool_(),
    **{name: getattr(pa, f"int{bits}")() for name, bits in _INTEGERS.items()},
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.binary(),
    "binary": pa.binary(),
    "variant": pa.string(),
    "date": pa.int32(),
    "timestamp": pa.int64(),
    "timestamp_ntz": pa.int64(),
    "time": pa.int64(),
    "interval day to second": pa.int64(),
    "interval year to month": pa.int32(),
}
_ARROW: Mapping[str, pa.DataType] = {
    "string": pa.string(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
_DATE = r"([+-]?\d{4,})-(\d\d)-(\d\d)"
_TIME = _DATE + r"[T ](\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?"
_OFFSET = r"(?:(Z)|([+-])(\d\d):?(\d\d)(?::?(\d\d))?)"


def days_of(text: str) -> int:
    """Return the days of a date as text, of any year."""
    found = re.fullmatch(_DATE, text)
    if found is None:
        raise ValueError(f"no date: {text}")
    return _days(*(int(part) for part in found.groups()))


def _days(year: int, month: int, day: int) -> int:
    # Python has only the years 1 to 9999, and the calendar repeats after 400.
    cycles, within = divmod(year - 2000, 400)
    return dt.date(2000 + within, month, day).toordinal() - _EPOCH + cycles * 146_097


def micros_of(text: str, *, zoned: bool) -> int:
    """Return the microseconds of a time as text, of any year, with or without an offset."""
    found = re.fullmatch(_TIME + (_OFFSET if zoned else ""), text)
    if found is None:
        raise ValueError(f"no time{' with an offset' if zoned else ''}: {text}")
    year, month, day, hour, minute, second = (int(part) for part in found.groups()[:6])
    seconds = (_days(year, month, day) * 24 + hour) * 3600 + minute * 60 + second
    if zoned and found[8] is None:
        offset = int(found[10]) * 3600 + int(found[11]) * 60 + int(found[12] or 0)
        seconds += offset if found[9] == "-" else -offset
    return seconds * SECOND + int((found[7] or "0").ljust(6, "0"))


def interval_of(text: str) -> int:
    """Return the microseconds, or the months, of an interval as Spark writes it."""
    if found := re.fullmatch(r"INTERVAL '(-?)(\d+)-(\d+)' YEAR TO MONTH", text):
        return (-1 if found[1] else 1) * (int(found[2]) * 12 + int(found[3]))
    time = r"(-?)(\d+) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?"
    found = re.fullmatch(f"INTERVAL '{time}' DAY TO SECOND", text)
    if found is None:
        raise ValueError(f"no interval: {text}")
    days, hours, minutes, seconds = (int(part) for part in found.groups()[1:5])
    micros = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    micros = micros * SECOND + int((found[6] or "0").ljust(6, "0"))
    return -micros if found[1] else micros


# --- what is tried ---


@dataclass(frozen=True)
class Kind:
    """A column of the frame: a type, and the values that are tried."""

    type: Type
    extremes: Sequence[Any]
    more: st.SearchStrategy[Any]
    sql: str = "{}"  # makes the column of what was read

    def write(self, values: Sequence[Any]) -> pa.Array:
        """Return the values as an Arrow array, with texts that need not be UTF-8."""
        plain = pa.array(values, self.type.arrow(plain=True))
        target = self.type.arrow(plain=False)
        return plain.cast(options=pc.CastOptions(target, allow_invalid_utf8=True))

    def read(self, column: Any) -> list[Any]:
        """Return the values of an Arrow column, whoever wrote it."""
        return column.cast(self.type.arrow(plain=True), safe=False).to_pylist()


def _whole(bits: int) -> Kind:
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1
    name = next(name for name, it in _INTEGERS.items() if it == bits)
    rounds = [sign * 10**digits for digits in (9, 18) for sign in (1, -1) if 10**digits < high]
    extremes = [low, low + 1, -1, 0, 1, high, *rounds]
    return Kind(Type(name), extremes, st.integers(low, high))


def _floating(name: str, smallest: float, normal: float, largest: float) -> Kind:
    signless = [0.0, smallest, normal, largest, math.inf, single(0.1), 1.0, single(1e-7)]
    wide = [0.1, 1e16 + 2, 123456789012345.67] if name == "double" else []
    both = [sign * it for it in signless for sign in (1.0, -1.0)]
    width = 64 if name == "double" else 32
    return Kind(Type(name), [math.nan, *both, *wide], st.floats(width=width))


def _decimal(precision: int, scale: int) -> Kind:
    most = 10**precision - 1

    def make(number: int) -> decimal.Decimal:
        digits = tuple(int(digit) for digit in str(abs(number)))
        return D((int(number < 0), digits, -scale))

    edges = [make(number) for number in (-most, -1, 0, 1, 10 ** (precision - 1), most)]
    type_ = Type("decimal", precision=precision, scale=scale)
    return Kind(type_, edges, st.integers(-most, most).map(make))


TEXTS = [
    "",
    " ",
    "abc   ",
    "a",
    "A",
    "ä",
    "a\u0308",
    "null",
    "NULL",
    "\\N",
    "__HIVE_DEFAULT_PARTITION__",
    "true",
    "0",
    "-0.0",
    '"',
    "'",
    "\\",
    "a,b;c\td",
    "line\nline\r\nline\rend",
    "\u2028\u2029\x85\x0b\x0c",
    "\ufeffbom",
    "\ufffd\ufffe\uffff",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\U0010ffff",
    "\u202eright to left",
    "\x00",
    "a\x00b",
    "\x01\x1f\x7f\x80\x9f",
    "2026-10-25T02:30:00",
    "{}",
    "%41/..=:",
    "x" * 20_000,
]
# A lone byte, a surrogate as Java has it, a cut and an overlong sequence.
NO_TEXTS = [b"\xff", b"a\xed\xa0\x80b", b"ok\xe2\x82", b"\xc0\x80", b"\x80" * 9]
BYTES = [
    b"",
    b"\x00",
    bytes(range(256)),
    b"\xff\xfe",
    b"text",
    b"\\x41",
    b"'",
    b"\n",
    b"z" * 20_000,
]
MOMENTS = [
    at(text)
    for text in (
        "1970-01-01 00:00:00",
        "1969-12-31 23:59:59.999999",
        "1970-01-01 00:00:00.000001",
        "1850-01-01 00:00:00.000001",  # before zones had offsets of whole minutes
        "1883-11-18 17:00:00",
        "1892-12-31 23:59:59.999999",
        "1893-03-31 23:06:31.999999",
        "1905-12-31 18:30:00",
        "1942-09-01 00:00:00",
        "1945-05-24 00:30:00",
        "1947-07-06 00:30:00",
        "1582-10-04 12:00:00",
        "1582-10-15 00:00:00",
        "1900-01-01 00:00:00",
        "2026-03-29 00:59:59.999999",  # the hours in which the offset changes
        "2026-03-29 01:00:00",
        "2026-03-29 01:30:00",
        "2026-03-29 02:30:00",
        "2026-10-25 00:30:00",
        "2026-10-25 01:30:00",
        "2026-10-25 02:30:00",
        "2026-03-08 06:59:59.999999",
        "2026-03-08 07:00:00",
        "2026-11-01 05:30:00",
        "2026-11-01 06:30:00",
        "2038-01-19 03:14:08",
        "2262-04-11 23:47:16.854776",
        "2024-02-29 12:34:56.123456",
        "9999-12-30 00:00:00",
    )
]
ENDS = [FIRST_TIME, FIRST_TIME + DAY, LAST_TIME - DAY, LAST_TIME]
BEYOND = [FIRST_TIME - 1, LAST_TIME + 1, at("9999-01-01 00:00:00") * 4, -(1 << 62), 1 << 62]
_DAYS_TRIED = [
    *(0, -1, FIRST_DAY, LAST_DAY, FIRST_DAY - 1, LAST_DAY + 1),
    *map(on, ("1582-10-04", "1582-10-15", "1900-02-28", "2024-02-29", "1893-04-01", "2026-10-25")),
]
_JSON = ["null", "true", '"ä\\u0000"', "[]", "{}", '{"a": [1, 2.5, null, {"b": "x"}], "": ""}', "1"]


_XML = [
    "<a>\u00e9</a>",
    '<?xml version="1.0" encoding="ISO-8859-1"?><a>\u00e9</a>',
    '<?xml version="1.0" encoding="UTF-8"?><a>\u00e9</a>',
    "text",
]


def _documents() -> st.SearchStrategy[bytes]:
    text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
    leaf = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | text
    both = st.recursive(
        leaf, lambda it: st.lists(it, max_size=3) | st.dictionaries(text, it, max_size=3)
    )
    return both.map(lambda it: json.dumps(it, ensure_ascii=False).encode())


def _texts() -> st.SearchStrategy[bytes]:
    good = st.text(max_size=30).map(str.encode)
    return st.one_of(good, good, good, st.binary(max_size=12))


_TIMES = st.one_of(st.integers(FIRST_TIME, LAST_TIME), st.sampled_from(MOMENTS))
_TEXT, _WHOLE, _MOMENT = Type("string"), Type("int"), Type("timestamp")
_UNIQUE = {"unique_by": lambda pair: pair[0], "max_size": 3}


def _pairs() -> st.SearchStrategy[Any]:
    return st.lists(st.tuples(_texts(), st.none() | st.integers(0, 9)), **_UNIQUE)  # type: ignore[arg-type]


def _meaningful_texts() -> dict[str, Kind]:
    """Return texts that have a meaning for some types of databases, and those that are variants."""
    xml = [it.encode() for it in _XML]
    ids = [b"00000000-0000-0000-0000-000000000000", b"FFFFFFFF-ffff-4fff-8FFF-ffffffffffff"]
    json_texts = [it.encode() for it in _JSON if "u0000" not in it]
    return {
        "uuid": Kind(_TEXT, ids, st.uuids(version=4).map(lambda it: str(it).encode())),
        "json": Kind(_TEXT, json_texts, _documents()),
        "xml": Kind(_TEXT, xml, st.sampled_from(xml)),
        "variant": Kind(Type("variant"), _JSON, st.integers(-9, 9).map(str), "parse_json({0})"),
    }


def _collections() -> dict[str, Kind]:
    texts = [text.encode() for text in TEXTS[:25]]
    digits = [D("0.000000000000000001"), D("12345678901234567890.123456789012345678")]
    some = _decimal(38, 18)
    deep = Type("array", {"e": Type("struct", {"m": Type("map", {"k": _TEXT, "v": _WHOLE})})})
    return {
        "array": Kind(
            Type("array", {"e": _TEXT}),
            [[], [None], [b""], [b"", None], texts, [NO_TEXTS[0]]],
            st.lists(st.none() | _texts(), max_size=4),
        ),
        "times": Kind(
            Type("array", {"e": _MOMENT}),
            [[MOMENTS[3]], MOMENTS, [None]],
            st.lists(_TIMES, max_size=4),
        ),
        "map": Kind(
            Type("map", {"k": _TEXT, "v": _WHOLE}),
            [[], [(b"a", None)], [(b"", 1), (b"b", 2)], [(NO_TEXTS[0], 1)]],
            _pairs(),
        ),
        "numbers": Kind(
            Type("array", {"e": some.type}),
            [[], [digits[0], None], [digits[1]]],
            st.lists(some.more, max_size=3),
        ),
        "deep": Kind(
            deep,
            [[], [None], [{"m": None}], [{"m": []}], [{"m": [(b"k", None)]}, None]],
            st.lists(st.none() | st.fixed_dictionaries({"m": st.none() | _pairs()}), max_size=2),
        ),
    }


def _structs() -> dict[str, Kind]:
    never_null = Type("struct", {"n": _WHOLE})
    small = st.fixed_dictionaries({"n": st.integers(-9, 9)})
    fields = {"n": st.integers(0, 9), "s": _texts(), "t": _TIMES}
    return {
        "struct": Kind(
            Type("struct", {"n": _WHOLE, "s": _TEXT, "t": _MOMENT}),
            [
                {"n": None, "s": None, "t": None},
                {"n": 1, "s": b"", "t": MOMENTS[3]},
                {"n": 1, "s": b"x", "t": MOMENTS[0]},
                {"n": -1, "s": NO_TEXTS[0], "t": None},
            ],
            st.fixed_dictionaries({name: st.none() | it for name, it in fields.items()}),
        ),
        # Null structs, whose field is never null.
        "strict": Kind(
            never_null,
            [{"n": 0}, {"n": -1}, {"n": 2**31 - 1}],
            small,
            sql="IF({0} IS NULL, NULL, named_struct('n', coalesce({0}.n, 0)))",
        ),
        "stricts": Kind(
            Type("array", {"e": never_null}),
            [[], [None], [{"n": 1}, None]],
            st.lists(st.none() | small, max_size=2),
            sql="transform({0}, e -> IF(e IS NULL, NULL, named_struct('n', coalesce(e.n, 0))))",
        ),
    }


KINDS: Mapping[str, Kind] = {
    "boolean": Kind(Type("boolean"), [True, False], st.booleans()),
    **{name: _whole(bits) for name, bits in _INTEGERS.items()},
    "float": _floating("float", 2.0**-149, 2.0**-126, (2 - 2.0**-23) * 2.0**127),
    "double": _floating("double", 5e-324, 2.0**-1022, 1.7976931348623157e308),
    "decimal10": _decimal(10, 2),
    "decimal38": _decimal(38, 0),
    "fraction38": _decimal(38, 38),
    "binary": Kind(Type("binary"), BYTES, st.binary(max_size=40)),
    "date": Kind(Type("date"), _DAYS_TRIED, st.integers(FIRST_DAY, LAST_DAY)),
    "timestamp": Kind(
        Type("timestamp"), [*MOMENTS, *ENDS, *BEYOND], st.integers(FIRST_TIME, LAST_TIME)
    ),
    "timestamp_ntz": Kind(
        Type("timestamp_ntz"), [*MOMENTS, *ENDS, *BEYOND], st.integers(FIRST_TIME, LAST_TIME)
    ),
    "daytime": Kind(
        Type("interval day to second"),
        [0, 1, -1, DAY, -DAY - 1, 10**17, -(10**17)],
        st.integers(-(10**17), 10**17),
    ),
    "yearmonth": Kind(
        Type("interval year to month"),
        [0, 1, -1, 13, 2**31 - 1, -(2**31)],
        st.integers(-(2**31), 2**31 - 1),
    ),
    "string": Kind(_TEXT, [*(text.encode() for text in TEXTS), *NO_TEXTS], _texts()),
    **_collections(),
    **_structs(),
    **_meaningful_texts(),
}


def generate(kind: Kind, count: int, chance: int) -> list[Any]:
    """Return the extremes of a kind, and `count` values that Hypothesis makes. `chance` is its seed."""
    found: list[Any] = []

    @seed(chance)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(kind.more)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return [*kind.extremes, *found]


def is_utf8(value: Any) -> bool:
    """Return whether all texts of a value are UTF-8."""
    return all(_decodes(it) for it in _leaves(value) if isinstance(it, bytes))


def _decodes(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def has_nul(value: Any) -> bool:
    """Return whether a text of a value contains a NUL."""
    return any(b"\0" in it for it in _leaves(value) if isinstance(it, bytes))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for it in value:
            yield from _leaves(it)
    else:
        yield value
