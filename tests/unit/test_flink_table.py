"""The page for users of Flink is up to date, and every name in it exists."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import pytest

import poundlock
from poundlock.spark.pipeline import pipeline
from poundlock.spark.stream import flow, keyedflow, windowed
from poundlock.stream import pattern

DOCS = Path(__file__).parents[2] / "docs"
SPEC = importlib.util.spec_from_file_location("flink_table", DOCS / "flink_table.py")
assert SPEC is not None and SPEC.loader is not None
flink_table = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(flink_table)

CLASSES = {
    "Flow": flow.Flow,
    "KeyedFlow": keyedflow.KeyedFlow,
    "ConnectedFlow": keyedflow.ConnectedFlow,
    "WindowedFlow": windowed.WindowedFlow,
    "Pattern": pattern.Pattern,
    "Pipeline": pipeline.Pipeline,
}
NAMES = sorted(
    {
        name.strip()
        for rows in flink_table.TABLE.values()
        for _, ours, _, _ in rows
        for name in ours.split(",")
        if ours
    }
)


def test_the_page_is_up_to_date():
    assert (DOCS / "flink.md").read_text() == flink_table.page(), "run docs/flink_table.py"


@pytest.mark.parametrize("name", NAMES)
def test_every_name_on_the_page_exists(name: str):
    first, _, rest = name.partition(".")
    if first in ("cli", "sqljob"):
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(f"poundlock.{module}"), attribute)
        return
    found = CLASSES.get(first) or getattr(poundlock, first)
    for part in filter(None, rest.split(".")):
        found = getattr(found, part)
    assert found


def test_every_public_operator_is_listed():
    mentioned = {name.split(".")[-1] for name in NAMES}
    plumbing = {
        "after",
        "check_clock",
        "df",
        "domain",
        "explain",
        "input",
        "key_fields",
        "outputs",
        "require_time",
        "run",
        "tagged",
        "watermarked",
        "with_pages",
        "with_time",
    }
    inner = {"expressions", "columns", "bind", "names", "gaps", "check"}  # of patterns
    for kind in (flow.Flow, keyedflow.KeyedFlow, windowed.WindowedFlow, pattern.Pattern):
        fields = getattr(kind, "__dataclass_fields__", {})
        public = {name for name in vars(kind) if not name.startswith("_") and name not in fields}
        rest = public - mentioned - plumbing - inner
        assert not rest, kind
