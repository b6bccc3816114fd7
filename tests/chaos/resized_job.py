"""A driver on a cluster of a given size that copies lines of files to a topic.

`python resized_job.py CONFIG.json`. With `die`, it kills itself after its first commit of a batch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import poundlock as lock
from poundlock import sinks
from poundlock.core.protocol import Step


def main(path: str) -> None:
    config = json.loads(Path(path).read_text())
    spark = lock.session(config["master"], conf={"spark.ui.enabled": "false"})
    frame = spark.readStream.format("text").load(config["source"])
    if config["shuffled"]:
        frame = frame.repartition("value")
    sink = sinks.Kafka(
        config["topic"], bootstrap_servers=config["servers"], transaction_timeout=config["timeout"]
    )
    settings = lock.Settings(least_time_left_s=0.5, tries=5, commits_at_once=1)

    def observe(step: Step, facts: Mapping[str, object]) -> None:
        if config["die"] and step is Step.COMMITTED_ONE:
            os.kill(os.getpid(), signal.SIGKILL)

    pipeline = lock.pipeline(
        frame, name="resized", checkpoint_location=config["checkpoint"], settings=settings
    )
    before = {name: spark.conf.get(name, None) for name in config["kept"]}
    query = pipeline.to(sink).observe(observe).start(availableNow=True)
    query.awaitTermination()
    assert before == {name: spark.conf.get(name, None) for name in config["kept"]}


if __name__ == "__main__":
    main(sys.argv[1])
