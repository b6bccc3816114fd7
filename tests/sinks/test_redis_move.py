"""Redis: a script moves all branches of a batch or none."""

from __future__ import annotations

import random
import re
import threading
import time
from typing import Any

import pyarrow as pa
import pytest
import redis
from fix_redis import DONE, LOST, SPACE, branch, create_user, list_leftovers, stage_rows

from poundlock.core.protocol import BranchState
from poundlock.errors import GuaranteeBroken, InDoubt, NotAuthorised, Rejected, UsageError
from poundlock.servers import valkey
from poundlock.sinks import Redis


class TestTheTarget:
    def test_a_target_of_another_type_is_refused_before_the_decision(
        self, make_redis: Any, redis_client: Any
    ) -> None:
        sink = make_redis(hash="h", field="id", value="v")
        receipt = stage_rows(sink, {"key": ["a"], "value": ["1"]})
        redis_client.set("h", "text")
        (reason,) = sink.check([receipt])
        assert reason == "key h is of type string, but the sink needs hash"
        with pytest.raises(UsageError, match="is of type string"):
            sink.preflight()

    def test_a_target_that_changes_its_type_after_the_decision_can_be_corrected(
        self, make_redis: Any, redis_client: Any
    ) -> None:
        sink = make_redis(hash="h", field="id", value="v")
        receipt = stage_rows(sink, {"key": ["a"], "value": ["1"]})
        redis_client.set("h", "text")
        with pytest.raises(InDoubt, match="Correct this"):
            sink.commit([receipt])
        assert redis_client.get("h") == "text"
        redis_client.delete("h")
        assert sink.commit([receipt]) == [DONE]
        assert redis_client.hgetall("h") == {"a": "1"}

    def test_keys_of_another_type_are_named(self, make_redis: Any, redis_client: Any) -> None:
        redis_client.set("p:b", "text")
        sink = make_redis(key="id", prefix="p:")
        receipt = stage_rows(sink, {"key": ["a", "b"], ".x": ["1", "2"]})
        assert sink.check([receipt]) == ["key p:b is of type string, but the sink needs hash"]

    def test_binary_keys_of_another_type_are_named(
        self, make_redis: Any, redis_server: valkey.Valkey
    ) -> None:
        binary = b"\xff\n" * 100
        redis.Redis.from_url(redis_server.address).set(b"p:" + binary, "text")
        sink = make_redis(key="id", prefix="p:")
        rows = {"key": pa.array([binary], pa.binary()), ".x": pa.array(["1"])}
        receipt = stage_rows(sink, rows)
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
            ("1e999", False, False),  # not finite, so nothing can be added
        ],
    )
    @pytest.mark.parametrize("amount", [1, 0.5])
    def test_a_counter_that_is_not_a_number_is_refused(
        self,
        make_redis: Any,
        redis_client: Any,
        value: str,
        integer: bool,
        number: bool,
        amount: float,
    ) -> None:
        redis_client.hset("h", "a", value)
        sink = make_redis(hash="h", field="id", value="n", operation="increment")
        receipt = stage_rows(sink, {"key": ["a"], "value": [amount]})
        (reason,) = sink.check([receipt])
        if integer if amount == 1 else number:
            assert reason is None and sink.commit([receipt]) == [DONE]
        else:
            assert reason and "field a of h" in reason
            with pytest.raises(InDoubt, match=f"{reason}. Nothing was changed"):
                sink.commit([receipt])

    def test_an_overflow_is_found_before_anything_is_added(
        self, make_redis: Any, redis_client: Any
    ) -> None:
        redis_client.hset("h", mapping={"a": 7, "z": 2**63 - 1})
        sink = make_redis(hash="h", field="id", value="n", operation="increment")
        receipt = stage_rows(sink, {"key": ["a", "new", "z"], "value": [1, 1, 1]})
        assert sink.check([receipt]) == ["adding to field z of h would overflow 64 bits"]
        with pytest.raises(InDoubt, match=r"field z.*overflow"):
            sink.commit([receipt])
        assert redis_client.hgetall("h") == {"a": "7", "z": str(2**63 - 1)}
        redis_client.hset("h", "z", 0)
        assert sink.commit([receipt]) == [DONE]
        assert redis_client.hgetall("h") == {"a": "8", "new": "1", "z": "1"}

    @pytest.mark.parametrize(
        ("options", "where"),
        [
            ({"counter": "c"}, "key c"),
            ({"key": "id", "prefix": "n:", "operation": "increment"}, "key n:a"),
            ({"hash": "h", "field": "id", "operation": "increment"}, "field a of h"),
        ],
    )
    @pytest.mark.parametrize("most", [2**62, 1e308])
    def test_an_overflow_of_the_sum_of_the_batch_is_found(
        self, make_redis: Any, options: dict[str, str], where: str, most: float
    ) -> None:
        sink = make_redis(value="n", **options)

        def rows(*values: float) -> dict[str, Any]:
            keys = {} if "counter" in options else {"key": ["a"] * len(values)}
            return keys | {"value": values}

        parts = [stage_rows(sink, rows(most), 0), stage_rows(sink, rows(most), 1)]
        for reason in sink.check(parts):
            assert reason and reason.startswith(f"adding to {where} would overflow")
        with pytest.raises(InDoubt, match=f"adding to {where} would overflow"):
            sink.commit(parts)
        sink.abort(sink.find(SPACE))
        assert sink.check([stage_rows(sink, rows(most), 2)]) == [None]

    def test_sums_are_exact_in_all_64_bits(self, make_redis: Any, redis_client: Any) -> None:
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
        redis_client.hset("h", mapping=before)
        dice.shuffle(added)
        sink = make_redis(hash="h", field="id", value="n", operation="increment")
        keys, values = zip(*added, strict=True)
        receipt = stage_rows(sink, {"key": keys, "value": values})
        assert sink.check([receipt]) == [None] and sink.commit([receipt]) == [DONE]
        after = dict(before)
        for key, value in added:
            after[key] += value
        assert {field: int(value) for field, value in redis_client.hgetall("h").items()} == after

    @pytest.mark.parametrize("edge", [2**63 - 1, -(2**63)])
    def test_the_last_number_that_fits_is_accepted(
        self, make_redis: Any, redis_client: Any, edge: int
    ) -> None:
        sink = make_redis(counter="c", value="n")
        one = 1 if edge > 0 else -1
        assert sink.commit([stage_rows(sink, {"value": [edge - one, one]})]) == [DONE]
        assert redis_client.get("c") == str(edge)
        further = stage_rows(sink, {"value": [one]}, batch=1)
        assert sink.check([further]) == ["adding to key c would overflow 64 bits"]

    @pytest.mark.parametrize("sum_", [-(10**9), -3 * 10**9, 10**9, -(10**18), -(10**9) - 1])
    def test_a_sum_of_whole_billions_is_accepted(
        self, make_redis: Any, redis_client: Any, sum_: int
    ) -> None:
        sink = make_redis(counter="c", value="n")
        assert sink.commit([stage_rows(sink, {"value": [sum_ - 5, 5]})]) == [DONE]
        assert redis_client.get("c") == str(sum_)

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
    def test_a_missing_right_is_named_before_the_decision(
        self, redis_server: valkey.Valkey, redis_client: Any, options: Any, rows: Any, right: str
    ) -> None:
        sink = Redis(url=create_user(redis_server, redis_client, "+@all"), name="out", **options)
        columns = {name: pa.array(values) for name, values in rows.items()}
        if rows.get("value") == [None]:
            columns["value"] = pa.array([None], pa.string())
        receipt = stage_rows(sink, columns)
        create_user(redis_server, redis_client, "+@all", f"-{right}")
        (reason,) = sink.check([receipt])
        assert reason and f"does not let the user run {right.upper()} with key" in reason
        with pytest.raises(InDoubt, match=f"run {right.upper()}.*Nothing was changed"):
            sink.commit([receipt])
        create_user(redis_server, redis_client, "+@all")
        assert sink.check([receipt]) == [None] and sink.commit([receipt]) == [DONE]

    def test_a_right_to_only_some_keys_moves_none(
        self, redis_server: valkey.Valkey, redis_client: Any
    ) -> None:
        url = create_user(redis_server, redis_client, "+@all", keys=["{poundlock}:*", "p:a*"])
        sink = Redis(url=url, name="out", key="id", prefix="p:", value="v")
        receipt = stage_rows(sink, {"key": ["a", "b"], "value": ["1", "2"]})
        assert sink.check([receipt]) == ["the server does not let the user run SET with key p:b"]
        with pytest.raises(InDoubt, match="Nothing was changed"):
            sink.commit([receipt])
        assert not redis_client.exists("p:a", "p:b")
        create_user(redis_server, redis_client, "+@all")
        assert sink.commit([receipt]) == [DONE]
        assert redis_client.mget("p:a", "p:b") == ["1", "2"]

    def test_a_missing_right_to_read_is_reported(
        self, redis_server: valkey.Valkey, redis_client: Any
    ) -> None:
        url = create_user(redis_server, redis_client, "+@all", "-type")
        sink = Redis(url=url, name="out", list="l", value="v")
        with pytest.raises(NotAuthorised, match=r"check of .* run th(e|is) "):
            sink.check([stage_rows(sink, {"value": ["1"]})])

    @pytest.mark.parametrize("readable", [True, False])
    def test_a_stream_without_free_ids_is_reported(
        self, redis_server: valkey.Valkey, redis_client: Any, readable: bool
    ) -> None:
        url = create_user(redis_server, redis_client, "+@all", "+xinfo" if readable else "-xinfo")
        redis_client.xadd("s", {"a": "1"}, id=f"{2**64 - 1}-{2**64 - 1}")
        sink = Redis(url=url, name="out", stream="s")
        receipt = stage_rows(sink, {".a": ["1", "2"]})
        problem = "stream s has no id left that is above its last one"
        assert sink.check([receipt]) == [problem if readable else None]
        with pytest.raises(InDoubt, match="Nothing was changed"):
            sink.commit([receipt])
        redis_client.delete("s")
        assert sink.commit([receipt]) == [DONE] and redis_client.xlen("s") == 2

    def test_a_stream_with_too_few_free_ids_is_reported(
        self, make_redis: Any, redis_client: Any
    ) -> None:
        sink = make_redis(stream="s")
        redis_client.xadd("s", {"a": "1"}, id=f"{2**64 - 1}-{2**64 - 2}")
        (reason,) = sink.check([stage_rows(sink, {".a": ["1", "2"]})])
        assert reason and "no id left" in reason
        redis_client.delete("s")
        redis_client.xadd("s", {"a": "1"}, id=f"{2**64 - 1}-5")
        assert sink.commit([stage_rows(sink, {".a": ["1", "2"]}, 1)]) == [DONE]


class TestTheWitness:
    def test_an_incomplete_branch_is_not_moved(self, make_redis: Any, redis_client: Any) -> None:
        sink = make_redis(list="l", value="v")
        texts = ["x" * 1000] * 2000
        receipt = stage_rows(sink, {"value": texts})
        key = f"{{l}}:{receipt.id}"
        chunk = redis_client.hkeys(key)
        assert len(chunk) > 1
        redis_client.hdel(key, chunk[0])
        assert "were prepared" in (sink.check([receipt])[0] or "")
        assert sink.commit([receipt]) == [LOST]
        assert redis_client.llen("l") == 0 and not list_leftovers(redis_client)

    def test_a_batch_with_a_lost_branch_is_lost_whole(
        self, make_redis: Any, redis_client: Any
    ) -> None:
        sink = make_redis(hash="h", field="id", value="v", order_by="ts")

        def rows(order: int) -> dict[str, list[str]]:
            return {"key": ["a"], "value": [str(order)], "order": [f"{order:020}"]}

        low, high = stage_rows(sink, rows(1)), stage_rows(sink, rows(2), task=1)
        redis_client.delete(f"{{h}}:{low.id}")
        assert sink.commit([low, high]) == [LOST, LOST]
        assert not redis_client.exists("h") and not list_leftovers(redis_client)
        assert sink.commit([high, low]) == [LOST, LOST]  # the outcome is final
        replay = [stage_rows(sink, rows(1), task=7), stage_rows(sink, rows(2), task=8)]
        assert sink.commit(replay) == [DONE, DONE]
        assert redis_client.hgetall("h") == {"a": "2"}

    def test_a_lost_branch_does_not_affect_other_batches(
        self, make_redis: Any, redis_client: Any
    ) -> None:
        sink = make_redis(list="l", value="v")
        lost = stage_rows(sink, {"value": ["1"]})
        other = stage_rows(sink, {"value": ["2"]}, batch=1)
        redis_client.delete(f"{{l}}:{lost.id}")
        assert sink.commit([lost, other]) == [LOST, DONE]
        assert redis_client.lrange("l", 0, -1) == ["2"]

    def test_a_lost_branch_stays_lost_when_a_zombie_stages_it_again(
        self, make_redis: Any, redis_client: Any
    ) -> None:
        sink = make_redis(list="l", value="v")
        receipt = stage_rows(sink, {"value": ["1"]})
        redis_client.delete(f"{{l}}:{receipt.id}")
        assert sink.commit([receipt]) == [LOST]
        with pytest.raises(Rejected, match=f"{receipt.id} is aborted already"):
            stage_rows(sink, {"value": ["1"]})
        assert sink.commit([receipt]) == [LOST]
        assert redis_client.llen("l") == 0 and not list_leftovers(redis_client)

    def test_a_committed_branch_is_not_opened_again(
        self, make_redis: Any, redis_client: Any
    ) -> None:
        sink = make_redis(list="l", value="v")
        receipt = stage_rows(sink, {"value": ["1"]})
        assert sink.commit([receipt]) == [DONE]
        with pytest.raises(Rejected, match=f"{receipt.id} is committed already"):
            stage_rows(sink, {"value": ["1"]})
        assert sink.find(SPACE) == [] and not list_leftovers(redis_client)

    def test_an_emptied_database_proves_nothing(self, make_redis: Any, redis_client: Any) -> None:
        sink = make_redis(list="l", value="v")
        receipt = stage_rows(sink, {"value": ["1"]})
        redis_client.flushall()
        assert sink.commit([receipt]) == [BranchState.NO_WITNESS]
        stage_rows(sink, {"value": ["2"]}, task=1)  # a new witness is not the old one
        assert sink.commit([receipt]) == [BranchState.NO_WITNESS]

    def test_a_pruned_batch_is_not_reported_as_lost(self, make_redis: Any) -> None:
        sink = make_redis(list="l", value="v")
        receipt = stage_rows(sink, {"value": ["1"]}, batch=3)
        assert sink.commit([receipt]) == [DONE]
        assert sink.commit([stage_rows(sink, {"value": ["2"]}, batch=4)]) == [DONE]
        sink.prune(SPACE, 4)
        assert sink.commit([receipt]) == [BranchState.NO_WITNESS]

    def test_a_move_that_stopped_half_way_is_not_repeated(
        self, make_redis: Any, redis_client: Any
    ) -> None:
        sink = make_redis(list="l", value="v")
        receipt = stage_rows(sink, {"value": ["1"]})
        (witness,) = redis_client.keys("*.witness")
        redis_client.hset(witness, receipt.id, "moving")
        with pytest.raises(GuaranteeBroken, match="half-way"):
            sink.commit([receipt])
        assert redis_client.llen("l") == 0

    def test_a_move_that_stops_half_way_is_reported(
        self, redis_server: valkey.Valkey, redis_client: Any
    ) -> None:
        # One id is left, and the sink cannot see this.
        redis_client.xadd("s", {"a": "0"}, id=f"{2**64 - 1}-{2**64 - 2}")
        sink = Redis(
            url=create_user(redis_server, redis_client, "+@all", "-xinfo"), name="out", stream="s"
        )
        receipt = stage_rows(sink, {".a": ["1", "2"]})
        assert sink.check([receipt]) == [None]
        with pytest.raises(InDoubt, match="exhausted the last possible ID") as raised:
            sink.commit([receipt])
        assert "Nothing was changed" not in str(raised.value)
        for _ in range(2):
            with pytest.raises(GuaranteeBroken, match="half-way"):
                sink.commit([receipt])
        assert [fields["a"] for _, fields in redis_client.xrange("s")] == ["0", "1"]

    def test_a_move_that_stopped_half_way_ends_when_an_operator_confirms_it(
        self, make_redis: Any, redis_client: Any
    ) -> None:
        sink = make_redis(list="l", value="v")
        receipts = [stage_rows(sink, {"value": [str(task)]}, task) for task in range(2)]
        (witness,) = redis_client.keys("*.witness")
        for receipt in receipts:
            redis_client.hset(witness, receipt.id, "moving")
        with pytest.raises(GuaranteeBroken) as raised:
            sink.commit(receipts)
        cure = re.search("confirm that with '(.*?)'", str(raised.value))
        assert cure
        redis_client.execute_command(*cure[1].split())
        assert sink.commit(receipts) == [DONE, DONE]
        assert (
            sink.find(SPACE) == []
            and not list_leftovers(redis_client)
            and redis_client.llen("l") == 0
        )

    def test_rows_that_a_zombie_writes_after_its_abort_are_not_staged(
        self, make_redis: Any, redis_client: Any
    ) -> None:
        sink = make_redis(list="l", value="v")
        zombie = sink.begin(branch())
        zombie.write(pa.RecordBatch.from_pydict({"value": ["1"]}))
        assert sink.abort(sink.find(SPACE)) == [LOST]
        with pytest.raises(Rejected, match="is aborted already"):
            zombie.write(pa.RecordBatch.from_pydict({"value": ["2"]}))
        zombie.abort()
        assert sink.find(SPACE) == [] and not list_leftovers(redis_client)

    def test_all_branches_of_a_batch_appear_at_one_instant(
        self, make_redis: Any, redis_client: Any
    ) -> None:
        sink = make_redis(hash="h", field="id", value="v")
        receipts = []
        for task in range(8):
            texts = [f"{task}-{number}" for number in range(5000)]
            receipts.append(stage_rows(sink, {"key": texts, "value": texts}, task=task))
        seen: set[int] = set()
        over = threading.Event()

        def watch() -> None:
            while not over.is_set():
                seen.add(redis_client.hlen("h"))

        watcher = threading.Thread(target=watch)
        watcher.start()
        time.sleep(0.05)
        assert sink.commit(receipts) == [DONE] * 8
        time.sleep(0.05)
        over.set()
        watcher.join()
        assert seen == {0, 40_000}
