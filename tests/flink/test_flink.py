"""Our operators against the answers that Flink gave to the same rows and watermarks.

Flink itself is not needed: its answers are in `results`. With FLINK_ANSWERS, a folder of fresh answers,
the recorded ones are compared with those, too.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from flink_run import digest
from ours import answer, batches, in_order, row_by_row
from scenarios import Scenario, groups

RESULTS = Path(__file__).parent / "results"
FRESH = os.environ.get("FLINK_ANSWERS")
GROUPS = groups()
SCENARIOS = [(group, each) for group, those in GROUPS.items() for each in those]

DUE = "a timer that is due when it is set fires in the same batch; in Flink at the next watermark"
TIE = (
    "of matches with the same first and last row, the one that is given first and skips the others"
)
WAITED = (
    "a match that waited for others to time out is given at that time; in Flink when a row comes"
)
REFUSED = "a group cannot end with not_followed_by here; Flink takes it, and finds nothing"
BEFORE_1970 = "in Flink the last watermark less such a time overflows, and it is never timed out"
DIFFERENT = {
    "timer before the watermark": DUE,
    "continuous, row behind the watermark": DUE,
    "skip next, any": TIE,
    "skip past, any": TIE,
    "skip first, any": TIE,
    "skip last, any": TIE,
    "random match 53": TIE,
    "random match 111": TIE,
    "random match 186": TIE,
    "random match 129": WAITED,
    "random match 135": WAITED,
    "random match 146": WAITED,
    "random match 31": REFUSED,
    "random match 75": BEFORE_1970,
}


def told(folder: Path, group: str) -> dict[str, Any]:
    return json.loads((folder / f"{group}.json").read_text())["answers"]


RECORDED = {group: told(RESULTS, group) for group in GROUPS}
AGAIN = {group: told(Path(FRESH), group) for group in GROUPS} if FRESH else RECORDED


def comparable(scenario: Scenario, outputs: dict[str, list[Any]]) -> Any:
    """Return an answer without the order that Flink does not define.

    The order is compared where Flink has one: of a key; of a window, as several windows of a key that
    fire at the same instant do so in any order; of matches that are complete at different times.
    """
    if "refused" in outputs:
        return "refused"
    operator, found = scenario["operator"], {}
    for name, rows in json.loads(json.dumps(outputs)).items():
        for row in rows:
            if name == "late":
                row[2] = str(row[2])  # the value, which is text on Flink's side
            windowed = operator["kind"] == "window" and name == "main"
            if windowed and operator["result"] == "rows" and operator["windows"]["kind"] in MERGED:
                row[3].sort()
            found.setdefault((name, *row[: 3 if windowed else 1]), []).append(row)
    for (name, *_), rows in found.items():
        if operator["kind"] == "join" or (operator["kind"] == "match" and name == "late"):
            rows.sort()
        elif operator["kind"] == "match":
            rows.sort(key=lambda row: (row[2], json.dumps(row, sort_keys=True)))
    return found


MERGED = ("session", "own gaps")  # the rows of windows that merged have no order in Flink


@pytest.mark.parametrize(
    ("group", "scenario"), SCENARIOS, ids=[each["name"] for _, each in SCENARIOS]
)
def test_our_operators_give_the_answers_of_flink(group, scenario):
    asked, flinks = RECORDED[group][scenario["name"]]
    assert asked == digest(scenario), "the scenario has changed: `make flink`, and see the README"
    expected = comparable(scenario, flinks)
    _, again = AGAIN[group][scenario["name"]]
    assert comparable(scenario, again) == expected, "Flink no longer says what is recorded"
    cuts = [row_by_row(scenario)] + ([batches(scenario)] if in_order(scenario) else [])
    for cut in cuts:
        ours = comparable(scenario, answer(scenario, cut))
        # The differences that are known must be there: else the list of them is wrong.
        assert (ours == expected) is (scenario["name"] not in DIFFERENT)


def test_most_scenarios_have_an_answer():
    """Two operators without output would always agree, so most scenarios must have an answer."""
    assert len({each["name"] for _, each in SCENARIOS}) == len(SCENARIOS)
    assert set(DIFFERENT) <= {each["name"] for _, each in SCENARIOS}
    for group, those in GROUPS.items():
        silent = [each for each in those if not any(RECORDED[group][each["name"]][1].values())]
        assert len(silent) < len(those) / 5, group
