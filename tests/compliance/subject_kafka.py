"""Kafka: a separate broker, which the suite may kill."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

import oracle
from poundlock.compliance import FaultCase, Subject, empty, fill, small_disk
from poundlock.core.model import Receipt
from poundlock.core.participant import Column, Participant
from poundlock.errors import BadRow, NotAuthorised, Unavailable, UsageError
from poundlock.servers import kafka
from poundlock.sinks import Kafka

_NO_KEYS = "A topic takes any number of rows with one key."

NOT_APPLICABLE: Mapping[str, str] = {
    "duplicate_key": _NO_KEYS,
    "key_in_two_tasks": _NO_KEYS,
    "no_room": "Neither brokers nor the sink set a bound to open transactions.",
}

FRAME = {"key": Column("key", "binary"), "value": Column("value", "binary")}


def keyed(values: Sequence[bytes], keys: Sequence[bytes | None] = ()) -> pa.RecordBatch:
    columns = {"key": keys or values, "value": values}
    return pa.RecordBatch.from_pydict({k: pa.array(v, pa.binary()) for k, v in columns.items()})


class KafkaSubject(Subject):
    has_place = True
    remembers = False  # an id has an epoch, but no batch
    prunes = False  # the witness is the record in the topic

    def __init__(self, cluster: kafka.Cluster):
        self._cluster = cluster
        self._numbers = itertools.count()

    def _oracle(self, sink: Participant) -> oracle.Kafka:
        assert isinstance(sink, Kafka)
        return oracle.Kafka(dict(sink.settings))

    def sink(self, name: str = "out") -> Participant:
        return self._made(self._cluster.client_settings(), name)

    def _made(self, settings: dict[str, str], name: str, **arguments: Any) -> Participant:
        topic = oracle.Kafka(settings).create(f"topic-{next(self._numbers)}")
        return self._make_sink(topic, name, settings, **arguments)

    def again(self, sink: Participant) -> Participant:
        assert isinstance(sink, Kafka) and sink.topic
        return self._make_sink(sink.topic, sink.name, self._cluster.client_settings())

    def _make_sink(
        self,
        topic: str | None,
        name: str,
        settings: dict[str, str],
        frame: Mapping[str, Column] = FRAME,
        **arguments: Any,
    ) -> Participant:
        others = dict(settings)
        servers = others.pop("bootstrap.servers")
        made = Kafka(topic, bootstrap_servers=servers, name=name, settings=others, **arguments)
        made.project(frame)
        made.preflight()
        return made

    def rows(self, numbers: Sequence[int]) -> pa.RecordBatch:
        return keyed([str(number).encode() for number in numbers])

    def visible(self, sink: Participant) -> Counter[int]:
        assert isinstance(sink, Kafka) and sink.topic
        found = self._oracle(sink).values(sink.topic)
        return Counter({int(value): count for value, count in found.items()})

    def open(self, sink: Participant) -> set[str]:
        return set(self._oracle(sink).transactions(rf"poundlock\..*\.{sink.name}\..*"))

    @contextmanager
    def killed(self) -> Iterator[None]:
        self._cluster.kill(1)
        yield
        self._cluster.start(1)

    def lose(self, sink: Participant, receipt: Receipt) -> None:
        self._oracle(sink).fence(receipt.id)

    # Faults.

    def _refused(self, sink: Participant, frame: Mapping[str, Column]) -> Participant:
        assert isinstance(sink, Kafka)
        return self._make_sink(sink.topic, sink.name, self._cluster.client_settings(), frame)

    @contextmanager
    def wrong_columns(self, sink: Participant) -> Iterator[FaultCase]:
        frame = {"worth": Column("worth", "binary")}
        says = "no column 'value' for the value.* The DataFrame has worth binary"
        yield FaultCase(says, UsageError, make=lambda: self._refused(sink, frame))

    @contextmanager
    def wrong_type(self, sink: Participant) -> Iterator[FaultCase]:
        frame = {"value": Column("value", "map<string,int>")}
        says = "column 'value' has type map<string,int>, but the value needs"
        yield FaultCase(says, UsageError, make=lambda: self._refused(sink, frame))

    @contextmanager
    def wrong_password(self, sink: Participant) -> Iterator[FaultCase]:
        with kafka.running(security="SASL_SSL", users={"somebody": "right"}) as secure:
            settings = secure.client_settings() | {"sasl.password": "nonsense"}
            yield FaultCase(
                "check sasl.mechanism, sasl.username and sasl.password",
                NotAuthorised,
                hides="nonsense",
                make=lambda: self._make_sink("t", sink.name, settings),
            )

    @contextmanager
    def null(self, sink: Participant) -> Iterator[FaultCase]:
        """A compacted topic requires keys. A null value is no fault: it deletes."""
        compacted = oracle.Kafka(self._cluster.client_settings()).create(
            f"topic-{next(self._numbers)}", config={"cleanup.policy": "compact"}
        )
        using = self._make_sink(compacted, sink.name, self._cluster.client_settings())
        bad = keyed([b"5", b"6"], [b"5", None])
        says = "a compacted topic needs a key in every row"
        yield FaultCase(says, BadRow, sink=using, tasks=[[self.rows(range(5)), bad]])

    @contextmanager
    def too_long(self, sink: Participant) -> Iterator[FaultCase]:
        bad = keyed([b"x" * 3_000_000], [b"5"])
        yield FaultCase(
            "message.max.bytes", BadRow, tasks=[[self.rows(range(5)), bad]], hides="xxx"
        )

    @contextmanager
    def full_disk(self, sink: Participant) -> Iterator[FaultCase]:
        """A broker stops when its only disk is full."""
        with small_disk(64) as disk, kafka.running(disk / "kafka") as small:
            using = self._made(small.client_settings(), sink.name, flush_timeout=10)

            def make_room() -> None:
                empty(disk)
                small.kill(1)
                small.start(1)

            rows = keyed([b"x" * 10_000] * 500, [b"x"] * 500)
            yield FaultCase(
                "check that the brokers are up.*the batch is run again",
                Unavailable,
                sink=using,
                tasks=[[rows] * 4],
                during=lambda: fill(disk),
                over=make_room,
            )

    @contextmanager
    def lost_connection(self, sink: Participant) -> Iterator[FaultCase]:
        def strike() -> None:
            with self.killed():
                pass

        yield FaultCase("", during=strike, survived=True)


@contextmanager
def started(directory: Path) -> Iterator[Subject]:
    with kafka.running(directory) as cluster:
        yield KafkaSubject(cluster)
