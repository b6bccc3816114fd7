"""Redis: a separate Valkey, which the suite may kill. Rows become fields of a hash."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import redis

from poundlock.compliance import FaultCase, Subject
from poundlock.core.model import Receipt
from poundlock.core.participant import Column, Participant
from poundlock.errors import BadRow, NotAuthorised, Unavailable, UsageError
from poundlock.servers import valkey
from poundlock.sinks import Redis

NOT_APPLICABLE: Mapping[str, str] = {
    "duplicate_key": "Of several rows for one field the greatest by order_by wins, or any one of them.",
    "key_in_two_tasks": "It does not matter in which tasks the rows for one field are.",
}


class RedisSubject(Subject):
    operation = "set"

    def __init__(self, server: valkey.Node):
        self._server = server
        self._numbers = itertools.count()

    @property
    def _admin(self) -> Any:
        return redis.Redis.from_url(self._server.address, decode_responses=True)

    def sink(self, name: str = "out") -> Participant:
        return self._make_sink(f"target-{next(self._numbers)}", name)

    def again(self, sink: Participant) -> Participant:
        assert isinstance(sink, Redis)
        return self._make_sink(sink.shape.target, sink.name)

    def _make_sink(
        self,
        target: str,
        name: str,
        frame: Mapping[str, str] = {"id": "string", "v": "int"},
        **others: Any,
    ) -> Participant:
        options: dict[str, Any] = {
            "url": self._server.address,
            "operation": self.operation,
        } | others
        made = Redis(name=name, hash=target, field="id", value="v", **options)
        made.project({column: Column(column, kind) for column, kind in frame.items()})
        assert made.preflight() == []
        return made

    def rows(self, numbers: Sequence[int]) -> pa.RecordBatch:
        texts = [str(number) for number in numbers]
        return pa.RecordBatch.from_pydict({"key": texts, "value": texts})

    def visible(self, sink: Participant) -> Counter[int]:
        assert isinstance(sink, Redis)
        return Counter(int(field) for field in self._admin.hkeys(sink.shape.target))

    def open(self, sink: Participant) -> set[str]:
        assert isinstance(sink, Redis)
        admin = self._admin
        keys = set(admin.scan_iter(f"{{{sink.shape.target}}}:poundlock.*", count=1000))
        listed = {name for key in keys if key.endswith(".open") for name in admin.smembers(key)}
        return listed | {key for key in keys if not key.endswith((".open", ".witness", ".logs"))}

    @contextmanager
    def killed(self) -> Iterator[None]:
        self._server.kill()
        yield
        self._server.start()

    def lose(self, sink: Participant, receipt: Receipt) -> None:
        assert isinstance(sink, Redis)
        assert self._admin.delete(f"{{{sink.shape.target}}}:{receipt.id}") == 1

    # Faults.

    def _refused(self, sink: Participant, **others: Any) -> Participant:
        assert isinstance(sink, Redis)
        return self._make_sink(sink.shape.target, sink.name, **others)

    @contextmanager
    def wrong_columns(self, sink: Participant) -> Iterator[FaultCase]:
        frame = {"id": "string", "w": "int"}
        says = "no column 'v' for the value. The DataFrame has id string, w int"
        yield FaultCase(says, UsageError, make=lambda: self._refused(sink, frame=frame))

    @contextmanager
    def wrong_type(self, sink: Participant) -> Iterator[FaultCase]:
        """The order column has a wrong type. Every other column is written as text."""
        frame = {"id": "string", "v": "string"}
        says = "column 'v' has type string, but the order needs an integer, a date or a timestamp"
        make = lambda: self._refused(sink, frame=frame, order_by="v")  # noqa: E731
        yield FaultCase(says, UsageError, make=make)

    @contextmanager
    def wrong_password(self, sink: Participant) -> Iterator[FaultCase]:
        url = self._server.url.replace("//", "//:nonsense@", 1)
        says = "refuses the user, the password.*WRONGPASS|invalid username-password"
        yield FaultCase(
            says, NotAuthorised, make=lambda: self._refused(sink, url=url), hides="nonsense"
        )

    def _keys(self, numbers: Sequence[int], keys: Sequence[str | None]) -> pa.RecordBatch:
        return self.rows(numbers).set_column(0, "key", pa.array(keys))

    @contextmanager
    def null(self, sink: Participant) -> Iterator[FaultCase]:
        tasks = [[self.rows(range(5)), self._keys([5, 6], ["5", None])]]
        yield FaultCase("1 rows cannot be written.* the key is null", BadRow, tasks=tasks)

    @contextmanager
    def too_long(self, sink: Participant) -> Iterator[FaultCase]:
        """The server's own limit is 512 MB and cannot be lowered to less than this."""
        self._admin.config_set("proto-max-bulk-len", 1 << 20)
        tasks = [[self.rows(range(5)), self._keys([5, 6], ["5", "too long" * (1 << 17)])]]
        yield FaultCase(
            "longer than the server's proto-max-bulk-len, 1048576 bytes",
            BadRow,
            sink=self.again(sink),
            tasks=tasks,
            hides="too long",
            over=lambda: self._admin.config_set("proto-max-bulk-len", 512 << 20),
        )

    @contextmanager
    def no_room(self, sink: Participant) -> Iterator[FaultCase]:
        """Branches are keys, whose number is unlimited, but each task needs a connection."""
        admin = self._admin
        most = admin.config_get("maxclients")["maxclients"]
        admin.config_set("maxclients", 1)  # existing connections stay
        yield FaultCase(
            "no connection left. Raise its maxclients",
            Unavailable,
            over=lambda: admin.config_set("maxclients", most),
        )

    @contextmanager
    def full_disk(self, sink: Participant) -> Iterator[FaultCase]:
        """Its memory is full. A full disk would stop the server: see `killed`."""
        admin = self._admin
        yield FaultCase(
            r"staging rows of .*no memory left \(maxmemory\).* Nothing is lost: free some memory",
            Unavailable,
            during=lambda: admin.config_set("maxmemory", 1),
            over=lambda: admin.config_set("maxmemory", 0),
        )

    @contextmanager
    def lost_connection(self, sink: Participant) -> Iterator[FaultCase]:
        """Staging and the move can be repeated, so the driver tries again."""
        cut = lambda: self._admin.client_kill_filter(_type="normal")  # noqa: E731
        yield FaultCase("", survived=True, during=cut)


@contextmanager
def started(directory: Path) -> Iterator[Subject]:
    with valkey.running(directory) as server:
        yield RedisSubject(server)
