"""OpenSearch: documents whole, repeats without effect, refusals told item by item."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import pickle
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import opensearchpy
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from poundlock.core.coordinator import Coordinator
from poundlock.core.job import Votes
from poundlock.core.log import MemoryLog
from poundlock.core.model import (
    Branch,
    Fingerprint,
    Namespace,
    OperatorDecided,
    OperatorDecision,
    Receipt,
    Transaction,
)
from poundlock.core.participant import Column
from poundlock.core.protocol import BranchState
from poundlock.core.site import LocalSite
from poundlock.core.sparksql import to_json
from poundlock.errors import BadRow, NotAuthorised, PermanentlyRefused, Unavailable, UsageError
from poundlock.servers import opensearch
from poundlock.sinks import Elasticsearch, OpenSearch
from poundlock.sinks.opensearch.bulk import Refused, Sender, refusal, requests
from poundlock.sinks.opensearch.types import compare
from poundlock.sinks.opensearch.writer import bad_rows
from poundlock.spark.pipeline.sinktask import SinkTask

SPACE = Namespace.new("trial", 1_700_000_000, 1)
DONE = BranchState.COMMITTED
_numbers = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[opensearch.Node]:
    with opensearch.running() as node:
        yield node


@pytest.fixture
def eyes(server: opensearch.Node) -> Iterator[Any]:
    client = opensearchpy.OpenSearch([server.url], timeout=30)
    yield client
    client.close()


@pytest.fixture
def make(server: opensearch.Node, eyes: Any, tmp_path: Path) -> Any:
    def make(
        mappings: Any = None, *, into: str = "", index_settings: Any = None, **options: Any
    ) -> OpenSearch:
        index = into or f"index-{next(_numbers)}"
        settings = {"number_of_replicas": 0} | (index_settings or {})
        if not into:
            body = {"settings": settings, "mappings": mappings or {}}
            eyes.indices.create(index=index, body=body)
        options = {"id": "id", "retries": 2, "url": server.url, "name": "out"} | options
        sink = OpenSearch(index, **options)
        sink.attach(LocalSite(str(tmp_path)))
        return sink

    return make


def branch(task: int = 0, *, batch: int = 0, tolerant: bool = False) -> Branch:
    return Branch(Transaction(SPACE, 1, batch, 1), "out", task, task, tolerant=tolerant)


def rows(ids: Sequence[str | None], values: Sequence[Any] = (), **more: Any) -> pa.RecordBatch:
    values = values or list(range(len(ids)))
    documents = [json.dumps({"id": it, "v": v}) for it, v in zip(ids, values, strict=True)]
    hashes = [hash(it) for it in ids]
    ids_ = pa.array(ids, pa.string())
    return pa.RecordBatch.from_pydict({"id": ids_, "hash": hashes, "document": documents} | more)


def kept(sink: OpenSearch, written: pa.RecordBatch, task: int = 0, batch: int = 0) -> Receipt:
    writer = pickle.loads(pickle.dumps(sink)).begin(branch(task, batch=batch))
    writer.write(written)
    prepared = writer.prepare()
    return Receipt("out", prepared.id, task, Fingerprint(len(written)), prepared.handle)


def found(eyes: Any, sink: OpenSearch) -> dict[str, Any]:
    eyes.indices.refresh(index=sink.index)
    hits = eyes.search(index=sink.index, body={"size": 10_000})["hits"]["hits"]
    return {hit["_id"]: hit["_source"]["v"] for hit in hits}


class TestDocuments:
    @pytest.mark.parametrize(
        "ids",
        [
            ["plain", 'quo"te', "back\\slash", '\\"', "ümläut 漢字", "x" * 512, "{}"],
            ["new\nline", "tab\t", 'quo"te', "back\\slash"],  # control characters go another way
        ],
    )
    def test_ids_of_every_kind(self, make: Any, eyes: Any, ids: list[str]) -> None:
        sink = make()
        assert sink.commit([kept(sink, rows(ids))]) == [DONE]
        assert found(eyes, sink) == dict(zip(ids, range(len(ids)), strict=True))

    def test_many_requests(self, make: Any, eyes: Any) -> None:
        sink = make(max_bytes=10_000, max_docs=70)
        ids = [str(number) for number in range(2_000)]
        assert sink.commit([kept(sink, rows(ids))]) == [DONE]
        assert len(found(eyes, sink)) == 2_000

    def test_an_earlier_batch_that_comes_late_replaces_nothing_and_is_told(
        self, make: Any, eyes: Any
    ) -> None:
        """No driver that owns its pipeline sends a batch after the next: see `Coordinator.run`."""
        sink = make()
        late = kept(sink, rows(["a", "b"], [1, 1]), batch=1)
        assert sink.commit([kept(sink, rows(["a"], [2]), batch=2)]) == [DONE]
        with pytest.raises(PermanentlyRefused, match="refuses 1 of its documents: 'a': 409"):
            sink.commit([late])
        assert found(eyes, sink) == {"a": 2, "b": 1}

    def test_the_same_batch_again_changes_nothing(self, make: Any, eyes: Any) -> None:
        sink = make(delete="gone")
        sink.commit([kept(sink, rows(["gone", "a"], [1, 1]))])
        for task in range(3):  # as if each of them had not known of the one before
            again = rows(["gone", "never", "a"], [2, 2, 2], delete=[True, True, False])
            assert sink.commit([kept(sink, again, task=task, batch=1)]) == [DONE]
        assert found(eyes, sink) == {"a": 2}

    def test_a_version_column_decides_in_whatever_task_and_batch(
        self, make: Any, eyes: Any
    ) -> None:
        sink = make(version="ts")
        first = kept(sink, rows(["a", "a", "a"], [5, 9, 7], version=[5, 9, 7]))
        second = kept(sink, rows(["a"], [8], version=[8]), task=1)
        assert sink.check([first, second]) == [None, None]
        assert sink.commit([first, second]) == [DONE, DONE]
        assert sink.commit([kept(sink, rows(["a"], [6], version=[6]), batch=1)]) == [DONE]
        assert found(eyes, sink) == {"a": 9}

    def test_deletes(self, make: Any, eyes: Any) -> None:
        sink = make(delete="gone")
        sink.commit([kept(sink, rows(["a", "b"], [1, 1], delete=[False, None]))])
        sink.commit([kept(sink, rows(["a", "never"], [0, 0], delete=[True, True]), batch=1)])
        assert found(eyes, sink) == {"b": 1}

    def test_what_others_change_by_hand_hides_no_batch(self, make: Any, eyes: Any) -> None:
        sink = make(delete="gone")
        sink.commit([kept(sink, rows(["a", "b", "c"], [1, 1, 1]))])
        for _ in range(3):  # each counts the document's version up
            eyes.update(index=sink.index, id="a", body={"doc": {"by": str(next(_numbers))}})
        eyes.delete(index=sink.index, id="b")
        eyes.update(index=sink.index, id="c", body={"doc": {"by": "hand"}})
        after = rows(["a", "b", "c"], [2, 2, 2], delete=[False, False, True])
        assert sink.commit([kept(sink, after, batch=1)]) == [DONE]
        assert found(eyes, sink) == {"a": 2, "b": 2}

    @pytest.mark.parametrize("delete", [False, True])
    @pytest.mark.parametrize(
        "stored",
        [
            Namespace.new("trial", 1_700_003_600, 2).version(0),  # of a clock that was ahead
            Namespace.new("other", 1_700_000_000, 3).version(5),  # of another pipeline
            SPACE.version(0) + 1,  # counted up by hand
        ],
    )
    def test_a_greater_version_of_somebody_else_is_never_taken_for_ours(
        self, make: Any, eyes: Any, stored: int, delete: bool
    ) -> None:
        sink = make(delete="gone", index_settings={"gc_deletes": "0s"})
        given = {"version": stored, "version_type": "external"}
        eyes.index(index=sink.index, id="a", body={"v": 1}, params=given)
        receipt = kept(sink, rows(["a", "b"], [2, 2], delete=[delete, False]))
        with pytest.raises(PermanentlyRefused, match="An id has one writer") as raised:
            sink.commit([receipt])
        assert f"'a': 409: version {stored} is stored" in str(raised.value)
        assert found(eyes, sink) == {"a": 1, "b": 2}
        eyes.delete(index=sink.index, id="a")  # as the error says
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:  # until the server has forgotten it
            with contextlib.suppress(PermanentlyRefused):
                assert sink.commit([receipt]) == [DONE]
                break
            eyes.indices.refresh(index=sink.index)
        assert found(eyes, sink) == ({"b": 2} if delete else {"a": 2, "b": 2})

    def test_a_batch_after_versions_in_microseconds(self, make: Any, eyes: Any) -> None:
        before = make(version="ts")
        written = rows(["a"], [1], version=[1_700_000_000_000_000])
        assert before.commit([kept(before, written)]) == [DONE]
        sink = make(into=before.index)
        assert sink.commit([kept(sink, rows(["a"], [2]), batch=1)]) == [DONE]
        assert found(eyes, sink) == {"a": 2}

    def test_versions_of_two_logs_and_of_two_batches_are_never_one(self) -> None:
        first, second = (Namespace.new("trial", 1_700_000_000, chance) for chance in (1, 2))
        assert first.version(0) != second.version(0)
        assert first.version(1) - first.version(0) > 1000
        assert Namespace.new("trial", 1_700_000_000.001, 0).version(0) > first.version(0)
        assert Namespace.new("trial", 9_000_000_000, 1).version(10**9) < 1 << 63

    @pytest.mark.parametrize("semantic", ["at_least_once", "none"])
    def test_less_is_sent_straight_through_and_needs_no_id(
        self, make: Any, eyes: Any, semantic: str
    ) -> None:
        sink = make(id=None, semantic=semantic)
        for _ in range(2):
            writer = sink.begin(branch())
            writer.write(pa.RecordBatch.from_pydict({"document": ['{"v":1}']}))
            assert writer.prepare() is None
        assert list(found(eyes, sink).values()) == [1, 1]


class TestStraightThrough:
    """Without exactly once, and without an id: whatever is sent twice is there twice."""

    MAPPING = {"properties": {"v": {"type": "long"}}}  # noqa: RUF012

    @staticmethod
    def sink_task(sink: OpenSearch, values: Sequence[Any], *, tolerant: bool = True) -> SinkTask:
        """Write rows as a task does."""
        texts = [json.dumps({"v": value}) for value in values]
        sink_task = SinkTask(sink, branch(tolerant=tolerant))
        written = pa.StructArray.from_arrays([pa.array(texts)], ["document"])
        sink_task.take(written, pa.array(range(len(values)), pa.int64()))
        return sink_task

    @pytest.mark.parametrize("semantic", ["at_least_once", "none"])
    def test_bad_rows_are_left_out_and_the_good_are_sent_once(
        self, make: Any, eyes: Any, semantic: str
    ) -> None:
        sink = make(self.MAPPING, id=None, semantic=semantic, max_docs=3)
        sink_task = self.sink_task(sink, [1, "many", 3, 4, 5, "more", 7, 8])
        assert sink_task.bad == 2 and sink_task.fingerprint.rows == 6
        assert self.sink_task(sink, ["many"]).bad == 1  # and no good one that would come again
        assert sink_task.writer is not None
        sink_task.take(  # what comes next is written
            pa.StructArray.from_arrays([pa.array(['{"v":9}'])], ["document"]),
            pa.array([9], pa.int64()),
        )
        assert sorted(found(eyes, sink).values()) == [1, 3, 4, 5, 7, 8, 9]

    def test_where_none_may_be_bad_the_batch_fails(self, make: Any) -> None:
        sink = make(self.MAPPING, id=None, semantic="at_least_once")
        with pytest.raises(BadRow) as raised:
            self.sink_task(sink, [1, "many"], tolerant=False)
        assert list(raised.value.rows) == [1]

    def test_a_row_without_an_id_is_not_passed_over(self, make: Any, eyes: Any) -> None:
        written = rows(["a", None, "c"])
        strict = make(semantic="at_least_once")
        with pytest.raises(BadRow) as raised:
            strict.begin(branch()).write(written)
        assert raised.value.rows == {1: "the id is null"} and found(eyes, strict) == {}
        loose = make(semantic="none")
        loose.begin(branch()).write(written)
        loose.begin(branch()).write(rows([None]))
        assert found(eyes, loose) == {"a": 0, "c": 2}


class TestRefusals:
    def test_exactly_once_needs_an_id(self) -> None:
        with pytest.raises(UsageError, match="would be there twice"):
            OpenSearch("index", url="http://localhost")
        with pytest.raises(UsageError, match="Elasticsearch gives"):
            Elasticsearch("index", url="http://localhost")

    def test_every_missing_or_ill_typed_column_is_named(self) -> None:
        sink = OpenSearch("i", url="http://localhost", id="id", version="ts", delete="gone")
        columns = {"id": Column("id", "double"), "gone": Column("gone", "string")}
        with pytest.raises(UsageError) as raised:
            sink.project(columns)
        for part in ("'id' has type double", "no column 'ts'", "'gone' has type string"):
            assert part in str(raised.value)

    def test_bad_ids_are_named_by_row(self, make: Any) -> None:
        sink = make()
        writer = sink.begin(branch(tolerant=True))
        with pytest.raises(BadRow) as raised:
            writer.write(rows(["a", None, "", "x" * 513, "a"]))
        told = raised.value.rows
        assert {row: reason[:24] for row, reason in told.items()} == {
            1: "the id is null",
            2: "the id is empty",
            3: "the id is longer than 51",
            4: "another row of the batch",
        }
        writer.write(rows(["a", "b"]))
        with pytest.raises(BadRow) as raised:
            writer.write(rows(["c", "b"]))
        assert list(raised.value.rows) == [1]
        writer.write(rows(["c"]))
        assert [len(part) for part in sink.row_store.read(writer.prepare().id)] == [2, 1]

    def test_one_id_in_two_tasks_is_a_no_before_the_decision(self, make: Any, eyes: Any) -> None:
        sink = make()
        receipts = [kept(sink, rows(["a", "b"])), kept(sink, rows(["b", "c"]), task=1)]
        reasons = sink.check(receipts)
        assert all(reason and reason.startswith("1 ids of the batch") for reason in reasons)
        sink.abort(sink.find(SPACE))
        assert found(eyes, sink) == {}

    def test_equal_hashes_of_different_ids_are_no_matter(self, make: Any) -> None:
        sink = make()
        receipts = []
        for task, name in enumerate(["a", "b"]):
            written = rows([name, f"{name}2"]).set_column(1, "hash", pa.array([7, 7]))
            receipts.append(kept(sink, written, task=task))
        assert sink.check(receipts) == [None, None]

    def test_documents_that_the_mapping_refuses_stop_it_and_can_be_put_right(
        self, make: Any, eyes: Any
    ) -> None:
        sink = make({"dynamic": "strict", "properties": {"id": {"type": "keyword"}}})
        receipt = kept(sink, rows([str(number) for number in range(8)]))
        with pytest.raises(PermanentlyRefused) as raised:
            sink.commit([receipt])
        told = str(raised.value)
        assert "refuses 8 of its documents" in told and "and 3 more" in told
        assert "'0': 400 strict_dynamic_mapping_exception" in told and receipt.id in told
        eyes.indices.put_mapping(index=sink.index, body={"properties": {"v": {"type": "long"}}})
        assert sink.commit([receipt]) == [DONE]
        assert len(found(eyes, sink)) == 8

    def test_the_others_of_a_request_are_there(self, make: Any, eyes: Any) -> None:
        sink = make({"properties": {"v": {"type": "long"}}})
        receipt = kept(sink, rows(["a", "b", "c"], [1, "many", 3]))
        with pytest.raises(
            PermanentlyRefused, match="refuses 1 of its documents: 'b': 400 mapper_p"
        ) as raised:
            sink.commit([receipt])
        assert "many" not in str(raised.value)  # no error carries data
        assert found(eyes, sink) == {"a": 1, "c": 3}

    def test_a_person_may_go_on_without_what_is_refused(self, make: Any, eyes: Any) -> None:
        sink = make({"properties": {"v": {"type": "long"}}})
        records: dict[int, bytes] = {}
        job = _Job(sink, [rows(["a", "b"], [1, "many"]), rows(["c"], [3])])

        def start() -> None:
            coordinator = Coordinator(MemoryLog(records), {"out": sink})
            coordinator.take_over("trial", query=lambda: None, owner="here")
            for batch in range(2):
                coordinator.run(batch, f"offsets {batch}", job)
                job.batches = [rows(["d"], [4])]

        for _ in range(2):
            with pytest.raises(
                PermanentlyRefused, match=r"'poundlock txn commit .* --accept-loss'"
            ):
                start()
        log = MemoryLog(records)
        log.load()
        log.append(OperatorDecided(0, OperatorDecision.ACCEPT_LOSS, "me"))
        start()
        assert found(eyes, sink) == {"a": 1, "c": 3, "d": 4}
        assert sink.find(log.load().generation.namespace) == []  # type: ignore[union-attr]

    def test_an_index_that_takes_no_writes_now_is_waited_for(self, make: Any, eyes: Any) -> None:
        sink = make(retries=1)
        receipt = kept(sink, rows(["a"]))
        block = "index.blocks.write"
        eyes.indices.put_settings(index=sink.index, body={block: True})
        with pytest.raises(Unavailable, match="in 2 tries"):
            sink.commit([receipt])
        eyes.indices.put_settings(index=sink.index, body={block: False})
        assert sink.commit([receipt]) == [DONE]

    def test_a_request_too_large_for_the_server_is_cut(self, server: Any, tmp_path: Path) -> None:
        client = _Small(limit=400)
        sender = Sender(client, "i", "out", retries=0)  # type: ignore[arg-type]
        (request,) = requests(rows([str(n) for n in range(20)]), 1, max_bytes=9999, max_docs=99)
        assert sender.send(request) == []
        assert client.taken == 20
        (one,) = requests(rows(["x" * 500]), 1, max_bytes=9999, max_docs=99)
        (refused,) = sender.send(one)
        assert "413" in refused.reason

    def test_only_what_failed_is_sent_again(self) -> None:
        client = _Busy()
        sender = Sender(client, "i", "out", retries=3, version=1, sleep=lambda _: None)  # type: ignore[arg-type]
        (request,) = requests(rows(["a", "b", "c"]), 1, max_bytes=9999, max_docs=99)
        assert sender.send(request) == []
        assert client.asked == [["a", "b", "c"], ["b"], ["b"]]

    def test_a_conflict_in_unknown_words_is_looked_up(self) -> None:
        sender = Sender(_Wordless(), "i", "out", retries=0, version=7)  # type: ignore[arg-type]
        spoof = "current version [7] is as high as [7]"  # an id, not the server's words
        (request,) = requests(
            rows(["ours", "newer", "gone", spoof]), 7, max_bytes=9999, max_docs=99
        )
        assert [(it.row, it.foreign) for it in sender.send(request)] == [
            (1, True), (2, True), (3, True),
        ]  # fmt: skip

    def test_what_an_ingest_pipeline_drops_is_not_there(self) -> None:
        sender = Sender(_Dropping(), "i", "out", retries=0)  # type: ignore[arg-type]
        (request,) = requests(rows(["a", "b"]), 1, max_bytes=9999, max_docs=99)
        assert [(it.id, it.reason) for it in sender.send(request)] == [
            ("b", "an ingest pipeline of the index drops it")
        ]

    def test_a_refused_document_is_known_by_its_row(self) -> None:
        client = _Picky()
        sender = Sender(client, "i", "out", retries=9, sleep=lambda _: None)  # type: ignore[arg-type]
        ids = ["a", "bad", "late", "bad", "x" * 500, "late", "bad"]
        found = [
            (it.row, it.reason[:3])
            for request in requests(rows(ids), 1, max_bytes=9999, max_docs=4)
            for it in sender.send(request)
        ]
        assert sorted(found) == [(1, "400"), (3, "400"), (4, "one"), (6, "400")]

    def test_an_error_names_no_more_than_a_few(self) -> None:
        error = refusal([Refused(str(n), "no") for n in range(1000)], "branch", "i", "out")
        assert len(str(error)) < 1000


class _Job:
    """One task for each batch of rows."""

    stateful = False

    def __init__(self, sink: OpenSearch, batches: list[pa.RecordBatch]):
        self._sink, self.batches = sink, batches

    def write(self, transaction: Transaction, sinks: Any, held_ids: Any) -> Votes:
        receipts: list[Receipt] = []
        for task, written in enumerate(self.batches):
            writer = self._sink.begin(Branch(transaction, "out", task, task))
            writer.write(written)
            prepared = writer.prepare()
            assert prepared is not None
            receipts.append(Receipt("out", prepared.id, task, Fingerprint(len(written))))
        return Votes(tuple(receipts), {"out": Fingerprint(sum(map(len, self.batches)))})

    def drain(self) -> Any:
        raise AssertionError("there is no state")


def _ids(body: bytes) -> list[str]:
    return [json.loads(line)["index"]["_id"] for line in body.splitlines()[::2]]


def _conflict(id: str, reason: str) -> Any:
    error = {"type": "version_conflict_engine_exception", "reason": f"[{id}]: {reason}"}
    return {"index": {"_id": id, "status": 409, "error": error}}


class _Wordless:
    """A server that tells a conflict in other words than those we know, and can be asked."""

    STORED = {"ours": 7, "newer": 8}  # noqa: RUF012

    def bulk(self, *, body: bytes, **_: Any) -> Any:
        return {"errors": True, "items": [_conflict(it, "no, 7") for it in _ids(body)]}

    def mget(self, *, body: Any, **_: Any) -> Any:
        docs = [
            {"_id": it, "found": True, "_version": self.STORED[it]}
            if it in self.STORED
            else {"_id": it, "found": False}
            for it in body["ids"]
        ]
        return {"docs": docs}


class _Dropping:
    """A server whose ingest pipeline drops `b`: ours comes without the processor."""

    def bulk(self, *, body: bytes, **_: Any) -> Any:
        result = {"b": {"status": 200, "result": "noop"}}
        made = {"status": 201, "result": "created"}
        items = [{"index": {"_id": it} | result.get(it, made)} for it in _ids(body)]
        return {"errors": False, "items": items}


class _Small:
    """A server with a small http.max_content_length, which a real one has only at 100 MB."""

    def __init__(self, limit: int):
        self.limit, self.taken = limit, 0

    def bulk(self, *, body: bytes, **_: Any) -> Any:
        if len(body) > self.limit:
            raise opensearchpy.exceptions.TransportError(413, "too large", {})
        ids = _ids(body)
        self.taken += len(ids)
        return {"errors": False, "items": [{"index": {"_id": it, "status": 201}} for it in ids]}


class _Busy:
    """A server that has no room for `b` at first, which cannot be had from a real one at will."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def bulk(self, *, body: bytes, **_: Any) -> Any:
        ids = _ids(body)
        self.asked.append(ids)
        busy = len(self.asked) < 3
        items = [
            {"index": {"_id": it, "status": 429, "error": {"type": "rejected", "reason": "full"}}}
            if it == "b" and busy
            else _conflict(it, "version conflict, current version [1] is as high as [1]")
            for it in ids
        ]
        return {"errors": True, "items": items}


class _Picky:
    """A server that takes little at once, some documents later, and some never."""

    def __init__(self) -> None:
        self.calls = 0

    def bulk(self, *, body: bytes, **_: Any) -> Any:
        self.calls += 1
        if self.calls == 1:
            raise opensearchpy.exceptions.TransportError(503, "away", {})
        if len(body) > 400:
            raise opensearchpy.exceptions.TransportError(413, "too large", {})
        ids = _ids(body)
        status = {"bad": 400, "late": 429 if self.calls < 8 else 201}
        items = [{"index": {"_id": it, "status": status.get(it, 201)}} for it in ids]
        return {"errors": True, "items": items}


class TestPreflight:
    COLUMNS = {"id": Column("id", "string"), "v": Column("v", "bigint")}  # noqa: RUF012

    def test_the_frame_gives_what_the_writer_takes(self) -> None:
        plain = OpenSearch("i", url="http://localhost", id="id")
        assert list(plain.project(self.COLUMNS)) == ["id", "hash", "document"]
        versioned = OpenSearch("i", url="http://localhost", id="id", version="v")
        wanted = versioned.project(self.COLUMNS)
        assert list(wanted) == ["id", "version", "document"]
        assert "'v', v" in wanted["document"]

    def test_times_of_both_kinds_keep_their_microseconds(self) -> None:
        columns = {"id": Column("id", "string"), "at": Column("at", "timestamp_ntz")}
        wanted = OpenSearch("i", url="http://localhost", id="id").project(columns)
        assert wanted["document"] == to_json("named_struct('id', id, 'at', at)", nulls=False)

    def test_a_strict_mapping_names_what_it_lacks(self, make: Any) -> None:
        sink = make({"dynamic": "strict", "properties": {"id": {"type": "keyword"}}})
        sink.project(self.COLUMNS)
        with pytest.raises(UsageError, match="column 'v' is not in the mapping, which is strict"):
            sink.preflight()

    def test_a_missing_index_is_told(self, server: opensearch.Node) -> None:
        sink = OpenSearch("missing", url=server.url, id="id")
        (told,) = sink.preflight()
        assert "does not exist" in told

    def test_an_index_that_soon_forgets_deletes_is_told(self, make: Any, eyes: Any) -> None:
        assert make().preflight() == []  # nothing is deleted
        sink = make(delete="gone")
        (told,) = sink.preflight()
        assert "60s" in told and f"PUT {sink.index}/_settings" in told
        for life, enough in (("90m", False), ("-1", False), ("24h", True), ("2d", True)):
            body = {"index.gc_deletes": life}
            eyes.indices.put_settings(index=sink.index, body=body)
            assert (sink.preflight() == []) == enough, life

    def test_types_are_compared_as_far_as_they_tell(self) -> None:
        fields = {
            name: {"type": name}
            for name in ("long", "integer", "date", "boolean", "keyword", "object", "ip")
        }
        kinds = {
            "long": "boolean", "integer": "bigint", "date": "string", "boolean": "int",
            "keyword": "array<int>", "object": "string", "ip": "string", "new": "int",
        }  # fmt: skip
        wrong, doubtful = compare({"properties": fields}, kinds)
        assert [text.split("'")[1] for text in wrong] == ["long", "boolean", "object"]
        assert [text.split("'")[1] for text in doubtful] == ["integer", "date", "ip"]

    @pytest.mark.parametrize(
        ("kind", "field", "value"),
        [
            ("double", {"type": "float"}, 1e300),
            ("double", {"type": "half_float"}, 7e4),
            ("bigint", {"type": "half_float"}, 70_000),
            ("bigint", {"type": "unsigned_long"}, -1),
            ("double", {"type": "long"}, 1e30),
            ("decimal(38,0)", {"type": "long"}, 10**25),
            ("decimal(5,1)", {"type": "long", "coerce": False}, 1.5),
            ("timestamp", {"type": "date_nanos"}, "1960-01-01T00:00:00.000000Z"),
            (
                "timestamp",
                {"type": "date", "format": "epoch_millis"},
                "2024-01-01T00:00:00.000000Z",
            ),
            ("string", {"type": "keyword"}, "x" * 32_767),
            ("array<string>", {"type": "keyword"}, ["x" * 32_767]),
        ],
    )
    def test_a_type_with_values_that_the_field_refuses_is_told(
        self, make: Any, eyes: Any, kind: str, field: Any, value: Any
    ) -> None:
        sink = make({"properties": {"v": field}})
        sink.project(self.COLUMNS | {"v": Column("v", kind)})
        (told,) = sink.preflight()
        assert "column 'v'" in told and "stops the pipeline" in told
        with pytest.raises(opensearchpy.exceptions.RequestError):
            eyes.index(index=sink.index, body={"v": value})

    @pytest.mark.parametrize(
        ("kind", "field"),
        [
            ("smallint", {"type": "half_float"}),
            ("decimal(38,0)", {"type": "float"}),
            ("decimal(18,0)", {"type": "long"}),
            ("decimal(20,2)", {"type": "long"}),
            ("double", {"type": "double"}),
            ("timestamp", {"type": "date", "format": "epoch_millis||strict_date_optional_time"}),
            ("string", {"type": "keyword", "ignore_above": 256}),
            ("double", {"type": "long", "ignore_malformed": True}),
        ],
    )
    def test_a_type_that_fits_is_not_told(self, kind: str, field: Any) -> None:
        assert compare({"properties": {"v": field}}, {"v": kind}) == ([], [])

    def test_an_id_is_never_too_long_for_its_field(self) -> None:
        mapping = {"properties": {"id": {"type": "keyword"}}}
        assert compare(mapping, {"id": "string"}, id="id") == ([], [])

    @pytest.mark.parametrize(
        "name", ["_id", "_source", "_routing", "_version", "_index", "_id.x", "", ".", ".a", "a..b"]
    )
    def test_columns_that_no_document_can_have(self, make: Any, eyes: Any, name: str) -> None:
        sink = make()
        with pytest.raises(UsageError, match=re.escape(f"column {name!r} has")):
            sink.project(self.COLUMNS | {name: Column("x", "string")})
        with pytest.raises(opensearchpy.exceptions.RequestError):
            eyes.index(index=sink.index, body={name: "x"})

    def test_columns_that_only_look_odd(self, make: Any, eyes: Any) -> None:
        sink = make(delete="_id")
        odd = {name: Column("x", "string") for name in ("_type", "a.b", "c.", " ", "x._id")}
        sink.project(self.COLUMNS | odd | {"_id": Column("y", "boolean")})
        eyes.index(index=sink.index, body=dict.fromkeys(odd, "x"))

    def test_an_index_that_requires_routing_is_refused(self, make: Any) -> None:
        with pytest.raises(UsageError, match="requires a routing value"):
            make({"_routing": {"required": True}}).preflight()

    @pytest.mark.parametrize("index", ["Upper", "index-*", "i1,i2", "_all", "-x", "a b", "x" * 256])
    def test_names_that_no_index_can_have(self, server: opensearch.Node, index: str) -> None:
        for semantic in ("exactly_once", "at_least_once"):
            sink = OpenSearch(index, url=server.url, id="id", name="out", semantic=semantic)
            with pytest.raises(UsageError, match=r"cannot be|no index can have that name"):
                sink.preflight()

    def test_settings_that_lose_documents_are_told(self, make: Any, eyes: Any) -> None:
        eyes.ingest.put_pipeline(id="nothing", body={"processors": []})
        settings = {"translog.durability": "async", "final_pipeline": "nothing"}
        told = make(index_settings=settings).preflight()
        assert ["translog.durability async" in it for it in told] == [True, False]
        assert "index.final_pipeline nothing" in told[1]
        quiet = {"translog.durability": "request", "default_pipeline": "_none"}
        assert make(index_settings=quiet).preflight() == []

    def test_a_server_that_is_away(self) -> None:
        sink = OpenSearch("i", url="http://user:hidden@127.0.0.1:1", id="id")
        with pytest.raises(Unavailable) as raised:
            sink.preflight()
        assert "hidden" not in str(raised.value) + repr(sink) + repr(sink.client)

    def test_a_refused_password_is_told_without_it(self) -> None:
        error = opensearchpy.exceptions.AuthenticationException(401, "Unauthorized", {})
        from poundlock.sinks.opensearch.client import translate_error

        assert isinstance(translate_error(error, "looking", "out"), NotAuthorised)

    def test_a_password_with_letters_that_addresses_lack(self) -> None:
        sink = OpenSearch("i", url="http://us%40er:p%2Fw%25@127.0.0.1:1", id="id")
        (connection,) = sink.client.transport.connection_pool.connections
        expected = base64.b64encode(b"us@er:p/w%").decode()
        assert connection.headers["authorization"] == f"Basic {expected}"

    def test_an_address_that_is_none(self) -> None:
        with pytest.raises(UsageError, match="https://user:password@host"):
            OpenSearch("i", url="secret nonsense", id="id").preflight()


class TestAliases:
    """What is sent again must go to the same index."""

    @pytest.fixture
    def alias(self, eyes: Any) -> Any:
        def alias(*entries: Any) -> str:
            name = f"alias-{next(_numbers)}"
            for number, entry in enumerate(entries):
                body = {"settings": {"number_of_replicas": 0}, "aliases": {name: entry}}
                eyes.indices.create(index=f"{name}-{number}", body=body)
            return name

        return alias

    def test_one_index_behind_an_alias_is_fine_until_the_alias_is_gone(
        self, make: Any, eyes: Any, alias: Any
    ) -> None:
        sink = make(into=alias({}))
        assert sink.preflight() == []
        assert sink.commit([kept(sink, rows(["a"]))]) == [DONE]
        eyes.indices.delete_alias(index=f"{sink.index}-0", name=sink.index)
        receipt = kept(sink, rows(["b"]), batch=1)
        with pytest.raises(PermanentlyRefused, match="is not an alias"):
            sink.commit([receipt])
        assert not eyes.indices.exists(index=sink.index)
        eyes.indices.put_alias(index=f"{sink.index}-0", name=sink.index)
        assert sink.commit([receipt]) == [DONE]
        assert set(found(eyes, sink)) == {"a", "b"}

    @pytest.mark.parametrize(
        "entries", [({"is_write_index": True},), ({"is_write_index": True}, {})]
    )
    def test_one_that_a_rollover_may_move_is_not_exactly_once(
        self, make: Any, alias: Any, entries: Any
    ) -> None:
        index = alias(*entries)
        with pytest.raises(UsageError, match="which a rollover changes"):
            make(into=index).preflight()
        assert len(make(into=index, semantic="at_least_once").preflight()) == len(entries) - 1

    @pytest.mark.parametrize("entries", [({"is_write_index": False},), ({}, {})])
    def test_one_that_nothing_can_be_written_to(self, make: Any, alias: Any, entries: Any) -> None:
        index = alias(*entries)
        for semantic in ("exactly_once", "at_least_once"):
            with pytest.raises(UsageError, match="write index"):
                make(into=index, semantic=semantic).preflight()

    def test_another_index_each_day_is_not_exactly_once(self, make: Any) -> None:
        with pytest.raises(UsageError, match="another index each day"):
            make(into="<day-{now/d}>").preflight()
        (told,) = make(into="<day-{now/d}>", semantic="at_least_once").preflight()
        assert "does not exist" in told


def test_numbers_that_json_has_no_word_for_are_bad_rows(make: Any, spark: SparkSession) -> None:
    """Spark spells them as text, and a field of numbers would refuse it after the decision."""
    values = {
        "flat": ("double", "double('{}')"),
        "half": ("float", "float('{}')"),
        "array": ("array<double>", "array(1.0D, null, double('{}'))"),
        "deep": (
            "array<struct<m:map<string,float>,d:decimal(3,1),s:struct<x:double>>>",
            "array(null, named_struct('m', map('NaN', float('{}')), 'd', 1.5BD, "
            "'s', named_struct('x', 1D)))",
        ),
    }
    sink = make()
    columns = {name: Column(f"r.`{name}`", kind) for name, (kind, _) in values.items()}
    wanted = sink.project({"id": Column("id", "string"), "t": Column("id", "string")} | columns)
    lines: list[str] = []
    for number, word in enumerate(["1", "NaN", "Infinity", "-Infinity"]):
        for odd in values if number else ["flat"]:
            row = ", ".join(
                f"{made.format(word if name == odd else 1)} AS {name}"
                for name, (_, made) in values.items()
            )
            lines.append(f"SELECT 'NaN{len(lines)}' AS id, struct({row}) AS r")
    lines.append(f"SELECT 'NaN' AS id, CAST(null AS {_struct(values)}) AS r")
    frame = spark.sql(" UNION ALL ".join(lines))
    got = frame.selectExpr(*(f"{sql} AS {name}" for name, sql in wanted.items())).collect()
    written = pa.RecordBatch.from_pylist([row.asDict() for row in got])
    with pytest.raises(BadRow, match="NaN or infinite") as raised:
        sink.begin(branch(tolerant=True)).write(written)
    assert sorted(raised.value.rows) == list(range(1, 13))
    good = kept(sink, written.take(pa.array([0, 13])))
    assert sink.commit([good]) == [DONE]


def _struct(values: Any) -> str:
    return f"struct<{','.join(f'{name}:{kind}' for name, (kind, _) in values.items())}>"


def test_a_document_has_room_for_its_id() -> None:
    written = rows(["a"]).set_column(2, "document", pa.array(["x" * ((100 << 20) - 100)]))
    assert "larger than 100 MiB" in bad_rows(written)[0]


def test_a_silent_server_is_away_and_a_repeat_changes_nothing(
    make: Any, eyes: Any, server: opensearch.Node
) -> None:
    sink = make(timeout=1, retries=0)
    receipt = kept(sink, rows(["a", "b"]))
    server.pause()
    try:
        with pytest.raises(Unavailable):
            sink.commit([receipt])
    finally:
        server.resume()
    assert sink.commit([receipt]) == [DONE]
    assert len(found(eyes, sink)) == 2
    versions = eyes.search(index=sink.index, body={"version": True})["hits"]["hits"]
    assert {hit["_version"] for hit in versions} == {SPACE.version(0)}


def test_nothing_is_left_beside_the_log(make: Any, tmp_path: Path) -> None:
    sink = make()
    receipts = [kept(sink, rows(["a"])), kept(sink, rows(["b"]), task=1)]
    sink.commit(receipts[:1])
    sink.abort(sink.find(SPACE))
    assert {file.suffix for file in tmp_path.rglob("*.*") if file.is_file()} == {
        ".sent",
        ".aborted",
    }
    sink.prune(SPACE, 1)
    left = [file.suffix for file in tmp_path.rglob("*") if file.is_file()]
    assert left == [".aborted"], "one mark tells of the newest generation"
