"""A second driver of a pipeline whose first one is alive and waits for rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import Chaos, Query, wait_until

from poundlock.servers.kafka import Cluster

ENDLESS = {"processingTime": "200 milliseconds"}


def finished(chaos: Chaos) -> int:
    return sum(record["kind"] == "Finished" for record in chaos.log("stateless"))


@pytest.mark.parametrize("rows", ["later", "at once"])
def test_the_second_driver_goes_on_and_the_first_one_stops(
    kafka_server: Cluster, tmp_path: Path, rows: str
) -> None:
    """Both are told. New rows arrive when the first has stopped, or as soon as it is replaced."""
    query = Query("stateless", rows=60, rows_per_batch=30, trigger=ENDLESS)
    chaos = Chaos(tmp_path, kafka_server.bootstrap_servers, [query])
    first = chaos.start()
    wait_until(lambda: finished(chaos) == 2, "the first driver's batches")
    second = chaos.start()
    owners = lambda: [it["owner"] for it in chaos.log("stateless") if it["kind"] == "Generation"]  # noqa: E731
    wait_until(lambda: len(owners()) == 2, "the second driver's take-over")
    if rows == "at once":
        chaos.grow("stateless", 60)
    ended = first.finish()
    assert "pipeline stateless ended with Fenced" in ended.output
    says = rf"driver {owners()[1]} took over the pipeline on \S+ at \S+ UTC, as generation 2"
    assert re.search(says, ended.output)
    if rows == "later":
        chaos.grow("stateless", 60)
    wait_until(lambda: finished(chaos) == 4, "the second driver's batches", 60)
    assert second.process.poll() is None, second.finish().tail()
    second.kill()
    log = second.finish().output
    assert f"took over from driver {owners()[0]}" in log
    chaos.live(trigger={"availableNow": True}).ended()
    chaos.check()
