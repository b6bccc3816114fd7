"""Redis: every shape writes its rows, and bad input is named."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
import redis
from fix_redis import DONE, SPACE, branch, list_leftovers, stage_rows

from poundlock.core.model import Fingerprint, Receipt
from poundlock.core.participant import Column
from poundlock.core.sparksql import row_json, to_json
from poundlock.errors import BadRow, NotAuthorised, UsageError
from poundlock.servers import valkey
from poundlock.sinks import Redis
from poundlock.sinks.redis.writer import as_bytes, chunks


class TestShapes:
    def test_each_row_becomes_a_field(self, make_redis: Any, redis_client: Any) -> None:
        sink = make_redis(hash="h", field="id", value="v")
        assert sink.commit([stage_rows(sink, {"key": ["a", "b"], "value": ["1", "2"]})]) == [DONE]
        assert redis_client.hgetall("h") == {"a": "1", "b": "2"}

    def test_a_null_deletes_the_field(self, make_redis: Any, redis_client: Any) -> None:
        redis_client.hset("h", mapping={"a": "1", "b": "2"})
        sink = make_redis(hash="h", field="id", value="v")
        sink.commit([stage_rows(sink, {"key": ["a", "c"], "value": [None, "3"]})])
        assert redis_client.hgetall("h") == {"b": "2", "c": "3"}

    def test_each_key_becomes_a_hash(self, make_redis: Any, redis_client: Any) -> None:
        redis_client.hset("p:a", mapping={"x": "old", "z": "kept"})
        sink = make_redis(key="id", prefix="p:", expire=100)
        rows = {"key": ["a", "b"], ".x": ["1", "2"], ".y": [None, "3"]}
        sink.commit([stage_rows(sink, rows)])
        assert redis_client.hgetall("p:a") == {"x": "1", "z": "kept"}
        assert redis_client.hgetall("p:b") == {"x": "2", "y": "3"}
        assert 90 < redis_client.ttl("p:b") <= 100

    def test_each_key_gets_a_value(self, make_redis: Any, redis_client: Any) -> None:
        redis_client.set("p:gone", "1")
        sink = make_redis(key="id", prefix="p:", value="v", expire=100)
        sink.commit([stage_rows(sink, {"key": ["a", "gone"], "value": ["x", None]})])
        assert redis_client.get("p:a") == "x" and redis_client.ttl("p:a") > 90
        assert redis_client.get("p:gone") is None

    def test_a_list_keeps_the_order_of_a_task(self, make_redis: Any, redis_client: Any) -> None:
        sink = make_redis(list="l", value="v")
        texts = [str(number) for number in range(30_000)]
        writer = sink.begin(branch())
        for start in range(0, 30_000, 1_000):  # more than nine chunks
            writer.write(pa.RecordBatch.from_pydict({"value": texts[start : start + 1_000]}))
        prepared = writer.prepare()
        receipt = Receipt("out", prepared.id, 0, Fingerprint(30_000), prepared.handle)
        assert sink.commit([receipt]) == [DONE]
        assert redis_client.lrange("l", 0, -1) == texts

    def test_each_row_becomes_an_entry_of_a_stream(
        self, make_redis: Any, redis_client: Any
    ) -> None:
        sink = make_redis(stream="s")
        sink.commit([stage_rows(sink, {".a": ["1", "2"], ".b": ["x", None]})])
        assert [fields for _, fields in redis_client.xrange("s")] == [
            {"a": "1", "b": "x"},
            {"a": "2"},
        ]

    def test_counters_are_incremented(self, make_redis: Any, redis_client: Any) -> None:
        one = make_redis(counter="c", value="n")
        one.commit(
            [stage_rows(one, {"value": [1, 2, -5]}), stage_rows(one, {"value": [10]}, task=1)]
        )
        assert redis_client.get("c") == "8"
        many = make_redis(key="id", prefix="n:", value="n", operation="increment")
        many.commit([stage_rows(many, {"key": ["a", "a"], "value": [0.5, 0.25]}, batch=1)])
        assert float(redis_client.get("n:a")) == 0.75
        most = make_redis(hash="totals", field="id", value="n", operation="increment")
        rows = {"key": ["a", "a"], "value": [2**62, 2**62 - 1]}
        most.commit([stage_rows(most, rows, batch=2)])
        assert redis_client.hget("totals", "a") == str(2**63 - 1)  # too large for a Lua number

    def test_the_row_with_the_highest_order_wins_over_all_tasks(
        self, make_redis: Any, redis_client: Any
    ) -> None:
        sink = make_redis(hash="h", field="id", value="v", order_by="ts")
        order = [f"{number:020}" for number in (5, 9, 7)]
        first = stage_rows(sink, {"key": ["a"] * 3, "value": ["5", "9", "7"], "order": order})
        second = stage_rows(sink, {"key": ["a"], "value": ["8"], "order": [f"{8:020}"]}, task=1)
        assert sink.commit([second, first]) == [DONE, DONE]
        assert redis_client.hgetall("h") == {"a": "9"}

    def test_bytes_arrive_unchanged(self, make_redis: Any, redis_server: valkey.Valkey) -> None:
        binary = bytes(range(256)) * 3
        sink = make_redis(hash="h", field="id", value="v")
        rows = pa.RecordBatch.from_pydict(
            {
                "key": pa.array([binary, b""], pa.binary()),
                "value": pa.array([binary, b""], pa.binary()),
            }
        )
        sink.commit([stage_rows(sink, rows)])
        assert redis.Redis.from_url(redis_server.address).hgetall("h") == {binary: binary, b"": b""}

    def test_more_rows_than_one_command_can_hold_arrive(
        self, make_redis: Any, redis_client: Any
    ) -> None:
        sink = make_redis(hash="h", field="id", value="v")
        texts = [str(number) for number in range(50_000)]
        assert sink.commit([stage_rows(sink, {"key": texts, "value": texts})]) == [DONE]
        assert redis_client.hlen("h") == 50_000
        assert not list_leftovers(redis_client)


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
    def test_each_shape_needs_its_columns(self, options: Any, wanted: list[str]) -> None:
        assert list(Redis(url="redis://nowhere", **options).project(self.COLUMNS)) == wanted

    @pytest.mark.parametrize("option", ["field", "key"])
    def test_a_missing_column_is_called_by_its_option(self, option: str) -> None:
        options: Any = {"hash": "h", "field": "gone"} if option == "field" else {"key": "gone"}
        sink = Redis(url="redis://nowhere", value="n", **options)
        with pytest.raises(UsageError, match=f"no column 'gone' for the {option}"):
            sink.project(self.COLUMNS)

    def test_times_inside_json_keep_their_microseconds(self) -> None:
        columns = {"id": Column("id", "string"), "at": Column("at", "array<timestamp_ntz>")}
        at = to_json("at", columns["at"], nulls=False)
        for value, inside in (("at", at), ("json", row_json(columns))):
            sink = Redis(url="redis://nowhere", hash="h", field="id", value=value)
            assert sink.project(columns)["value"] == f"CAST({inside} AS BINARY)"
            assert "SSSSSS" in inside

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
    def test_more_columns_than_one_command_can_hold_are_refused(
        self, make_redis: Any, redis_client: Any, options: dict[str, str]
    ) -> None:
        names = [f"c{number}" for number in range(3900 - len(options.get("key", "")) // 2)]
        sink = make_redis(**options)
        columns = {name: Column(name, "string") for name in [*names, "id"][-3900:]}
        rows = {name: ["x"] for name in sink.project(columns)}
        assert sink.commit([stage_rows(sink, rows)]) == [DONE]
        with pytest.raises(UsageError, match="3901 columns are more than the 3900"):
            sink.project(columns | {"more": Column("more", "string")})

    def test_an_order_column_without_an_order_is_refused(self) -> None:
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
            ({"hash": "{h}:poundlock.w", "field": "f", "value": "v"}, "hash= names keys of"),
            ({"list": "{l}:poundlock.w", "value": "v"}, "list= names keys of"),
            ({"stream": "{s}:poundlock.w"}, "stream= names keys of"),
            ({"counter": "{c}:poundlock.w", "value": "v"}, "counter= names keys of"),
            ({"key": "id", "prefix": "{poundlock}:poundlock."}, "prefix= names keys of"),
        ],
    )
    def test_contradictory_arguments_are_refused(self, options: Any, says: str) -> None:
        with pytest.raises(UsageError, match=says):
            Redis(url="redis://nowhere", **options)

    def test_every_missing_column_is_named(self, make_redis: Any) -> None:
        sink = make_redis(hash="h", field="id", value="v", operation="increment")
        with pytest.raises(UsageError, match=r"no column 'id'.*'v' has type string") as raised:
            sink.project({"v": Column("v", "string")})
        assert "The DataFrame has v string" in str(raised.value)

    def test_bad_rows_are_named_and_nothing_is_staged(
        self, make_redis: Any, redis_client: Any
    ) -> None:
        sink = make_redis(hash="h", field="id", value="n", operation="increment")
        writer = sink.begin(branch(tolerant=True))
        rows = {"key": ["a", None, "c", "d"], "value": [1.0, 2.0, None, float("nan")]}
        with pytest.raises(BadRow) as raised:
            writer.write(pa.RecordBatch.from_pydict(rows))
        assert raised.value.rows == {
            1: "the key is null",
            2: "the value is null",
            3: "the value is not a finite number",
        }
        assert not list_leftovers(redis_client)

    @pytest.mark.parametrize(
        ("options", "values"),
        [
            ({"value": "v"}, {"value": ["1", None, "1", "1", "1", "1"]}),
            ({}, {".x": ["1", None, "1", "1", "1", "1"]}),
            ({"value": "n", "operation": "increment"}, {"value": [1] * 6}),
        ],
    )
    @pytest.mark.parametrize("prefix", ["", "{", "{poundlock}:pound"])
    def test_a_key_of_the_sinks_own_is_a_bad_row(
        self, make_redis: Any, redis_client: Any, prefix: str, options: Any, values: Any
    ) -> None:
        """With such a key a row could overwrite or delete the witness of its own batch."""
        sink = make_redis(key="id", prefix=prefix, **options)
        writer = sink.begin(branch(tolerant=True))
        witness = f"{{poundlock}}:poundlock.trial.{SPACE.identity}.out.witness"
        wrong = [witness, witness.replace("{poundlock}", "{a}b\n}"), f"{witness} "]
        keys = [*wrong, "{x}:poundlockish", "x{}:poundlock.x", "{}poundlock.x"]
        whole = [key if key.startswith(prefix) else prefix + key for key in keys]
        rows = {"key": [key.removeprefix(prefix).encode() for key in whole]} | values
        with pytest.raises(BadRow) as raised:
            writer.write(pa.RecordBatch.from_pydict(rows))
        expected = [row for row, key in enumerate(whole) if "}:poundlock." in key and key[0] == "{"]
        assert expected[:3] == [0, 1, 2] and 3 not in expected
        assert raised.value.rows == dict.fromkeys(
            expected, "the key is reserved for staged rows and witnesses"
        )
        assert not redis_client.keys("*poundlock.*")

    def test_a_row_too_large_for_one_value_is_a_bad_row(
        self, make_redis: Any, redis_client: Any
    ) -> None:
        sink = make_redis(key="id", prefix="p:")
        assert sink.preflight() == [] and sink.longest == 512 << 20
        sink.longest = 100
        rows = {"key": ["a", "b"], ".x": ["x" * 45, "x" * 50], ".y": ["y" * 34, "y" * 50]}
        with pytest.raises(BadRow) as raised:
            sink.begin(branch()).write(pa.RecordBatch.from_pydict(rows))
        assert list(raised.value.rows) == [1]
        assert not list_leftovers(redis_client)

    def test_an_empty_entry_of_a_stream_is_a_bad_row(self, make_redis: Any) -> None:
        sink = make_redis(stream="s")
        rows = pa.RecordBatch.from_pydict(
            {".a": pa.array(["1", None]), ".b": pa.array([None, None], pa.string())}
        )
        with pytest.raises(BadRow) as raised:
            sink.begin(branch()).write(rows)
        assert list(raised.value.rows) == [1]

    def test_a_wrong_password_is_reported_but_not_shown(self, redis_server: valkey.Valkey) -> None:
        url = redis_server.address.replace("//", "//:wrong-secret@")
        sink = Redis(url=url, list="l", value="v")
        with pytest.raises(NotAuthorised) as raised:
            sink.preflight()
        assert "wrong-secret" not in str(raised.value) + repr(sink)

    def test_an_unreadable_address_is_refused(self) -> None:
        with pytest.raises(UsageError, match="redis://"):
            Redis(url="secret-nonsense", list="l", value="v").preflight()


def test_chunks_hold_all_rows_undivided() -> None:
    columns = [as_bytes(pa.array(["a", None, "ccc"])), as_bytes(pa.array([1, 2, None]))]
    assert list(chunks(columns, 1 << 20)) == [
        (3, b"\xdd\0\0\0\x06\xdb\0\0\0\x01a\xdb\0\0\0\x011\xc0\xdb\0\0\0\x012\xdb\0\0\0\x03ccc\xc0")
    ]
    assert [count for count, _ in chunks(columns, 1)] == [1, 1, 1]
    sliced = [as_bytes(pa.array(["x", "a", "b"]).slice(1))]
    assert list(chunks(sliced, 1 << 20)) == [(2, b"\xdd\0\0\0\x02\xdb\0\0\0\x01a\xdb\0\0\0\x01b")]
