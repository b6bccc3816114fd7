"""Options of the model: which schedules, and how many. They are read by `pytest tests/model`."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator

import pytest

from .reading import read_once

SEED, SCHEDULES = "20261115", 3300
LINES = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("model")
    group.addoption("--model-seed", default=SEED, help="a number, or 'random'")
    group.addoption("--model-schedules", type=int, default=SCHEDULES, help="how many random ones")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for line in config.stash.get(LINES, []):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def report(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Print a line under the results, whether or not output is captured."""
    return pytestconfig.stash.setdefault(LINES, []).append


@pytest.fixture(scope="session")
def model_seed(pytestconfig: pytest.Config, report: Callable[[str], None]) -> int:
    given: str = pytestconfig.getoption("--model-seed", SEED) or SEED
    chosen = secrets.randbelow(2**32) if given == "random" else int(given)
    report(f"model: --model-seed {chosen}")
    return chosen


@pytest.fixture(scope="session")
def model_schedules(pytestconfig: pytest.Config) -> int:
    return pytestconfig.getoption("--model-schedules", SCHEDULES) or SCHEDULES


@pytest.fixture(autouse=True, scope="package")
def quickly() -> Iterator[None]:
    """Suppress thousands of warnings, and cache records that are read repeatedly."""
    logger = logging.getLogger("poundlock")
    before, logger.disabled = logger.disabled, True
    with read_once():
        yield
    logger.disabled = before
