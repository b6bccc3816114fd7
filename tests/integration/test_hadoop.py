"""The log and the checkpoint on Hadoop file systems: a real HDFS, and some that are not safe."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError

import oracle
from poundlock.errors import UsageError
from poundlock.spark.storage import HadoopFiles, HadoopLog

HERE = Path(__file__).parent


def test_a_pipeline_with_its_log_on_hdfs_goes_on_after_a_crash(
    kafka: oracle.Kafka, topic: Any, tmp_path: Path
) -> None:
    source, target = topic(partitions=2, name="source"), topic(partitions=2, name="target")
    other = topic(partitions=2, name="other")
    rows = [f"row {number}" for number in range(100)]
    kafka.produce(source, rows)
    done = subprocess.run(
        [
            *(sys.executable, HERE / "hdfs_job.py", kafka.servers),
            *(source, target, other, tmp_path / "hdfs"),
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["log"] == {
        "kind": "HadoopLog",
        "query": "query",
        "fenced": True,
        "generation": 2,
        "audits": [[], "seen"],
    }
    assert report["pipeline"]["died"]
    assert "moved or copied" in report["pipeline"]["moved"]
    assert report["default"] == {
        "died": True,
        "records": True,
        "local": False,
        "operator": [True, True],
    }
    for written in (target, other):
        kafka.assert_exact(written, rows)
        kafka.assert_settled(written)


class Careless(HadoopFiles):
    """A file system whose rename replaces the target, as in some object stores."""

    def __init__(self) -> None:
        self.root, self.scheme, self.kept = "careless://bucket/log", "careless", dict[str, bytes]()

    def make_root(self) -> None: ...

    def read(self, name: str) -> bytes | None:
        return self.kept.get(name)

    def delete(self, name: str) -> None:
        self.kept.pop(name, None)

    def _write_and_rename(self, name: str, data: Iterable[bytes]) -> None:
        self.kept[name] = b"".join(data)


def test_a_file_system_that_lets_two_writers_win_is_refused() -> None:
    with pytest.raises(UsageError, match="race to create one file: 2 succeeded"):
        HadoopLog(Careless())


class Refusing(Careless):
    """A file system that correctly refuses the second writer."""

    def _write_and_rename(self, name: str, data: Iterable[bytes]) -> None:
        mine = b"".join(data)
        if self.kept.setdefault(name, mine) != mine:
            error = SimpleNamespace(_target_id="o1", _gateway_client=None, _pool=set[str]())
            raise Py4JJavaError("taken", error)


def test_a_file_system_that_passes_the_probe_is_accepted() -> None:
    assert HadoopLog(Refusing()).uri == "careless://bucket/log"
