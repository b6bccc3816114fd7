"""The shape of the source, as a test: who may import whom, and how long things may be."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "poundlock"
MODULES = sorted(PACKAGE.rglob("*.py"))

MODULE_LINES, FUNCTION_LINES = 600, 60
SHAPELESS = {"utils", "util", "helpers", "helper", "common", "misc"}
# Where packages are to be had is a matter of the machine, never of the source.
REGISTRIES = ("pypi", "pythonhosted", "maven", "npmjs", "jfrog", "artifactory", "nexus", "docker")


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    """Return every module that a file names in an import, wherever in it that stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module_name(path).split(".")
                depth = node.level - (path.name == "__init__.py")
                base = ".".join([*package[: len(package) - depth], *filter(None, [base])])
            found.add(base)
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def every(*folders: str) -> pytest.MarkDecorator:
    """Run a test once for each module below these folders; all modules, if none is named."""
    inside = [p for p in MODULES if not folders or p.relative_to(PACKAGE).parts[0] in folders]
    return pytest.mark.parametrize("path", inside, ids=module_name)


@every("core")
def test_the_core_needs_only_the_standard_library(path: Path) -> None:
    strangers = {
        name
        for name in imports(path)
        if name.split(".")[0] not in sys.stdlib_module_names
        and not within(name, "poundlock.core")
        and not within(name, "poundlock.errors")
    }
    assert not strangers


def test_the_protocol_has_no_clock_thread_chance_or_io() -> None:
    forbidden = {"time", "threading", "random", "secrets", "uuid", "os", "io", "socket", "asyncio"}
    for name in ("protocol.py", "model.py", "guarantee.py"):
        assert not {i.split(".")[0] for i in imports(PACKAGE / "core" / name)} & forbidden


@every()
def test_only_spark_imports_pyspark(path: Path) -> None:
    if path.relative_to(PACKAGE).parts[0] != "spark":
        assert not [name for name in imports(path) if within(name, "pyspark")]


@every("kafka", "postgres", "mysql", "redis", "opensearch", "files")
def test_systems_do_not_know_each_other(path: Path) -> None:
    mine = path.relative_to(PACKAGE).parts[0]
    others = {f"poundlock.{name}" for name in SYSTEMS if name not in (mine, "kept.py")}
    assert not [name for name in imports(path) for other in others if within(name, other)]


@every("sinks")
def test_sinks_do_not_know_each_other(path: Path) -> None:
    others = {
        name
        for name in imports(path)
        if name.startswith("poundlock.sinks.")
        and not name.removeprefix("poundlock.sinks.").startswith("_")
        and name != module_name(path)
    }
    if path.name != "__init__.py":
        assert not others


SYSTEMS = ("kafka", "postgres", "mysql", "redis", "opensearch", "files", "kept.py")
LAYERS = (
    ("errors.py",),
    ("core", "stream", "servers"),
    SYSTEMS,
    ("sinks", "sources"),
    ("spark", "inspectors"),
    ("sqljob",),
    ("cli", "demo", "run", "verify", "dashboard", "compliance", "txn.py", "jobfile.py"),
)


@every(*(part for layer in LAYERS for part in layer))
def test_dependencies_point_one_way(path: Path) -> None:
    """cli, demo -> spark -> sinks, sources -> each system, core -> errors; servers stand apart."""
    layers = [[part.removesuffix(".py") for part in layer] for layer in LAYERS]
    rank = {name: number for number, layer in enumerate(layers) for name in layer}
    mine = rank[path.relative_to(PACKAGE).parts[0].removesuffix(".py")]
    ours = {name.split(".")[1] for name in imports(path) if name.startswith("poundlock.")}
    assert not {name for name in ours if rank.get(name, -1) > mine}


@every()
def test_nobody_imports_the_command_line(path: Path) -> None:
    if path.relative_to(PACKAGE).parts[0] not in ("cli", "cli.py", "__main__.py"):
        assert not [name for name in imports(path) if within(name, "poundlock.cli")]


def test_errors_import_nothing_of_ours() -> None:
    assert not [name for name in imports(PACKAGE / "errors.py") if within(name, "poundlock")]


@every()
def test_a_module_has_one_subject(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MODULE_LINES
    assert path.stem not in SHAPELESS


@every()
def test_a_function_fits_on_a_page(path: Path) -> None:
    long = [
        f"{node.name}: {length} lines"
        for node in functions(path)
        if (length := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES
    ]
    assert not long


@every()
def test_a_module_says_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not tree.body or ast.get_docstring(tree)


def test_no_file_names_a_registry() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    host = re.compile(rf"https?://[\w.@:-]*(?:{'|'.join(REGISTRIES)})[\w.-]*")
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.is_file() and path.stat().st_size < 1 << 20:
            text = path.read_text(errors="ignore")
            found += [f"{name}: {match}" for match in host.findall(text)]
    assert not found
