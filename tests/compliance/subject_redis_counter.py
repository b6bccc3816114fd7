"""Redis, where each row adds one to a counter of its own: a repeat would show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from poundlock.core.participant import Participant
from poundlock.servers import valkey
from poundlock.sinks import Redis

from .subject import Subject
from .subject_redis import RedisSubject

EXCUSED: Mapping[str, str] = {}


class CounterSubject(RedisSubject):
    operation = "increment"

    def rows(self, numbers: Sequence[int]) -> pa.RecordBatch:
        texts = [str(number) for number in numbers]
        return pa.RecordBatch.from_pydict({"key": texts, "value": [1] * len(texts)})

    def visible(self, sink: Participant) -> Counter[int]:
        assert isinstance(sink, Redis)
        found = self._eyes.hgetall(sink.shape.target)
        return Counter({int(field): int(value) for field, value in found.items()})


@contextmanager
def started(directory: Path) -> Iterator[Subject]:
    with valkey.running(directory) as server:
        yield CounterSubject(server)
