"""The server for the tests of the OpenSearch sink, and its fixtures."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import opensearchpy
import pyarrow as pa
import pytest

from poundlock.core.model import Branch, Fingerprint, Namespace, Receipt, Transaction
from poundlock.core.protocol import BranchState
from poundlock.core.site import LocalSite
from poundlock.servers import opensearch
from poundlock.sinks import OpenSearch

SPACE = Namespace.new("trial", 1_700_000_000, 1)
DONE = BranchState.COMMITTED
NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def search_server() -> Iterator[opensearch.Node]:
    with opensearch.running() as node:
        yield node


@pytest.fixture
def search_client(search_server: opensearch.Node) -> Iterator[Any]:
    client = opensearchpy.OpenSearch([search_server.url], timeout=30)
    yield client
    client.close()


@pytest.fixture
def make_search(search_server: opensearch.Node, search_client: Any, tmp_path: Path) -> Any:
    def make_search(
        mappings: Any = None, *, into: str = "", index_settings: Any = None, **options: Any
    ) -> OpenSearch:
        index = into or f"index-{next(NUMBERS)}"
        settings = {"number_of_replicas": 0} | (index_settings or {})
        if not into:
            body = {"settings": settings, "mappings": mappings or {}}
            search_client.indices.create(index=index, body=body)
        options = {"id": "id", "retries": 2, "url": search_server.url, "name": "out"} | options
        sink = OpenSearch(index, **options)
        sink.attach(LocalSite(str(tmp_path)))
        return sink

    return make_search


def branch(task: int = 0, *, batch: int = 0, tolerant: bool = False) -> Branch:
    return Branch(Transaction(SPACE, 1, batch, 1), "out", task, task, tolerant=tolerant)


def make_rows(ids: Sequence[str | None], values: Sequence[Any] = (), **more: Any) -> pa.RecordBatch:
    values = values or list(range(len(ids)))
    documents = [json.dumps({"id": it, "v": v}) for it, v in zip(ids, values, strict=True)]
    hashes = [hash(it) for it in ids]
    ids_ = pa.array(ids, pa.string())
    return pa.RecordBatch.from_pydict({"id": ids_, "hash": hashes, "document": documents} | more)


def store_rows(sink: OpenSearch, written: pa.RecordBatch, task: int = 0, batch: int = 0) -> Receipt:
    writer = pickle.loads(pickle.dumps(sink)).begin(branch(task, batch=batch))
    writer.write(written)
    prepared = writer.prepare()
    return Receipt("out", prepared.id, task, Fingerprint(len(written)), prepared.handle)


def read_documents(search_client: Any, sink: OpenSearch) -> dict[str, Any]:
    search_client.indices.refresh(index=sink.index)
    hits = search_client.search(index=sink.index, body={"size": 10_000})["hits"]["hits"]
    return {hit["_id"]: hit["_source"]["v"] for hit in hits}
