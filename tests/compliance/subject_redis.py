"""Redis: a Valkey of its own, which the suite may kill. Rows become fields of a hash."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import redis

from poundlock.core.model import Receipt
from poundlock.core.participant import Participant
from poundlock.servers import valkey
from poundlock.sinks import Redis

from .subject import Subject

EXCUSED: Mapping[str, str] = {}


class RedisSubject(Subject):
    operation = "set"

    def __init__(self, server: valkey.Node):
        self._server = server
        self._numbers = itertools.count()

    @property
    def _eyes(self) -> Any:
        return redis.Redis.from_url(self._server.address, decode_responses=True)

    def sink(self, name: str = "out") -> Participant:
        return self._looked_over(f"target-{next(self._numbers)}", name)

    def again(self, sink: Participant) -> Participant:
        assert isinstance(sink, Redis)
        return self._looked_over(sink.shape.target, sink.name)

    def _looked_over(self, target: str, name: str) -> Participant:
        made = Redis(
            url=self._server.address, name=name, hash=target, field="id", value="v",
            operation=self.operation,
        )  # fmt: skip
        assert made.preflight() == []
        return made

    def rows(self, numbers: Sequence[int]) -> pa.RecordBatch:
        texts = [str(number) for number in numbers]
        return pa.RecordBatch.from_pydict({"key": texts, "value": texts})

    def visible(self, sink: Participant) -> Counter[int]:
        assert isinstance(sink, Redis)
        return Counter(int(field) for field in self._eyes.hkeys(sink.shape.target))

    def open(self, sink: Participant) -> set[str]:
        assert isinstance(sink, Redis)
        eyes = self._eyes
        keys = set(eyes.scan_iter(f"{{{sink.shape.target}}}:poundlock.*", count=1000))
        listed = {name for key in keys if key.endswith(".open") for name in eyes.smembers(key)}
        return listed | {key for key in keys if not key.endswith((".open", ".witness"))}

    @contextmanager
    def killed(self) -> Iterator[None]:
        self._server.kill()
        yield
        self._server.start()

    def lose(self, sink: Participant, receipt: Receipt) -> None:
        assert isinstance(sink, Redis)
        assert self._eyes.delete(f"{{{sink.shape.target}}}:{receipt.id}") == 1


@contextmanager
def started(directory: Path) -> Iterator[Subject]:
    with valkey.running(directory) as server:
        yield RedisSubject(server)
