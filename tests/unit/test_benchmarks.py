"""The benchmarks are run by hand, so a change of the code that they call must not break them unseen."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from benchmarks import driver

ROOT = Path(__file__).parents[2]
MODULES = sorted(file.stem for file in (ROOT / "benchmarks").glob("[a-z]*.py"))


@pytest.mark.parametrize("module", MODULES)
def test_every_benchmark_can_be_imported(module: str) -> None:
    importlib.import_module(f"benchmarks.{module}")


@pytest.mark.parametrize("kind", ["kafka", "staged"])
def test_the_driver_is_measured(kind: str, tmp_path: Path) -> None:
    ran = driver.run(kind, 3, 4, str(tmp_path))
    started = driver.start(kind, 3, 4, str(tmp_path))
    assert ran["log_mb"] >= 0
    assert started["peak_mb"] >= started["peak_mb_before"]


@pytest.mark.parametrize("kind", ["all", "retention"])
def test_the_manifest_is_measured(kind: str, tmp_path: Path) -> None:
    assert driver.files(kind, 2, 20, str(tmp_path))["peak_mb"] > 0
