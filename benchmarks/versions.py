"""Compare this version of Poundlock with another commit: `python -m benchmarks.versions COMMIT`.

Each version runs in a process of its own, with its own Spark session. The two take turns on the same
servers and the same rows, so that a slow moment of the machine affects both. A first round warms the
JITs and is not counted. Only our side of the other benchmarks runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = "result: "
WORKLOADS = ("kafka", "postgres", "mysql", "windows", "lateness", "matcher")


class Version:
    """One version, in a process of its own that runs a workload at a time."""

    def __init__(self, tree: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'src'}"}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--child"],
            cwd=tree,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, workload: str, arguments: dict[str, Any]) -> float:
        """Run the workload once and return its rows per second."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps({"workload": workload, **arguments}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(RESULT):
                return float(line.removeprefix(RESULT))
        raise SystemExit(f"a version ended while it ran {workload}; its output is above")

    def close(self) -> None:
        self._process.stdin and self._process.stdin.close()
        self._process.wait(60)


def child() -> None:
    """Run the workloads that standard input names, with the version that PYTHONPATH leads to."""
    # Not the folder of this file: its modules are named like the clients of the systems.
    sys.path.pop(0)
    import poundlock
    from benchmarks import cep, kafka, mysql, postgres, streams

    if not Path(poundlock.__file__).is_relative_to(Path.cwd()):
        raise SystemExit(f"measured {poundlock.__file__}, not the version in {Path.cwd()}")
    spark = kafka.session()
    for line in sys.stdin:
        asked = json.loads(line)
        source = Path(asked["source"])
        match asked["workload"]:
            case "kafka":
                done = kafka.run_once(
                    spark, asked["servers"], "lines", "poundlock", asked["rows"], asked["per_batch"]
                )
            case "postgres":
                done = postgres.run_once(
                    spark, "poundlock", asked["dsn"], source, asked["rows"], asked["files"]
                )
            case "mysql":
                server = _Server(asked["address"], asked["connect"])
                done = mysql.run_once(spark, server, source, "poundlock", asked["rows"])
            case "windows":
                done = streams.run_once(spark, "native", source, asked["rows"])
            case "lateness":
                done = streams.run_once(spark, "stateful", source, asked["rows"])
            case _:
                done = cep.alone(cep.readings(asked["rows"]), "10 seconds")
        print(f"{RESULT}{done['rows_per_second']}", flush=True)


class _Server:
    """What `benchmarks.mysql` asks of a server."""

    def __init__(self, address: str, connect: dict[str, Any]) -> None:
        self.address = address
        self._connect = connect

    def connect_arguments(self) -> dict[str, Any]:
        return self._connect


def prepare(stack: ExitStack, workload: str, rows: int, directory: Path) -> dict[str, Any]:
    """Start the server that the workload needs, write its rows, and return what a version needs."""
    from benchmarks import kafka, mysql, postgres, streams
    from poundlock.servers import kafka as kafka_server
    from poundlock.servers import mariadb
    from poundlock.servers import postgres as postgres_server

    asked: dict[str, Any] = {"source": str(directory), "rows": rows}
    match workload:
        case "kafka":
            servers = stack.enter_context(kafka_server.running()).bootstrap_servers
            kafka.create_topic(servers, "lines")
            kafka.fill(servers, "lines", rows)
            return asked | {"servers": servers, "per_batch": rows // 4}
        case "postgres":
            server = stack.enter_context(postgres_server.running())
            postgres.fill(directory, rows, 16)
            return asked | {"dsn": server.dsn(), "files": 4}
        case "mysql":
            server = stack.enter_context(mariadb.running())
            mysql.fill(directory, rows, rows // 4)
            return asked | {"address": server.address, "connect": server.connect_arguments()}
        case "windows" | "lateness":
            streams.fill(directory, rows, 1_000)
    return asked


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("commit", nargs="?", default="HEAD~1")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    arguments.add_argument("--scale", type=float, default=1.0, help="of the numbers of rows")
    arguments.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.child:
        return child()
    millions = dict(zip(WORKLOADS, (8, 4, 2, 4, 0.5, 0.4), strict=True))
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        tree = Path(temporary) / "before"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", str(tree), options.commit], check=True)
        stack.callback(subprocess.run, [*git, "remove", "--force", str(tree)], check=True)
        versions = {"before": Version(tree), "now": Version(ROOT)}
        for version in versions.values():
            stack.callback(version.close)
        for workload in options.workloads:
            count = int(millions[workload] * 1e6 * options.scale)
            with ExitStack() as servers, tempfile.TemporaryDirectory() as directory:
                asked = prepare(servers, workload, count, Path(directory))
                ratios = []
                for number in range(options.rounds + 1):
                    order = list(versions)[:: 1 if number % 2 else -1]
                    speed = {name: versions[name].run(workload, asked) for name in order}
                    if number:
                        ratios.append(speed["now"] / speed["before"])
                each = " ".join(f"{ratio:.2f}" for ratio in ratios)
                median = statistics.median(ratios)
                print(f"{workload}: now / before {median:.3f} (rounds: {each})", flush=True)
    return None


if __name__ == "__main__":
    main()
