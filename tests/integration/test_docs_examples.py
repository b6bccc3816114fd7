"""Every marked example of the documentation runs against real servers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from docs_job import BLOCK

from poundlock import sinks

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if BLOCK.search(page.read_text())]

# The address that an example may use, the fixture of the server, and how to reach it.
SERVERS = {
    "SERVERS": ("kafka_server", "bootstrap_servers"),
    "PG_DSN": ("postgres_server", "address"),
    "MYSQL_URL": ("mariadb_server", "address"),
    "REDIS_URL": ("valkey_server", "address"),
    "OPENSEARCH_URL": ("opensearch_server", "url"),
}


def test_every_sink_has_a_page_with_a_tested_example() -> None:
    pages = {page.stem for page in PAGES if page.parent.name == "sinks"}
    assert pages == {page.stem for page in (DOCS / "sinks").glob("*.md")}
    named = {name.lower() for name in sinks.__all__}
    assert named - pages <= {"simple", "elasticsearch", "memory", "memorysystem"}, named - pages


@pytest.fixture(scope="module")
def output(request: pytest.FixtureRequest) -> str:
    """What the examples of all pages printed."""
    addresses = {
        name: getattr(request.getfixturevalue(fixture), attribute)
        for name, (fixture, attribute) in SERVERS.items()
    }
    done = subprocess.run(
        [sys.executable, HERE / "docs_job.py", *PAGES],
        env=os.environ | addresses,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_the_examples_of_a_page_run(page: Path, output: str) -> None:
    _, _, failure = output.partition(f"failed {page}\n")
    assert not failure, failure.partition(f"end of {page}")[0]
    assert output.count(f"ran {page}:") == len(BLOCK.findall(page.read_text()))
