"""What many tasks and batches cost the driver: memory, and the time of a batch, a start and a sweep.

The real coordinator, log and encoding run over a system that answers at once, so only the driver's own
work is measured. Each width runs in a process of its own, and the start after it in another. A last
part publishes a day of files through the manifest of the files sink.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rounds import commit
from poundlock.core.checkpoint import Plan
from poundlock.core.coordinator import Coordinator
from poundlock.core.job import Votes
from poundlock.core.log import FileLog
from poundlock.core.model import Branch, Fingerprint, Namespace, Receipt, Stray, Transaction
from poundlock.core.naming import name_of
from poundlock.core.participant import Column, Commitment, Participant, Writer
from poundlock.core.protocol import BranchState
from poundlock.core.site import LocalSite
from poundlock.core.sweep import sweep_once
from poundlock.sinks.files.branches import branch_of
from poundlock.sinks.files.manifest import DataFile, Manifest
from poundlock.spark.pipeline.task import encode_vote, read_votes

RESULTS = Path(__file__).parent / "results"
WIDTHS = (200, 1000, 3000)
BATCHES = 200
PARTITIONS = 100  # of Kafka that every task writes to
FILES_A_BATCH, SECONDS_A_BATCH = 200, 10
WORD = "measured: "


class Answering(Participant):
    """A system that answers at once: every branch is there, and every commit succeeds."""

    commitment = Commitment.TRANSACTIONAL

    def __init__(self, name: str):
        self.name = self.system = name
        self.strays: list[Stray] = []

    def project(self, columns: Mapping[str, Column]) -> dict[str, str]:
        raise NotImplementedError

    def begin(self, branch: Branch) -> Writer:
        raise NotImplementedError

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        return [None] * len(receipts)

    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        return [BranchState.COMMITTED] * len(receipts)

    def find(self, namespace: Namespace) -> list[Stray]:
        return self.strays

    def abort(self, strays: Sequence[Stray]) -> list[BranchState]:
        self.strays = []
        return [BranchState.ABORTED] * len(strays)


class Tasks:
    """A job whose tasks vote yes. `spent` is the CPU time of the tasks, which is not the driver's."""

    stateful = False

    def __init__(self, kind: str, count: int):
        self._kind, self._count = kind, count
        self.spent = 0.0

    def write(
        self,
        transaction: Transaction,
        sinks: frozenset[str],
        held_ids: Mapping[str, frozenset[str]],
    ) -> Votes:
        began = time.process_time()
        votes = [
            encode_vote(it.sink, it.fingerprint, it)
            for it in receipts(self._kind, transaction, self._count)
        ]
        self.spent += time.process_time() - began
        found, totals, _ = read_votes(votes)
        return Votes(tuple(found), totals)

    def drain(self) -> Mapping[str, Fingerprint]:
        raise NotImplementedError


def receipts(kind: str, transaction: Transaction, tasks: int) -> Iterator[Receipt]:
    """Yield receipts like those of the Kafka sink, or of PostgreSQL's staged branches."""
    now = time.time()
    for task in range(tasks):
        attempt = transaction.batch * tasks + task
        branch = Branch(transaction, kind, task, attempt)
        share = Fingerprint(1000 + task, hash((transaction.batch, task)) % (1 << 64))
        if kind == "kafka":
            space = transaction.namespace
            id_ = f"poundlock.{space.pipeline}.{space.identity}.1.{kind}.{task}"
            last = transaction.batch * 1000 + task
            handle: dict[str, Any] = {
                "producer_id": 4000 + task,
                "epoch": transaction.batch,
                "written": {
                    "output": [
                        list(range(PARTITIONS)),
                        [last + number for number in range(PARTITIONS)],
                    ]
                },
                "topics": {"output": "AAAAAAAAAAAAAAAAAAAAAA"},
            }
            yield Receipt(kind, id_, task, share, handle, now + task / 100, now + 900, kind)
            continue
        handle = {
            "mode": "staged",
            "schema": "public",
            "witness": ["poundlock", "0123456789abcdef"],
            "into": {"schema": "public", "table": "t", "key": ["id"], "columns": ["id", "v"]},
            "shape": "0123456789abcdef",
        }
        yield Receipt(kind, str(name_of(branch)), task, share, handle, now + task / 100, None, kind)


def run(kind: str, tasks: int, batches: int, directory: str) -> dict[str, Any]:
    """Run batches from the first on. Then sweep what one aborted attempt left."""
    sink, log = Answering(kind), FileLog(directory)
    coordinator = Coordinator(log, {kind: sink})
    coordinator.take_over("measured", query=lambda: None, owner="benchmark")
    job, half = Tasks(kind, tasks), batches // 2
    cpu = list[float]()
    for batch in range(batches):
        began, spent = time.process_time(), job.spent
        coordinator.run(batch, Plan(f"the plan of batch {batch}".encode()), job)
        cpu.append(time.process_time() - began - (job.spent - spent))
    late = cpu[half:]
    return {
        "cpu_s_a_batch": round(sum(late) / len(late), 4),
        "peak_mb": _peak_mb(),
        "log_mb": round(sum(it.stat().st_size for it in Path(directory).iterdir()) / 1e6, 1),
    }


def start(kind: str, tasks: int, batches: int, directory: str) -> dict[str, Any]:
    """Load the log of `batches` batches, and sweep what one aborted attempt left."""
    before = _peak_mb()
    began, worked = time.perf_counter(), time.process_time()
    state = FileLog(directory).load()
    loaded, worked = time.perf_counter() - began, time.process_time() - worked
    assert len(state.batches) == batches
    assert state.generation is not None
    transaction = Transaction(state.generation.namespace, state.generation.number, batches, 1)
    sink = Answering(kind)
    sink.strays = [
        Stray(
            kind, it.id, 1, "open", {"producer_id": 1, "epoch": 30_000} if kind == "kafka" else {}
        )
        for it in receipts(kind, transaction, tasks)
    ]
    began, working = time.perf_counter(), time.process_time()
    swept, _ = sweep_once(state, sink)
    assert swept == tasks
    took, swept_cpu = time.perf_counter() - began, time.process_time() - working
    return {
        "load_s": round(loaded, 3),
        "load_cpu_s": round(worked, 3),
        "sweep_s": round(took, 4),
        "sweep_cpu_s": round(swept_cpu, 4),
        "peak_mb": _peak_mb(),
        "peak_mb_before": before,
    }


def files(kind: str, tasks: int, batches: int, directory: str) -> dict[str, Any]:
    """Start on a manifest that has grown for so many batches, and publish until the next compaction.

    With a `kind` of "retention", what is older than an hour leaves the manifest.
    """
    site, place = LocalSite(directory), f"{directory}/out"
    now_ms = int(time.time() * 1000)

    def record(batch: int) -> Iterator[DataFile]:
        transaction = Transaction(Namespace("measured", "0123456789abcdef0123"), 1, batch, 1)
        written_ms = now_ms - (batches - batch) * SECONDS_A_BATCH * 1000
        for task in range(tasks):
            name = name_of(Branch(transaction, "out", task, batch * tasks + task))
            yield DataFile.at(f"file://{place}", f"part-{name}-00000.parquet", 1, written_ms)

    last = batches // 10 * 10 - 1
    lines = (f"\n{file.line()}".encode() for batch in range(last + 1) for file in record(batch))
    compacted = f"{place}/_spark_metadata/{last}.compact"
    assert site.create(compacted, itertools.chain([b"v1"], lines))
    before = _peak_mb()
    manifest = Manifest(place, branch_of, 3600.0 if kind == "retention" else None)
    began = time.perf_counter()
    manifest.load()
    loaded = time.perf_counter() - began
    assert manifest.last == last
    took = list[float]()
    for batch in range(last + 1, last + 11):
        began = time.perf_counter()
        assert manifest.publish(list(record(batch)), site.create)
        took.append(time.perf_counter() - began)
    return {
        "load_s": round(loaded, 2),
        "publish_s": round(sorted(took)[5], 4),
        "compact_s": round(took[-1], 2),
        "manifest_mb": round(
            Path(f"{place}/_spark_metadata/{last + 10}.compact").stat().st_size / 1e6, 1
        ),
        "peak_mb": _peak_mb(),
        "peak_mb_before": before,
    }


def _peak_mb() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


PARTS = {"run": run, "start": start, "files": files}


def apart(part: str, *arguments: object) -> dict[str, Any]:
    """Run a part in a process of its own and return what it measured."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.driver", "--part", part, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith(WORD))
    return json.loads(line.removeprefix(WORD))


def measure(kind: str, tasks: int, batches: int, place: str) -> dict[str, Any]:
    directory = tempfile.mkdtemp(dir=place)
    try:
        running = apart("run", kind, tasks, batches, directory)
        return {"run": running, "start": apart("start", kind, tasks, batches, directory)}
    finally:
        shutil.rmtree(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=BATCHES)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--place", default=tempfile.gettempdir(), help="where the logs are written")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.part:
        name, kind, tasks, batches, directory = chosen.part
        print(WORD + json.dumps(PARTS[name](kind, int(tasks), int(batches), directory)))
        return
    results: dict[str, Any] = {
        "commit": commit(),
        "batches": chosen.batches,
        "partitions_of_kafka": PARTITIONS,
    }
    for kind in ("kafka", "staged"):
        for tasks in chosen.widths:
            found = results.setdefault(kind, {})[str(tasks)] = measure(
                kind, tasks, chosen.batches, chosen.place
            )
            print(f"{kind}, {tasks} tasks: {found}", flush=True)
    day = 24 * 3600 // SECONDS_A_BATCH
    for kind in ("all", "retention"):
        for batches in (day // 16, day // 4, day):
            directory = tempfile.mkdtemp(dir=chosen.place)
            found = apart("files", kind, FILES_A_BATCH, batches, directory)
            shutil.rmtree(directory)
            key = f"{batches} batches of {FILES_A_BATCH} files"
            results.setdefault("manifest", {}).setdefault(kind, {})[key] = found
            print(f"manifest, {kind}, {key}: {found}", flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "driver.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
