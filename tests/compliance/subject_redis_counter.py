"""Redis: each row adds one to its own counter, so a repeat would be visible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from poundlock.compliance import FaultCase, Subject
from poundlock.core.participant import Participant
from poundlock.errors import BadRow, UsageError
from poundlock.servers import valkey
from poundlock.sinks import Redis

from .subject_redis import RedisSubject

NOT_APPLICABLE: Mapping[str, str] = {
    "duplicate_key": "All rows for one field are added.",
    "key_in_two_tasks": "All rows for one field are added, in whatever tasks they are.",
}


class CounterSubject(RedisSubject):
    operation = "increment"

    def rows(self, numbers: Sequence[int]) -> pa.RecordBatch:
        texts = [str(number) for number in numbers]
        return pa.RecordBatch.from_pydict({"key": texts, "value": [1] * len(texts)})

    def visible(self, sink: Participant) -> Counter[int]:
        assert isinstance(sink, Redis)
        found = self._admin.hgetall(sink.shape.target)
        return Counter({int(field): int(value) for field, value in found.items()})

    # Faults.

    @contextmanager
    def wrong_type(self, sink: Participant) -> Iterator[FaultCase]:
        frame = {"id": "string", "v": "string"}
        says = "column 'v' has type string, but the value needs a number"
        yield FaultCase(says, UsageError, make=lambda: self._refused(sink, frame=frame))

    @contextmanager
    def null(self, sink: Participant) -> Iterator[FaultCase]:
        bad = self.rows([5, 6]).set_column(1, "value", pa.array([1, None]))
        says = "1 rows cannot be written.* the value is null"
        yield FaultCase(says, BadRow, tasks=[[self.rows(range(5)), bad]])


@contextmanager
def started(directory: Path) -> Iterator[Subject]:
    with valkey.running(directory) as server:
        yield CounterSubject(server)
