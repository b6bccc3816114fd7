"""A real Kafka for the tests that need one: a single broker, started once per session."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest

from poundlock.servers import kafka


@pytest.fixture(scope="session")
def kafka_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kafka.Cluster]:
    """One broker, shared. A test that hurts brokers starts a cluster of its own: kafka.running()."""
    with kafka.running(tmp_path_factory.mktemp("kafka")) as cluster:
        yield cluster


@pytest.fixture
def topic(kafka_server: kafka.Cluster) -> Callable[..., str]:
    """Makes topics that no other test knows: `topic(partitions=3)` returns the name."""
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient(kafka_server.client_settings())

    def make(partitions: int = 1, *, name: str = "topic", **config: str) -> str:
        unique = f"{name}-{uuid.uuid4().hex[:8]}"
        config = {"retention.ms": "-1"} | config  # some rows say that they are from 1970
        new = NewTopic(unique, num_partitions=partitions, replication_factor=1, config=config)
        admin.create_topics([new])[unique].result(timeout=30)
        return unique

    return make
