"""OpenSearch and Elasticsearch: rows into documents, exactly once, by ids and versions.

No search engine holds a transaction. So the rows are kept beside the log until the batch is decided,
and then sent by tasks. Each document has an id, from a column, and a version that grows with every
batch; the server keeps the greatest version of each id, so sending twice changes nothing. Nothing of
a batch that was not decided is ever sent.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

import numpy as np
import opensearchpy.exceptions as said
import pyarrow as pa
import pyarrow.compute
from opensearchpy import OpenSearch as Driver

from poundlock.core.model import Branch, Namespace, Receipt, Stray, checked_name
from poundlock.core.naming import BranchName, name_of, parse_name
from poundlock.core.participant import Column, Commitment, PreparedBranch, Semantic, Writer
from poundlock.core.protocol import BranchState
from poundlock.core.site import Site
from poundlock.errors import BadRow, InDoubt, PoundlockError, UsageError
from poundlock.secret import resolve, resolve_all
from poundlock.sinks.opensearch.bulk import Refused, Sender, problem, refusal, requests
from poundlock.sinks.opensearch.mapping import (
    careless,
    compare,
    forgets_deletes,
    impossible_name,
    unfit_alias,
)
from poundlock.sinks.opensearch.rows import (
    EXPRESSIONS,
    NOT_FINITE,
    bad_names,
    bad_rows,
    document,
    not_finite,
    repeated,
)
from poundlock.sinks.rowstore import RowStore, StoredBranches, StoredWriter

pc: Any = pyarrow.compute  # made at run time: no type checker knows what is in it
logger = logging.getLogger("poundlock")


class OpenSearch(StoredBranches):
    """An index of OpenSearch, or an alias of one.

    Args:
        index: The index. Create it beforehand, with a mapping that takes every row.
        url: `https://user:password@host:9200`, several with commas; best as `env:NAME`.
        id: The column with each document's id. Needed for exactly once.
        name: The sink's name in its pipeline; the index's by default.
        version: A column, bigint or timestamp: of several rows with one id the greatest wins, in
            whatever batch. By default the batch is the version, and one batch may have only one row
            of each id.
        delete: A boolean column: true deletes the document. The server forgets a deletion after
            `index.gc_deletes`, and then takes older rows again.
        max_bytes, max_docs: Of one bulk request.
        retries: How often a document that the server cannot take now is sent again, before the
            coordinator waits and tries anew.
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
        label = re.sub(r"[^A-Za-z0-9_-]+", "-", index).strip("-_")[:63]
        self.name = checked_name("sink name", name or label or "index")
        self.index = index
        self.semantic = Semantic(semantic)
        self.retries, self.timeout = retries, timeout
        self.max_bytes, self.max_docs = max_bytes, max_docs
        self._url, self._settings = url, dict(settings or {})
        self._id, self._version, self._delete = id, version, delete
        self._columns: dict[str, str] = {}
        self._is_alias = False  # as preflight saw it
        self._client: Driver | None = None
        self._ids: RowStore | None = None
        if id is None and self.semantic is Semantic.EXACTLY_ONCE:
            raise UsageError(
                f"exactly once needs id=, the column with each document's id: {self.product} gives "
                "documents without one an id of its own, so one that is sent again would be there "
                "twice. Name a column, or ask for semantic='at_least_once'",
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
        wanted: dict[str, str] = {}
        problems: list[str] = []
        accepted = {
            "id": "text, an integer, a boolean or a date",
            "version": "bigint or timestamp",
            "delete": "boolean",
        }
        named = {"id": self._id, "version": self._version, "delete": self._delete}
        for role, name in named.items():
            if name is None:
                continue
            if name not in columns:
                problems.append(f"there is no column {name!r} for the {role}")
                continue
            expression = EXPRESSIONS[role](columns[name])
            if expression is None:
                problems.append(
                    f"column {name!r} has type {columns[name].type}, but the {role} needs "
                    f"{accepted[role]}"
                )
            else:
                wanted[role] = expression
        problems += bad_names(name for name in columns if name != self._delete)
        if problems:
            has = ", ".join(f"{name} {column.type}" for name, column in columns.items())
            raise UsageError(
                f"the frame does not fit: {'; '.join(problems)}. It has {has}", sink=self.name
            )
        inside = {name: column for name, column in columns.items() if name != self._delete}
        self._columns = {name: column.type for name, column in inside.items()}
        if self._needs_one_row_per_id:
            wanted["hash"] = f"xxhash64({wanted['id']})"
        conditions = [not_finite(column.sql, column.type) for column in inside.values()]
        if any(conditions):
            wanted[NOT_FINITE] = f"coalesce({' OR '.join(filter(None, conditions))}, false)"
        return wanted | {"document": document(inside)}

    @property
    def _needs_one_row_per_id(self) -> bool:
        return self.semantic is Semantic.EXACTLY_ONCE and self._version is None

    def preflight(self) -> list[str]:
        once = self.semantic is Semantic.EXACTLY_ONCE
        impossible = impossible_name(self.index, moving=not once)
        if impossible:
            raise UsageError(impossible, sink=self.name)
        try:
            self.client.info()
            found: dict[str, Any] = self.client.indices.get(index=self.index)
        except said.NotFoundError:
            if self.index != self.index.lower():
                raise UsageError(
                    f"there is no alias {self.index}, and no index can have that name: write it in "
                    "small letters",
                    sink=self.name,
                ) from None
            return [
                f"index {self.index} does not exist: the first document makes it, with a mapping "
                "guessed from that document. Create it with the mapping that you want"
            ]
        except said.TransportError as error:
            told = problem(error, f"looking at index {self.index}", self.name)
            raise (
                UsageError(*told.args, sink=self.name) if isinstance(told, InDoubt) else told
            ) from error
        aliases = [
            it["aliases"][self.index] for it in found.values() if self.index in it["aliases"]
        ]
        self._is_alias = bool(aliases)
        unfit = unfit_alias(self.index, aliases, moving=not once)
        if unfit:
            raise UsageError(unfit, sink=self.name)
        warnings: list[str] = []
        for index, content in found.items():
            if "data_stream" in content:
                raise UsageError(
                    f"{self.index} is a data stream, which takes neither ids nor versions from "
                    "outside: write to an index",
                    sink=self.name,
                )
            wrong, doubtful = compare(content.get("mappings", {}), self._columns, id=self._id)
            if wrong:
                raise UsageError(
                    f"the frame does not fit index {index}: {'; '.join(wrong)}", sink=self.name
                )
            settings = content.get("settings", {}).get("index", {})
            warnings += doubtful + careless(index, settings)
            if self._delete:
                told = forgets_deletes(index, settings)
                warnings += [told] if told else []
        if len(found) > 1:
            warnings.append(
                f"{self.index} stands for {len(found)} indices: rows go to the one that is its write "
                "index, and a document in another is not replaced"
            )
        return warnings

    def attach(self, site: Site) -> None:
        super().attach(site)
        # Beside the rows, for no sink has a name with a dot.
        self._ids = RowStore(f"{site.rows_uri}/{self.name}.ids")

    @property
    def ids(self) -> RowStore:
        """Hashes of the ids in each branch: small enough for the driver to compare them all."""
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
            return StoredDocuments(self, branch)
        return StraightWriter(self, branch)

    def send(self, name: BranchName, rows: Iterator[pa.RecordBatch]) -> None:
        version = name.namespace.version(name.batch)
        refused: list[Refused] = []
        for batch in rows:
            refused += self.send_rows(batch, version)
        if refused:
            raise refusal(refused, str(name), self.index, self.name)

    def send_rows(self, rows: pa.RecordBatch, version: int | None) -> list[Refused]:
        sender = Sender(
            self.client, self.index, self.name, retries=self.retries,
            version=None if "version" in rows.schema.names else version,
            is_alias=self._is_alias,
        )  # fmt: skip
        refused: list[Refused] = []
        for request in requests(rows, version, max_bytes=self.max_bytes, max_docs=self.max_docs):
            refused += sender.send(request)
        return refused

    # On the driver.

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        answers = super().check(receipts)
        if not self._needs_one_row_per_id or len(receipts) < 2 or any(answers):
            return answers
        twice = self._in_two_branches([receipt.id for receipt in receipts])
        if not twice:
            return answers
        reason = (
            f"{twice} ids of the batch are also in another task's rows, and which of two rows with one "
            "id wins would be chance. Name a version= column, or bring them into one task "
            "(repartition by the id) and keep one of each (dropDuplicates, or an aggregate)"
        )
        return [reason] * len(receipts)

    def _in_two_branches(self, branches: Sequence[str]) -> int:
        """Count the ids that more than one branch has: first by hash, then, if there are any, whole."""
        hashes = [np.asarray(part.column(0)) for name in branches for part in self.ids.read(name)]
        values, counts = np.unique(np.concatenate(hashes), return_counts=True)
        suspects = pa.array(values[counts > 1])
        if not len(suspects):
            return 0
        seen: list[pa.Array] = []
        for name in branches:
            for rows in self.shelved.read(name):
                kept = rows.filter(pc.is_in(rows.column("hash"), value_set=suspects))
                seen.append(kept.column("id"))
        return int(np.sum(np.asarray(pc.value_counts(pa.chunked_array(seen)).field("counts")) > 1))

    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        states = super().commit(receipts)
        self._forget([receipt.id for receipt in receipts])
        return states

    def abort(self, strays: Sequence[Stray]) -> list[BranchState]:
        states = super().abort(strays)
        self._forget([stray.id for stray in strays])
        return states

    def prune(self, namespace: Namespace, floor: int) -> None:
        super().prune(namespace, floor)
        names = ((text, parse_name(text)) for text in self.ids.states())
        self._forget(
            text
            for text, name in names
            if name and (name.namespace, name.sink) == (namespace, self.name) and name.batch < floor
        )

    def _forget(self, branches: Any) -> None:
        if self._needs_one_row_per_id:
            for branch in branches:
                self.ids.drop(branch)


class Elasticsearch(OpenSearch):
    """An index of Elasticsearch, or an alias of one: as `OpenSearch`, whose requests it understands."""

    product = "Elasticsearch"


class StoredDocuments(StoredWriter):
    """Looks at ids, and keeps the rows beside the log."""

    def __init__(self, sink: OpenSearch, branch: Branch):
        super().__init__(sink.shelved, branch)
        self._sink = sink
        self._hashes = sink.ids.write(str(name_of(branch))) if sink._needs_one_row_per_id else None
        self._seen = pa.table({"id": pa.array([], pa.string()), "hash": pa.array([], pa.int64())})

    def write(self, rows: pa.RecordBatch) -> None:
        bad = bad_rows(rows)
        if self._hashes is not None:
            bad |= {row: it for row, it in repeated(rows, self._seen).items() if row not in bad}
        if bad:
            first = min(bad)
            raise BadRow(
                f"{len(bad)} rows cannot be sent, the first because {bad[first]}",
                sink=self._sink.name,
                rows=bad,
            )
        super().write(rows.select([it for it in rows.schema.names if it != NOT_FINITE]))
        if self._hashes is not None:
            mine = pa.Table.from_batches([rows.select(["id", "hash"])]).cast(self._seen.schema)
            self._seen = pa.concat_tables([self._seen, mine])
            self._hashes.write(rows.select(["hash"]))

    def prepare(self) -> PreparedBranch | None:
        prepared = super().prepare()
        if self._hashes is not None:
            self._hashes.finish()  # after the rows: whoever sweeps those sweeps these
        return prepared

    def abort(self) -> None:
        super().abort()
        if self._hashes is not None:
            self._hashes.abort()


class StraightWriter(Writer):
    """Sends rows as they come: a replay sends them again."""

    def __init__(self, sink: OpenSearch, branch: Branch):
        self._sink, self._tolerant = sink, branch.tolerant
        self._sent = 0  # rows that were taken when others of one write were refused

    def write(self, rows: pa.RecordBatch) -> None:
        if self._sent:
            # After a refusal the good rows of that write come again, and those are there.
            assert len(rows) == self._sent
            self._sent = 0
            return
        bad = bad_rows(rows)
        known = bool(bad)  # before anything is sent
        try:
            bad = bad or {it.row: it.reason for it in self._sink.send_rows(rows, None)}
        except PoundlockError as error:
            self._lose(error)
        if not bad:
            return
        told = BadRow(
            f"index {self._sink.index} refuses {len(bad)} documents, the first because: "
            f"{bad[min(bad)]}",
            sink=self._sink.name,
            rows=bad,
        )
        if self._tolerant:
            self._sent = 0 if known else len(rows) - len(bad)
            raise told
        self._lose(told)
        good = [row for row in range(len(rows)) if row not in bad]
        if known and good:
            self.write(rows.take(pa.array(good)))

    def _lose(self, error: PoundlockError) -> None:
        """Go on without rows, if that is allowed."""
        if self._sink.semantic is not Semantic.NONE:
            raise error
        logger.warning("sink %s: rows were lost, as semantic NONE allows: %s",
                       self._sink.name, error)  # fmt: skip

    def prepare(self) -> PreparedBranch | None:
        return None

    def abort(self) -> None:
        """What was sent, is sent."""


def connect(url: str, settings: Mapping[str, Any], timeout: float, sink: str) -> Driver:
    """Open a client. User and password are taken out of the addresses: errors show addresses."""
    texts = {name: value for name, value in settings.items() if isinstance(value, str)}
    options: dict[str, Any] = dict(settings) | resolve_all(texts)
    hosts: list[str] = []
    for address in resolve("url", url).split(","):
        try:
            parts = urlsplit(address.strip())
            port = parts.port or (443 if parts.scheme == "https" else 9200)
        except ValueError:
            parts, port = urlsplit(""), 0
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(
                "url cannot be understood: write https://user:password@host:9200, several with commas",
                sink=sink,
            )
        if parts.username:
            login = unquote(parts.username), unquote(parts.password or "")
            options.setdefault("http_auth", login)
        name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        hosts.append(urlunsplit((parts.scheme, f"{name}:{port}", parts.path, "", "")))
    # Our own retries know which documents to send again; the driver's do not.
    return Driver(hosts, timeout=timeout, max_retries=0, retry_on_timeout=False, **options)
