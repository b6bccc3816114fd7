"""Every example in the documentation that is marked to be run, runs, against real servers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs_job import BLOCK

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if BLOCK.search(page.read_text())]

# What an example may name, the fixture with the server that it stands for, and how that is reached.
SERVERS = {
    "SERVERS": ("kafka_server", "bootstrap_servers"),
    "PG_DSN": ("postgres_server", "address"),
    "MYSQL_URL": ("mariadb_server", "address"),
    "REDIS_URL": ("valkey_server", "address"),
    "OPENSEARCH_URL": ("opensearch_server", "url"),
}


def needed(page: Path) -> set[str]:
    """Return what the examples of a page need of the world."""
    code = "\n".join(match[2] for match in BLOCK.finditer(page.read_text()))
    return {name for name in SERVERS if re.search(rf"\b{name}\b", code)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_the_examples_of_a_page_run(page: Path, request: pytest.FixtureRequest) -> None:
    addresses: dict[str, str] = {}
    for name in needed(page):
        fixture, attribute = SERVERS[name]
        addresses[name] = getattr(request.getfixturevalue(fixture), attribute)
    done = subprocess.run(
        [sys.executable, HERE / "docs_job.py", page],
        env=os.environ | addresses,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert done.stdout.count(f"ran {page.name}:") == len(BLOCK.findall(page.read_text()))
