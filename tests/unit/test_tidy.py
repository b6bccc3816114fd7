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
TESTS = sorted(file for folder in ("tests", "benchmarks") for file in (ROOT / folder).rglob("*.py"))

MODULE_LINES, FUNCTION_LINES, COMPLEXITY = 600, 60, 20
TEST_LINES = 600
SHAPELESS = {"utils", "util", "helpers", "helper", "common", "misc"}
# The machine's configuration decides where packages come from. The source never does.
REGISTRIES = ("pypi", "pythonhosted", "maven", "npmjs", "jfrog", "artifactory", "nexus", "docker")


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, *, for_types: bool = True) -> set[str]:
    """Return every module that a file imports, inside functions too.

    Without `for_types`, not those that only a type checker imports.
    """
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    for node in list(ast.walk(tree)):
        if not for_types and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
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


def long_functions(path: Path) -> dict[str, int]:
    """Return the functions that do not fit on a page, with the number of their lines."""
    return {
        node.name: lines
        for node in functions(path)
        if (lines := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES
    }


def every(*folders: str) -> pytest.MarkDecorator:
    """Run a test once for each module below these folders, or for every module of the package."""
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


def test_the_protocol_uses_no_clock_thread_randomness_or_io() -> None:
    forbidden = {"time", "threading", "random", "secrets", "uuid", "os", "io", "socket", "asyncio"}
    for name in ("protocol.py", "model.py", "guarantee.py"):
        assert not {i.split(".")[0] for i in imports(PACKAGE / "core" / name)} & forbidden


@every()
def test_only_spark_imports_pyspark(path: Path) -> None:
    if path.relative_to(PACKAGE).parts[0] != "spark":
        assert not [name for name in imports(path, for_types=False) if within(name, "pyspark")]


# The lowest layer first. A part may import from its own layer and from lower ones. Every module and
# package directly below `poundlock` is in exactly one layer; `poundlock` itself is the top.
LAYERS = (
    ("errors", "terminal"),
    ("core", "secret", "ownership", "stream", "jvm"),
    ("filesystem", "servers"),
    ("sinks",),
    ("sources",),
    ("spark",),
    ("sqljob", "txn", "jobfile", "compliance"),
    ("demo",),
    ("cli",),
)
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}


def part_of(module: str) -> str:
    """Return the part directly below `poundlock` that a module belongs to; empty for the top."""
    return module.removeprefix("poundlock").lstrip(".").split(".")[0]


def parts_on_disk() -> set[str]:
    return {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in MODULES} - {
        "__init__"
    }


def climbs(module: str, imported: set[str]) -> list[str]:
    """Return what a module imports from a layer above its own, the top package included."""
    mine = part_of(module)
    if not mine:
        return []
    ours = {name for name in imported if within(name, "poundlock")}
    above = {name for name in ours if RANK.get(part_of(name), len(LAYERS)) > RANK[mine]}
    # `from poundlock import x` also names `poundlock` itself, which breaks no rule.
    return sorted(above - {"poundlock", "poundlock.__version__"})


def test_every_part_has_a_layer_and_every_layer_a_part() -> None:
    assert parts_on_disk() == set(RANK)
    assert sum(map(len, LAYERS)) == len(RANK), "a part is in two layers"


@every()
def test_dependencies_point_one_way(path: Path) -> None:
    assert climbs(module_name(path), imports(path)) == []


@pytest.mark.parametrize("part", sorted(set(RANK) - {"cli"}))
def test_an_import_from_a_higher_layer_is_found(part: str) -> None:
    """The test plants one in each part, so that no part escapes the rule."""
    higher = f"poundlock.{LAYERS[RANK[part] + 1][0]}.planted"
    assert climbs(f"poundlock.{part}.module", {"os", higher}) == [higher]
    assert climbs(f"poundlock.{part}.module", {"poundlock", "poundlock.pipeline"})


def room_of(module: str) -> str:
    """Return the system whose folder below `poundlock.sinks` holds a module, or an empty string."""
    parts = module.split(".")
    folder = (
        parts[:2] == ["poundlock", "sinks"] and len(parts) > 2 and (PACKAGE / "sinks" / parts[2])
    )
    return parts[2] if folder and folder.is_dir() else ""


@every("sinks")
def test_sinks_of_different_systems_do_not_import_each_other(path: Path) -> None:
    """A sink imports its own package and what sinks share; no other sink."""
    mine = room_of(module_name(path)) or path.stem
    shared = {"rowstore", "partitions", "text", "sql", mine}
    others = {
        name
        for name in imports(path)
        if name.startswith("poundlock.sinks.") and name.split(".")[2] not in shared
    }
    if path != PACKAGE / "sinks" / "__init__.py":
        assert not others


@every()
def test_no_other_module_imports_the_command_line(path: Path) -> None:
    if path.relative_to(PACKAGE).parts[0] not in ("cli", "cli.py", "__main__.py"):
        assert not [name for name in imports(path) if within(name, "poundlock.cli")]


# The terminal obeys what these print; `poundlock.terminal` makes it visible.
RAW_DOORS = {"print", "echo", "secho", "confirm", "prompt", "Console", "from_markup"}


def raw_doors(source: str) -> set[str]:
    """Return the calls that print past `poundlock.terminal`, and imports of rich's markup."""
    found, rich = set[str](), set[str]()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module="click"):
                found |= {alias.name for alias in node.names} & RAW_DOORS
            case ast.ImportFrom(module=str(module)) if within(module, "rich"):
                rich |= {f"{module}.{alias.name}" for alias in node.names}
            case ast.Call(func=ast.Name(id="print")):
                found.add("print")
            case ast.Call(func=ast.Name(id="Console")) if "rich.console.Console" in rich:
                found.add("Console")
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name)):
                if name in RAW_DOORS and owner in ("click", "rich", "Text"):
                    found.add(f"{owner}.{name}")
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr=stream), attr="write")):
                if stream in ("stdout", "stderr"):
                    found.add(f"sys.{stream}.write")
    return found | {name for name in rich if within(name, "rich.markup")}


@every()
def test_only_one_module_prints(path: Path) -> None:
    if path != PACKAGE / "terminal.py":
        assert not raw_doors(path.read_text())


@pytest.mark.parametrize(
    "planted",
    [
        "print(1)",
        "import click; click.echo(1)",
        "import click; click.confirm('x')",
        "from click import echo",
        "from rich.console import Console; Console().print(1)",
        "from rich.markup import escape",
        "from rich.text import Text; Text.from_markup('x')",
        "import sys; sys.stdout.write('x')",
    ],
)
def test_a_second_door_to_the_terminal_is_found(planted: str) -> None:
    assert raw_doors(planted)


def test_the_errors_module_imports_no_other_module_of_ours() -> None:
    assert not [name for name in imports(PACKAGE / "errors.py") if within(name, "poundlock")]


@every()
def test_a_module_has_one_subject(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MODULE_LINES
    assert path.stem not in SHAPELESS


@every()
def test_a_function_fits_on_a_page(path: Path) -> None:
    assert long_functions(path) == {}


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_test_module_and_its_functions_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= TEST_LINES
    assert long_functions(path) == {}


class Decisions(ast.NodeVisitor):
    """Counts the decisions in the body of one function as radon counts them.

    A function or class inside it counts for itself.
    """

    def __init__(self, function: ast.FunctionDef | ast.AsyncFunctionDef):
        self.count = 0
        for statement in function.body:
            self.visit(statement)

    def visit_FunctionDef(self, node: ast.AST) -> None:
        pass

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef  # noqa: N815

    def visit_Assert(self, node: ast.Assert) -> None:
        self.count += 1

    def generic_visit(self, node: ast.AST) -> None:
        match node:
            case ast.If() | ast.IfExp():
                self.count += 1
            case ast.For() | ast.AsyncFor() | ast.While():
                self.count += 1 + bool(node.orelse)
            case ast.Try():
                self.count += len(node.handlers) + bool(node.orelse)
            case ast.BoolOp():
                self.count += len(node.values) - 1
            case ast.comprehension():
                self.count += 1 + len(node.ifs)
            case ast.Match():
                patterns = [case.pattern for case in node.cases]
                names = [it for it in patterns if isinstance(it, ast.MatchAs) and not it.pattern]
                self.count += len(patterns) - bool(names)
        super().generic_visit(node)


def complexity(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return 1 + Decisions(function).count


@every()
def test_a_function_has_few_branches(path: Path) -> None:
    complicated = [
        f"{node.name}: {count}"
        for node in functions(path)
        if (count := complexity(node)) > COMPLEXITY
    ]
    assert not complicated


PLANTED = """
def planted(values, other=1 if True else 2):
    assert values or other
    for value in values:
        if value and other or value is None:
            break
    else:
        return [a for a in values if a if a > 1 for b in a]
    while True:
        try:
            return 1 if other else 2
        except ValueError:
            pass
        except TypeError:
            pass
        else:
            break
    with suppress(KeyError):
        pass
    match other:
        case 1:
            pass
        case 2 if values:
            pass
        case _:
            pass
    def inner():
        if values:
            return 1
    return lambda: 1 if values else 2
"""


def test_complexity_is_counted_as_radon_counts_it() -> None:
    nodes = ast.walk(ast.parse(PLANTED))
    found = {it.name: complexity(it) for it in nodes if isinstance(it, ast.FunctionDef)}
    assert found == {"planted": 19, "inner": 2}


@every()
def test_a_module_has_a_docstring(path: Path) -> None:
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


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-build.lock"])
def test_every_package_is_pinned_by_version_and_hash(name: str) -> None:
    text = (ROOT / name).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines
    for line in lines:
        assert re.fullmatch(r"[\w.-]+==[^ ;]+(; [^-]+)?( +--hash=sha256:[0-9a-f]{64})+", line), line
    script = (ROOT / "scripts" / "venv").read_text().splitlines()
    installs = [line for line in script if line.startswith("install ") and " -r " in line]
    assert any(line.endswith(f" -r {name}") for line in installs)
    assert all(" --require-hashes " in line for line in installs)
