"""The documents agree with the repository: names, links, figures, and the tree of the source."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from poundlock.core.protocol import Step

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "poundlock"


def tracked_documents() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.splitlines()]


DOCUMENTS = tracked_documents()
every_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)


def test_every_invariant_names_tests_that_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    invariants = text.split("## Invariants")[1].split("\n## ")[0]
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", invariants, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    for item in re.split(r"^\d+\. ", invariants, flags=re.MULTILINE)[1:]:
        named = re.findall(r"`((?:tests|src/poundlock/compliance)/[\w/]+\.py)::(\w+)`", item)
        assert named, f"no test is named by: {item[:60]}"
        for file, test in named:
            assert f"def {test}(" in (ROOT / file).read_text(), f"{file}::{test}"


@every_document
def test_links_have_existing_targets(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text()):
        assert (document.parent / target).exists(), target


def test_architecture_names_the_important_lines() -> None:
    for module, line in (
        ("coordinator", "The line that decides."),
        ("commit", "The line that commits."),
    ):
        assert (ROOT / f"src/poundlock/core/{module}.py").read_text().count(f"# {line}") == 1


# --- the width of a line ---

WIDTH = 100
LINK_ALONE = re.compile(
    r"(?:[-*] |\d+\. )?(?:!?\[[^\]]*\]\(\S+\)|\[[^\]]*\]: \S+|<\S+>|`\S+`)[.,;]?"
)


def long_lines(text: str) -> Iterator[int]:
    """Yield the numbers of prose lines that are too wide.

    Headings, tables, code blocks and lines with nothing but a link or a name cannot be wrapped.
    """
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        content = line.strip()
        if content.startswith("```"):
            code = not code
        unbreakable = code or content.startswith(("|", "#")) or LINK_ALONE.fullmatch(content)
        if len(line) > WIDTH and not unbreakable:
            yield number


@every_document
def test_prose_is_wrapped(document: Path) -> None:
    assert list(long_lines(document.read_text())) == []


def test_only_a_line_of_prose_is_too_wide() -> None:
    wide = "word " * 30
    link = f"[page](https://example.org/{'x' * 100})"
    exempt = [f"# {wide}", f"| {wide} |", f"- {link}", f"- `{'x' * 100}`", "```", wide, "```"]
    assert list(long_lines("\n".join([wide, *exempt, f"See {link}", f"- {wide}"]))) == [1, 9, 10]


# --- the index of docs/ ---


def test_the_index_names_every_page() -> None:
    docs = ROOT / "docs"
    links = re.findall(r"\]\(([\w/.-]+\.md)\)", (docs / "README.md").read_text())
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")}
    assert {link for link in links if not link.startswith("..")} == pages - {"README.md"}


# --- the tree in ARCHITECTURE.md ---

NAME = re.compile(r"\w+/|\w+\.\w+")
DESCRIPTION_COLUMN = 20


def tree_of(text: str) -> list[str]:
    """Return the path of each entry in the tree of a document, a directory with a slash at its end.

    The tree is a fenced block whose first line is `src/poundlock/`. Each level below it is indented
    by two spaces more. A line has one or more names, then a description, all two or more spaces
    apart. A line that is indented by 20 columns or more continues the description above it.
    """
    _, _, rest = text.partition("```\nsrc/poundlock/\n")
    found: list[str] = []
    parents = [""]
    for line in rest.partition("```")[0].splitlines():
        content = line.lstrip(" ")
        indent = len(line) - len(content)
        if not content or indent >= DESCRIPTION_COLUMN:
            continue
        level = indent // 2
        assert indent % 2 == 0, f"indented by an odd number of spaces: {line}"
        assert 1 <= level <= len(parents), f"not below one directory: {line}"
        names: list[str] = []
        for word in re.split(r" {2,}", content):
            if not NAME.fullmatch(word):
                break
            names.append(word)
        assert names, f"begins with no name of a file or directory: {line}"
        parent = parents[level - 1]
        found += [parent + name for name in names]
        del parents[level:]
        if len(names) == 1 and names[0].endswith("/"):
            parents.append(parent + names[0])
    return found


def tree_errors(listed: list[str], on_disk: set[str]) -> set[str]:
    """Compare a document's tree with what is on disk.

    Every directory and every top-level part must be listed. If one module of a directory is listed,
    all are, apart from `__init__.py`.
    """

    def folder(entry: str) -> str:
        return entry.rstrip("/").rpartition("/")[0]

    modules = {it for it in on_disk if it.endswith(".py") and not it.endswith("__init__.py")}
    complete = {folder(entry) for entry in listed if entry in modules} | {""}
    wanted = {entry for entry in on_disk if entry.endswith("/")}
    wanted |= {module for module in modules if folder(module) in complete}
    errors = {f"not on disk: {entry}" for entry in listed if entry not in on_disk}
    errors |= {f"listed twice: {entry}" for entry in listed if listed.count(entry) > 1}
    return errors | {f"not in the tree: {entry}" for entry in wanted - set(listed)}


def package_on_disk() -> set[str]:
    paths = [path for path in PACKAGE.rglob("*") if "__pycache__" not in path.parts]
    full = [path for path in paths if not path.is_dir() or any(path.rglob("*.py"))]
    return {str(path.relative_to(PACKAGE)) + "/" * path.is_dir() for path in full}


def test_the_page_of_observers_names_every_step_once() -> None:
    table = (ROOT / "docs" / "observe.md").read_text()
    assert re.findall(r"^\| `([A-Z_]+)` \|", table, re.MULTILINE) == [step.name for step in Step]


def test_the_tree_in_architecture_equals_the_disk() -> None:
    listed = tree_of((ROOT / "ARCHITECTURE.md").read_text())
    assert listed
    assert tree_errors(listed, package_on_disk()) == set()


TREE = """## The parts

```
src/poundlock/
  errors.py         every exception; log.py is named by a description and is no entry
  core/             two-phase commit
    log.py          the transaction log
                    core.py  would be an entry if it were further left
    coordinator.py  settings.json  the order of the steps
  sinks/            one per system
    kafka/  redis/  their own packages
    memory.py       the smallest
```
"""
DISK = {
    "__init__.py", "errors.py", "core/", "core/__init__.py", "core/log.py", "core/coordinator.py",
    "core/settings.json", "sinks/", "sinks/kafka/", "sinks/kafka/sink.py", "sinks/redis/",
    "sinks/memory.py",
}  # fmt: skip


def test_a_tree_that_agrees_with_the_disk_passes() -> None:
    assert tree_errors(tree_of(TREE), DISK) == set()


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ("core/log.py", "not on disk: core/log.py"),
        ("sinks/redis/", "not on disk: sinks/redis/"),
        ("core/settings.json", "not on disk: core/settings.json"),
    ],
)
def test_an_entry_that_is_not_on_disk_is_found(entry: str, error: str) -> None:
    assert tree_errors(tree_of(TREE), DISK - {entry}) == {error}


@pytest.mark.parametrize("entry", ["txn.py", "txn/", "sinks/mysql/", "core/model.py"])
def test_an_entry_that_the_tree_lacks_is_found(entry: str) -> None:
    assert tree_errors(tree_of(TREE), DISK | {entry}) == {f"not in the tree: {entry}"}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("   odd.py", "odd number"),
        ("  lacks a name", "begins with no name"),
        ("      deep.py", "not below one directory"),
        ("flat.py", "not below one directory"),
    ],
)
def test_a_line_that_cannot_be_read_is_refused(line: str, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        tree_of(TREE.replace("  errors.py ", f"{line}\n  errors.py "))


def test_documents_describe_only_the_product() -> None:
    for document in DOCUMENTS:
        found = re.findall(r"(?i)\.\./shared|subagent|\bLLM\b|\bSEEDS\b", document.read_text())
        assert not found, (document.name, found)


FIGURES = {  # the start of a line in README's table, and the file with its measurements
    "| Kafka to Kafka": ["kafka:ratio_vs_spark_sink"],
    "| files to PostgreSQL": ["postgres:ratio_vs_spark_jdbc", "postgres:ratio_vs_spark_jdbc_tuned"],
    "| files to MariaDB": ["mysql:ratio_vs_spark_jdbc", "mysql:ratio_vs_spark_jdbc_tuned"],
    "| plain windows": ["streams:ratio_vs_spark_native"],
}


@pytest.mark.parametrize("line", FIGURES)
def test_figures_match_the_measurements(line: str) -> None:
    readme = (ROOT / "README.md").read_text().splitlines()
    [written] = [it.split("|")[-2] for it in readme if it.startswith(line)]
    measured: list[str] = []
    for place in FIGURES[line]:
        file, name = place.split(":")
        text = (ROOT / "benchmarks" / "results" / f"{file}.json").read_text()
        [figure] = re.findall(rf'"{name}": ([\d.]+)', text)
        measured.append(f"{float(figure):.1f}")
    assert re.findall(r"\d+\.\d", written) == measured
