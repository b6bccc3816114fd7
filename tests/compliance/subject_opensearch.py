"""OpenSearch: a node of its own, which the suite may kill. What is open is kept in a directory."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import opensearchpy
import pyarrow as pa

from poundlock.core.model import Receipt
from poundlock.core.participant import Participant
from poundlock.core.site import LocalSite
from poundlock.servers import opensearch
from poundlock.sinks import OpenSearch

from .subject import Subject

EXCUSED: Mapping[str, str] = {}


class OpenSearchSubject(Subject):
    finds_without_server = True  # open branches are kept beside the log

    def __init__(self, server: opensearch.Node, directory: Path):
        self._server, self._directory = server, directory
        self._numbers = itertools.count()

    @property
    def _eyes(self) -> Any:
        return opensearchpy.OpenSearch([self._server.url], timeout=30)

    def sink(self, name: str = "out") -> Participant:
        index = f"target-{next(self._numbers)}"
        self._eyes.indices.create(index=index, body={"settings": {"number_of_replicas": 0}})
        return self._looked_over(index, name)

    def again(self, sink: Participant) -> Participant:
        assert isinstance(sink, OpenSearch)
        return self._looked_over(sink.index, sink.name)

    def _looked_over(self, index: str, name: str) -> Participant:
        made = OpenSearch(index, url=self._server.url, name=name, id="number", retries=1)
        made.attach(LocalSite(str(self._directory / index)))
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
        eyes = self._eyes
        eyes.indices.refresh(index=sink.index)
        found = eyes.search(index=sink.index, body={"size": 10_000})
        return Counter(hit["_source"]["number"] for hit in found["hits"]["hits"])

    def open(self, sink: Participant) -> set[str]:
        assert isinstance(sink, OpenSearch)
        place = self._directory / sink.index
        return {str(file) for file in place.rglob("*") if file.suffix in (".arrow", ".tmp")}

    @contextmanager
    def killed(self) -> Iterator[None]:
        self._server.kill()
        yield
        self._server.start()

    def lose(self, sink: Participant, receipt: Receipt) -> None:
        assert isinstance(sink, OpenSearch)
        (self._directory / sink.index / sink.name / f"{receipt.id}.arrow").unlink()


@contextmanager
def started(directory: Path) -> Iterator[Subject]:
    with opensearch.running(directory / "server") as server:
        yield OpenSearchSubject(server, directory / "rows")
