"""Every example in the documentation that is marked to be run, runs, against real servers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
BLOCK = re.compile(r"^<!-- run( delta)? -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if BLOCK.search(page.read_text())]

# What an example may name, the server that it stands for, and where that says how to reach it.
SERVERS = {
    "SERVERS": ("kafka", "bootstrap_servers"),
    "PG_DSN": ("postgres", "url"),
    "MYSQL_URL": ("mariadb", "url"),
    "REDIS_URL": ("valkey", "url"),
    "OPENSEARCH_URL": ("opensearch", "url"),
}


@contextmanager
def running(name: str, directory: Path) -> Iterator[str]:
    server, attribute = SERVERS[name]
    module = import_module(f"poundlock.servers.{server}")
    with module.running(directory / server) as node:
        yield getattr(node, attribute)


@pytest.fixture(scope="session")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The servers that any page needs, started when the first page asks for them."""
    directory = tmp_path_factory.mktemp("servers")
    found: dict[str, str] = {}
    open_ones = []
    wanted = {name for page in PAGES for name in named(page)}
    try:
        for name in sorted(wanted):
            server = running(name, directory)
            found[name] = server.__enter__()
            open_ones.append(server)
        yield found
    finally:
        for server in reversed(open_ones):
            server.__exit__(None, None, None)


def named(page: Path) -> set[str]:
    """Return what the examples of a page need of the world."""
    code = "\n".join(match[2] for match in BLOCK.finditer(page.read_text()))
    return {name for name in SERVERS if re.search(rf"\b{name}\b", code)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_the_examples_of_a_page_run(page: Path, request: pytest.FixtureRequest) -> None:
    needed = named(page)
    known = request.getfixturevalue("addresses") if needed else {}
    done = subprocess.run(
        [sys.executable, HERE / "docs_job.py", page],
        env=os.environ | {name: known[name] for name in needed},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert done.stdout.count(f"ran {page.name}:") == len(BLOCK.findall(page.read_text()))
