"""OpenSearch: complete documents, repeats without effect, and refusals that name the document."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import opensearchpy
import pyarrow as pa
import pytest
from fix_opensearch import DONE, NUMBERS, SPACE, branch, make_rows, read_documents, store_rows

from poundlock.core.checkpoint import Plan
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
from poundlock.errors import BadRow, PermanentlyRefused, Unavailable, UsageError
from poundlock.servers import opensearch
from poundlock.sinks import Elasticsearch, OpenSearch
from poundlock.sinks.opensearch.bulk import Refused, Sender, refusal, requests
from poundlock.spark.pipeline.sinktask import SinkTask


class TestDocuments:
    @pytest.mark.parametrize(
        "ids",
        [
            ["plain", 'quo"te', "back\\slash", '\\"', "ümläut 漢字", "x" * 512, "{}"],
            # Control characters are escaped in another way.
            ["new\nline", "tab\t", 'quo"te', "back\\slash"],
        ],
    )
    def test_ids_with_any_characters_arrive(
        self, make_search: Any, search_client: Any, ids: list[str]
    ) -> None:
        sink = make_search()
        assert sink.commit([store_rows(sink, make_rows(ids))]) == [DONE]
        assert read_documents(search_client, sink) == dict(zip(ids, range(len(ids)), strict=True))

    def test_a_batch_can_take_many_requests(self, make_search: Any, search_client: Any) -> None:
        sink = make_search(max_bytes=10_000, max_docs=70)
        ids = [str(number) for number in range(2_000)]
        assert sink.commit([store_rows(sink, make_rows(ids))]) == [DONE]
        assert len(read_documents(search_client, sink)) == 2_000

    def test_a_late_earlier_batch_replaces_nothing_and_is_reported(
        self, make_search: Any, search_client: Any
    ) -> None:
        """A driver that owns its pipeline never sends batches out of order: see `Coordinator.run`."""
        sink = make_search()
        late = store_rows(sink, make_rows(["a", "b"], [1, 1]), batch=1)
        assert sink.commit([store_rows(sink, make_rows(["a"], [2]), batch=2)]) == [DONE]
        with pytest.raises(PermanentlyRefused, match="refuses 1 of its documents: 'a': 409"):
            sink.commit([late])
        assert read_documents(search_client, sink) == {"a": 2, "b": 1}

    def test_a_repeated_batch_changes_nothing(self, make_search: Any, search_client: Any) -> None:
        sink = make_search(delete="gone")
        sink.commit([store_rows(sink, make_rows(["gone", "a"], [1, 1]))])
        for task in range(3):  # as if each did not know about the one before
            again = make_rows(["gone", "never", "a"], [2, 2, 2], delete=[True, True, False])
            assert sink.commit([store_rows(sink, again, task=task, batch=1)]) == [DONE]
        assert read_documents(search_client, sink) == {"a": 2}

    def test_the_highest_version_wins_over_all_tasks_and_batches(
        self, make_search: Any, search_client: Any
    ) -> None:
        sink = make_search(version="ts")
        first = store_rows(sink, make_rows(["a", "a", "a"], [5, 9, 7], version=[5, 9, 7]))
        second = store_rows(sink, make_rows(["a"], [8], version=[8]), task=1)
        assert sink.check([first, second]) == [None, None]
        assert sink.commit([first, second]) == [DONE, DONE]
        assert sink.commit([store_rows(sink, make_rows(["a"], [6], version=[6]), batch=1)]) == [
            DONE
        ]
        assert read_documents(search_client, sink) == {"a": 9}

    def test_a_flag_deletes_documents(self, make_search: Any, search_client: Any) -> None:
        sink = make_search(delete="gone")
        sink.commit([store_rows(sink, make_rows(["a", "b"], [1, 1], delete=[False, None]))])
        sink.commit(
            [store_rows(sink, make_rows(["a", "never"], [0, 0], delete=[True, True]), batch=1)]
        )
        assert read_documents(search_client, sink) == {"b": 1}

    def test_changes_made_by_hand_hide_no_batch(self, make_search: Any, search_client: Any) -> None:
        sink = make_search(delete="gone")
        sink.commit([store_rows(sink, make_rows(["a", "b", "c"], [1, 1, 1]))])
        for _ in range(3):  # each increments the document's version
            search_client.update(index=sink.index, id="a", body={"doc": {"by": str(next(NUMBERS))}})
        search_client.delete(index=sink.index, id="b")
        search_client.update(index=sink.index, id="c", body={"doc": {"by": "hand"}})
        after = make_rows(["a", "b", "c"], [2, 2, 2], delete=[False, False, True])
        assert sink.commit([store_rows(sink, after, batch=1)]) == [DONE]
        assert read_documents(search_client, sink) == {"a": 2, "b": 2}

    @pytest.mark.parametrize("delete", [False, True])
    @pytest.mark.parametrize(
        "stored",
        [
            Namespace.new("trial", 1_700_003_600, 2).version(0),  # from a clock that was ahead
            Namespace.new("other", 1_700_000_000, 3).version(5),  # from another pipeline
            SPACE.version(0) + 1,  # incremented by hand
        ],
    )
    def test_a_greater_foreign_version_is_never_mistaken_for_ours(
        self, make_search: Any, search_client: Any, stored: int, delete: bool
    ) -> None:
        sink = make_search(delete="gone", index_settings={"gc_deletes": "0s"})
        given = {"version": stored, "version_type": "external"}
        search_client.index(index=sink.index, id="a", body={"v": 1}, params=given)
        receipt = store_rows(sink, make_rows(["a", "b"], [2, 2], delete=[delete, False]))
        with pytest.raises(PermanentlyRefused, match="An id has one writer") as raised:
            sink.commit([receipt])
        assert f"'a': 409: version {stored} is stored" in str(raised.value)
        assert read_documents(search_client, sink) == {"a": 1, "b": 2}
        search_client.delete(index=sink.index, id="a")  # as the error advises
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:  # until the server has forgotten the deletion
            with contextlib.suppress(PermanentlyRefused):
                assert sink.commit([receipt]) == [DONE]
                break
            search_client.indices.refresh(index=sink.index)
        assert read_documents(search_client, sink) == ({"b": 2} if delete else {"a": 2, "b": 2})

    def test_a_batch_replaces_documents_with_versions_in_microseconds(
        self, make_search: Any, search_client: Any
    ) -> None:
        before = make_search(version="ts")
        written = make_rows(["a"], [1], version=[1_700_000_000_000_000])
        assert before.commit([store_rows(before, written)]) == [DONE]
        sink = make_search(into=before.index)
        assert sink.commit([store_rows(sink, make_rows(["a"], [2]), batch=1)]) == [DONE]
        assert read_documents(search_client, sink) == {"a": 2}

    def test_two_logs_and_two_batches_never_share_a_version(self) -> None:
        first, second = (Namespace.new("trial", 1_700_000_000, chance) for chance in (1, 2))
        assert first.version(0) != second.version(0)
        assert first.version(1) - first.version(0) > 1000
        assert Namespace.new("trial", 1_700_000_000.001, 0).version(0) > first.version(0)
        assert Namespace.new("trial", 9_000_000_000, 1).version(10**9) < 1 << 63

    @pytest.mark.parametrize("semantic", ["at_least_once", "none"])
    def test_weaker_semantics_send_at_once_and_need_no_id(
        self, make_search: Any, search_client: Any, semantic: str
    ) -> None:
        sink = make_search(id=None, semantic=semantic)
        for _ in range(2):
            writer = sink.begin(branch())
            writer.write(pa.RecordBatch.from_pydict({"document": ['{"v":1}']}))
            assert writer.prepare() is None
        assert list(read_documents(search_client, sink).values()) == [1, 1]


class TestStraightThrough:
    """Weaker semantics without an id: a document that is sent twice is stored twice."""

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
    def test_bad_rows_are_left_out_and_good_rows_are_sent_once(
        self, make_search: Any, search_client: Any, semantic: str
    ) -> None:
        sink = make_search(self.MAPPING, id=None, semantic=semantic, max_docs=3)
        sink_task = self.sink_task(sink, [1, "many", 3, 4, 5, "more", 7, 8])
        assert sink_task.bad == 2 and sink_task.fingerprint.rows == 6
        # No good row is written, which the batch would repeat.
        assert self.sink_task(sink, ["many"]).bad == 1
        assert sink_task.writer is not None
        sink_task.take(  # later rows are written
            pa.StructArray.from_arrays([pa.array(['{"v":9}'])], ["document"]),
            pa.array([9], pa.int64()),
        )
        assert sorted(read_documents(search_client, sink).values()) == [1, 3, 4, 5, 7, 8, 9]

    def test_a_bad_row_fails_a_batch_that_tolerates_none(self, make_search: Any) -> None:
        sink = make_search(self.MAPPING, id=None, semantic="at_least_once")
        with pytest.raises(BadRow) as raised:
            self.sink_task(sink, [1, "many"], tolerant=False)
        assert list(raised.value.rows) == [1]

    def test_a_row_without_an_id_is_reported(self, make_search: Any, search_client: Any) -> None:
        written = make_rows(["a", None, "c"])
        strict = make_search(semantic="at_least_once")
        with pytest.raises(BadRow) as raised:
            strict.begin(branch()).write(written)
        assert (
            raised.value.rows == {1: "the id is null"}
            and read_documents(search_client, strict) == {}
        )
        loose = make_search(semantic="none")
        loose.begin(branch()).write(written)
        loose.begin(branch()).write(make_rows([None]))
        assert read_documents(search_client, loose) == {"a": 0, "c": 2}


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

    def test_bad_ids_are_named_by_row(self, make_search: Any) -> None:
        sink = make_search()
        writer = sink.begin(branch(tolerant=True))
        with pytest.raises(BadRow) as raised:
            writer.write(make_rows(["a", None, "", "x" * 513, "a"]))
        reasons = raised.value.rows
        assert {row: reason[:24] for row, reason in reasons.items()} == {
            1: "the id is null",
            2: "the id is empty",
            3: "the id is longer than 51",
            4: "another row of the batch",
        }
        writer.write(make_rows(["a", "b"]))
        with pytest.raises(BadRow) as raised:
            writer.write(make_rows(["c", "b"]))
        assert list(raised.value.rows) == [1]
        writer.write(make_rows(["c"]))
        assert [len(part) for part in sink.row_store.read(writer.prepare().id)] == [2, 1]

    def test_one_id_in_two_tasks_is_refused_before_the_decision(
        self, make_search: Any, search_client: Any
    ) -> None:
        sink = make_search()
        receipts = [
            store_rows(sink, make_rows(["a", "b"])),
            store_rows(sink, make_rows(["b", "c"]), task=1),
        ]
        reasons = sink.check(receipts)
        assert all(reason and reason.startswith("1 ids of the batch") for reason in reasons)
        sink.abort(sink.find(SPACE))
        assert read_documents(search_client, sink) == {}

    def test_equal_hashes_of_different_ids_are_accepted(self, make_search: Any) -> None:
        sink = make_search()
        receipts = []
        for task, name in enumerate(["a", "b"]):
            written = make_rows([name, f"{name}2"]).set_column(1, "hash", pa.array([7, 7]))
            receipts.append(store_rows(sink, written, task=task))
        assert sink.check(receipts) == [None, None]

    def test_documents_refused_by_the_mapping_stop_the_pipeline_until_it_is_corrected(
        self, make_search: Any, search_client: Any
    ) -> None:
        sink = make_search({"dynamic": "strict", "properties": {"id": {"type": "keyword"}}})
        receipt = store_rows(sink, make_rows([str(number) for number in range(8)]))
        with pytest.raises(PermanentlyRefused) as raised:
            sink.commit([receipt])
        message = str(raised.value)
        assert "refuses 8 of its documents" in message and "and 3 more" in message
        assert "'0': 400 strict_dynamic_mapping_exception" in message and receipt.id in message
        search_client.indices.put_mapping(
            index=sink.index, body={"properties": {"v": {"type": "long"}}}
        )
        assert sink.commit([receipt]) == [DONE]
        assert len(read_documents(search_client, sink)) == 8

    def test_the_other_documents_of_a_request_are_written(
        self, make_search: Any, search_client: Any
    ) -> None:
        sink = make_search({"properties": {"v": {"type": "long"}}})
        receipt = store_rows(sink, make_rows(["a", "b", "c"], [1, "many", 3]))
        with pytest.raises(
            PermanentlyRefused, match="refuses 1 of its documents: 'b': 400 mapper_p"
        ) as raised:
            sink.commit([receipt])
        assert "many" not in str(raised.value)  # no error contains data
        assert read_documents(search_client, sink) == {"a": 1, "c": 3}

    def test_an_operator_can_go_on_without_the_refused_documents(
        self, make_search: Any, search_client: Any
    ) -> None:
        sink = make_search({"properties": {"v": {"type": "long"}}})
        records: dict[int, bytes] = {}
        job = _Job(sink, [make_rows(["a", "b"], [1, "many"]), make_rows(["c"], [3])])

        def start() -> None:
            coordinator = Coordinator(MemoryLog(records), {"out": sink})
            coordinator.take_over("trial", query=lambda: None, owner="here")
            for batch in range(2):
                coordinator.run(batch, Plan(f"offsets {batch}".encode()), job)
                job.batches = [make_rows(["d"], [4])]

        for _ in range(2):
            with pytest.raises(
                PermanentlyRefused, match=r"'poundlock txn commit .* --accept-loss'"
            ):
                start()
        log = MemoryLog(records)
        log.load()
        log.append(OperatorDecided(0, OperatorDecision.ACCEPT_LOSS, ("out",), "me"))
        start()
        assert read_documents(search_client, sink) == {"a": 1, "c": 3, "d": 4}
        assert sink.find(log.load().generation.namespace) == []  # type: ignore[union-attr]

    def test_a_read_only_index_is_waited_for(self, make_search: Any, search_client: Any) -> None:
        sink = make_search(retries=1)
        receipt = store_rows(sink, make_rows(["a"]))
        block = "index.blocks.write"
        search_client.indices.put_settings(index=sink.index, body={block: True})
        with pytest.raises(Unavailable, match="in 2 tries"):
            sink.commit([receipt])
        search_client.indices.put_settings(index=sink.index, body={block: False})
        assert sink.commit([receipt]) == [DONE]

    def test_a_request_too_large_for_the_server_is_split(
        self, search_server: Any, tmp_path: Path
    ) -> None:
        client = _Small(limit=400)
        sender = Sender(client, "i", "out", retries=0)  # type: ignore[arg-type]
        (request,) = requests(
            make_rows([str(n) for n in range(20)]), 1, max_bytes=9999, max_docs=99
        )
        assert sender.send(request) == []
        assert client.accepted == 20
        (one,) = requests(make_rows(["x" * 500]), 1, max_bytes=9999, max_docs=99)
        (refused,) = sender.send(one)
        assert "413" in refused.reason

    def test_only_failed_documents_are_sent_again(self) -> None:
        client = _Busy()
        sender = Sender(client, "i", "out", retries=3, version=1, sleep=lambda _: None)  # type: ignore[arg-type]
        (request,) = requests(make_rows(["a", "b", "c"]), 1, max_bytes=9999, max_docs=99)
        assert sender.send(request) == []
        assert client.received == [["a", "b", "c"], ["b"], ["b"]]

    def test_a_conflict_with_an_unknown_message_is_looked_up(self) -> None:
        sender = Sender(_Wordless(), "i", "out", retries=0, version=7)  # type: ignore[arg-type]
        spoof = "current version [7] is as high as [7]"  # an id, not the server's words
        (request,) = requests(
            make_rows(["ours", "newer", "gone", spoof]), 7, max_bytes=9999, max_docs=99
        )
        assert [(it.row, it.foreign) for it in sender.send(request)] == [
            (1, True),
            (2, True),
            (3, True),
        ]

    def test_a_document_dropped_by_an_ingest_pipeline_is_refused(self) -> None:
        sender = Sender(_Dropping(), "i", "out", retries=0)  # type: ignore[arg-type]
        (request,) = requests(make_rows(["a", "b"]), 1, max_bytes=9999, max_docs=99)
        assert [(it.id, it.reason) for it in sender.send(request)] == [
            ("b", "an ingest pipeline of the index drops it")
        ]

    def test_a_refused_document_is_reported_with_its_row(self) -> None:
        client = _Picky()
        sender = Sender(client, "i", "out", retries=9, sleep=lambda _: None)  # type: ignore[arg-type]
        ids = ["a", "bad", "late", "bad", "x" * 500, "late", "bad"]
        found = [
            (it.row, it.reason[:3])
            for request in requests(make_rows(ids), 1, max_bytes=9999, max_docs=4)
            for it in sender.send(request)
        ]
        assert sorted(found) == [(1, "400"), (3, "400"), (4, "one"), (6, "400")]

    def test_an_error_names_only_a_few_documents(self) -> None:
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
    """A server that reports a conflict with an unknown message, and answers a lookup."""

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
    """A server whose ingest pipeline drops `b`. Our real server lacks the processor."""

    def bulk(self, *, body: bytes, **_: Any) -> Any:
        result = {"b": {"status": 200, "result": "noop"}}
        made = {"status": 201, "result": "created"}
        items = [{"index": {"_id": it} | result.get(it, made)} for it in _ids(body)]
        return {"errors": False, "items": items}


class _Small:
    """A server with a small http.max_content_length. That of a real one is 100 MB."""

    def __init__(self, limit: int):
        self.limit, self.accepted = limit, 0

    def bulk(self, *, body: bytes, **_: Any) -> Any:
        if len(body) > self.limit:
            raise opensearchpy.exceptions.TransportError(413, "too large", {})
        ids = _ids(body)
        self.accepted += len(ids)
        return {"errors": False, "items": [{"index": {"_id": it, "status": 201}} for it in ids]}


class _Busy:
    """A server that has no room for `b` at first. A real one cannot be made to do so."""

    def __init__(self) -> None:
        self.received: list[list[str]] = []

    def bulk(self, *, body: bytes, **_: Any) -> Any:
        ids = _ids(body)
        self.received.append(ids)
        busy = len(self.received) < 3
        items = [
            {"index": {"_id": it, "status": 429, "error": {"type": "rejected", "reason": "full"}}}
            if it == "b" and busy
            else _conflict(it, "version conflict, current version [1] is as high as [1]")
            for it in ids
        ]
        return {"errors": True, "items": items}


class _Picky:
    """A server that accepts small requests, some documents only later, and some never."""

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


def test_a_silent_server_is_unavailable_and_a_repeat_changes_nothing(
    make_search: Any, search_client: Any, search_server: opensearch.Node
) -> None:
    sink = make_search(timeout=1, retries=0)
    receipt = store_rows(sink, make_rows(["a", "b"]))
    search_server.pause()
    try:
        with pytest.raises(Unavailable):
            sink.commit([receipt])
    finally:
        search_server.resume()
    assert sink.commit([receipt]) == [DONE]
    assert len(read_documents(search_client, sink)) == 2
    versions = search_client.search(index=sink.index, body={"version": True})["hits"]["hits"]
    assert {hit["_version"] for hit in versions} == {SPACE.version(0)}


def test_no_file_is_left_beside_the_log(make_search: Any, tmp_path: Path) -> None:
    sink = make_search()
    receipts = [store_rows(sink, make_rows(["a"])), store_rows(sink, make_rows(["b"]), task=1)]
    sink.commit(receipts[:1])
    sink.abort(sink.find(SPACE))
    assert {file.suffix for file in tmp_path.rglob("*.*") if file.is_file()} == {
        ".sent",
        ".aborted",
    }
    sink.prune(SPACE, 1)
    left = [file.suffix for file in tmp_path.rglob("*") if file.is_file()]
    assert sorted(left) == [".aborted", ".sent"], "the newest mark, and the newest of a batch sent"
