"""OpenSearch and Elasticsearch: rows into documents, exactly once, by ids and versions.

Search engines have no transactions. So the rows are stored beside the log until the batch is decided,
and then sent by tasks. Each document has an id, from a column, and a version that grows with every
batch. The server keeps the greatest version of each id, so sending twice changes nothing. Nothing of
an undecided batch is ever sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from opensearchpy import OpenSearch as Driver
from opensearchpy import exceptions

from poundlock.core.model import Branch, Json, Namespace, Receipt, Stray, checked_name
from poundlock.core.naming import BranchName, derive_sink_name, parse_name
from poundlock.core.participant import (
    Column,
    Commitment,
    MissingOrder,
    Semantic,
    Writer,
    frame_mismatch,
)
from poundlock.core.projection import Projection
from poundlock.core.protocol import BranchState
from poundlock.core.site import Site
from poundlock.core.sparksql import row_json
from poundlock.errors import InDoubt, UsageError
from poundlock.sinks.opensearch.bulk import Refused, Sender, refusal, requests
from poundlock.sinks.opensearch.client import connect, translate_error
from poundlock.sinks.opensearch.fields import crossed, too_many
from poundlock.sinks.opensearch.types import (
    ROLES,
    bad_key,
    bad_names,
    compare,
    not_finite,
    refused_shape,
    shape_of,
    takes_any_key,
)
from poundlock.sinks.opensearch.writer import (
    BAD_KEY,
    NOT_FINITE,
    SHAPE,
    SendingWriter,
    StoringWriter,
)
from poundlock.sinks.rowstore import RowStore, StoredBranches

pc: Any = pyarrow.compute  # made at run time: no type checker knows what is in it

_IMPOSSIBLE = re.compile(r'[ "*\\<|,>/?#:]|^[-_+]|^\.{0,2}$')
_SECONDS = {"nanos": 1e-9, "micros": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86400}


class OpenSearch(StoredBranches):
    """An index of OpenSearch, or an alias of one.

    Args:
        index: The index. Create it beforehand, with a mapping that accepts every row.
        url: `https://user:password@host:9200`, several with commas; best as `env:NAME`.
        id: The column with each document's id. Needed for exactly once.
        name: The sink's name in its pipeline; the index's by default.
        version: A column, bigint or timestamp: of several rows with one id the greatest wins, in
            whatever batch. By default the batch is the version, and a batch may have only one row
            of each id.
        delete: A boolean column: true deletes the document. The server forgets a deletion after
            `index.gc_deletes`, and then accepts older rows again.
        max_bytes, max_docs: Limits of one bulk request.
        retries: How often a document that the server cannot accept now is sent again, before the
            coordinator waits and tries again.
        timeout: Seconds to wait for an answer.
        settings: Options of opensearch-py's client, such as `ca_certs` or `http_auth`.
        semantic: "exactly_once", "at_least_once" or "none".
    """

    system = "OpenSearch"
    commitment = Commitment.IDEMPOTENT
    product = "OpenSearch"

    def __init__(
        self,
        index: str,
        *,
        url: str,
        id: str | None = None,
        name: str | None = None,
        version: str | None = None,
        delete: str | None = None,
        max_bytes: int = 8 << 20,
        max_docs: int = 5000,
        retries: int = 5,
        timeout: float = 60.0,
        settings: Mapping[str, Any] | None = None,
        semantic: str | Semantic = Semantic.EXACTLY_ONCE,
    ):
        label = derive_sink_name(index)[:63]
        self.name = checked_name("sink name", name or label or "index")
        self.index = index
        self.semantic = Semantic(semantic)
        self.retries, self.timeout = retries, timeout
        self.max_bytes, self.max_docs = max_bytes, max_docs
        self._url, self._settings = url, dict(settings or {})
        self._id, self._version, self._delete = id, version, delete
        self._columns: dict[str, Column] = {}
        self._is_alias = False  # as preflight saw it
        self._variants: dict[str, str] = {}  # the names of such columns, by that of their shape
        self.refused_shapes: dict[str, tuple[str, str]] = {}  # and what their fields refuse
        self._cluster: str | None = None  # its id
        self._resolved = index  # the index behind an alias
        self.takes_any_key = False  # of a map: whether the index makes no fields of them
        self._client: Driver | None = None
        self._ids: RowStore | None = None
        if id is None and self.semantic is Semantic.EXACTLY_ONCE:
            raise UsageError(
                f"exactly once needs id=, the column with each document's id: {self.product} gives "
                "documents without one an id of its own, so a document that is sent again would be "
                "there twice. Name a column, or use semantic='at_least_once'",
                sink=self.name,
            )
        if id is None and (version or delete):
            raise UsageError("version= and delete= need id=", sink=self.name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.index!r}, name={self.name!r})"

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_client": None}

    def reader_settings(self) -> str:
        return "a refresh of the index: by itself within a second, as index.refresh_interval says"

    @property
    def client(self) -> Driver:
        if self._client is None:
            self._client = connect(self._url, self._settings, self.timeout, self.name)
        return self._client

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None

    # Before anything starts.

    def project(self, columns: Mapping[str, Column]) -> dict[str, str]:
        projection = Projection(columns)
        named = {"id": self._id, "version": self._version, "delete": self._delete}
        for role, name in named.items():
            projection.add(role, name, *ROLES[role])
        fields = {name: column for name, column in columns.items() if name != self._delete}
        projection.problems += bad_names(fields)
        self._columns = fields  # a start also compares the index with a frame that has problems
        projection.check(self.name)
        wanted = projection.expressions
        if self.unique_ids:
            wanted["hash"] = f"xxhash64({wanted['id']})"
        conditions = [not_finite(column.sql, column.type) for column in fields.values()]
        if any(conditions):
            wanted[NOT_FINITE] = f"coalesce({' OR '.join(filter(None, conditions))}, false)"
        conditions = [bad_key(column.sql, column.type) for column in fields.values()]
        if any(conditions):
            wanted[BAD_KEY] = f"coalesce({' OR '.join(filter(None, conditions))}, false)"
        variants = [name for name, column in fields.items() if column.type == "variant"]
        self._variants = {f"{SHAPE}{place}": name for place, name in enumerate(variants)}
        wanted |= {word: shape_of(fields[name].sql) for word, name in self._variants.items()}
        return wanted | {"document": row_json(fields)}

    def target(self) -> dict[str, Json]:
        return {"cluster": self._cluster, "index": self._resolved}

    @property
    def unique_ids(self) -> bool:
        """Whether a batch may have only one row of each id."""
        return self.semantic is Semantic.EXACTLY_ONCE and self._version is None

    def missing_order(self) -> MissingOrder | None:
        if self._id is None or self._version is not None:
            return None
        return MissingOrder([self._id], "version", refuses=self.unique_ids)

    def preflight(self) -> list[str]:
        may_change = self.semantic is not Semantic.EXACTLY_ONCE
        self._reject(_name_problem(self.index, may_change=may_change))
        indices = self._read_indices()
        if indices is None:
            return [
                f"index {self.index} does not exist: the first document creates it, with a mapping "
                "guessed from that document. Create it with the mapping that you need",
                *self._check_fields(self.index, self._read_template()),
            ]
        self._resolved = ", ".join(sorted(indices))
        aliases = [
            it["aliases"][self.index] for it in indices.values() if self.index in it["aliases"]
        ]
        self._is_alias = bool(aliases)
        types = {name: column.type for name, column in self._columns.items()}
        self.takes_any_key = all(
            takes_any_key(found.get("mappings", {}), types) for found in indices.values()
        )
        self._reject(_alias_problem(self.index, aliases, may_change=may_change))
        warnings = [
            it for index, found in indices.items() for it in self._check_index(index, found)
        ]
        if len(indices) > 1:
            warnings.append(
                f"{self.index} means {len(indices)} indices: rows go to its write index, and a "
                "document in another index is not replaced"
            )
        return warnings

    def _reject(self, problem: str | None) -> None:
        if problem:
            raise UsageError(problem, sink=self.name)

    def _read_indices(self) -> dict[str, Any] | None:
        """Return what the server says of each index behind the name. None if there is none."""
        try:
            cluster = str(self.client.info().get("cluster_uuid", "_na_"))
            self._cluster = None if cluster == "_na_" else cluster  # of a cluster that still starts
            return self.client.indices.get(index=self.index)
        except exceptions.NotFoundError:
            if self.index != self.index.lower():
                raise UsageError(
                    f"there is no alias {self.index}, and no index can have that name: write it in "
                    "lower case",
                    sink=self.name,
                ) from None
            return None
        except exceptions.TransportError as error:
            translated = translate_error(error, f"looking at index {self.index}", self.name)
            if isinstance(translated, InDoubt):
                translated = UsageError(*translated.args, sink=self.name)
            raise translated from error

    def _check_index(self, index: str, found: Mapping[str, Any]) -> list[str]:
        """Compare an index with the DataFrame. Return warnings."""
        if "data_stream" in found:
            raise UsageError(
                f"{self.index} is a data stream, which accepts neither ids nor versions from "
                "clients: write to an index",
                sink=self.name,
            )
        types = {name: column.type for name, column in self._columns.items()}
        wrong, doubtful = compare(found.get("mappings", {}), types, id=self._id)
        if wrong:
            raise frame_mismatch(self.name, wrong, self._columns, target=f"index {index}")
        settings = found.get("settings", {}).get("index", {})
        warnings = doubtful + self._check_number(index, found) + _loss_warnings(index, settings)
        for word, name in self._variants.items():
            if refused := refused_shape(found.get("mappings", {}), name):
                self.refused_shapes[word] = (name, refused)
        if self._delete and (warning := _deletion_warning(index, settings)):
            warnings.append(warning)
        return warnings

    def _check_fields(self, index: str, found: Mapping[str, Any]) -> list[str]:
        """Check that an index without more fields than these can have all of the DataFrame's."""
        types = {name: column.type for name, column in self._columns.items()}
        if wrong := crossed(found.get("mappings", {}), types):
            raise frame_mismatch(self.name, wrong, self._columns, target=f"index {index}")
        return self._check_number(index, found)

    def _check_number(self, index: str, found: Mapping[str, Any]) -> list[str]:
        types = {name: column.type for name, column in self._columns.items()}
        settings = found.get("settings", {}).get("index", {})
        surely, maybe = too_many(found.get("mappings", {}), types, settings)
        if surely:
            raise UsageError(f"index {index}: {surely}", sink=self.name)
        return [f"index {index}: {maybe}"] if maybe else []

    def _read_template(self) -> dict[str, Any]:
        """Return what the server would make of an index that does not exist yet."""
        try:
            answer = self.client.indices.simulate_index_template(name=self.index)
        except exceptions.OpenSearchException:  # the account may not ask, or the server is too old
            return {}
        return answer.get("template", {})

    def attach(self, site: Site) -> None:
        super().attach(site)
        # Beside the rows: no sink has a name with a dot.
        self._ids = RowStore(f"{site.rows_uri}/{self.name}.ids")

    @property
    def ids(self) -> RowStore:
        """Hashes of the ids in each branch, few enough for the driver to compare them all."""
        assert self._ids is not None
        return self._ids

    # In a task.

    def dead_letters(self, dead_letters: pa.RecordBatch) -> pa.RecordBatch:
        if self._id is not None:
            raise UsageError(
                "dead letters have no id: send them to a sink with semantic='at_least_once' and "
                "without id=, or to another system",
                sink=self.name,
            )
        texts = [json.dumps(dead_letter) for dead_letter in dead_letters.to_pylist()]
        return pa.RecordBatch.from_pydict({"document": pa.array(texts, pa.string())})

    def begin(self, branch: Branch) -> Writer:
        if self.semantic is Semantic.EXACTLY_ONCE:
            return StoringWriter(self, branch)
        return SendingWriter(self, branch)

    def send(self, name: BranchName, rows: Iterator[pa.RecordBatch]) -> None:
        version = name.namespace.version(name.batch)
        refused: list[Refused] = []
        for batch in rows:
            refused += self.send_rows(batch, version)
        if refused:
            raise refusal(refused, str(name), self.index, self.name)

    def send_rows(self, rows: pa.RecordBatch, version: int | None) -> list[Refused]:
        sender = Sender(
            self.client,
            self.index,
            self.name,
            retries=self.retries,
            version=None if "version" in rows.schema.names else version,
            is_alias=self._is_alias,
        )
        refused: list[Refused] = []
        for request in requests(rows, version, max_bytes=self.max_bytes, max_docs=self.max_docs):
            refused += sender.send(request)
        return refused

    # On the driver.

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        answers = super().check(receipts)
        if not self.unique_ids or len(receipts) < 2 or any(answers):
            return answers
        shared = self._count_shared_ids([receipt.id for receipt in receipts])
        if not shared:
            return answers
        reason = (
            f"{shared} ids of the batch are also in another task's rows, and chance would decide which "
            "of two rows with one id wins. Name a version= column, or bring them into one task "
            "(repartition by the id) and keep one of each (dropDuplicates, or an aggregate)"
        )
        return [reason] * len(receipts)

    def _count_shared_ids(self, branches: Sequence[str]) -> int:
        """Count the ids that more than one branch has: first by hash, then by the ids themselves."""
        hashes = [np.asarray(part.column(0)) for name in branches for part in self.ids.read(name)]
        values, counts = np.unique(np.concatenate(hashes), return_counts=True)
        suspects = pa.array(values[counts > 1])
        if not len(suspects):
            return 0
        ids: list[pa.Array] = []
        for name in branches:
            for rows in self.row_store.read(name):
                suspicious = rows.filter(pc.is_in(rows.column("hash"), value_set=suspects))
                ids.append(suspicious.column("id"))
        return int(np.sum(np.asarray(pc.value_counts(pa.chunked_array(ids)).field("counts")) > 1))

    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        states = super().commit(receipts)
        self._drop_ids([receipt.id for receipt in receipts])
        return states

    def abort(self, strays: Sequence[Stray]) -> list[BranchState]:
        states = super().abort(strays)
        self._drop_ids([stray.id for stray in strays])
        return states

    def prune(self, namespace: Namespace, floor: int) -> None:
        super().prune(namespace, floor)
        names = ((text, parse_name(text)) for text in self.ids.states())
        self._drop_ids(
            text
            for text, name in names
            if name and (name.namespace, name.sink) == (namespace, self.name) and name.batch < floor
        )

    def _drop_ids(self, branches: Iterable[str]) -> None:
        if self.unique_ids:
            self.ids.drop(branches)


class Elasticsearch(OpenSearch):
    """An index of Elasticsearch, or an alias of one. It understands the requests of `OpenSearch`."""

    product = "Elasticsearch"


def _name_problem(index: str, *, may_change: bool) -> str | None:
    """Say why nothing can be written to an index of this name. None if it can.

    `may_change`: the name may mean another index each day.
    """
    if index.startswith("<") and index.endswith(">"):
        problem = (
            f"{index} is another index each day, and a document that is sent again on the next day "
            "would be in both: name one index, or use semantic='at_least_once'"
        )
        return None if may_change else problem
    if _IMPOSSIBLE.search(index) or len(index.encode()) > 255:
        return (
            f"{index!r}: no index can have that name. A name has at most 255 bytes, none of them a "
            'blank or one of "*\\<|,>/?#: and does not begin with _, - or +. Rows go into one index, '
            "or one alias"
        )
    return None


def _alias_problem(
    alias: str, entries: Sequence[Mapping[str, Any]], *, may_change: bool
) -> str | None:
    """Say why an alias cannot be written to. None if it can.

    `entries` are what each of its indices says of it. `may_change`: it may mean another index later.
    """
    if any("is_write_index" in entry for entry in entries) and not may_change:
        return (
            f"alias {alias} has a write index, which a rollover changes: a document that is sent again "
            "after one would be in two indices. Write to the index itself, or to an alias of one index "
            "without is_write_index, or use semantic='at_least_once'"
        )
    single = len(entries) == 1 and entries[0].get("is_write_index", True)
    if entries and not single and not any(entry.get("is_write_index") for entry in entries):
        return f"none of the {len(entries)} indices of alias {alias} is its write index"
    return None


def _loss_warnings(index: str, settings: Mapping[str, Any]) -> list[str]:
    """Return warnings of settings with which the server may lose what it acknowledged."""
    warnings: list[str] = []
    if str(settings.get("translog", {}).get("durability", "")).lower() == "async":
        warnings.append(
            f"index {index} has index.translog.durability async: a server that crashes loses the last "
            'seconds of acknowledged writes. Set it: {"index.translog.durability": "request"}'
        )
    warnings += [
        f"index {index} has index.{name} {settings[name]}: a document that it drops or fails on stops "
        "the pipeline after the decision, and a document whose id or index it changes is not found "
        "again. Remove it, or make sure that it does neither"
        for name in ("default_pipeline", "final_pipeline")
        if settings.get(name, "_none") != "_none"
    ]
    return warnings


def _deletion_warning(index: str, settings: Mapping[str, Any]) -> str | None:
    """Return a warning if the index remembers the versions of deleted documents for less than a day."""
    gc_deletes = str(settings.get("gc_deletes", "60s"))  # a default, which the server does not list
    match = re.fullmatch(r"(\d+)([a-z]+)", gc_deletes)
    if match and int(match[1]) * _SECONDS.get(match[2], 0) >= _SECONDS["d"]:
        return None
    return (
        f"index {index} forgets deleted documents after index.gc_deletes, {gc_deletes}: a row with a "
        "lower version that comes later, or is sent again, brings the document back. Set it longer "
        "than rows may be late or the pipeline may be down: "
        f'PUT {index}/_settings {{"index.gc_deletes": "1d"}}. A node that restarts forgets them all '
        "the same: if that matters, keep the document, with a field that says that it is deleted, in "
        "place of delete="
    )
