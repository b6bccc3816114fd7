"""Runs the scenarios in Flink: `python flink_run.py FOLDER` writes its answers there.

Use the Python of .venv-flink, where pip installed Flink's own libraries. The script compiles
FlinkRun.java with them and runs all scenarios in one JVM.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

from scenarios import Scenario, groups

HERE = Path(__file__).parent
OPENS = [
    part
    for package in ("lang", "util", "util.concurrent", "net", "nio", "time")
    for part in ("--add-opens", f"java.base/java.{package}=ALL-UNNAMED")
]


def libraries() -> str:
    spec = find_spec("pyflink")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("There is no Flink in this environment: run `make flink`")
    return str(Path(spec.submodule_search_locations[0]) / "lib" / "*")


def program(name: str) -> str:
    home = os.environ.get("JAVA_HOME")
    found = which(name, path=f"{home}/bin") if home else which(name)
    if not found:
        sys.exit(f"There is no {name}: install a JDK of Java 17, on Debian openjdk-17-jdk-headless")
    return found


def answer(scenarios: list[Scenario]) -> dict[str, Any]:
    """Return Flink's answers: {"flink": version, "answers": {scenario: {output: rows}}}."""
    with tempfile.TemporaryDirectory() as folder:
        given, said, path = Path(folder, "given"), Path(folder, "said"), libraries()
        given.write_text(json.dumps(scenarios))
        source = str(HERE / "FlinkRun.java")
        subprocess.run(
            [program("javac"), "-nowarn", "-Xlint:none", "-d", folder, "-cp", path, source],
            check=True,
        )
        quiet = Path(folder, "log4j2.properties")
        quiet.write_text("rootLogger.level = OFF\n")
        command = [program("java"), "-Xmx1g", *OPENS, f"-Dlog4j.configurationFile={quiet}"]
        subprocess.run(
            [*command, "-cp", f"{folder}:{path}", "FlinkRun", str(given), str(said)], check=True
        )
        return json.loads(said.read_text())


def digest(scenario: Scenario) -> str:
    """Return a digest of the scenario, so that its answer is not compared with another's."""
    text = json.dumps(scenario, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write(folder: Path) -> None:
    every = groups()
    whole = answer([scenario for group in every.values() for scenario in group])
    folder.mkdir(parents=True, exist_ok=True)
    for name, group in every.items():
        lines = [
            f"{json.dumps(each['name'])}: "
            + json.dumps([digest(each), whole["answers"][each["name"]]], sort_keys=True)
            for each in group
        ]
        text = f'{{"flink": "{whole["flink"]}", "answers": {{\n' + ",\n".join(lines) + "\n}}\n"
        (folder / f"{name}.json").write_text(text)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
