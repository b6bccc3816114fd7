"""What `poundlock doctor` checks of Python: packages, drivers, and the Python of Spark's workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from poundlock import __version__

_PATIENCE_S = 60  # for a Python that says what it has
_SHARED = ("pyarrow", "pandas", "numpy", "msgpack")  # what every task imports


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check, and what to do if it is bad."""

    what: str
    good: bool
    found: str
    cure: str = ""
    needed: bool = True  # whether a pipeline cannot do without it


@dataclass(frozen=True, slots=True)
class Driver:
    """A package with which a sink reaches its system."""

    extra: str
    module: str
    sink: str
    fits: Callable[[tuple[int, ...]], bool]

    @property
    def cure(self) -> str:
        return f"the {self.sink} sink needs it: pip install 'poundlock[{self.extra}]'"


# By their names in pyproject.toml, with the same versions.
DRIVERS = {
    "confluent-kafka": Driver("kafka", "confluent_kafka", "Kafka", lambda v: (2, 16) <= v < (3,)),
    "kafka-python": Driver("kafka", "kafka", "Kafka", lambda v: (3, 0, 12) <= v < (4,)),
    "psycopg": Driver("postgres", "psycopg", "Postgres", lambda v: (3, 2) <= v < (4,)),
    "pymysql": Driver("mysql", "pymysql", "MySQL", lambda v: (1, 1) <= v < (2,)),
    "redis": Driver("redis", "redis", "Redis", lambda v: (5,) <= v < (9,)),
    "opensearch-py": Driver(
        "opensearch", "opensearchpy", "OpenSearch", lambda v: (2, 8) <= v < (4,)
    ),
}


def python() -> Iterator[Finding]:
    good = sys.version_info >= (3, 10)
    yield Finding("Python", good, sys.version.split()[0], "use Python 3.10 or later")


def packages() -> Iterator[Finding]:
    """Check the packages that every pipeline needs."""
    wanted: dict[str, tuple[Callable[[str], bool], str]] = {
        "pyspark": (lambda v: v == "4.2.0", "pip install pyspark==4.2.0"),
        "pandas": (lambda v: int(v.split(".")[0]) < 3, "pip install 'pandas<3'"),
        "pyarrow": (lambda v: int(v.split(".")[0]) >= 18, "pip install 'pyarrow>=18'"),
    }
    for name, (fits, cure) in wanted.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            yield Finding(name, False, "not installed", cure)
        else:
            yield Finding(name, fits(found), found, cure)


def drivers() -> Iterator[Finding]:
    """Import the driver of each system. A missing one is needed only for its own sink."""
    for name, driver in DRIVERS.items():
        try:
            import_module(driver.module)
            found = version(name)
        except (ModuleNotFoundError, PackageNotFoundError):
            yield Finding(name, False, "not installed", driver.cure, needed=False)
        except ImportError as error:
            yield Finding(name, False, f"cannot be imported: {error}", driver.cure)
        else:
            yield Finding(name, driver.fits(_numbers(found)), found, driver.cure)


def workers() -> Iterator[Finding]:
    """Ask the Python that Spark's workers will run what it has."""
    chosen, what = os.environ.get("PYSPARK_PYTHON"), "PYSPARK_PYTHON"
    if chosen is not None:
        problem = _problem(chosen)
        cure = (
            f"unset PYSPARK_PYTHON, or set it to {sys.executable}: workers need the driver's version "
            "of Python, and its packages"
        )
        yield Finding(what, not problem, f"{chosen} {problem}" if problem else chosen, cure)
        return
    yield Finding(what, True, f"not set, so that poundlock.session() chooses {sys.executable}")
    if problem := _problem("python3"):
        cure = (
            "sessions that poundlock.session() or configure() did not make run it in their workers: "
            f"use one of them, or set PYSPARK_PYTHON={sys.executable}"
        )
        yield Finding("python3 on the PATH", False, problem, cure, needed=False)


# Runs in the Python that is asked, whose version may be another one.
_ASK = """
import importlib.util, json, sys
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
poundlock = None
if "poundlock" not in missing:
    import poundlock
    poundlock = poundlock.__version__
found = {"python": sys.version_info[:2], "poundlock": poundlock, "missing": missing}
print(json.dumps(found))
"""


def _problem(program: str) -> str:
    """Return why workers cannot run this Python; empty if they can."""
    # Tasks import the drivers of the sinks: as many as this Python has.
    here = [driver.module for driver in DRIVERS.values() if find_spec(driver.module)]
    try:
        done = subprocess.run(
            [program, "-c", _ASK, "poundlock", *_SHARED, *here],
            capture_output=True,
            text=True,
            check=True,
            timeout=_PATIENCE_S,
        )
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return f"is no Python that runs: {_reason(error)}"
    ours = list(sys.version_info[:2])
    if found["python"] != ours:
        return f"is Python {_dotted(found['python'])}, and the driver's is {_dotted(ours)}"
    if found["missing"]:
        return f"lacks {', '.join(found['missing'])}"
    if found["poundlock"] != __version__:
        return f"has Poundlock {found['poundlock']}, and the driver {__version__}"
    return ""


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        last = (error.stderr or "").strip().splitlines()[-1:]
        return "".join(last) or f"it ended with status {error.returncode}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it did not answer within {_PATIENCE_S} s"
    return str(error)


def _dotted(numbers: list[int]) -> str:
    return ".".join(map(str, numbers))


def _numbers(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version."""
    found: list[int] = []
    for part in text.split("."):
        if not part.isdecimal():
            break
        found.append(int(part))
    return tuple(found)
