"""Redis: every shape whole, bad input named, and the move all or nothing."""

from __future__ import annotations

import pickle
import random
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pyarrow as pa
import pytest
import redis

from poundlock.core.model import Branch, Fingerprint, Namespace, Receipt, Transaction
from poundlock.core.participant import Column
from poundlock.core.protocol import BranchState
from poundlock.core.sparksql import to_json
from poundlock.errors import (
    BadRow,
    GuaranteeBroken,
    InDoubt,
    NotAuthorised,
    Rejected,
    Unavailable,
    UsageError,
)
from poundlock.servers import valkey
from poundlock.sinks import Redis
from poundlock.sinks.redis.writer import as_bytes, chunks

SPACE = Namespace.new("trial", 1_700_000_000, 1)
DONE, LOST = BranchState.COMMITTED, BranchState.ABORTED


@pytest.fixture(scope="module")
def server() -> Iterator[valkey.Valkey]:
    with valkey.running() as node:
        yield node


@pytest.fixture
def eyes(server: valkey.Valkey) -> Iterator[Any]:
    client = redis.Redis.from_url(server.address, decode_responses=True)
    client.flushall()
    yield client
    client.close()


@pytest.fixture
def make(server: valkey.Valkey, eyes: Any) -> Any:
    return lambda **options: Redis(url=server.address, name="out", **options)


def branch(task: int = 0, *, batch: int = 0, tolerant: bool = False) -> Branch:
    return Branch(Transaction(SPACE, 1, batch, 1), "out", task, task, tolerant=tolerant)


def staged(sink: Redis, rows: Any, task: int = 0, batch: int = 0) -> Receipt:
    rows = rows if isinstance(rows, pa.RecordBatch) else pa.RecordBatch.from_pydict(rows)
    writer = pickle.loads(pickle.dumps(sink)).begin(branch(task, batch=batch))
    writer.write(rows)
    prepared = writer.prepare()
    fingerprint = Fingerprint(len(rows), 0)
    receipt = Receipt("out", prepared.id, task, fingerprint, prepared.handle)
    return Receipt.from_json(receipt.to_json())


def ours(eyes: Any) -> set[str]:
    """What is left of ours besides the witness."""
    return {key for key in eyes.keys("*poundlock*") if not key.endswith(".witness")}


def user(server: valkey.Valkey, eyes: Any, *commands: str, keys: Sequence[str] = ("*",)) -> str:
    """Give a user these rights and no others, and return the address for it."""
    rights = {"reset_keys": True, "keys": keys, "commands": ["-@all", *commands]}
    eyes.acl_setuser("app", enabled=True, passwords=["+pw"], **rights)
    return server.url.replace("//", "//app:pw@")


class TestShapes:
    def test_a_field_per_row(self, make: Any, eyes: Any) -> None:
        sink = make(hash="h", field="id", value="v")
        assert sink.commit([staged(sink, {"key": ["a", "b"], "value": ["1", "2"]})]) == [DONE]
        assert eyes.hgetall("h") == {"a": "1", "b": "2"}

    def test_null_deletes_the_field(self, make: Any, eyes: Any) -> None:
        eyes.hset("h", mapping={"a": "1", "b": "2"})
        sink = make(hash="h", field="id", value="v")
        sink.commit([staged(sink, {"key": ["a", "c"], "value": [None, "3"]})])
        assert eyes.hgetall("h") == {"b": "2", "c": "3"}

    def test_a_hash_per_key(self, make: Any, eyes: Any) -> None:
        eyes.hset("p:a", mapping={"x": "old", "z": "kept"})
        sink = make(key="id", prefix="p:", expire=100)
        rows = {"key": ["a", "b"], ".x": ["1", "2"], ".y": [None, "3"]}
        sink.commit([staged(sink, rows)])
        assert eyes.hgetall("p:a") == {"x": "1", "z": "kept"}
        assert eyes.hgetall("p:b") == {"x": "2", "y": "3"}
        assert 90 < eyes.ttl("p:b") <= 100

    def test_a_value_per_key(self, make: Any, eyes: Any) -> None:
        eyes.set("p:gone", "1")
        sink = make(key="id", prefix="p:", value="v", expire=100)
        sink.commit([staged(sink, {"key": ["a", "gone"], "value": ["x", None]})])
        assert eyes.get("p:a") == "x" and eyes.ttl("p:a") > 90
        assert eyes.get("p:gone") is None

    def test_a_list_keeps_the_order_of_a_task(self, make: Any, eyes: Any) -> None:
        sink = make(list="l", value="v")
        texts = [str(number) for number in range(30_000)]
        writer = sink.begin(branch())
        for start in range(0, 30_000, 1_000):  # more chunks than have one digit
            writer.write(pa.RecordBatch.from_pydict({"value": texts[start : start + 1_000]}))
        prepared = writer.prepare()
        receipt = Receipt("out", prepared.id, 0, Fingerprint(30_000), prepared.handle)
        assert sink.commit([receipt]) == [DONE]
        assert eyes.lrange("l", 0, -1) == texts

    def test_a_stream(self, make: Any, eyes: Any) -> None:
        sink = make(stream="s")
        sink.commit([staged(sink, {".a": ["1", "2"], ".b": ["x", None]})])
        assert [fields for _, fields in eyes.xrange("s")] == [{"a": "1", "b": "x"}, {"a": "2"}]

    def test_counters(self, make: Any, eyes: Any) -> None:
        one = make(counter="c", value="n")
        one.commit([staged(one, {"value": [1, 2, -5]}), staged(one, {"value": [10]}, task=1)])
        assert eyes.get("c") == "8"
        many = make(key="id", prefix="n:", value="n", operation="increment")
        many.commit([staged(many, {"key": ["a", "a"], "value": [0.5, 0.25]}, batch=1)])
        assert float(eyes.get("n:a")) == 0.75
        most = make(hash="totals", field="id", value="n", operation="increment")
        rows = {"key": ["a", "a"], "value": [2**62, 2**62 - 1]}
        most.commit([staged(most, rows, batch=2)])
        assert eyes.hget("totals", "a") == str(2**63 - 1)  # beyond what a Lua number holds

    def test_of_several_rows_the_greatest_wins_in_whatever_task(self, make: Any, eyes: Any) -> None:
        sink = make(hash="h", field="id", value="v", order_by="ts")
        order = [f"{number:020}" for number in (5, 9, 7)]
        first = staged(sink, {"key": ["a"] * 3, "value": ["5", "9", "7"], "order": order})
        second = staged(sink, {"key": ["a"], "value": ["8"], "order": [f"{8:020}"]}, task=1)
        assert sink.commit([second, first]) == [DONE, DONE]
        assert eyes.hgetall("h") == {"a": "9"}

    def test_bytes_stay_as_they_are(self, make: Any, server: valkey.Valkey) -> None:
        wild = bytes(range(256)) * 3
        sink = make(hash="h", field="id", value="v")
        rows = pa.RecordBatch.from_pydict(
            {"key": pa.array([wild, b""], pa.binary()), "value": pa.array([wild, b""], pa.binary())}
        )
        sink.commit([staged(sink, rows)])
        assert redis.Redis.from_url(server.address).hgetall("h") == {wild: wild, b"": b""}

    def test_more_rows_than_one_command_takes(self, make: Any, eyes: Any) -> None:
        sink = make(hash="h", field="id", value="v")
        texts = [str(number) for number in range(50_000)]
        assert sink.commit([staged(sink, {"key": texts, "value": texts})]) == [DONE]
        assert eyes.hlen("h") == 50_000
        assert not ours(eyes)


class TestProject:
    COLUMNS = {  # noqa: RUF012
        "id": Column("id", "string"),
        "n": Column("n", "int"),
        "at": Column("at", "timestamp"),
        "tags": Column("tags", "array<string>"),
    }

    @pytest.mark.parametrize(
        ("options", "wanted"),
        [
            ({"hash": "h", "field": "id", "value": "n"}, ["key", "value"]),
            (
                {"hash": "h", "field": "id", "value": "n", "order_by": "at"},
                ["key", "value", "order"],
            ),
            ({"key": "id"}, ["key", ".n", ".at", ".tags"]),
            ({"key": "id", "value": "json"}, ["key", "value"]),
            ({"list": "l", "value": "tags"}, ["value"]),
            ({"stream": "s"}, [".id", ".n", ".at", ".tags"]),
            ({"counter": "c", "value": "n"}, ["value"]),
        ],
    )
    def test_each_shape_asks_for_its_columns(self, options: Any, wanted: list[str]) -> None:
        assert list(Redis(url="redis://nowhere", **options).project(self.COLUMNS)) == wanted

    def test_times_inside_json_keep_their_microseconds(self) -> None:
        columns = {"id": Column("id", "string"), "at": Column("at", "array<timestamp_ntz>")}
        for value, inside in (("at", "at"), ("json", "named_struct('id', id, 'at', at)")):
            sink = Redis(url="redis://nowhere", hash="h", field="id", value=value)
            spelled = sink.project(columns)["value"]
            assert spelled == f"CAST({to_json(inside, nulls=False)} AS BINARY)"

    @pytest.mark.parametrize("digits", [15, 16])
    def test_decimals_that_the_server_would_round_are_not_added(self, digits: int) -> None:
        sink = Redis(url="redis://nowhere", counter="c", value="n")
        columns = {"n": Column("n", f"decimal({digits},2)")}
        if digits == 15:
            assert sink.project(columns) == {"value": "n"}
            return
        with pytest.raises(UsageError, match=r"at most 15 digits: the server adds them in float"):
            sink.project(columns)

    @pytest.mark.parametrize("options", [{"stream": "s"}, {"key": "id"}])
    def test_as_many_columns_as_one_command_takes(
        self, make: Any, eyes: Any, options: dict[str, str]
    ) -> None:
        names = [f"c{number}" for number in range(3900 - len(options.get("key", "")) // 2)]
        sink = make(**options)
        columns = {name: Column(name, "string") for name in [*names, "id"][-3900:]}
        rows = {name: ["x"] for name in sink.project(columns)}
        assert sink.commit([staged(sink, rows)]) == [DONE]
        with pytest.raises(UsageError, match="3901 columns are more than the 3900"):
            sink.project(columns | {"more": Column("more", "string")})

    def test_only_what_can_be_ordered_orders(self) -> None:
        sink = Redis(url="redis://nowhere", hash="h", field="id", value="n", order_by="tags")
        with pytest.raises(UsageError, match="order needs an integer, a date or a timestamp"):
            sink.project(self.COLUMNS)


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({}, "exactly one of"),
            ({"hash": "", "field": "id", "value": "v"}, "hash= is empty"),
            ({"hash": "h", "list": "l"}, "hash and list"),
            ({"hash": "h", "field": "id"}, "needs value="),
            ({"list": "l", "value": "v", "expire": 5}, "expire= has no meaning"),
            ({"list": "l", "value": "v", "operation": "increment"}, "no meaning with list="),
            ({"key": "id", "expire": 0}, "from 0.001 to"),
            ({"key": "id", "expire": 0.0004}, "from 0.001 to"),
            ({"key": "id", "expire": 1e20}, "from 0.001 to"),
            ({"key": "id", "expire": float("nan")}, "from 0.001 to"),
            ({"hash": "h", "field": "f", "value": "v", "operation": "add"}, "'increment'"),
        ],
    )
    def test_arguments_that_mean_no_shape(self, options: Any, says: str) -> None:
        with pytest.raises(UsageError, match=says):
            Redis(url="redis://nowhere", **options)

    def test_every_missing_column_is_named(self, make: Any) -> None:
        sink = make(hash="h", field="id", value="v", operation="increment")
        with pytest.raises(UsageError, match=r"no column 'id'.*'v' has type string") as raised:
            sink.project({"v": Column("v", "string")})
        assert "The DataFrame has v string" in str(raised.value)

    def test_bad_rows_are_named_and_leave_nothing(self, make: Any, eyes: Any) -> None:
        sink = make(hash="h", field="id", value="n", operation="increment")
        writer = sink.begin(branch(tolerant=True))
        rows = {"key": ["a", None, "c", "d"], "value": [1.0, 2.0, None, float("nan")]}
        with pytest.raises(BadRow) as raised:
            writer.write(pa.RecordBatch.from_pydict(rows))
        assert raised.value.rows == {
            1: "the key is null",
            2: "the value is null",
            3: "the value is not a finite number",
        }
        assert not ours(eyes)

    def test_rows_that_do_not_fit_into_one_value(self, make: Any, eyes: Any) -> None:
        sink = make(key="id", prefix="p:")
        assert sink.preflight() == [] and sink.longest == 512 << 20
        sink.longest = 100
        rows = {"key": ["a", "b"], ".x": ["x" * 45, "x" * 50], ".y": ["y" * 34, "y" * 50]}
        with pytest.raises(BadRow) as raised:
            sink.begin(branch()).write(pa.RecordBatch.from_pydict(rows))
        assert list(raised.value.rows) == [1]
        assert not ours(eyes)

    def test_an_empty_entry_of_a_stream_is_a_bad_row(self, make: Any) -> None:
        sink = make(stream="s")
        rows = pa.RecordBatch.from_pydict(
            {".a": pa.array(["1", None]), ".b": pa.array([None, None], pa.string())}
        )
        with pytest.raises(BadRow) as raised:
            sink.begin(branch()).write(rows)
        assert list(raised.value.rows) == [1]

    def test_a_wrong_password_is_told_without_it(self, server: valkey.Valkey) -> None:
        url = server.address.replace("//", "//:wrong-secret@")
        sink = Redis(url=url, list="l", value="v")
        with pytest.raises(NotAuthorised) as raised:
            sink.preflight()
        assert "wrong-secret" not in str(raised.value) + repr(sink)

    def test_an_address_that_is_none(self) -> None:
        with pytest.raises(UsageError, match="redis://"):
            Redis(url="secret-nonsense", list="l", value="v").preflight()


class TestTheTarget:
    def test_of_another_type_is_refused_before_the_decision(self, make: Any, eyes: Any) -> None:
        sink = make(hash="h", field="id", value="v")
        receipt = staged(sink, {"key": ["a"], "value": ["1"]})
        eyes.set("h", "text")
        (reason,) = sink.check([receipt])
        assert reason == "key h is of type string, but the sink needs hash"
        with pytest.raises(UsageError, match="is of type string"):
            sink.preflight()

    def test_that_turned_after_the_decision_stops_and_can_be_put_right(
        self, make: Any, eyes: Any
    ) -> None:
        sink = make(hash="h", field="id", value="v")
        receipt = staged(sink, {"key": ["a"], "value": ["1"]})
        eyes.set("h", "text")
        with pytest.raises(InDoubt, match="Correct this"):
            sink.commit([receipt])
        assert eyes.get("h") == "text"
        eyes.delete("h")
        assert sink.commit([receipt]) == [DONE]
        assert eyes.hgetall("h") == {"a": "1"}

    def test_keys_of_another_type_are_named(self, make: Any, eyes: Any) -> None:
        eyes.set("p:b", "text")
        sink = make(key="id", prefix="p:")
        receipt = staged(sink, {"key": ["a", "b"], ".x": ["1", "2"]})
        assert sink.check([receipt]) == ["key p:b is of type string, but the sink needs hash"]

    def test_keys_that_are_not_text_are_told_too(self, make: Any, server: valkey.Valkey) -> None:
        wild = b"\xff\n" * 100
        redis.Redis.from_url(server.address).set(b"p:" + wild, "text")
        sink = make(key="id", prefix="p:")
        rows = {"key": pa.array([wild], pa.binary()), ".x": pa.array(["1"])}
        receipt = staged(sink, rows)
        (reason,) = sink.check([receipt])
        assert reason and reason.endswith("... is of type string, but the sink needs hash")
        with pytest.raises(InDoubt, match="is of type string"):
            sink.commit([receipt])

    @pytest.mark.parametrize(
        ("value", "integer", "number"),
        [
            ("12", True, True),
            ("-9223372036854775808", True, True),
            ("1.5", False, True),
            ("+.5e-3", False, True),
            ("9223372036854775808", False, True),
            ("99999999999999999999", False, True),
            ("007", False, True),
            ("many", False, False),
            ("", False, False),
            (" 1", False, False),
            ("inf", False, False),
            ("nan", False, False),
            ("1e999", False, False),  # as much as no number: nothing can be added
        ],
    )
    @pytest.mark.parametrize("amount", [1, 0.5])
    def test_a_counter_that_is_no_number(
        self, make: Any, eyes: Any, value: str, integer: bool, number: bool, amount: float
    ) -> None:
        eyes.hset("h", "a", value)
        sink = make(hash="h", field="id", value="n", operation="increment")
        receipt = staged(sink, {"key": ["a"], "value": [amount]})
        (reason,) = sink.check([receipt])
        if integer if amount == 1 else number:
            assert reason is None and sink.commit([receipt]) == [DONE]
        else:
            assert reason and "field a of h" in reason
            with pytest.raises(InDoubt, match=f"{reason}. Nothing was changed"):
                sink.commit([receipt])

    def test_an_overflow_is_known_before_anything_is_added(self, make: Any, eyes: Any) -> None:
        eyes.hset("h", mapping={"a": 7, "z": 2**63 - 1})
        sink = make(hash="h", field="id", value="n", operation="increment")
        receipt = staged(sink, {"key": ["a", "new", "z"], "value": [1, 1, 1]})
        assert sink.check([receipt]) == ["adding to field z of h would overflow 64 bits"]
        with pytest.raises(InDoubt, match=r"field z.*overflow"):
            sink.commit([receipt])
        assert eyes.hgetall("h") == {"a": "7", "z": str(2**63 - 1)}
        eyes.hset("h", "z", 0)
        assert sink.commit([receipt]) == [DONE]
        assert eyes.hgetall("h") == {"a": "8", "new": "1", "z": "1"}

    @pytest.mark.parametrize(
        ("options", "where"),
        [
            ({"counter": "c"}, "key c"),
            ({"key": "id", "prefix": "n:", "operation": "increment"}, "key n:a"),
            ({"hash": "h", "field": "id", "operation": "increment"}, "field a of h"),
        ],
    )
    @pytest.mark.parametrize("most", [2**62, 1e308])
    def test_an_overflow_that_only_the_batch_makes(
        self, make: Any, options: dict[str, str], where: str, most: float
    ) -> None:
        sink = make(value="n", **options)

        def rows(*values: float) -> dict[str, Any]:
            keys = {} if "counter" in options else {"key": ["a"] * len(values)}
            return keys | {"value": values}

        parts = [staged(sink, rows(most), 0), staged(sink, rows(most), 1)]
        for reason in sink.check(parts):
            assert reason and reason.startswith(f"adding to {where} would overflow")
        with pytest.raises(InDoubt, match=f"adding to {where} would overflow"):
            sink.commit(parts)
        sink.abort(sink.find(SPACE))
        assert sink.check([staged(sink, rows(most), 2)]) == [None]

    def test_sums_are_exact_in_all_64_bits(self, make: Any, eyes: Any) -> None:
        dice, least, most = random.Random(7), -(2**63), 2**63 - 1
        edges = [0, 1, -1, 10**9, -(10**9), 10**9 - 1, 2**53 + 1, least, most, least + 1]
        before, added = {}, []
        for field in range(300):
            values = [dice.randrange(10 ** dice.randrange(1, 19)) for _ in range(8)]
            values = [*(value * dice.choice((1, -1)) for value in values), dice.choice(edges)]
            old, total = dice.choice(edges), sum(values)
            if least <= total <= most and least <= old + total <= most:
                before[f"f{field}"] = old
                added += [(f"f{field}", value) for value in values]
        assert len(before) > 100
        eyes.hset("h", mapping=before)
        dice.shuffle(added)
        sink = make(hash="h", field="id", value="n", operation="increment")
        keys, values = zip(*added, strict=True)
        receipt = staged(sink, {"key": keys, "value": values})
        assert sink.check([receipt]) == [None] and sink.commit([receipt]) == [DONE]
        after = dict(before)
        for key, value in added:
            after[key] += value
        assert {field: int(value) for field, value in eyes.hgetall("h").items()} == after

    @pytest.mark.parametrize("edge", [2**63 - 1, -(2**63)])
    def test_the_last_number_that_fits(self, make: Any, eyes: Any, edge: int) -> None:
        sink = make(counter="c", value="n")
        one = 1 if edge > 0 else -1
        assert sink.commit([staged(sink, {"value": [edge - one, one]})]) == [DONE]
        assert eyes.get("c") == str(edge)
        further = staged(sink, {"value": [one]}, batch=1)
        assert sink.check([further]) == ["adding to key c would overflow 64 bits"]

    RIGHTS = (
        ({"list": "l", "value": "v"}, {"value": ["1"]}, "rpush"),
        ({"stream": "s"}, {".a": ["1"]}, "xadd"),
        ({"hash": "h", "field": "id", "value": "v"}, {"key": ["a"], "value": ["1"]}, "hset"),
        ({"hash": "h", "field": "id", "value": "v"}, {"key": ["a"], "value": [None]}, "hdel"),
        ({"key": "id", "value": "v"}, {"key": ["a"], "value": ["1"]}, "set"),
        ({"key": "id", "value": "v"}, {"key": ["a"], "value": [None]}, "del"),
        ({"key": "id", "expire": 9}, {"key": ["a"], ".x": ["1"]}, "pexpire"),
        ({"counter": "c", "value": "n"}, {"value": [1]}, "incrby"),
        ({"counter": "c", "value": "n"}, {"value": [0.5]}, "incrbyfloat"),
        ({"list": "l", "value": "v"}, {"value": ["1"]}, "unlink"),
    )

    @pytest.mark.parametrize(("options", "rows", "right"), RIGHTS)
    def test_a_right_that_is_missing_is_named_before_the_decision(
        self, server: valkey.Valkey, eyes: Any, options: Any, rows: Any, right: str
    ) -> None:
        sink = Redis(url=user(server, eyes, "+@all"), name="out", **options)
        columns = {name: pa.array(values) for name, values in rows.items()}
        if rows.get("value") == [None]:
            columns["value"] = pa.array([None], pa.string())
        receipt = staged(sink, columns)
        user(server, eyes, "+@all", f"-{right}")
        (reason,) = sink.check([receipt])
        assert reason and f"does not let the user run {right.upper()} with key" in reason
        with pytest.raises(InDoubt, match=f"run {right.upper()}.*Nothing was changed"):
            sink.commit([receipt])
        user(server, eyes, "+@all")
        assert sink.check([receipt]) == [None] and sink.commit([receipt]) == [DONE]

    def test_a_right_to_some_of_the_keys_moves_none(self, server: valkey.Valkey, eyes: Any) -> None:
        url = user(server, eyes, "+@all", keys=["{poundlock}:*", "p:a*"])
        sink = Redis(url=url, name="out", key="id", prefix="p:", value="v")
        receipt = staged(sink, {"key": ["a", "b"], "value": ["1", "2"]})
        assert sink.check([receipt]) == ["the server does not let the user run SET with key p:b"]
        with pytest.raises(InDoubt, match="Nothing was changed"):
            sink.commit([receipt])
        assert not eyes.exists("p:a", "p:b")
        user(server, eyes, "+@all")
        assert sink.commit([receipt]) == [DONE]
        assert eyes.mget("p:a", "p:b") == ["1", "2"]

    def test_a_right_to_read_that_is_missing(self, server: valkey.Valkey, eyes: Any) -> None:
        url = user(server, eyes, "+@all", "-type")
        sink = Redis(url=url, name="out", list="l", value="v")
        with pytest.raises(NotAuthorised, match=r"check of .* run th(e|is) "):
            sink.check([staged(sink, {"value": ["1"]})])

    @pytest.mark.parametrize("told", [True, False])
    def test_a_stream_that_has_no_ids_left(
        self, server: valkey.Valkey, eyes: Any, told: bool
    ) -> None:
        url = user(server, eyes, "+@all", "+xinfo" if told else "-xinfo")
        eyes.xadd("s", {"a": "1"}, id=f"{2**64 - 1}-{2**64 - 1}")
        sink = Redis(url=url, name="out", stream="s")
        receipt = staged(sink, {".a": ["1", "2"]})
        problem = "stream s has no id left that is above its last one"
        assert sink.check([receipt]) == [problem if told else None]
        with pytest.raises(InDoubt, match="Nothing was changed"):
            sink.commit([receipt])
        eyes.delete("s")
        assert sink.commit([receipt]) == [DONE] and eyes.xlen("s") == 2

    def test_a_stream_that_has_few_ids_left(self, make: Any, eyes: Any) -> None:
        sink = make(stream="s")
        eyes.xadd("s", {"a": "1"}, id=f"{2**64 - 1}-{2**64 - 2}")
        (reason,) = sink.check([staged(sink, {".a": ["1", "2"]})])
        assert reason and "no id left" in reason
        eyes.delete("s")
        eyes.xadd("s", {"a": "1"}, id=f"{2**64 - 1}-5")
        assert sink.commit([staged(sink, {".a": ["1", "2"]}, 1)]) == [DONE]


class TestTheWitness:
    def test_staged_rows_that_lost_a_part_are_not_moved(self, make: Any, eyes: Any) -> None:
        sink = make(list="l", value="v")
        texts = ["x" * 1000] * 2000
        receipt = staged(sink, {"value": texts})
        key = f"{{l}}:{receipt.id}"
        chunk = eyes.hkeys(key)
        assert len(chunk) > 1
        eyes.hdel(key, chunk[0])
        assert "were prepared" in (sink.check([receipt])[0] or "")
        assert sink.commit([receipt]) == [LOST]
        assert eyes.llen("l") == 0 and not ours(eyes)

    def test_a_batch_that_lost_a_part_is_lost_whole(self, make: Any, eyes: Any) -> None:
        sink = make(hash="h", field="id", value="v", order_by="ts")

        def rows(order: int) -> dict[str, list[str]]:
            return {"key": ["a"], "value": [str(order)], "order": [f"{order:020}"]}

        low, high = staged(sink, rows(1)), staged(sink, rows(2), task=1)
        eyes.delete(f"{{h}}:{low.id}")
        assert sink.commit([low, high]) == [LOST, LOST]
        assert not eyes.exists("h") and not ours(eyes)
        assert sink.commit([high, low]) == [LOST, LOST]  # it is final
        replay = [staged(sink, rows(1), task=7), staged(sink, rows(2), task=8)]
        assert sink.commit(replay) == [DONE, DONE]
        assert eyes.hgetall("h") == {"a": "2"}

    def test_a_part_that_is_lost_takes_no_other_batch_with_it(self, make: Any, eyes: Any) -> None:
        sink = make(list="l", value="v")
        gone = staged(sink, {"value": ["1"]})
        other = staged(sink, {"value": ["2"]}, batch=1)
        eyes.delete(f"{{l}}:{gone.id}")
        assert sink.commit([gone, other]) == [LOST, DONE]
        assert eyes.lrange("l", 0, -1) == ["2"]

    def test_a_lost_branch_stays_lost_when_a_zombie_stages_it_again(
        self, make: Any, eyes: Any
    ) -> None:
        sink = make(list="l", value="v")
        receipt = staged(sink, {"value": ["1"]})
        eyes.delete(f"{{l}}:{receipt.id}")
        assert sink.commit([receipt]) == [LOST]
        with pytest.raises(Rejected, match=f"{receipt.id} is aborted already"):
            staged(sink, {"value": ["1"]})
        assert sink.commit([receipt]) == [LOST]
        assert eyes.llen("l") == 0 and not ours(eyes)

    def test_a_committed_branch_is_not_opened_again(self, make: Any, eyes: Any) -> None:
        sink = make(list="l", value="v")
        receipt = staged(sink, {"value": ["1"]})
        assert sink.commit([receipt]) == [DONE]
        with pytest.raises(Rejected, match=f"{receipt.id} is committed already"):
            staged(sink, {"value": ["1"]})
        assert sink.find(SPACE) == [] and not ours(eyes)

    def test_an_emptied_database_proves_nothing(self, make: Any, eyes: Any) -> None:
        sink = make(list="l", value="v")
        receipt = staged(sink, {"value": ["1"]})
        eyes.flushall()
        assert sink.commit([receipt]) == [BranchState.NO_WITNESS]
        staged(sink, {"value": ["2"]}, task=1)  # a new witness is not the old one
        assert sink.commit([receipt]) == [BranchState.NO_WITNESS]

    def test_a_forgotten_batch_is_not_called_lost(self, make: Any) -> None:
        sink = make(list="l", value="v")
        receipt = staged(sink, {"value": ["1"]}, batch=3)
        assert sink.commit([receipt]) == [DONE]
        assert sink.commit([staged(sink, {"value": ["2"]}, batch=4)]) == [DONE]
        sink.prune(SPACE, 4)
        assert sink.commit([receipt]) == [BranchState.NO_WITNESS]

    def test_a_move_that_stopped_half_way_is_not_repeated(self, make: Any, eyes: Any) -> None:
        sink = make(list="l", value="v")
        receipt = staged(sink, {"value": ["1"]})
        (witness,) = eyes.keys("*.witness")
        eyes.hset(witness, receipt.id, "moving")
        with pytest.raises(GuaranteeBroken, match="half-way"):
            sink.commit([receipt])
        assert eyes.llen("l") == 0

    def test_a_move_that_really_stops_half_way_says_so(
        self, server: valkey.Valkey, eyes: Any
    ) -> None:
        eyes.xadd("s", {"a": "0"}, id=f"{2**64 - 1}-{2**64 - 2}")  # one more, which nobody can see
        sink = Redis(url=user(server, eyes, "+@all", "-xinfo"), name="out", stream="s")
        receipt = staged(sink, {".a": ["1", "2"]})
        assert sink.check([receipt]) == [None]
        with pytest.raises(InDoubt, match="exhausted the last possible ID") as raised:
            sink.commit([receipt])
        assert "Nothing was changed" not in str(raised.value)
        for _ in range(2):
            with pytest.raises(GuaranteeBroken, match="half-way"):
                sink.commit([receipt])
        assert [fields["a"] for _, fields in eyes.xrange("s")] == ["0", "1"]

    def test_a_move_that_stopped_half_way_is_over_when_a_person_says_so(
        self, make: Any, eyes: Any
    ) -> None:
        sink = make(list="l", value="v")
        receipts = [staged(sink, {"value": [str(task)]}, task) for task in range(2)]
        (witness,) = eyes.keys("*.witness")
        for receipt in receipts:
            eyes.hset(witness, receipt.id, "moving")
        with pytest.raises(GuaranteeBroken) as raised:
            sink.commit(receipts)
        cure = re.search("confirm that with '(.*?)'", str(raised.value))
        assert cure
        eyes.execute_command(*cure[1].split())
        assert sink.commit(receipts) == [DONE, DONE]
        assert sink.find(SPACE) == [] and not ours(eyes) and eyes.llen("l") == 0

    def test_what_a_zombie_writes_after_its_abort_is_not_staged(self, make: Any, eyes: Any) -> None:
        sink = make(list="l", value="v")
        zombie = sink.begin(branch())
        zombie.write(pa.RecordBatch.from_pydict({"value": ["1"]}))
        assert sink.abort(sink.find(SPACE)) == [LOST]
        with pytest.raises(Rejected, match="is aborted already"):
            zombie.write(pa.RecordBatch.from_pydict({"value": ["2"]}))
        zombie.abort()
        assert sink.find(SPACE) == [] and not ours(eyes)

    def test_all_branches_of_a_batch_appear_at_one_instant(self, make: Any, eyes: Any) -> None:
        sink = make(hash="h", field="id", value="v")
        receipts = []
        for task in range(8):
            texts = [f"{task}-{number}" for number in range(5000)]
            receipts.append(staged(sink, {"key": texts, "value": texts}, task=task))
        seen: set[int] = set()
        over = threading.Event()

        def watch() -> None:
            while not over.is_set():
                seen.add(eyes.hlen("h"))

        watcher = threading.Thread(target=watch)
        watcher.start()
        time.sleep(0.05)
        assert sink.commit(receipts) == [DONE] * 8
        time.sleep(0.05)
        over.set()
        watcher.join()
        assert seen == {0, 40_000}


class Slot:
    """A slot of a cluster of two nodes, on its way from one to the other."""

    def __init__(self, eyes: Any, tag: str, address: str):
        number, source = eyes.keyslot(tag), eyes.get_node_from_key(tag)
        (target,) = (it for it in eyes.get_primaries() if it.name != source.name)
        self._tag, self._password = tag, address.partition("//:")[2].partition("@")[0]
        self._to = (target.host, target.port)
        self._ends = [eyes.get_redis_connection(it) for it in (source, target)]
        self._ids = [it.execute_command("CLUSTER MYID") for it in self._ends]
        self._set = ("CLUSTER SETSLOT", number)

    def open(self) -> None:
        self._ends[1].execute_command(*self._set, "IMPORTING", self._ids[0])
        self._ends[0].execute_command(*self._set, "MIGRATING", self._ids[1])

    def left(self) -> list[str]:
        return self._ends[0].keys(f"{{{self._tag}}}:*")

    def send(self, *keys: str) -> None:
        order = ("MIGRATE", *self._to, "", 0, 5000, "AUTH", self._password, "KEYS")
        self._ends[0].execute_command(*order, *keys)

    def close(self) -> None:
        for end in reversed(self._ends):
            end.execute_command(*self._set, "NODE", self._ids[1])


class TestTheServer:
    def test_one_that_is_killed_in_the_middle_of_a_move(self) -> None:
        texts = [str(number) for number in range(30_000)]
        ones = pa.RecordBatch.from_pydict({"key": texts, "value": [1] * len(texts)})
        cut = 0
        with valkey.running() as node:
            for batch in range(4):
                sink = Redis(
                    url=node.address,
                    name="out",
                    hash="h",
                    field="id",
                    value="n",
                    operation="increment",
                )
                receipts = [staged(sink, ones, task, batch) for task in range(2)]
                killer = threading.Timer(0.1 + 0.2 * batch, node.kill)
                killer.start()
                try:
                    sink.commit(receipts)
                except Unavailable:
                    cut += 1
                killer.join()
                node.start()
                sink.close()
                assert sink.commit(receipts) == [DONE, DONE]
                found = redis.Redis.from_url(node.address).hvals("h")
                assert len(found) == len(texts) and set(found) == {str(2 * batch + 2).encode()}
        assert cut  # or nothing was tried

    def test_settings_that_lose_data_are_warned_of(self) -> None:
        settings = {"appendonly": "no", "maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"}
        with valkey.running(settings=settings) as node:
            sink = Redis(url=node.address, list="l", value="v")
            told = "\n".join(sink.preflight())
            assert "appendonly is off" in told and "allkeys-lru" in told
            client = redis.Redis.from_url(node.address)
            client.config_set("appendonly", "yes")
            client.config_set("appendfsync", "everysec")
            client.config_set("maxmemory-policy", "volatile-lru")  # ours never expire
            (told,) = sink.preflight()
            assert "appendfsync is everysec" in told
            client.replicaof("127.0.0.1", 1)
            with pytest.raises(UsageError, match="is a replica"):
                sink.preflight()
            node.kill()  # a replica that still looks for its primary is slow to end

    @pytest.mark.parametrize(
        ("version", "fits"), [("5.0.14", False), ("6.0.16", False), ("6.2.0", True), ("10.0", True)]
    )
    def test_one_that_is_too_old_is_refused(
        self, make: Any, monkeypatch: pytest.MonkeyPatch, version: str, fits: bool
    ) -> None:
        sink = make(list="l", value="v")
        ask = sink.client.execute

        def told(*command: Any, key: str) -> Any:
            return {"redis_version": version} if command[0] == "INFO" else ask(*command, key=key)

        monkeypatch.setattr(sink.client, "execute", told)
        with (
            nullcontext()
            if fits
            else pytest.raises(UsageError, match=f"is Redis {version}, but the sink needs 6.2")
        ):
            assert sink.preflight() == []

    def test_one_without_memory_moves_nothing_until_it_has_some(self, make: Any, eyes: Any) -> None:
        adding = make(hash="sums", field="id", value="n", operation="increment")
        setting = make(hash="words", field="id", value="v")
        sums = [staged(adding, {"key": ["a", "b"], "value": [1, 2]}, task) for task in range(2)]
        words = [staged(setting, {"key": ["a"], "value": ["x"]}, batch=1)]
        eyes.config_set("maxmemory", 1)
        try:
            for sink, receipts in ((adding, sums), (setting, words)):
                assert set(sink.check(receipts)) == {None}
                with pytest.raises(
                    Unavailable, match=r"no memory left \(maxmemory\).*Nothing is lost"
                ):
                    sink.commit(receipts)
                assert not eyes.exists("sums", "words")
        finally:
            eyes.config_set("maxmemory", 0)
        assert adding.commit(sums) == [DONE, DONE] and setting.commit(words) == [DONE]
        assert eyes.hgetall("sums") == {"a": "2", "b": "4"} and eyes.hgetall("words") == {"a": "x"}
        assert not ours(eyes)

    def test_one_without_memory_lets_go_of_what_is_aborted(self, make: Any, eyes: Any) -> None:
        sink = make(list="l", value="v")
        writer = sink.begin(branch())
        writer.write(pa.RecordBatch.from_pydict({"value": ["x" * 1000] * 1000}))
        staged(sink, {"value": ["1"]}, task=1)
        eyes.config_set("maxmemory", 1)
        try:
            writer.abort()
            (stray,) = sink.find(SPACE)
            assert sink.abort([stray]) == [LOST]
            assert not ours(eyes)
        finally:
            eyes.config_set("maxmemory", 0)

    def test_one_before_7_that_has_no_memory(self, make: Any) -> None:
        """Its scripts tell it in other words."""
        said = (
            "Error running script: @user_script:1: -OOM command not allowed when used memory > 'm'."
        )
        with (
            pytest.raises(Unavailable, match="no memory left"),
            make(list="l", value="v").client.errors("staging"),
        ):
            raise redis.ResponseError(said)

    def test_one_that_is_silent_is_away(self, server: valkey.Valkey, eyes: Any) -> None:
        sink = Redis(url=server.address, name="out", list="l", value="v", timeout=0.3)
        receipt = staged(sink, {"value": ["1"]})
        writer = sink.begin(branch(1))
        writer.write(pa.RecordBatch.from_pydict({"value": ["2"]}))
        server.pause()
        try:
            with pytest.raises(Unavailable):
                sink.commit([receipt])
            with pytest.raises(Unavailable):
                writer.write(pa.RecordBatch.from_pydict({"value": ["3"]}))
            writer.abort()  # never raises
        finally:
            server.resume()
        # What was sent while it was silent may have been done since: once in any case.
        assert sink.commit([receipt]) == [DONE]
        sink.abort(sink.find(SPACE))
        assert eyes.lrange("l", 0, -1) == ["1"]
        assert not ours(eyes)

    @pytest.mark.parametrize("semantic", ["at_least_once", "none"])
    def test_less_is_written_straight_through(self, make: Any, eyes: Any, semantic: str) -> None:
        sink = make(list="l", value="v", semantic=semantic)
        writer = sink.begin(branch())
        writer.write(pa.RecordBatch.from_pydict({"value": ["1", "2"]}))
        assert writer.prepare() is None
        writer.abort()  # as after a failure of another sink in the task
        assert eyes.lrange("l", 0, -1) == ["1", "2"]
        assert eyes.keys("*") == ["l"]

    @pytest.mark.parametrize("semantic", ["at_least_once", "none"])
    def test_what_a_dead_task_wrote_straight_through_ends_by_itself(
        self, make: Any, eyes: Any, semantic: str
    ) -> None:
        sink = make(list="l", value="v", semantic=semantic)
        writer = sink.begin(branch())
        writer.write(pa.RecordBatch.from_pydict({"value": ["1"]}))
        left = eyes.keys("*")
        assert len(left) == 2 and all(86_000 < eyes.ttl(key) <= 86_400 for key in left)
        writer.abort()
        assert eyes.keys("*") == []
        with pytest.raises(Rejected) if semantic == "at_least_once" else nullcontext():
            writer.prepare()  # a move that comes late finds nothing, and is no success
        assert eyes.keys("*") == []

    def test_a_replica_is_not_believed(self, make: Any, eyes: Any) -> None:
        sink = make(list="l", value="v")
        receipt = staged(sink, {"value": ["1"]})
        eyes.flushall()  # as it is before it has heard anything
        eyes.replicaof("127.0.0.1", 1)
        try:
            with pytest.raises(Unavailable, match="read only replica"):
                sink.commit([receipt])
        finally:
            eyes.replicaof("no", "one")
        assert sink.commit([receipt]) == [BranchState.NO_WITNESS]

    def test_a_slot_that_moves_to_another_node_is_waited_for(self) -> None:
        shapes = {
            "p": ({"value": "v"}, {"value": ["1", "2"]}, "1"),
            "q": ({"value": "n", "operation": "increment"}, {"value": [1, 2]}, "11"),
            "r": ({}, {".x": ["1", "2"]}, {"x": "1", "y": "10"}),
        }
        with valkey.running(nodes=2, cluster=True) as node:
            eyes = redis.RedisCluster.from_url(node.address, decode_responses=True)
            for tag, (options, rows, after) in shapes.items():
                old, new = f"{{{tag}}}:a", f"{{{tag}}}:b"
                if isinstance(after, str):
                    eyes.set(old, "10")
                else:
                    eyes.hset(old, "y", "10")
                sink = Redis(
                    url=node.address, name="out", key="id", prefix=f"{{{tag}}}:", **options
                )
                receipt = staged(sink, {"key": ["a", "b"]} | rows)
                slot = Slot(eyes, tag, node.address)
                slot.open()
                for who in ("at the source", "at the target"):
                    for doing in (sink.check, sink.commit):
                        with pytest.raises(Unavailable, match="non local key"):
                            doing([receipt])
                    if who == "at the source":  # our own keys go first, and the script after them
                        ours = [key for key in slot.left() if "poundlock" in key]
                        assert len(ours) == 3
                        slot.send(*ours)
                assert slot.left() == [old]
                slot.send(old)
                slot.close()
                assert sink.commit([receipt]) == [DONE]
                assert after == (eyes.get(old) if isinstance(after, str) else eyes.hgetall(old))
                assert eyes.exists(new)
            eyes.close()

    def test_a_cluster(self) -> None:
        with valkey.running(nodes=3, cluster=True) as node:
            loose = Redis(url=node.address, name="out", key="id", prefix="p:")
            with pytest.raises(UsageError, match=r"prefix='\{p\}:'"):
                loose.preflight()
            eyes = redis.RedisCluster.from_url(node.address, decode_responses=True)
            for number, target in enumerate(["one", "two", "three", "a{four}b"]):
                sink = Redis(url=node.address, name="out", hash=target, field="id", value="v")
                assert sink.preflight() == []
                receipts = [
                    staged(sink, {"key": [str(task)], "value": ["1"]}, task, number)
                    for task in range(3)
                ]
                assert sink.check(receipts) == [None] * 3
                assert sink.commit(receipts) == [DONE] * 3
                assert sink.commit(receipts) == [DONE] * 3
                assert eyes.hlen(target) == 3 and sink.find(SPACE) == []
            many = Redis(url=node.address, name="out", key="id", prefix="{p}:")
            assert many.preflight() == []
            assert many.commit([staged(many, {"key": ["a", "b"], ".x": ["1", "2"]})]) == [DONE]
            assert eyes.hgetall("{p}:b") == {"x": "2"}
            eyes.close()


def test_chunks_hold_whole_rows_and_all_of_them() -> None:
    columns = [as_bytes(pa.array(["a", None, "ccc"])), as_bytes(pa.array([1, 2, None]))]
    assert list(chunks(columns, 1 << 20)) == [
        (3, b"\xdd\0\0\0\x06\xdb\0\0\0\x01a\xdb\0\0\0\x011\xc0\xdb\0\0\0\x012\xdb\0\0\0\x03ccc\xc0")
    ]
    assert [count for count, _ in chunks(columns, 1)] == [1, 1, 1]
    sliced = [as_bytes(pa.array(["x", "a", "b"]).slice(1))]
    assert list(chunks(sliced, 1 << 20)) == [(2, b"\xdd\0\0\0\x02\xdb\0\0\0\x01a\xdb\0\0\0\x01b")]
