"""The matcher against what Flink's own tests expect a pattern to find."""

from __future__ import annotations

import pytest
from flink_choices import GROUPS, NEGATIVE, SAME_TIME, SKIPS, UNTIL
from flink_sequences import AT_LEAST, GREEDY, RANGES, SEQUENCES
from nfa_rows import run

CASES = SEQUENCES + RANGES + AT_LEAST + GREEDY + UNTIL + NEGATIVE + SKIPS + GROUPS + SAME_TIME


@pytest.mark.parametrize(
    ("pattern", "rows", "expected"),
    [case[1:] for case in CASES],
    ids=[case[0].replace(" ", "-") for case in CASES],
)
def test_the_matcher_finds_what_flink_finds(pattern, rows, expected):
    matches, _ = run(pattern, rows)
    assert sorted(matches) == sorted(expected.split(" | ") if expected else [])
