"""The README's quick start, pasted: a wheel in a fresh environment, and real servers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from poundlock.jvm import jars
from poundlock.servers import NAMES, base

ROOT = Path(__file__).parents[2]

# A block after a line that marks it. A block of Python names the file to save it as. The block that is
# marked "last" stops the servers.
BLOCK = re.compile(
    r"^<!-- (paste|prints)(?: (last|\w+\.py))? -->\n```(?:sh|python)?\n(.*?)^```$",
    re.MULTILINE | re.DOTALL,
)

# What is run beside the blocks: where the package is, and what happens to readings that are repeated.
WHERE = "python -c 'import poundlock; print(\"package\", poundlock.__file__)'"
REPEAT = """\
import json, os
from confluent_kafka import Producer
producer = Producer({"bootstrap.servers": os.environ["SERVERS"]})
for temperature in (98, 99):
    reading = {"id": "oven", "ts": "2026-01-31T12:59:00Z", "temperature": temperature}
    producer.produce("sensor", key="oven", value=json.dumps(reading))
producer.flush()
"""
COUNT = """\
import os
from confluent_kafka import Consumer
settings = {"bootstrap.servers": os.environ["SERVERS"], "group.id": "count"}
consumer = Consumer(
    settings | {"auto.offset.reset": "earliest", "isolation.level": "read_committed"}
)
consumer.subscribe(["means"])
print("means:", len(consumer.consume(6, timeout=60)))
"""


BESIDE = f"""
{WHERE}
python - <<'END OF FILE'
{COUNT}END OF FILE
python - <<'END OF FILE'
{REPEAT}END OF FILE
python sensors.py
python look.py | sed 's/^/repeated /'
"""


def blocks(kind: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each block of a kind."""
    for found, name, text in BLOCK.findall((ROOT / "README.md").read_text()):
        if found == kind:
            yield name, text


def script() -> str:
    """Return the pasted blocks as one program for bash."""
    lines, last = ["set -eu"], ""
    for name, text in blocks("paste"):
        if name.endswith(".py"):
            lines.append(f"cat > {name} <<'END OF FILE'\n{text}END OF FILE")
        elif name == "last":
            last = text
        else:
            lines.append(text)
    return "\n".join([*lines, BESIDE, last])


def environment(home: Path) -> dict[str, str]:
    """Return a new user's environment. What the package needs is taken from this one, not fetched."""
    (home / "bin").mkdir()
    (home / "bin" / "python3").symlink_to(Path(sys.base_prefix, "bin", "python3").resolve())
    given = ("POUNDLOCK", "PYSPARK", "SPARK", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(given)}
    return kept | {
        "HOME": str(home),
        "PATH": f"{home}/bin:{os.environ['PATH']}",
        "PYTHONPATH": sysconfig.get_path("purelib"),
        "POUNDLOCK_CACHE": str(jars.cache().parent),
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it so: no isolation
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


@dataclass(frozen=True)
class Pasted:
    """What a new user has after pasting every block."""

    home: Path
    output: str
    left: list[str]  # the servers that are not wiped


@pytest.fixture(scope="module")
def pasted(tmp_path_factory: pytest.TempPathFactory) -> Pasted:
    home = tmp_path_factory.mktemp("home")
    homes = [base.home_of(name, home / ".local/state/poundlock/servers") for name in NAMES]
    try:
        done = subprocess.run(
            ["bash", "-c", script()],
            cwd=ROOT,
            env=environment(home),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=800,
            check=False,
        )
    finally:
        left = [place.name for place in homes if base.status(place).created]
        for place in homes:
            base.down(place, wipe=True)
    assert done.returncode == 0, done.stdout[-6000:]
    return Pasted(home, done.stdout, left)


def test_the_quick_start_prints_what_the_readme_shows(pasted: Pasted) -> None:
    shown = [line for _, text in blocks("prints") for line in text.splitlines()]
    assert len(shown) == 3
    assert [line for line in pasted.output.splitlines() if line in shown] == shown
    assert "Traceback" not in pasted.output


def test_it_runs_what_was_installed(pasted: Pasted) -> None:
    assert f"package {pasted.home}/lock-env/" in pasted.output


def test_its_sinks_have_an_order(pasted: Pasted) -> None:
    assert "no order" not in pasted.output


def test_a_repeated_reading_replaces_the_one_before(pasted: Pasted) -> None:
    assert "repeated readings: [('cellar', 60), ('oven', 60)]\n" in pasted.output
    assert "repeated newest: [('cellar', '14.0'), ('oven', '99.0')]\n" in pasted.output
    assert "repeated hot: 2 messages\n" in pasted.output  # the group has seen the others


def test_the_second_program_reads_the_same_topic(pasted: Pasted) -> None:
    assert "means: 6\n" in pasted.output  # the last quarter of an hour of each sensor is open


def test_nothing_is_left_running(pasted: Pasted) -> None:
    assert pasted.left == []
    assert not (pasted.home / "lock" / "checkpoints").exists()
