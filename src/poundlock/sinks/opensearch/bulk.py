"""Bulk requests: made column by column, sent, and their answers read item by item.

A repeat changes nothing, because every document has a version and the server keeps the greatest one.
But a conflict alone does not prove that the document is stored. If the batch is the version, exactly
that version must be stored, because no later batch is sent before this one is finished. If rows have
versions of their own, a greater one may be stored.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from opensearchpy import OpenSearch as Driver
from opensearchpy import exceptions

from poundlock.errors import PermanentlyRefused, Unavailable
from poundlock.sinks.opensearch.client import REASON_CHARACTERS, translate_error

pc: Any = pyarrow.compute  # made at run time: no type checker knows what is in it

_BYTES = pa.large_binary()
_ANSWER = "errors,items.*.status,items.*.result,items.*.error,items.*._id"
_NAMED = 5  # refused documents that an error names
_CONFLICT = "version_conflict_engine_exception"
# After the id, which may contain anything.
_STORED = re.compile(r"current version \[(\d+)\][^\[\]]*\[\d+\]$")
_PREVIEW = re.compile(r"\.? Preview of field's value: .*", re.DOTALL)


@dataclass(frozen=True)
class Request:
    """Actions and documents of some rows, ready to be sent."""

    body: memoryview
    rows: int
    first: int = 0  # the number of its first row


def requests(
    rows: pa.RecordBatch, version: int | None, *, max_bytes: int, max_docs: int
) -> Iterator[Request]:
    """Yield rows as bulk requests. Columns: `document`, and perhaps `id`, `version` and `delete`.

    Without a version, in a column or given, the last document of an id wins.
    """
    lines = _lines(rows, version)
    ends = np.frombuffer(lines.buffers()[1], np.int64)[lines.offset : lines.offset + len(lines) + 1]
    body = memoryview(lines.buffers()[2])
    first = 0
    while first < len(lines):
        last = int(np.searchsorted(ends, ends[first] + max_bytes, side="right")) - 1
        last = min(max(last, first + 1), first + max_docs, len(lines))
        yield Request(body[ends[first] : ends[last]], last - first, first)
        first = last


def _lines(rows: pa.RecordBatch, version: int | None) -> pa.Array:
    """Return the action and the document of each row, as bytes."""
    names = rows.schema.names
    document = rows.column("document").cast(pa.large_string()).cast(_BYTES)
    fields: list[Any] = []
    if "id" in names:
        fields += [_scalar('"_id":'), _json_strings(rows.column("id"))]
    if "version" in names:
        versions = rows.column("version").cast(pa.large_string()).cast(_BYTES)
        fields += [_scalar(',"version_type":"external","version":'), versions]
    elif version is not None:
        fields.append(_scalar(f',"version_type":"external","version":{version}'))
    head, tail = _scalar('{"index":{'), pc.binary_join_element_wise(document, _scalar("\n"), _EMPTY)
    if "delete" in names:
        deleted = pc.fill_null(rows.column("delete"), False)
        head = pc.if_else(deleted, _scalar('{"delete":{'), head)
        tail = pc.if_else(deleted, _EMPTY, tail)
    lines = pc.binary_join_element_wise(head, *fields, _scalar("}}\n"), tail, _EMPTY)
    return lines.combine_chunks() if isinstance(lines, pa.ChunkedArray) else lines


def _scalar(text: str) -> pa.Scalar:
    return pa.scalar(text.encode(), _BYTES)


_EMPTY = _scalar("")


def _json_strings(column: pa.Array) -> pa.Array:
    """Return texts as JSON strings."""
    column = column.cast(pa.large_string())
    if pc.any(pc.match_substring_regex(column, r"[\x00-\x1f]")).as_py():
        # Control characters in an id are so rare that each row may cost a call.
        column = pa.array(
            [json.dumps(text)[1:-1] for text in column.to_pylist()], pa.large_string()
        )
    else:
        column = pc.replace_substring(column, "\\", "\\\\")
        column = pc.replace_substring(column, '"', '\\"')
    return pc.binary_join_element_wise(_scalar('"'), column.cast(_BYTES), _scalar('"'), _EMPTY)


@dataclass(frozen=True)
class Refused:
    """A document that the server will never accept as it is."""

    id: str
    reason: str
    row: int = -1  # the number of its row
    foreign: bool = False  # a version that this sink did not write is stored


@dataclass(frozen=True)
class _Part:
    """An action with its document, and the number of its row."""

    body: bytes
    row: int


class Sender:
    """Sends requests until every document is stored or refused for good.

    `version` is that of the batch; None if rows have their own, or none. `is_alias`: the index is an
    alias, and must still be one.
    """

    def __init__(
        self,
        client: Driver,
        index: str,
        sink: str,
        *,
        retries: int,
        version: int | None = None,
        is_alias: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._client, self._index, self._sink = client, index, sink
        self._retries, self._version = retries, version
        # If the alias was deleted, the server must not create an index with a guessed mapping.
        self._params = {"filter_path": _ANSWER} | ({"require_alias": "true"} if is_alias else {})
        self._sleep = sleep

    def send(self, request: Request) -> list[Refused]:
        """Return what was refused for good. Raises `Unavailable` after the last retry."""
        body, tries = bytes(request.body), 0
        rows: Sequence[int] = range(request.first, request.first + request.rows)
        refused: list[Refused] = []
        while True:
            waiting, why = self._send_once(body, rows, refused)
            if not waiting:
                return refused
            tries += 1
            if tries > self._retries:
                raise Unavailable(
                    f"index {self._index}: the server did not accept {len(waiting)} documents in "
                    f"{tries} tries, the last time because: {why}",
                    sink=self._sink,
                )
            body, rows = b"".join(part.body for part in waiting), [part.row for part in waiting]
            # At random, so that tasks that were refused together do not retry together.
            self._sleep(min(0.1 * 2**tries, 10.0) * (0.5 + random.random() / 2))

    def _send_once(
        self, body: bytes, rows: Sequence[int], refused: list[Refused]
    ) -> tuple[list[_Part], str]:
        """Send once. Return the parts of the body that must be sent again, and why."""
        try:
            answer = self._client.bulk(body=body, index=self._index, params=dict(self._params))
        except exceptions.TransportError as error:
            if error.status_code == 413:
                return self._send_halves(body, rows, refused)
            translated = translate_error(error, f"index {self._index}", self._sink)
            if isinstance(translated, Unavailable):
                return _parts(body, rows), str(translated.args[0])
            raise translated from error
        items = answer["items"]
        if answer["errors"] or any("noop" in it.values() for i in items for it in i.values()):
            return self._read_items(_parts(body, rows), items, refused)
        return [], ""

    def _read_items(
        self, parts: Sequence[_Part], items: Sequence[Any], refused: list[Refused]
    ) -> tuple[list[_Part], str]:
        """Read the result of each part: stored, refused, or to be sent again."""
        waiting, why = list[_Part](), ""
        conflicts: list[tuple[_Part, Any]] = []
        for part, item in zip(parts, items, strict=True):
            (result,) = item.values()
            if _is_stored(result):
                continue
            reason = _reason(result)
            if _is_temporary(result):
                waiting.append(part)
                why = reason
            elif (result.get("error") or {}).get("type") == _CONFLICT:
                conflicts.append((part, result))
            else:
                refused.append(Refused(str(result.get("_id", "")), reason, part.row))
        if self._version is not None:
            refused += self._foreign(conflicts)
        return waiting, why

    def _foreign(self, conflicts: Sequence[tuple[_Part, Any]]) -> list[Refused]:
        """Return the conflicts with a version other than this batch's, which was sent before."""
        stored: dict[str, int] = {}
        for _, result in conflicts:
            match = _STORED.search(result["error"].get("reason") or "")
            if match:
                stored[result["_id"]] = int(match[1])
        unknown = [result["_id"] for _, result in conflicts if result["_id"] not in stored]
        if unknown:
            stored |= self._read_versions(unknown)
        return [
            Refused(
                result["_id"],
                f"409: version {stored.get(result['_id'], 'unknown')} is stored, which is not this "
                f"batch's, {self._version}",
                part.row,
                foreign=True,
            )
            for part, result in conflicts
            if stored.get(result["_id"]) != self._version
        ]

    def _read_versions(self, ids: Sequence[str]) -> dict[str, int]:
        """Return the stored version of each of these documents that exists."""
        try:
            answer = self._client.mget(
                body={"ids": list(ids)}, index=self._index, params={"_source": "false"}
            )
        except exceptions.TransportError as error:
            raise translate_error(error, f"index {self._index}", self._sink) from error
        return {it["_id"]: it["_version"] for it in answer["docs"] if it.get("found")}

    def _send_halves(
        self, body: bytes, rows: Sequence[int], refused: list[Refused]
    ) -> tuple[list[_Part], str]:
        """Send a request that is too large for the server as two."""
        parts = _parts(body, rows)
        if len(parts) == 1:
            reason = "one document is larger than the server accepts (413)"
            refused.append(Refused("", reason, parts[0].row))
            return [], ""
        waiting, why = list[_Part](), ""
        middle = len(parts) // 2
        for half in (parts[:middle], parts[middle:]):
            again, reason = self._send_once(
                b"".join(part.body for part in half), [part.row for part in half], refused
            )
            waiting += again
            why = why or reason
        return waiting, why


def _parts(body: bytes, rows: Sequence[int]) -> list[_Part]:
    """Split a body into its actions, each with its document."""
    lines = iter(body.split(b"\n")[:-1])
    parts = [
        line + b"\n" if line.startswith(b'{"delete"') else line + b"\n" + next(lines) + b"\n"
        for line in lines
    ]
    return [_Part(part, row) for part, row in zip(parts, rows, strict=True)]


def _is_stored(result: Any) -> bool:
    status = result["status"]
    if result.get("result") == "noop":  # an ingest pipeline dropped it
        return False
    # 404 without an error: it was deleted before.
    return status in (200, 201) or (status == 404 and "error" not in result)


def _is_temporary(result: Any) -> bool:
    """Whether the server may accept the document later: it is busy, full or has no shard."""
    blocked = result.get("error", {}).get("type") in (
        "cluster_block_exception",
        "unavailable_shards_exception",
        "process_cluster_event_timeout_exception",
    )
    return blocked or result["status"] in (429, 500, 502, 503, 504)


def _reason(result: Any) -> str:
    """Return why a document was refused, without its values, which the server shows."""
    if result.get("result") == "noop":
        return "an ingest pipeline of the index drops it"
    error = result.get("error") or {}
    text = _PREVIEW.sub("", error.get("reason") or "no reason given")
    cause = (error.get("caused_by") or {}).get("type")
    because = f" ({cause})" if cause else ""
    return f"{result['status']} {error.get('type', '')}: {text[:REASON_CHARACTERS]}{because}"


def refusal(refused: Sequence[Refused], branch: str, index: str, sink: str) -> PermanentlyRefused:
    """Return the error for documents of a decided batch that the server will never accept."""
    named = "; ".join(f"{it.id!r}: {it.reason}" for it in refused[:_NAMED])
    more = f"; and {len(refused) - _NAMED} more" if len(refused) > _NAMED else ""
    cures: list[str] = []
    if not all(it.foreign for it in refused):
        cures.append(
            "Change the index so that it accepts them (add the field to the mapping, set "
            "ignore_malformed, or reindex into one with other types behind the same alias)"
        )
    if any(it.foreign for it in refused):
        cures.append(
            "An id has one writer, and someone else wrote these: another pipeline, a program, or an "
            "earlier log that began while the clock was ahead. Make sure that nobody does, and delete "
            "these documents; the server forgets their versions after index.gc_deletes, a minute"
        )
    return PermanentlyRefused(
        f"branch {branch} is decided, but index {index} refuses {len(refused)} of its documents: "
        f"{named}{more}. All others are stored. {'. '.join(cures)}. Then start the pipeline again: it "
        "sends the branch once more, which changes nothing else",
        sink=sink,
    )
