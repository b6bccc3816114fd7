"""Patterns of sequences and loops, with the matches that Flink's own tests expect."""

from __future__ import annotations

from nfa_rows import a, b, c, d, e, f, is_, price_above

from poundlock.stream.pattern import begin

# Name, pattern, rows, matches: the outcomes that Flink's tests of the same name expect.
SEQUENCES = [
    ("no condition",
     begin("start").followed_by("end"),
     "a1@1 b1@2 c1@3 d1@4 e1@5", "a1 b1 | b1 c1 | c1 d1 | d1 e1"),
    ("no condition looping",
     begin("start").followed_by("end").one_or_more(),
     "a1@1 b1@2 c1@3 d1@4 e1@5",
     "a1 b1 c1 d1 e1 | a1 b1 c1 d1 | a1 b1 c1 | a1 b1 | b1 c1 d1 e1 | b1 c1 d1 | b1 c1 | c1 d1 "
     "e1 | c1 d1 | d1 e1"),
    ("any with no condition",
     begin("start").followed_by_any("end"),
     "a1@1 b1@2 c1@3 d1@4 e1@5",
     "a1 b1 | a1 c1 | a1 d1 | a1 e1 | b1 c1 | b1 d1 | b1 e1 | c1 d1 | c1 e1 | d1 e1"),
    ("strict continuity with results",
     begin("middle").where(a).next("end").where(b),
     "a1@3 b1@5", "a1 b1"),
    ("strict continuity no results",
     begin("middle").where(a).next("end").where(b),
     "a1@3 c1@4 b1@5", ""),
    ("simple pattern with time window within first and last",
     begin("start").where(is_("start")).followed_by("middle").where(is_("middle"))
     .followed_by("end").where(is_("end")).within("10 ms"),
     "start1@1 start2@2 middle1@3 foobar1@4 end1@11 end2@13", "start2 middle1 end1"),
    ("simple pattern with time window within previous and current",
     begin("start").where(is_("start")).followed_by("middle").where(is_("middle"))
     .followed_by("end").where(is_("end")).within("9 ms", since="previous"),
     "start1@1 start2@2 middle1@3 foobar1@4 end1@11 end2@13",
     "start1 middle1 end1 | start2 middle1 end1"),
    ("complex branching after zero or more",
     begin("start").where(c).followed_by_any("middle").where(a).one_or_more()
     .allow_combinations().optional().followed_by_any("end1").where(b).followed_by_any("end2")
     .where(d).followed_by_any("end3").where(e),
     "c1@1 a1@3 a2@4 a3@5 b1@6 d1@7 d2@8 e1@9",
     "c1 a1 a2 a3 b1 d1 e1 | c1 a1 a2 b1 d1 e1 | c1 a1 a3 b1 d1 e1 | c1 a2 a3 b1 d1 e1 | c1 a1 "
     "b1 d1 e1 | c1 a2 b1 d1 e1 | c1 a3 b1 d1 e1 | c1 b1 d1 e1 | c1 a1 a2 a3 b1 d2 e1 | c1 a1 "
     "a2 b1 d2 e1 | c1 a1 a3 b1 d2 e1 | c1 a2 a3 b1 d2 e1 | c1 a1 b1 d2 e1 | c1 a2 b1 d2 e1 | "
     "c1 a3 b1 d2 e1 | c1 b1 d2 e1"),
    ("zero or more",
     begin("start").where(c).followed_by_any("middle").where(a).one_or_more()
     .allow_combinations().optional().followed_by("end1").where(b),
     "c1@1 a1@3 a2@4 b1@6", "c1 a1 a2 b1 | c1 a1 b1 | c1 a2 b1 | c1 b1"),
    ("eager zero or more",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().optional()
     .followed_by("end1").where(b),
     "c1@1 a1@3 a2@4 d1@5 a3@6 b1@7", "c1 a1 a2 a3 b1 | c1 a1 a2 b1 | c1 a1 b1 | c1 b1"),
    ("begin with zero or more",
     begin("middle").where(a).one_or_more().optional().followed_by("end").where(b),
     "a1@3 a2@4 a3@5 b1@6", "a1 a2 a3 b1 | a1 a2 b1 | a2 a3 b1 | a1 b1 | a2 b1 | a3 b1 | b1"),
    ("zero or more after zero or more",
     begin("start").where(c).followed_by_any("middle-first").where(a).one_or_more()
     .allow_combinations().optional().followed_by("middle-second").where(d).one_or_more()
     .allow_combinations().optional().followed_by("end").where(e),
     "c1@1 a1@3 d1@4 d2@5 e1@6",
     "c1 a1 d1 d2 e1 | c1 a1 d1 e1 | c1 d1 d2 e1 | c1 d1 e1 | c1 a1 e1 | c1 e1"),
    ("zero or more after branching",
     begin("start").where(c).followed_by_any("branching").where(a).followed_by_any("merging")
     .where(f).followed_by_any("kleene").where(d).one_or_more().allow_combinations().optional()
     .followed_by("end").where(e),
     "c1@1 a1@3 a2@4 f1@5 d1@6 d2@7 e1@8",
     "c1 a1 f1 e1 | c1 a1 f1 d1 e1 | c1 a1 f1 d2 e1 | c1 a1 f1 d1 d2 e1 | c1 a2 f1 e1 | c1 a2 "
     "f1 d1 e1 | c1 a2 f1 d2 e1 | c1 a2 f1 d1 d2 e1"),
    ("strict continuity no results after zero or more",
     begin("start").where(d).followed_by("middle").where(a).one_or_more().optional().next("end")
     .where(b),
     "d1@1 a1@2 a2@3 c1@4 b1@5", ""),
    ("strict continuity results after zero or more",
     begin("start").where(d).followed_by_any("middle").where(a).one_or_more().optional()
     .allow_combinations().next("end").where(b),
     "d1@1 a1@2 a2@3 b1@5", "d1 a1 a2 b1 | d1 a2 b1"),
    ("at least one",
     begin("start").where(c).followed_by_any("middle").where(a).one_or_more()
     .allow_combinations().followed_by_any("end1").where(b),
     "c1@1 a1@3 a2@4 b1@6", "c1 a1 a2 b1 | c1 a1 b1 | c1 a2 b1"),
    ("begin with at least one",
     begin("start").where(a).one_or_more().allow_combinations().followed_by("end").where(b),
     "a1@3 a2@4 a3@5 b1@6",
     "a1 a2 a3 b1 | a1 a2 b1 | a1 a3 b1 | a2 a3 b1 | a1 b1 | a2 b1 | a3 b1"),
    ("at least one eager",
     begin("start").where(c).followed_by_any("middle").where(a).one_or_more()
     .followed_by_any("end1").where(b),
     "c1@1 a1@3 a2@4 a3@5 b1@6",
     "c1 a1 a2 a3 b1 | c1 a1 a2 b1 | c1 a2 a3 b1 | c1 a3 b1 | c1 a2 b1 | c1 a1 b1"),
    ("optional",
     begin("start").where(c).followed_by("middle").where(a).optional().followed_by("end1")
     .where(b),
     "c1@1 a1@5 b1@6", "c1 a1 b1 | c1 b1"),
    ("times",
     begin("start").where(c).next("middle").where(a).times(2).allow_combinations()
     .followed_by("end1").where(b),
     "c1@1 a1@2 a2@3 a3@4 b1@6", "c1 a1 a2 b1 | c1 a1 a3 b1"),
    ("start with times",
     begin("middle").where(a).times(2).consecutive().followed_by("end1").where(b),
     "a1@2 a2@3 a3@4 b1@6", "a1 a2 b1 | a2 a3 b1"),
    ("times non strict with next",
     begin("start").where(c).next("middle").where(a).times(2).allow_combinations()
     .followed_by("end1").where(b),
     "c1@1 a1@2 f1@3 a2@4 f2@5 a3@6 b1@7", "c1 a1 a2 b1 | c1 a1 a3 b1"),
    ("times not strict with followed by eager",
     begin("start").where(c).followed_by("middle").where(a).times(2).followed_by("end1").where(b),
     "c1@1 a1@2 a2@4 a3@6 b1@7", "c1 a1 a2 b1"),
    ("times not strict with followed by not eager",
     begin("start").where(c).followed_by_any("middle").where(a).times(2).allow_combinations()
     .followed_by("end1").where(b),
     "c1@1 a1@2 a2@4 a3@6 b1@7", "c1 a1 a2 b1 | c1 a2 a3 b1 | c1 a1 a3 b1"),
    ("times strict with next and consecutive",
     begin("start").where(c).next("middle").where(a).times(2).consecutive().followed_by("end1")
     .where(b),
     "c1@1 a1@2 f1@3 a2@4 a3@6 b1@7", ""),
    ("start with optional",
     begin("start").where(c).optional().followed_by("end1").where(b),
     "c1@1 b1@6", "c1 b1 | b1"),
    ("end with zero or more",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().optional(),
     "c1@1 a1@3 a2@4 a3@5", "c1 a1 a2 a3 | c1 a1 a2 | c1 a1 | c1"),
    ("start and end with zero or more",
     begin("start").where(a).one_or_more().optional(),
     "c1@1 a1@3 a2@4 a3@5 d1@6 d2@6 d3@6", "a1 a2 a3 | a1 a2 | a1 | a2 a3 | a2 | a3"),
    ("end with optional",
     begin("start").where(c).followed_by("middle").where(a).optional(),
     "c1@1 a1@3", "c1 a1 | c1"),
    ("end with one or more",
     begin("start").where(c).followed_by("middle").where(a).one_or_more(),
     "c1@1 a1@3 a2@4 a3@5", "c1 a1 a2 a3 | c1 a1 a2 | c1 a1"),
    ("times non strict optional 1",
     begin("start").where(c).followed_by("middle").where(a).times(3).optional()
     .followed_by("end1").where(b),
     "c1@1 f1@2 b1@7", "c1 b1"),
    ("times non strict optional 2",
     begin("start").where(c).followed_by_any("middle").where(a).times(2).allow_combinations()
     .optional().followed_by("end1").where(b),
     "c1@1 f1@2 a1@3 f2@4 a2@5 a3@6 b1@7", "c1 a1 a2 b1 | c1 a1 a3 b1 | c1 a2 a3 b1 | c1 b1"),
    ("times non strict optional 3",
     begin("start").where(c).followed_by_any("middle").where(a).times(2).optional()
     .followed_by("end1").where(b),
     "c1@1 f1@2 a1@3 f2@4 a2@5 a3@6 b1@7", "c1 a1 a2 b1 | c1 a2 a3 b1 | c1 b1"),
    ("times strict optional",
     begin("start").where(c).followed_by_any("middle").where(a).times(2).consecutive().optional()
     .followed_by("end1").where(b),
     "c1@1 f1@2 a1@3 f2@4 a2@5 a3@6 b1@7", "c1 a2 a3 b1 | c1 b1"),
    ("one or more strict optional",
     begin("start").where(c).followed_by_any("middle").where(a).one_or_more().consecutive()
     .optional().followed_by("end1").where(b),
     "c1@1 f1@2 a1@3 f2@4 a2@5 a3@6 b1@7",
     "c1 a2 a3 b1 | c1 a1 b1 | c1 a2 b1 | c1 a3 b1 | c1 b1"),
    ("times strict optional 1",
     begin("start").where(c).next("middle").where(a).times(2).consecutive().optional()
     .followed_by("end1").where(b),
     "c1@1 a1@3 a2@5 a3@6 b1@7", "c1 a1 a2 b1 | c1 b1"),
    ("optional times non strict with next",
     begin("start").where(c).next("middle").where(a).times(2).allow_combinations().optional()
     .followed_by("end1").where(b),
     "c1@1 a1@2 f1@3 a2@4 f2@5 a3@6 b1@7", "c1 a1 a2 b1 | c1 a1 a3 b1 | c1 b1"),
    ("times strict",
     begin("start").where(c).followed_by_any("middle").where(a).times(2).consecutive()
     .followed_by("end1").where(b),
     "c1@1 f1@2 a1@3 f2@4 a2@5 a3@6 b1@7", "c1 a2 a3 b1"),
    ("times non strict",
     begin("start").where(c).followed_by_any("middle").where(a).times(2).allow_combinations()
     .followed_by("end1").where(b),
     "c1@1 f1@2 a1@3 f2@4 a2@5 a3@6 b1@7", "c1 a1 a2 b1 | c1 a1 a3 b1 | c1 a2 a3 b1"),
    ("multiple takes version collision",
     begin("start").where(c).followed_by("middle1").where(a).one_or_more().allow_combinations()
     .followed_by("middle2").where(a).one_or_more().allow_combinations().followed_by("end")
     .where(b),
     "c1@1 a1@3 a2@4 a3@5 a4@6 a5@7 b1@10",
     "c1 a1 a2 a3 a4 a5 b1 | c1 a1 a2 a3 a4 a5 b1 | c1 a1 a2 a3 a4 a5 b1 | c1 a1 a2 a3 a4 a5 "
     "b1 | c1 a1 a2 a3 a4 b1 | c1 a1 a2 a4 a5 b1 | c1 a1 a2 a3 a4 b1 | c1 a1 a2 a3 a5 b1 | c1 "
     "a1 a3 a4 a5 b1 | c1 a1 a3 a4 a5 b1 | c1 a1 a2 a3 a4 b1 | c1 a1 a2 a3 a5 b1 | c1 a1 a2 a4 "
     "a5 b1 | c1 a1 a2 a3 b1 | c1 a1 a3 a4 b1 | c1 a1 a4 a5 b1 | c1 a1 a2 a3 b1 | c1 a1 a2 a4 "
     "b1 | c1 a1 a2 a5 b1 | c1 a1 a2 b1"),
]  # fmt: skip

RANGES = [
    ("times range",
     begin("start").where(c).next("middle").where(a).times(1, 3).allow_combinations()
     .followed_by("end1").where(b),
     "c1@1 a1@2 a2@3 a3@4 b1@6", "c1 a1 a2 a3 b1 | c1 a1 a2 b1 | c1 a1 a3 b1 | c1 a1 b1"),
    ("times range from zero",
     begin("start").where(c).next("middle").where(a).times(0, 2).allow_combinations()
     .followed_by("end1").where(b),
     "c1@1 a1@2 a2@3 a3@4 b1@6", "c1 a1 a2 b1 | c1 a1 a3 b1 | c1 a1 b1 | c1 b1"),
    ("times range strict",
     begin("start").where(c).followed_by_any("middle").where(a).times(0, 3).consecutive()
     .followed_by("end1").where(b),
     "c1@1 f1@2 a1@3 f2@4 a2@5 a3@6 b1@7",
     "c1 a2 a3 b1 | c1 a1 b1 | c1 a2 b1 | c1 a3 b1 | c1 b1"),
    ("times range strict optional",
     begin("start").where(c).followed_by_any("middle").where(a).times(1, 3).consecutive()
     .optional().followed_by("end1").where(b),
     "c1@1 f1@2 a1@3 f2@4 a2@5 a3@6 b1@7",
     "c1 a2 a3 b1 | c1 a1 b1 | c1 a2 b1 | c1 a3 b1 | c1 b1"),
    ("times range strict optional 1",
     begin("start").where(c).next("middle").where(a).times(1, 3).consecutive().optional()
     .followed_by("end1").where(b),
     "c1@1 a1@3 a2@5 a3@6 b1@7", "c1 a1 a2 a3 b1 | c1 a1 a2 b1 | c1 a1 b1 | c1 b1"),
    ("times range non strict optional 1",
     begin("start").where(c).followed_by("middle").where(a).times(1, 3).optional()
     .followed_by("end1").where(b),
     "c1@1 f1@2 b1@7", "c1 b1"),
    ("times range non strict optional 3",
     begin("start").where(c).followed_by_any("middle").where(a).times(2, 3).optional()
     .followed_by("end1").where(b),
     "c1@1 f1@2 a1@3 f2@4 a2@5 a3@6 b1@7", "c1 a1 a2 a3 b1 | c1 a1 a2 b1 | c1 a2 a3 b1 | c1 b1"),
    ("times range not strict with followed by",
     begin("start").where(c).followed_by("middle").where(a).times(2, 3).followed_by("end1")
     .where(b),
     "c1@1 a1@2 a2@4 a3@6 b1@7", "c1 a1 a2 a3 b1 | c1 a1 a2 b1"),
]  # fmt: skip

AT_LEAST = [
    ("times or more",
     begin("start").where(c).followed_by("middle").where(a).times_or_more(2).allow_combinations()
     .followed_by("end1").where(b),
     "c1@1 a1@2 a2@3 a3@4 b1@6", "c1 a1 a2 a3 b1 | c1 a1 a2 b1 | c1 a1 a3 b1"),
    ("times or more strict optional",
     begin("start").where(c).followed_by_any("middle").where(a).times_or_more(2).consecutive()
     .optional().followed_by("end1").where(b),
     "c1@1 f1@2 a1@3 f2@4 a2@5 a3@6 b1@7", "c1 a2 a3 b1 | c1 b1"),
    ("times or more strict optional 2",
     begin("start").where(c).next("middle").where(a).times_or_more(2).consecutive().optional()
     .followed_by("end1").where(b),
     "c1@1 a1@3 a2@5 a3@6 b1@7", "c1 a1 a2 a3 b1 | c1 a1 a2 b1 | c1 b1"),
    ("times or more non strict optional",
     begin("start").where(c).followed_by("middle").where(a).times_or_more(2).optional()
     .followed_by("end1").where(b),
     "c1@1 f1@2 b1@7", "c1 b1"),
    ("times or more non strict optional 3",
     begin("start").where(c).followed_by_any("middle").where(a).times_or_more(2).optional()
     .followed_by("end1").where(b),
     "c1@1 f1@2 a1@3 f2@4 a2@5 a3@6 b1@7", "c1 a1 a2 a3 b1 | c1 a1 a2 b1 | c1 a2 a3 b1 | c1 b1"),
    ("times or more not strict with followed by",
     begin("start").where(c).followed_by("middle").where(a).times_or_more(2).followed_by("end1")
     .where(b),
     "c1@1 a1@2 a2@4 a3@6 b1@7", "c1 a1 a2 a3 b1 | c1 a1 a2 b1"),
]  # fmt: skip

GREEDY = [
    ("greedy zero or more",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().optional().greedy()
     .followed_by("end").where(d),
     "c1@1 a1@2 a2@3 a3@4 d1@5", "c1 a1 a2 a3 d1"),
    ("greedy zero or more in between",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().optional().greedy()
     .followed_by("end").where(d),
     "c1@1 dummy1@2 a1@3 dummy2@4 a2@5 dummy3@6 a3@7 d1@8", "c1 a1 a2 a3 d1"),
    ("greedy zero or more with dummy events after quantifier",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().optional().greedy()
     .followed_by("end").where(d),
     "c1@1 a1@2 a2@3 dummy1@4 d1@5", "c1 a1 a2 d1"),
    ("greedy zero or more with dummy events before quantifier",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().optional().greedy()
     .followed_by("end").where(d),
     "c1@1 dummy1@2 d1@5", "c1 d1"),
    ("greedy until zero or more with dummy events after quantifier",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().optional().greedy()
     .until(price_above(3)).followed_by("end").where(d),
     "c1=1@1 a1=2@2 a2=3@3 a3=3@4 a4=4@5 d1=3@6", "c1 a1 a2 a3 d1"),
    ("greedy until with dummy events before quantifier",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().optional().greedy()
     .until(price_above(3)).followed_by("end").where(d),
     "c1=1@1 a1=4@2 a2=2@3 a3=3@4 a4=3@5 d1=3@6", "c1 d1"),
    ("greedy one or more",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().greedy()
     .followed_by("end").where(d),
     "c1@1 a1@2 a2@3 a3@4 d1@5", "c1 a1 a2 a3 d1"),
    ("greedy one or more in between",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().greedy()
     .followed_by("end").where(d),
     "c1@1 dummy1@2 a1@3 dummy2@4 a2@5 dummy3@6 a3@7 d1@8", "c1 a1 a2 a3 d1"),
    ("greedy one or more with dummy events after quantifier",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().greedy()
     .followed_by("end").where(d),
     "c1@1 a1@2 a2@3 dummy1@4 d1@5", "c1 a1 a2 d1"),
    ("greedy one or more with dummy events before quantifier",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().greedy()
     .followed_by("end").where(d),
     "c1@1 dummy1@2 d1@5", ""),
    ("greedy until one or more with dummy events after quantifier",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().greedy()
     .until(price_above(3)).followed_by("end").where(d),
     "c1=1@1 a1=2@2 a2=3@3 a3=3@4 a4=4@5 d1=3@6", "c1 a1 a2 a3 d1"),
    ("greedy until one or more with dummy events before quantifier",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().greedy()
     .until(price_above(3)).followed_by("end").where(d),
     "c1=1@1 a1=4@2 a2=2@3 a3=3@4 a4=3@5 d1=3@6", ""),
    ("greedy zero or more before group pattern",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().optional().greedy()
     .followed_by(begin("middle1").where(d).followed_by("middle2").where(e)).times(2)
     .followed_by("end").where(f),
     "c1@1 a1@2 a2@3 dummy1@4 a3@5 d1@6 e1@7 d2@8 e2@9 f1@10", "c1 a1 a2 a3 d1 e1 d2 e2 f1"),
    ("end with zero or more greedy",
     begin("start").where(c).followed_by("end").where(a).one_or_more().optional().greedy(),
     "c1@1 a1@2 a2@3 dummy1@4 a3@5", "c1 | c1 a1 | c1 a1 a2 | c1 a1 a2 a3"),
    ("end with zero or more consecutive greedy",
     begin("start").where(c).followed_by("end").where(a).one_or_more().optional().consecutive()
     .greedy(),
     "c1@1 a1@2 a2@3 dummy1@4 a3@5", "c1 | c1 a1 | c1 a1 a2"),
    ("end with greedy times range",
     begin("start").where(c).followed_by("end").where(a).times(2, 5).greedy(),
     "c1@1 a1@2 a2@3 a3@4 a4@5 dummy1@6", "c1 a1 a2 | c1 a1 a2 a3 | c1 a1 a2 a3 a4"),
    ("greedy times range",
     begin("start").where(c).followed_by("middle").where(a).times(2, 5).greedy()
     .followed_by("end").where(d),
     "c1@1 a1@2 a2@3 a3@4 a4@5 d1@6", "c1 a1 a2 a3 a4 d1"),
]  # fmt: skip
