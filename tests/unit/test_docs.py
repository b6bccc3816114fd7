"""What the documents say is there, is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("*.md"))


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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text()):
        assert (document.parent / target).exists(), target


def test_architecture_names_the_lines_that_matter() -> None:
    coordinator = (ROOT / "src/poundlock/core/coordinator.py").read_text()
    assert coordinator.count("The line that decides.") == 1
    assert coordinator.count("The line that commits.") == 1


def test_every_file_that_architecture_lists_exists() -> None:
    tree = (ROOT / "ARCHITECTURE.md").read_text().split("src/poundlock/\n")[1].split("```")[0]
    here = ROOT / "src" / "poundlock"
    folder = here
    for line in tree.splitlines():
        for name in re.findall(r"(\w+/|\w+\.py)(?=\s|;|,|$)", line):
            if name.endswith("/"):
                folder = here / name
                assert folder.is_dir(), name
            else:
                assert (folder / name).exists() or (here / name).exists(), name


def test_documents_speak_of_the_product_alone() -> None:
    for document in DOCUMENTS:
        found = re.findall(r"(?i)\.\./shared|subagent|\bLLM\b|\bSEEDS\b", document.read_text())
        assert not found, (document.name, found)


FIGURES = {  # the beginning of a line in README's table, and where its figures were measured
    "| Kafka to Kafka": ["kafka:ratio_vs_spark_sink"],
    "| files to PostgreSQL": ["postgres:ratio_vs_spark_jdbc", "postgres:ratio_vs_spark_jdbc_tuned"],
    "| files to MariaDB": ["mysql:ratio_vs_spark_jdbc", "mysql:ratio_vs_spark_jdbc_tuned"],
    "| plain windows": ["streams:ratio_vs_spark_native"],
}


@pytest.mark.parametrize("line", FIGURES)
def test_figures_are_those_that_were_measured(line: str) -> None:
    readme = (ROOT / "README.md").read_text().splitlines()
    [written] = [it.split("|")[-2] for it in readme if it.startswith(line)]
    measured: list[str] = []
    for place in FIGURES[line]:
        file, name = place.split(":")
        text = (ROOT / "benchmarks" / "results" / f"{file}.json").read_text()
        [figure] = re.findall(rf'"{name}": ([\d.]+)', text)
        measured.append(f"{float(figure):.1f}")
    assert re.findall(r"\d+\.\d", written) == measured
