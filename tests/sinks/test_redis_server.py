"""Redis: servers that fail, lack memory, are replicas or form a cluster."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pyarrow as pa
import pytest
import redis
from fix_redis import DONE, LOST, SPACE, branch, list_leftovers, stage_rows

from poundlock.core.protocol import BranchState
from poundlock.errors import Rejected, Unavailable, UsageError
from poundlock.servers import valkey
from poundlock.sinks import Redis


class Slot:
    """A slot that moves between the two nodes of a cluster."""

    def __init__(self, redis_client: Any, tag: str, address: str):
        number, source = redis_client.keyslot(tag), redis_client.get_node_from_key(tag)
        (target,) = (it for it in redis_client.get_primaries() if it.name != source.name)
        self._tag, self._password = tag, address.partition("//:")[2].partition("@")[0]
        self._to = (target.host, target.port)
        self._ends = [redis_client.get_redis_connection(it) for it in (source, target)]
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
    def test_a_server_killed_during_a_move_loses_and_repeats_nothing(self) -> None:
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
                receipts = [stage_rows(sink, ones, task, batch) for task in range(2)]
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
        assert cut  # at least one move was interrupted

    def test_settings_that_lose_data_are_warned_of(self) -> None:
        settings = {"appendonly": "no", "maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"}
        with valkey.running(settings=settings) as node:
            sink = Redis(url=node.address, list="l", value="v")
            warnings = "\n".join(sink.preflight())
            assert "appendonly is off" in warnings and "allkeys-lru" in warnings
            client = redis.Redis.from_url(node.address)
            client.config_set("appendonly", "yes")
            client.config_set("appendfsync", "everysec")
            # The sink's own keys never expire.
            client.config_set("maxmemory-policy", "volatile-lru")
            (warning,) = sink.preflight()
            assert "appendfsync is everysec" in warning
            client.replicaof("127.0.0.1", 1)
            with pytest.raises(UsageError, match="is a replica"):
                sink.preflight()
            node.kill()  # a replica without its primary stops slowly

    @pytest.mark.parametrize(
        ("version", "fits"), [("5.0.14", False), ("6.0.16", False), ("6.2.0", True), ("10.0", True)]
    )
    def test_a_server_that_is_too_old_is_refused(
        self, make_redis: Any, monkeypatch: pytest.MonkeyPatch, version: str, fits: bool
    ) -> None:
        sink = make_redis(list="l", value="v")
        ask = sink.client.execute

        def answer(*command: Any, key: str) -> Any:
            return {"redis_version": version} if command[0] == "INFO" else ask(*command, key=key)

        monkeypatch.setattr(sink.client, "execute", answer)
        with (
            nullcontext()
            if fits
            else pytest.raises(UsageError, match=f"is Redis {version}, but the sink needs 6.2")
        ):
            assert sink.preflight() == []

    def test_a_server_without_memory_moves_nothing_until_it_has_some(
        self, make_redis: Any, redis_client: Any
    ) -> None:
        adding = make_redis(hash="sums", field="id", value="n", operation="increment")
        setting = make_redis(hash="words", field="id", value="v")
        sums = [stage_rows(adding, {"key": ["a", "b"], "value": [1, 2]}, task) for task in range(2)]
        words = [stage_rows(setting, {"key": ["a"], "value": ["x"]}, batch=1)]
        redis_client.config_set("maxmemory", 1)
        try:
            for sink, receipts in ((adding, sums), (setting, words)):
                assert set(sink.check(receipts)) == {None}
                with pytest.raises(
                    Unavailable, match=r"no memory left \(maxmemory\).*Nothing is lost"
                ):
                    sink.commit(receipts)
                assert not redis_client.exists("sums", "words")
        finally:
            redis_client.config_set("maxmemory", 0)
        assert adding.commit(sums) == [DONE, DONE] and setting.commit(words) == [DONE]
        assert redis_client.hgetall("sums") == {"a": "2", "b": "4"} and redis_client.hgetall(
            "words"
        ) == {"a": "x"}
        assert not list_leftovers(redis_client)

    def test_a_server_without_memory_deletes_aborted_rows(
        self, make_redis: Any, redis_client: Any
    ) -> None:
        sink = make_redis(list="l", value="v")
        writer = sink.begin(branch())
        writer.write(pa.RecordBatch.from_pydict({"value": ["x" * 1000] * 1000}))
        stage_rows(sink, {"value": ["1"]}, task=1)
        redis_client.config_set("maxmemory", 1)
        try:
            writer.abort()
            (stray,) = sink.find(SPACE)
            assert sink.abort([stray]) == [LOST]
            assert not list_leftovers(redis_client)
        finally:
            redis_client.config_set("maxmemory", 0)

    def test_a_lack_of_memory_before_version_7_is_recognised(self, make_redis: Any) -> None:
        """Its scripts report it with another message."""
        message = (
            "Error running script: @user_script:1: -OOM command not allowed when used memory > 'm'."
        )
        with (
            pytest.raises(Unavailable, match="no memory left"),
            make_redis(list="l", value="v").client.errors("staging"),
        ):
            raise redis.ResponseError(message)

    def test_a_silent_server_is_unavailable(
        self, redis_server: valkey.Valkey, redis_client: Any
    ) -> None:
        sink = Redis(url=redis_server.address, name="out", list="l", value="v", timeout=0.3)
        receipt = stage_rows(sink, {"value": ["1"]})
        writer = sink.begin(branch(1))
        writer.write(pa.RecordBatch.from_pydict({"value": ["2"]}))
        redis_server.pause()
        try:
            with pytest.raises(Unavailable):
                sink.commit([receipt])
            with pytest.raises(Unavailable):
                writer.write(pa.RecordBatch.from_pydict({"value": ["3"]}))
            writer.abort()  # never raises
        finally:
            redis_server.resume()
        # The server may have run the silent commit since. It runs only once in any case.
        assert sink.commit([receipt]) == [DONE]
        sink.abort(sink.find(SPACE))
        assert redis_client.lrange("l", 0, -1) == ["1"]
        assert not list_leftovers(redis_client)

    @pytest.mark.parametrize("semantic", ["at_least_once", "none"])
    def test_weaker_semantics_write_without_a_branch(
        self, make_redis: Any, redis_client: Any, semantic: str
    ) -> None:
        sink = make_redis(list="l", value="v", semantic=semantic)
        writer = sink.begin(branch())
        writer.write(pa.RecordBatch.from_pydict({"value": ["1", "2"]}))
        assert writer.prepare() is None
        writer.abort()  # as after a failure of another sink in the task
        assert redis_client.lrange("l", 0, -1) == ["1", "2"]
        assert redis_client.keys("*") == ["l"]

    @pytest.mark.parametrize("semantic", ["at_least_once", "none"])
    def test_rows_of_a_dead_task_without_a_branch_expire(
        self, make_redis: Any, redis_client: Any, semantic: str
    ) -> None:
        sink = make_redis(list="l", value="v", semantic=semantic)
        writer = sink.begin(branch())
        writer.write(pa.RecordBatch.from_pydict({"value": ["1"]}))
        left = redis_client.keys("*")
        assert len(left) == 2 and all(86_000 < redis_client.ttl(key) <= 86_400 for key in left)
        writer.abort()
        assert redis_client.keys("*") == []
        with pytest.raises(Rejected) if semantic == "at_least_once" else nullcontext():
            writer.prepare()  # a late move finds nothing and fails
        assert redis_client.keys("*") == []

    def test_a_replica_proves_nothing(self, make_redis: Any, redis_client: Any) -> None:
        sink = make_redis(list="l", value="v")
        receipt = stage_rows(sink, {"value": ["1"]})
        redis_client.flushall()  # as before its first synchronisation
        redis_client.replicaof("127.0.0.1", 1)
        try:
            with pytest.raises(Unavailable, match="read only replica"):
                sink.commit([receipt])
        finally:
            redis_client.replicaof("no", "one")
        assert sink.commit([receipt]) == [BranchState.NO_WITNESS]

    def test_a_slot_that_moves_to_another_node_is_waited_for(self) -> None:
        shapes = {
            "p": ({"value": "v"}, {"value": ["1", "2"]}, "1"),
            "q": ({"value": "n", "operation": "increment"}, {"value": [1, 2]}, "11"),
            "r": ({}, {".x": ["1", "2"]}, {"x": "1", "y": "10"}),
        }
        with valkey.running(nodes=2, cluster=True) as node:
            redis_client = redis.RedisCluster.from_url(node.address, decode_responses=True)
            for tag, (options, rows, after) in shapes.items():
                old, new = f"{{{tag}}}:a", f"{{{tag}}}:b"
                if isinstance(after, str):
                    redis_client.set(old, "10")
                else:
                    redis_client.hset(old, "y", "10")
                sink = Redis(
                    url=node.address, name="out", key="id", prefix=f"{{{tag}}}:", **options
                )
                receipt = stage_rows(sink, {"key": ["a", "b"]} | rows)
                slot = Slot(redis_client, tag, node.address)
                slot.open()
                for who in ("at the source", "at the target"):
                    for doing in (sink.check, sink.commit):
                        with pytest.raises(Unavailable, match="non local key"):
                            doing([receipt])
                    # The sink's own keys move first, and the script follows them.
                    if who == "at the source":
                        ours = [key for key in slot.left() if "poundlock" in key]
                        assert len(ours) == 3
                        slot.send(*ours)
                assert slot.left() == [old]
                slot.send(old)
                slot.close()
                assert sink.commit([receipt]) == [DONE]
                assert after == (
                    redis_client.get(old) if isinstance(after, str) else redis_client.hgetall(old)
                )
                assert redis_client.exists(new)
            redis_client.close()

    def test_a_cluster_is_supported(self) -> None:
        with valkey.running(nodes=3, cluster=True) as node:
            loose = Redis(url=node.address, name="out", key="id", prefix="p:")
            with pytest.raises(UsageError, match=r"prefix='\{p\}:'"):
                loose.preflight()
            redis_client = redis.RedisCluster.from_url(node.address, decode_responses=True)
            for number, target in enumerate(["one", "two", "three", "a{four}b"]):
                sink = Redis(url=node.address, name="out", hash=target, field="id", value="v")
                assert sink.preflight() == []
                receipts = [
                    stage_rows(sink, {"key": [str(task)], "value": ["1"]}, task, number)
                    for task in range(3)
                ]
                assert sink.check(receipts) == [None] * 3
                assert sink.commit(receipts) == [DONE] * 3
                assert sink.commit(receipts) == [DONE] * 3
                assert redis_client.hlen(target) == 3 and sink.find(SPACE) == []
            many = Redis(url=node.address, name="out", key="id", prefix="{p}:")
            assert many.preflight() == []
            assert many.commit([stage_rows(many, {"key": ["a", "b"], ".x": ["1", "2"]})]) == [DONE]
            assert redis_client.hgetall("{p}:b") == {"x": "2"}
            redis_client.close()
