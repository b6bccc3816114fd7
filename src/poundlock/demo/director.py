"""Starts a broker, runs both sides through their kills and restarts, and counts the rows."""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from poundlock.demo import plan, topics
from poundlock.demo.count import Reading, compare, from_json, from_line
from poundlock.demo.result import Order, Outcome, Result
from poundlock.demo.screen import Screen
from poundlock.demo.side import PoundlockSide, Scene, Side, SparkSide
from poundlock.errors import Unavailable
from poundlock.jvm import jars
from poundlock.servers import kafka

_POLL_S = 0.01


def run(order: Order, screen: Screen) -> Result:
    """Run the demo. Everything that it starts has ended when this returns or raises."""
    order.out.mkdir(parents=True, exist_ok=True)
    screen.print("fetching the jars, if they are not in the cache")
    jars.paths("kafka-server")
    jars.paths("spark-kafka")
    with _directory(order) as place, contextlib.ExitStack() as stack:
        screen.print("starting a Kafka broker")
        broker = stack.enter_context(kafka.running(place / "kafka"))
        servers = broker.bootstrap_servers
        screen.print(f"sending {order.rows:,} sensor lines")
        topics.create(servers)
        topics.feed(servers, topics.sensor_lines(order.rows, order.seed))
        scene = Scene(
            servers=servers,
            checkpoints=place / "checkpoints",
            logs=_make_empty(order.out / "logs"),
            rows_per_batch=math.ceil(order.rows / plan.batches(order.kills)),
            kills=tuple(plan.kills(order.kills, order.seed)),
            began=time.monotonic(),
            on_event=screen.show_event,
        )
        sides = [PoundlockSide(scene), SparkSide(scene)]
        for side in sides:
            stack.callback(side.close)
        _run_sides(sides, screen, order.time_limit_s)
        seconds = scene.now()
        screen.print("counting the rows in the topics")
        sent = [from_line(line) for line in topics.read(servers, topics.SENSOR)]
        outcomes = [_outcome(side, sent, servers) for side in sides]
        return Result(order, *outcomes, seconds=seconds)


def _run_sides(sides: list[Side], screen: Screen, time_limit_s: float) -> None:
    deadline = time.monotonic() + time_limit_s
    with screen.live(sides):
        while not all(side.done for side in sides):
            if time.monotonic() > deadline:
                where = "; ".join(
                    f"{side.title}: {side.state}, batch {side.batch}, {side.kills} kills"
                    for side in sides
                )
                raise Unavailable(
                    f"the demo did not finish within {time_limit_s:.0f} s ({where}). On a busy "
                    "machine, use fewer --rows and --kills, or a longer --time-limit"
                )
            for side in sides:
                side.poll()
            screen.update()
            time.sleep(_POLL_S)


def _outcome(side: Side, sent: list[Reading], servers: str) -> Outcome:
    received = map(from_json, topics.read(servers, side.topic))
    count = compare(sent, received)
    return Outcome(side.key, side.title, side.topic, count, side.kills, side.history)


@contextlib.contextmanager
def _directory(order: Order) -> Iterator[Path]:
    """Provide a directory for the broker and the checkpoints, and delete it unless it is kept."""
    if order.keep:
        yield _make_empty(order.out / "kept")
        return
    place = Path(tempfile.mkdtemp(prefix="poundlock-demo-"))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _make_empty(directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory
