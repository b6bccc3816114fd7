"""On which addresses the JVM of a session listens."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyspark
import pytest

HERE = Path(__file__).parent
SUBMIT = Path(pyspark.__file__).parent / "bin" / "spark-submit"
EVERYWHERE = {"0.0.0.0", "::"}
OURS = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@contextmanager
def program(*command: str | Path, **environment: str) -> Generator[subprocess.Popen[str]]:
    kept = {name: value for name, value in os.environ.items() if name != "SPARK_LOCAL_IP"}
    kept |= {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    with subprocess.Popen(
        [str(word) for word in command],
        env=kept | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.terminate()  # a program that was submitted does not get its end


def told(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Read the next line that the program prints about a session."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise AssertionError("the program ended without a session")


def listening(pid: int) -> set[str]:
    """The addresses on which a process listens, from the kernel's tables."""
    inodes: set[str] = set()
    for place in Path(f"/proc/{pid}/fd").iterdir():
        try:
            kind, _, inode = os.readlink(place).partition(":")
        except FileNotFoundError:
            continue
        if kind == "socket":
            inodes.add(inode.strip("[]"))
    found: set[str] = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                text = fields[1].partition(":")[0]
                # Four bytes at a time, each in this machine's order.
                words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
                found.add(socket.inet_ntop(family, b"".join(words)))
    return found


@pytest.mark.parametrize("master", ["-", "local[2]", "local-cluster[1,1,1024]"])
def test_a_local_session_listens_on_loopback_only(master: str) -> None:
    with program(sys.executable, HERE / "session_job.py", master) as process:
        session = told(process)
        assert session["ui"]
        found = listening(session["pid"])
    assert found
    assert found <= OURS


def test_a_chosen_address_of_the_ui_is_kept() -> None:
    command = (sys.executable, HERE / "session_job.py", "local[1]")
    with program(*command, SPARK_LOCAL_IP="0.0.0.0") as process:
        assert listening(told(process)["pid"]) & EVERYWHERE


def test_a_submitted_local_session_listens_on_loopback_only() -> None:
    command = (SUBMIT, "--master", "local[2]", HERE / "session_job.py", "-")
    with program(*command) as process:
        session = told(process)
        assert session["master"] == "local[2]"
        assert session["ui"] is None, "its address cannot be chosen any more"
        assert listening(session["pid"]) <= OURS
    with program(*command, SPARK_LOCAL_IP="127.0.0.1") as process:
        session = told(process)
        assert session["ui"]
        assert listening(session["pid"]) <= OURS


def test_a_cluster_is_refused_in_a_jvm_that_its_executors_cannot_reach() -> None:
    job = HERE / "session_job.py"
    with program(sys.executable, job, "local[1]", "spark://127.0.0.1:1") as process:
        told(process)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert "could not reach this program" in told(process)["error"]
