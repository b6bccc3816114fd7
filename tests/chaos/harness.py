"""Real drivers that are killed at named points and started again.

The oracles share no code with the product.

    chaos = Chaos(directory, bootstrap_servers, [Query("stateless")])    # topics, input
    life = chaos.live({"stateless": Fault("decided")})    # run one driver until it ends
    assert life.killed and life.reached == {"stateless": ["decided"]}    # `die_at` does both
    chaos.live().ended()                # the last run must end by itself, without an error
    chaos.check()                       # output exact, nothing left open, LSO == high watermark

`Fault(at, then, nth, match)` names a point (`faults` lists them), an action, how many times the point
must be reached in this run (`nth`), and facts that must hold. `then` is one of

    kill           SIGKILL for the driver, Python and JVM. If several pipelines of one driver have a
                   `kill`, each stops at its point, and the last to arrive kills all of them
    kill-python    the same, but the JVM stays behind as a zombie
    hold           wait for `child.release(pipeline, point)`
    outlive        the same in a task, which then outlives its executor
    note           only write the report
    fail, reject   raise an unknown error, or a no vote
    kill-worker, kill-executor    in a task: this Python worker, or the JVM of its executor
    cut-off        in a task: from now on, no task on its executor reaches the sink

A fault is carried out once in a run, by the first process that reaches it, after its report was
written and synced. `live` is `start` and `finish`. For more than one driver at a time, use
`child = chaos.start(...)`, `child.wait_for(pipeline, point)`, `child.release(...)`,
`child.signal(SIGSTOP)`, `child.kill()` and `child.finish()`.

A `Query` is one of four kinds: "stateless" (one output topic), "outputs" (three sinks, four topics),
"stateful" (a windowed aggregation in update mode) and "five" (five `systems`, see `test_five`). Its
`sink`, `source`, `settings` and `trigger` go to the Kafka sinks, to `read_kafka`, to `Settings` and
to `start`, and must be JSON; `start` and `live` take other values for one life. What the driver
printed is in `life.output` and, while it runs, in DIRECTORY/life-N.log.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pyspark
from confluent_kafka import Producer
from expected import EXPECTED, Row, assert_same, make_rows
from kafka_oracle import create_topics, open_transactions, quiet, read, stable_and_high

import trial
from poundlock.jvm import jars

HERE = Path(__file__).parent
LIFE_TIMEOUT_S = 180.0
_POLL_S = 0.02

# A driver runs only for seconds, so it needs no optimising compiler and no web page.
CONF = {"spark.ui.enabled": "false", "spark.driver.memory": "600m"}
_JVM = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xlog:cds=off -Xlog:cds+dynamic=off"
_JVM_OPTION = "spark.driver.extraJavaOptions"


@dataclass(frozen=True)
class Fault:
    at: str
    then: str = "kill"
    nth: int = 1
    match: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""  # the name of its report; by default that of the point

    @property
    def report(self) -> str:
        return self.name or self.at


@dataclass(frozen=True)
class Query:
    """One pipeline of the child, its input and its outputs."""

    kind: str
    name: str = ""
    rows: int = 600
    rows_per_batch: int = 30
    partitions: int = 2
    sink: Mapping[str, Any] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    trigger: Mapping[str, Any] = field(default_factory=lambda: {"availableNow": True})
    systems: Mapping[str, str] = field(default_factory=dict)  # of the kind "five": name to address

    @property
    def pipeline(self) -> str:
        return self.name or self.kind


OUTPUTS = {
    "stateless": ["out"],
    "outputs": ["every", "hot", "even", "odd"],
    "stateful": ["counts"],
    "five": ["out"],
}


class Life:
    """One run of a driver, after its end."""

    def __init__(self, reports: Path, returncode: int, log: Path):
        self.returncode = returncode
        self.output = log.read_text(errors="replace")
        self.reports = [
            json.loads(file.read_text())
            for file in reports.iterdir()
            if file.suffix not in (".go", ".aside", ".cut-off")
        ]
        self.reports.sort(key=lambda report: report["at"])

    @property
    def killed(self) -> bool:
        return self.returncode == -signal.SIGKILL

    @property
    def reached(self) -> dict[str, list[str]]:
        """The names of the faults that were carried out, by pipeline, in the order of their times."""
        names: dict[str, list[str]] = defaultdict(list)
        for report in self.reports:
            names[report["pipeline"]].append(report["name"])
        return dict(names)

    def ended(self) -> Life:
        """Check that the driver ended by itself and without an error."""
        assert self.returncode == 0, f"the driver ended with {self.returncode}:\n{self.tail()}"
        return self

    def tail(self, lines: int = 60) -> str:
        """Return the last lines that it printed, without the JVM's stack traces."""
        kept = [line for line in self.output.splitlines() if not line.startswith("\tat ")]
        return "\n".join(kept[-lines:])


class Child:
    """A running driver. It leads its own process group, which contains its JVM."""

    all: ClassVar[list[Child]] = []  # `conftest` kills those that a test leaves running

    def __init__(self, config: Path, reports: Path, log: Path):
        self.all.append(self)
        self._reports, self._log = reports, log
        paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "job.py"), str(config)],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def has_reached(self, pipeline: str, point: str) -> bool:
        return (self._reports / f"{pipeline}@{point}").exists()

    def wait_for(self, pipeline: str, point: str, timeout: float = LIFE_TIMEOUT_S) -> None:
        """Wait until a pipeline has reported a point."""

        def there() -> bool:
            reached = self.has_reached(pipeline, point)
            assert reached or self.process.poll() is None, f"it died:\n{self.finish().tail()}"
            return reached

        wait_until(there, f"{pipeline} at {point}", timeout)

    def report(self, pipeline: str, point: str) -> dict[str, Any]:
        """Return the report of a pipeline about a point: its facts, and the process."""
        return json.loads((self._reports / f"{pipeline}@{point}").read_text())

    def release(self, pipeline: str, point: str) -> None:
        """Let a pipeline that waits at a point continue."""
        (self._reports / f"{pipeline}@{point}.go").touch()

    def group(self) -> list[int]:
        """Return the live processes of the driver's group: its Python and its JVM."""
        return [pid for pid, group, state in _processes() if group == self.pid and state != "Z"]

    def signal(self, number: int) -> None:
        """Send a signal to the driver's Python and its JVM."""
        os.killpg(self.pid, number)

    def kill(self) -> None:
        if self.group():
            self.signal(signal.SIGKILL)

    def finish(self, timeout: float = LIFE_TIMEOUT_S, *, zombie: bool = False) -> Life:
        """Wait until the driver has ended, and its JVM unless `zombie`. Return how it ended."""
        try:
            self.process.wait(timeout)
            if not zombie:
                wait_until(lambda: not self.group(), "the end of the driver's JVM", timeout)
        except BaseException:
            self.kill()
            self.process.wait()
            print(Life(self._reports, 0, self._log).tail())
            raise
        return Life(self._reports, self.process.returncode, self._log)


class Chaos:
    """Pipelines over new topics, and the runs of their drivers."""

    def __init__(
        self,
        directory: Path,
        bootstrap_servers: str,
        queries: Sequence[Query],
        *,
        master: str = "local[8]",
        conf: Mapping[str, str] | None = None,
        replication: int = 1,
    ):
        self.directory, self.servers, self.master = directory, bootstrap_servers, master
        self.queries = {query.pipeline: query for query in queries}
        self.conf = CONF | {_JVM_OPTION: _JVM} | dict(conf or {})
        self.run = uuid.uuid4().hex[:8]
        self.lives = 0
        create_topics(
            bootstrap_servers,
            {
                topic: query.partitions
                for name, query in self.queries.items()
                for topic in (self.source(name), *self.outputs(name))
            },
            replication,
        )
        for name in self.queries:
            self.feed(name)

    def source(self, pipeline: str) -> str:
        return f"{self.run}-{pipeline}-in"

    def outputs(self, pipeline: str) -> list[str]:
        kind = self.queries[pipeline].kind
        return [f"{self.run}-{pipeline}-{output}" for output in OUTPUTS[kind]]

    def checkpoint(self, pipeline: str) -> Path:
        return self.directory / "checkpoints" / pipeline

    def grow(self, pipeline: str, rows: int) -> None:
        """Add rows to the input, for drivers that wait for more."""
        before = self.queries[pipeline]
        self.queries[pipeline] = replace(before, rows=before.rows + rows)
        self.feed(pipeline, before.rows)

    def feed(self, pipeline: str, start: int = 0) -> None:
        """Write the whole input, or its end. The number of a row determines its partition."""
        query = self.queries[pipeline]
        producer = Producer(quiet(self.servers) | {"acks": "all"})
        for row in make_rows(query.rows)[start:]:
            producer.produce(
                self.source(pipeline), value=row.line(), partition=row.i % query.partitions
            )
        assert producer.flush(60) == 0

    # Runs.

    def start(
        self,
        faults: Mapping[str, Fault | Sequence[Fault]] | None = None,
        *,
        only: Iterable[str] | None = None,
        **changes: Any,
    ) -> Child:
        """Start a driver with all pipelines, or `only` some. `changes` replace their fields."""
        if self.conf[_JVM_OPTION] == _JVM:
            self.conf[_JVM_OPTION] += f" -XX:SharedArchiveFile={class_archive(self.servers)}"
        self.lives += 1
        reports = self.directory / f"life-{self.lives}"
        reports.mkdir(parents=True)
        wanted = {name: several(fault) for name, fault in (faults or {}).items()}
        assert wanted.keys() <= self.queries.keys()
        chosen = list(self.queries if only is None else only)
        config = {
            "bootstrap_servers": self.servers,
            "master": self.master,
            "conf": self.conf,
            "reports": str(reports),
            "killers": [
                f"{name}@{fault.report}"
                for name, each in wanted.items()
                for fault in each
                if fault.then in ("kill", "kill-python")
            ],
            "queries": [
                asdict(self.queries[name])
                | {
                    "name": name,
                    "topic": self.source(name),
                    "outputs": self.outputs(name),
                    "checkpoint": str(self.checkpoint(name)),
                    "faults": [
                        asdict(fault) | {"name": fault.report} for fault in wanted.get(name, [])
                    ],
                }
                | changes
                for name in chosen
            ],
        }
        file = self.directory / f"life-{self.lives}.json"
        file.write_text(json.dumps(config, indent=1, default=dict))
        return Child(file, reports, self.directory / f"life-{self.lives}.log")

    def live(
        self,
        faults: Mapping[str, Fault | Sequence[Fault]] | None = None,
        *,
        only: Iterable[str] | None = None,
        timeout: float = LIFE_TIMEOUT_S,
        **changes: Any,
    ) -> Life:
        """Run one driver until it dies or has no more rows."""
        return self.start(faults, only=only, **changes).finish(timeout)

    def die_at(self, faults: Mapping[str, Fault | Sequence[Fault]]) -> Life:
        """Run one driver whose pipelines stop at their points, and check that it is killed there."""
        life = self.live(faults, only=faults)
        assert life.killed, f"ended with {life.returncode}, not at {faults}:\n{life.tail()}"
        assert life.reached == {
            name: [fault.report for fault in several(fault)] for name, fault in faults.items()
        }
        for name in faults:
            self.check_underway(name)
        return life

    # Oracles.

    def check(self) -> None:
        """Check that the output has exactly the expected rows, and that nothing is left open."""
        for name, query in self.queries.items():
            batches = self.batches(name)
            assert sum(map(len, batches)) == query.rows, "Spark's offsets do not cover the input"
            for topic, values in self.visible(name).items():
                assert_same(topic, self.expected(name, batches)[topic], values)
            self.check_nothing_open(name)

    def check_underway(self, pipeline: str) -> None:
        """Check that all rows of finished batches are visible, and none of an undecided one."""
        batches, log = self.batches(pipeline), self.log(pipeline)
        decided = [record["batch"] for record in log if record["kind"] == "Decided"]
        finished = [
            record["batch"]
            for record in log
            if record["kind"] == "Finished"
            or (record["kind"] == "Decided" and not record["receipts"])
        ]
        least = self.expected(pipeline, batches[: len(finished)])
        most = self.expected(pipeline, batches[: len(decided)])
        for topic, values in self.visible(pipeline).items():
            missing, extra = least[topic] - values, values - most[topic]
            assert not missing, f"{topic}: finished, but not visible: {list(missing)[:5]}"
            assert not extra, f"{topic}: visible, but not decided: {list(extra)[:5]}"

    def check_nothing_open(self, pipeline: str) -> None:
        # The name of each of our transactions contains the log's identity.
        log = [it["generation"] if it["kind"] == "Compacted" else it for it in self.log(pipeline)]
        identity = next(record["identity"] for record in log if "identity" in record)
        assert open_transactions(self.servers, self.outputs(pipeline), identity) == {}
        stable, high = stable_and_high(self.servers, self.outputs(pipeline))
        assert stable == high, f"a reader of committed rows is held back: {stable} of {high}"

    def visible(self, pipeline: str) -> dict[str, Counter[str]]:
        """Read the values of each output topic that a reader of committed rows sees now."""
        return read(self.servers, self.outputs(pipeline))

    def expected(self, pipeline: str, batches: Sequence[Sequence[Row]]) -> dict[str, Counter[str]]:
        """Compute the values of each output topic, in plain Python."""
        values = EXPECTED[self.queries[pipeline].kind](batches)
        return dict(zip(self.outputs(pipeline), map(Counter, values), strict=True))

    def batches(self, pipeline: str) -> list[list[Row]]:
        """Cut the input into batches as Spark did, by the end offsets in its own checkpoint."""
        query = self.queries[pipeline]
        rows = make_rows(query.rows)
        partitions = [rows[number :: query.partitions] for number in range(query.partitions)]
        batches: list[list[Row]] = []
        ends = [0] * query.partitions
        files = (self.checkpoint(pipeline) / "offsets").glob("[0-9]*")
        for file in sorted(files, key=lambda it: int(it.name)):
            offsets = json.loads(file.read_text().splitlines()[2])[self.source(pipeline)]
            begins, ends = ends, [offsets[str(number)] for number in range(query.partitions)]
            batches.append(
                [
                    row
                    for partition, begin, end in zip(partitions, begins, ends, strict=True)
                    for row in partition[begin:end]
                ]
            )
        return batches

    def log(self, pipeline: str) -> list[dict[str, Any]]:
        """Read the records of the transaction log as plain JSON."""
        files = (self.checkpoint(pipeline) / "poundlock").glob("[0-9]*.json")
        return [trial.record_on_disk(file) for file in sorted(files)]


def class_archive(bootstrap_servers: str) -> Path:
    """Return an archive of the classes that a driver loads. It saves a third of each start.

    A driver that runs each kind of query makes it once. The JVM ignores an archive that does not
    match.
    """
    archive = jars.cache().parent / "chaos" / f"spark-{pyspark.__version__}.jsa"
    if not archive.exists():
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=archive.parent) as directory:
            made = Path(directory) / "archive"
            conf = {_JVM_OPTION: f"{_JVM} -XX:ArchiveClassesAtExit={made}"}
            queries = [Query(kind, rows=40) for kind in ("stateless", "outputs", "stateful")]
            Chaos(Path(directory), bootstrap_servers, queries, conf=conf).live().ended()
            made.replace(archive)
    return archive


def several(faults: Fault | Sequence[Fault]) -> list[Fault]:
    return [faults] if isinstance(faults, Fault) else list(faults)


def wait_until(true: Callable[[], bool], what: str, timeout: float = LIFE_TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, f"waited {timeout:.0f} s without success for {what}"
        time.sleep(_POLL_S)


def _processes() -> Iterator[tuple[int, int, str]]:
    """Yield (id, group, state) of every process."""
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                state, _, group = (directory / "stat").read_text().rsplit(")", 1)[1].split()[:3]
            except (FileNotFoundError, ProcessLookupError):
                continue
            yield int(directory.name), int(group), state
