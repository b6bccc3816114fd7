"""OpenSearch: a separate node, which the suite may kill. Open branches are stored in a directory."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import opensearchpy
import pyarrow as pa

from poundlock.compliance import FaultCase, Subject, empty, fill, small_disk
from poundlock.core.model import Receipt
from poundlock.core.participant import Column, Participant
from poundlock.core.site import LocalSite
from poundlock.errors import BadRow, NotAuthorised, Unavailable, UsageError
from poundlock.servers import opensearch
from poundlock.sinks import OpenSearch

NOT_APPLICABLE: Mapping[str, str] = {
    "no_room": "Branches are files beside the log, of which there may be as many as the disk holds.",
    "lost_connection": "A task that writes has no connection: it keeps its rows in a file, and they "
    "are sent after the decision, as often as it takes.",
}
FRAME = {"number": "bigint"}


class OpenSearchSubject(Subject):
    remembers = False  # what was sent is known only beside the log
    finds_without_server = True  # open branches are stored beside the log

    def __init__(self, server: opensearch.Node, directory: Path):
        self._server, self._directory = server, directory
        self._numbers = itertools.count()

    @property
    def _admin(self) -> Any:
        return opensearchpy.OpenSearch([self._server.url], timeout=30)

    def sink(self, name: str = "out") -> Participant:
        return self._make_sink(self._index(), name)

    def _index(self, mappings: Mapping[str, Any] = {}) -> str:
        index = f"target-{next(self._numbers)}"
        body = {"settings": {"number_of_replicas": 0}, "mappings": mappings}
        self._admin.indices.create(index=index, body=body)
        return index

    def again(self, sink: Participant) -> Participant:
        assert isinstance(sink, OpenSearch)
        return self._make_sink(sink.index, sink.name)

    def _make_sink(
        self,
        index: str,
        name: str,
        frame: Mapping[str, str] = FRAME,
        rows: Path | None = None,
        url: str | None = None,
    ) -> Participant:
        made = OpenSearch(index, url=url or self._server.url, name=name, id="number", retries=1)
        made.project({column: Column(column, kind) for column, kind in frame.items()})
        made.attach(LocalSite(str(rows or self._directory / index)))
        assert made.preflight() == []
        return made

    def rows(self, numbers: Sequence[int]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pydict(
            {
                "id": [str(number) for number in numbers],
                "hash": [number * 7919 for number in numbers],
                "document": [f'{{"number":{number}}}' for number in numbers],
            }
        )

    def visible(self, sink: Participant) -> Counter[int]:
        assert isinstance(sink, OpenSearch)
        admin = self._admin
        admin.indices.refresh(index=sink.index)
        found = admin.search(index=sink.index, body={"size": 10_000})
        return Counter(hit["_source"]["number"] for hit in found["hits"]["hits"])

    def open(self, sink: Participant) -> set[str]:
        assert isinstance(sink, OpenSearch)
        place = Path(sink.row_store.uri).parent
        return {str(file) for file in place.rglob("*") if file.suffix in (".arrow", ".tmp")}

    @contextmanager
    def killed(self) -> Iterator[None]:
        self._server.kill()
        yield
        self._server.start()

    def lose(self, sink: Participant, receipt: Receipt) -> None:
        assert isinstance(sink, OpenSearch)
        (self._directory / sink.index / sink.name / f"{receipt.id}.arrow").unlink()

    # Faults.

    @contextmanager
    def wrong_columns(self, sink: Participant) -> Iterator[FaultCase]:
        index = self._index({"dynamic": "strict", "properties": {"number": {"type": "long"}}})
        frame = FRAME | {"word": "string"}
        says = "column 'word' is not in the mapping, which is strict"
        make = lambda: self._make_sink(index, sink.name, frame)  # noqa: E731
        yield FaultCase(says, UsageError, make=make)

    @contextmanager
    def wrong_type(self, sink: Participant) -> Iterator[FaultCase]:
        index = self._index({"properties": {"number": {"type": "boolean"}}})
        says = "column 'number' has type bigint, but the field is of type boolean"
        yield FaultCase(says, UsageError, make=lambda: self._make_sink(index, sink.name))

    @contextmanager
    def wrong_password(self, sink: Participant) -> Iterator[FaultCase]:
        """A gateway refuses it, because the server itself has no passwords."""
        assert isinstance(sink, OpenSearch)
        index = sink.index
        with gate() as port:
            url = f"http://somebody:nonsense@127.0.0.1:{port}"
            yield FaultCase(
                f"looking at index {index}: the server refuses the user or the password",
                NotAuthorised,
                make=lambda: self._make_sink(index, sink.name, url=url),
                hides="nonsense",
            )

    def _ids(self, numbers: Sequence[int], ids: Sequence[str | None]) -> pa.RecordBatch:
        return self.rows(numbers).set_column(0, "id", pa.array(ids))

    @contextmanager
    def null(self, sink: Participant) -> Iterator[FaultCase]:
        tasks = [[self.rows(range(5)), self._ids([5, 6], ["5", None])]]
        yield FaultCase("1 rows cannot be sent.* the id is null", BadRow, tasks=tasks)

    @contextmanager
    def too_long(self, sink: Participant) -> Iterator[FaultCase]:
        tasks = [[self.rows(range(5)), self._ids([5, 6], ["5", "too long" * 65])]]
        says = "1 rows cannot be sent.* the id is longer than 512 bytes"
        yield FaultCase(says, BadRow, tasks=tasks, hides="too long")

    @contextmanager
    def duplicate_key(self, sink: Participant) -> Iterator[FaultCase]:
        tasks = [[self.rows([1, 2]), self.rows([2, 3])]]
        yield FaultCase("another row of the batch has the same id.* version=", BadRow, tasks=tasks)

    @contextmanager
    def key_in_two_tasks(self, sink: Participant) -> Iterator[FaultCase]:
        tasks = [[self.rows([1, 2])], [self.rows([2, 3])]]
        yield FaultCase(
            "1 ids of the batch are also in another task's rows.* version=", tasks=tasks
        )

    @contextmanager
    def full_disk(self, sink: Participant) -> Iterator[FaultCase]:
        """The disk with the stored rows is full. The server's disk matters only after the decision."""
        assert isinstance(sink, OpenSearch)
        with small_disk(4) as disk:
            yield FaultCase(
                f"{disk}.* the disk is full .*No space left.* make room",
                Unavailable,
                sink=self._make_sink(sink.index, sink.name, rows=disk / "rows"),
                tasks=[[self.rows(range(5)), self.rows(range(5, 20_000))]],
                during=lambda: fill(disk),
                over=lambda: empty(disk),
            )


class _Gate(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(401)
        self.send_header("WWW-Authenticate", 'Basic realm="OpenSearch Security"')
        self.send_header("Content-Length", "12")
        self.end_headers()
        self.wfile.write(b"Unauthorized")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def gate() -> Iterator[int]:
    """Refuse every request, as OpenSearch's security plugin does with a wrong password."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Gate) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@contextmanager
def started(directory: Path) -> Iterator[Subject]:
    with opensearch.running(directory / "server") as server:
        yield OpenSearchSubject(server, directory / "rows")
