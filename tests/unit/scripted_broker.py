"""A Kafka client whose brokers answer from a script."""

from __future__ import annotations

import time
from types import SimpleNamespace

from poundlock.sinks.kafka.client import KafkaClient

SERVERS = {"bootstrap.servers": "a:9092, b:9093"}
SECRET = "hunter2-very-secret"
TOPIC_ID = "w6uTz_0tRRebSn6VE0079Q"


class Script:
    """Replaces the connections by a function from node and request to the answer."""

    def __init__(self, answer):
        self._answer = answer
        self.asked: list[tuple[int | None, str]] = []

    async def send(self, request, node, seconds):
        self.asked.append((node, type(request).__name__))
        answer = self._answer(node, request)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def post(self, work):
        return work()

    async def sleep(self, seconds):
        time.sleep(seconds)


def wired(answer, seconds: float = 0.2) -> tuple[KafkaClient, Script]:
    client, script = KafkaClient(SERVERS, time_limit=seconds), Script(answer)
    client._link = script
    client._deadline = time.monotonic() + seconds
    return client, script


def metadata(leaders: dict[int, int], brokers: tuple[int, ...] = (1, 2)) -> SimpleNamespace:
    partitions = [
        SimpleNamespace(partition_index=number, leader_id=leader, leader_epoch=leader)
        for number, leader in leaders.items()
    ]
    return SimpleNamespace(
        brokers=[SimpleNamespace(node_id=node) for node in brokers],
        topics=[SimpleNamespace(partitions=partitions)],
    )


def listing(*ids: str, code: int = 0) -> SimpleNamespace:
    rows = [
        SimpleNamespace(transactional_id=i, producer_id=1, transaction_state="Ongoing") for i in ids
    ]
    return SimpleNamespace(error_code=code, transaction_states=rows)


def coordinators(request, node: int) -> SimpleNamespace:
    return SimpleNamespace(
        coordinators=[
            SimpleNamespace(key=key, node_id=node, error_code=0) for key in request.coordinator_keys
        ]
    )
