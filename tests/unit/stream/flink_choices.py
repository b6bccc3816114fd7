"""Patterns of until, not, skips and groups, with the matches that Flink's own tests expect."""

from __future__ import annotations

from nfa_rows import a, b, c, d, e, has, price_is

from poundlock.stream.pattern import (
    begin,
    no_skip,
    skip_past_last_event,
    skip_to_first,
    skip_to_last,
    skip_to_next,
)

# Name, pattern, rows, matches: the outcomes that Flink's tests of the same name expect.
UNTIL = [
    ("until condition followed by one or more",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().until(price_is(5))
     .followed_by("end").where(price_is(5)),
     "c1=1@1 a1=2@3 a2=3@4 a3=5@6 a4=6@7", "c1 a1 a2 a3 | c1 a1 a3"),
    ("until condition followed by one or more combinations",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().allow_combinations()
     .until(price_is(5)).followed_by("end").where(price_is(5)),
     "c1=1@1 a1=2@3 a2=3@4 a3=4@5 a4=5@6 a5=6@7",
     "c1 a1 a2 a3 a4 | c1 a1 a2 a4 | c1 a1 a3 a4 | c1 a1 a4"),
    ("until condition followed by one or more consecutive",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().consecutive()
     .until(price_is(5)).followed_by("end").where(price_is(5)),
     "c1=1@1 a1=2@3 a2=3@4 a3=5@7 a4=6@8", "c1 a1 a2 a3 | c1 a1 a3"),
    ("until condition followed by one or more consecutive 2",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().consecutive()
     .until(price_is(5)).followed_by("end").where(price_is(5)),
     "c1=1@1 a1=2@3 b1=3@4 a2=4@5 a3=5@7 a4=6@8", "c1 a1 a3"),
    ("until condition followed by zero or more",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().optional()
     .until(price_is(5)).followed_by("end").where(price_is(5)),
     "c1=1@1 a1=2@3 a2=3@4 a3=5@6 a4=6@7", "c1 a1 a2 a3 | c1 a1 a3 | c1 a3"),
    ("until condition followed by zero or more combinations",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().optional()
     .allow_combinations().until(price_is(5)).followed_by("end").where(price_is(5)),
     "c1=1@1 a1=2@3 a2=3@4 a3=4@5 a4=5@6 a5=6@7",
     "c1 a1 a2 a3 a4 | c1 a1 a2 a4 | c1 a1 a3 a4 | c1 a1 a4 | c1 a4"),
    ("until condition followed by zero or more consecutive",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().optional()
     .consecutive().until(price_is(5)).followed_by("end").where(price_is(5)),
     "c1=1@1 a1=2@3 a2=3@4 a3=5@7 a4=6@8", "c1 a1 a2 a3 | c1 a1 a3 | c1 a3"),
    ("until condition followed by any one or more",
     begin("start").where(c).followed_by_any("middle").where(a).one_or_more().until(price_is(5)),
     "c1=1@1 a1=2@3 a2=3@4 a3=5@6 a4=6@7", "c1 a1 a2 | c1 a1 | c1 a2 | c1 a4"),
    ("until condition followed by any zero or more",
     begin("start").where(c).followed_by_any("middle").where(a).one_or_more().optional()
     .until(price_is(5)),
     "c1=1@1 a1=2@3 a2=3@4 a3=5@6 a4=6@7", "c1 a1 a2 | c1 a1 | c1 a2 | c1 a4 | c1"),
    ("until condition with empty where",
     begin("start").where(c).followed_by("middle").one_or_more().until(price_is(5)),
     "c1=1@1 a1=2@3 a2=3@4 d1=1@5 a3=5@6 a4=6@7", "c1 a1 a2 d1 | c1 a1 a2 | c1 a1"),
]  # fmt: skip

NEGATIVE = [
    ("not next",
     begin("start").where(a).not_next("notPattern").where(b).followed_by_any("middle").where(c)
     .followed_by("end").where(d),
     "a1@1 c1@2 b1@3 c2@4 d1@5", "a1 c1 d1 | a1 c2 d1"),
    ("not next no matches",
     begin("start").where(a).not_next("notPattern").where(b).followed_by("middle").where(c)
     .followed_by("end").where(d),
     "a1@1 b1@2 c1@3 c2@4 d1@5", ""),
    ("not next no matches at the end",
     begin("start").where(a).followed_by_any("middle").where(c).followed_by_any("end").where(d)
     .not_next("notPattern").where(b),
     "a1@1 c1@2 c2@3 d1@4 b1@5", ""),
    ("not followed by",
     begin("start").where(a).not_followed_by("notPattern").where(b).followed_by_any("middle")
     .where(c).followed_by("end").where(d),
     "a1@1 c1@2 b1@3 c2@4 d1@5", "a1 c1 d1"),
    ("not followed by before optional",
     begin("start").where(a).not_followed_by("notPattern").where(b).followed_by_any("middle")
     .where(c).optional().followed_by("end").where(d),
     "a1@1 c1@2 b1@3 c2@4 d1@5", "a1 c1 d1"),
    ("times with not followed by",
     begin("start").where(a).followed_by_any("middle").where(b).times(2)
     .not_followed_by("notPattern").where(c).followed_by("end").where(d),
     "a1@1 b1@2 c1@3 b2@4 d1@5", ""),
    ("ignore state of times with not followed by",
     begin("start").where(a).not_followed_by("notPattern").where(b).followed_by_any("middle")
     .where(c).times(2).optional().followed_by("end").where(d),
     "a1@1 d1@2 e1@1 b1@3 c1@2 c2@4 d2@5", "a1 d1"),
    ("times with not followed by after",
     begin("start").where(a).followed_by_any("middle").where(b).times(2)
     .not_followed_by("notPattern").where(c).followed_by("end").where(d),
     "a1@1 d1@2 e1@1 b1@3 b2@3 c1@2 d2@5", ""),
    ("not followed by before optional at the end",
     begin("start").where(a).not_followed_by("notPattern").where(b).followed_by_any("end")
     .where(c).optional(),
     "a1@1 c1@2 b1@3 c2@4", "a1 c1 | a1"),
    ("not followed by before optional times",
     begin("start").where(a).not_followed_by("notPattern").where(b).followed_by_any("middle")
     .where(c).times(2).optional().followed_by("end").where(d),
     "a1@1 c1@2 b1@3 c2@4 d1@5", "a1 c1 c2 d1"),
    ("not followed by with branching at start",
     begin("start").where(a).not_followed_by("notPattern").where(b).followed_by("middle")
     .where(c).followed_by("end").where(d),
     "a1@1 b1@2 c1@3 a2@4 c2@5 d1@6", "a2 c2 d1"),
    ("not follow by before times within",
     begin("a").where(a).not_followed_by("b").where(b).followed_by("c").where(c).times(0, 2)
     .within("3 ms"),
     "a1@1 b1@2 a2@10 c1@11 c2@12 a3@20 c3@21 c4@24", "a1 | a2 | a2 c1 | a2 c1 c2 | a3 | a3 c3"),
    ("not followed by within at end after match",
     begin("a", skip_past_last_event()).where(a).one_or_more().allow_combinations()
     .followed_by("c").where(c).not_followed_by("b").where(b).within("5 ms"),
     "a1@1 a2@2 a3@3 c1@4 c2@10", "a1 a2 a3 c1"),
]  # fmt: skip

SKIPS = [
    ("no skip",
     begin("start", no_skip()).where(a).times(3),
     "a1 a2 a3 a4 a5 a6", "a1 a2 a3 | a2 a3 a4 | a3 a4 a5 | a4 a5 a6"),
    ("no skip with followed by any",
     begin("start", no_skip()).where(a).followed_by_any("end").where(b),
     "a1 b1 a2 b2", "a1 b1 | a1 b2 | a2 b2"),
    ("skip to next with followed by any",
     begin("start", skip_to_next()).where(a).followed_by_any("end").where(b),
     "a1 b1 a2 b2", "a1 b1 | a2 b2"),
    ("no skip with quantifier at the end",
     begin("start", no_skip()).where(a).next("end").where(b).one_or_more(),
     "a1 b1 b2 b3", "a1 b1 b2 b3 | a1 b1 b2 | a1 b1"),
    ("skip to next with quantifier at the end",
     begin("start", skip_to_next()).where(a).next("end").where(b).one_or_more(),
     "a1 b1 b2 b3", "a1 b1"),
    ("skip past last",
     begin("start", skip_past_last_event()).where(a).times(3),
     "a1 a2 a3 a4 a5 a6", "a1 a2 a3 | a4 a5 a6"),
    ("skip to first",
     begin("start", skip_to_first("end")).where(has("a")).times(2).next("end").where(has("b"))
     .times(2),
     "ab1 ab2 ab3 ab4 ab5 ab6", "ab1 ab2 ab3 ab4 | ab3 ab4 ab5 ab6"),
    ("skip to last",
     begin("start", skip_to_last("end")).where(has("a")).times(2).next("end").where(has("b"))
     .times(2),
     "ab1 ab2 ab3 ab4 ab5 ab6 ab7", "ab1 ab2 ab3 ab4 | ab4 ab5 ab6 ab7"),
    ("skip past last 2",
     begin("a", skip_past_last_event()).where(has("a")).followed_by_any("b").where(has("b"))
     .followed_by_any("c").where(has("c")).followed_by("d").where(has("d")),
     "a1 a2 b1 b2 c1 c2 d1 d2", "a1 b1 c1 d1"),
    ("skip past last 3",
     begin("a", skip_past_last_event()).where(has("a")).next("b").where(has("b")),
     "a1 c1 a2 b1", "a2 b1"),
    ("skip to first with optional match",
     begin("x", skip_to_first("b")).where(has("x")).one_or_more().optional().next("b")
     .where(has("b")).next("c").where(has("c")),
     "ab1 c1 ab2 c2", "ab1 c1 | ab2 c2"),
    ("skip to first at start position",
     begin("b", skip_to_first("b")).where(has("b")).next("c").where(has("c")),
     "ab1 c1 ab2 c2", "ab1 c1 | ab2 c2"),
    ("skip to first with one or more",
     begin("a", skip_to_first("b")).where(has("a")).next("b").where(has("b")).one_or_more()
     .consecutive(),
     "a1 b1 a2 b2 b3 a3 b4", "a1 b1 | a2 b2 | a3 b4"),
    ("skip to first non existent position without exception",
     begin("a", skip_to_first("b")).where(has("a")).next("b").where(has("b")).one_or_more()
     .optional().consecutive().next("c").where(has("c")),
     "a1 c1", "a1 c1"),
    ("skip to last with one or more",
     begin("a", skip_to_last("b")).where(has("a")).next("b").where(has("b")).one_or_more()
     .consecutive(),
     "a1 b1 a2 b2 b3 a3 b4", "a1 b1 | a2 b2 | a3 b4"),
    ("skip past last with one or more at beginning",
     begin("a", skip_past_last_event()).where(has("a")).one_or_more().consecutive().greedy()
     .next("b").where(has("b")),
     "a1 a2 a3 b1", "a1 a2 a3 b1"),
    ("skip to last with one or more at beginning",
     begin("a", skip_to_last("a")).where(has("a")).one_or_more().consecutive().greedy().next("b")
     .where(has("b")),
     "a1 a2 a3 b1", "a1 a2 a3 b1 | a3 b1"),
    ("skip to first with one or more at beginning",
     begin("a", skip_to_first("a")).where(has("a")).one_or_more().consecutive().greedy()
     .next("b").where(has("b")),
     "a1 a2 a3 b1", "a1 a2 a3 b1 | a2 a3 b1 | a3 b1"),
    ("no skip with one or more at beginning",
     begin("a", no_skip()).where(has("a")).one_or_more().consecutive().greedy().next("b")
     .where(has("b")),
     "a1 a2 a3 b1", "a1 a2 a3 b1 | a2 a3 b1 | a3 b1"),
    ("skip to first discarding",
     begin("a or c", skip_to_first("c*")).where(has("a", "c")).followed_by("b or c")
     .where(has("b", "c")).followed_by("c*").where(has("c")).one_or_more().greedy()
     .followed_by("d").where(has("d")),
     "a1 b1 c1 c2 c3 d1", "a1 b1 c1 c2 c3 d1 | c1 c2 c3 d1"),
]  # fmt: skip

GROUPS = [
    ("group followed by times",
     begin("start").where(c)
     .followed_by(begin("middle1").where(a).followed_by("middle2").where(b)).times(2)
     .followed_by("end").where(d),
     "c1@1 a1@2 b1@3 a2@4 b2@5 d1@6", "c1 a1 b1 a2 b2 d1"),
    ("group followed by optional",
     begin("start").where(c)
     .followed_by(begin("middle1").where(a).followed_by("middle2").where(b)).optional()
     .followed_by("end").where(d),
     "c1@1 a1@2 a2@3 b1@4 d1@5", "c1 d1 | c1 a1 b1 d1"),
    ("followed by group times optional",
     begin("start").where(c)
     .followed_by(begin("middle1").where(a).followed_by("middle2").where(b)).times(2).optional()
     .followed_by("end").where(d),
     "c1@1 a1@2 d1@3", "c1 d1"),
    ("group followed by one or more",
     begin("start").where(c)
     .followed_by(begin("middle1").where(a).followed_by("middle2").where(b)).one_or_more()
     .followed_by("end").where(d),
     "c1@1 a1@2 b1@3 a2@4 b2@5 d1@6", "c1 a1 b1 d1 | c1 a1 b1 a2 b2 d1"),
    ("group followed by zero or more",
     begin("start").where(c)
     .followed_by(begin("middle1").where(a).followed_by("middle2").where(b)).one_or_more()
     .optional().followed_by("end").where(d),
     "c1@1 a1@2 b1@3 a2@4 b2@5 d1@6", "c1 d1 | c1 a1 b1 d1 | c1 a1 b1 a2 b2 d1"),
    ("group followed by any times combinations",
     begin("start").where(c)
     .followed_by_any(begin("middle1").where(a).followed_by("middle2").where(b)).times(2)
     .allow_combinations().followed_by("end").where(d),
     "c1@1 a1@2 b1@3 a2@4 b2@5 a3@6 b3@7 d1@8",
     "c1 a1 b1 a2 b2 d1 | c1 a1 b1 a3 b3 d1 | c1 a2 b2 a3 b3 d1"),
    ("group followed by any times optional",
     begin("start").where(c)
     .followed_by_any(begin("middle1").where(a).followed_by("middle2").where(b)).times(2)
     .optional().followed_by("end").where(d),
     "c1@1 a1@2 b1@3 a2@4 b2@5 a3@6 b3@7 d1@8", "c1 d1 | c1 a1 b1 a2 b2 d1 | c1 a2 b2 a3 b3 d1"),
    ("group followed by any one or more",
     begin("start").where(c)
     .followed_by_any(begin("middle1").where(a).followed_by("middle2").where(b)).one_or_more()
     .followed_by("end").where(d),
     "c1@1 a1@2 b1@3 a2@4 b2@5 a3@6 b3@7 d1@8",
     "c1 a1 b1 d1 | c1 a2 b2 d1 | c1 a3 b3 d1 | c1 a1 b1 a2 b2 d1 | c1 a2 b2 a3 b3 d1 | c1 a1 "
     "b1 a2 b2 a3 b3 d1"),
    ("group not followed by",
     begin("start").where(c)
     .followed_by_any(begin("middle1").where(a).followed_by("middle2").where(b))
     .not_followed_by("notPattern").where(d).followed_by("end").where(e),
     "c1@1 a1@2 b1@3 d1@4 a2@5 b2@6 e1@7", "c1 a2 b2 e1"),
    ("group not next",
     begin("start").where(c)
     .followed_by_any(begin("middle1").where(a).followed_by("middle2").where(b))
     .not_next("notPattern").where(d).followed_by("end").where(e),
     "c1@1 a1@2 b1@3 d1@4 a2@5 b2@6 e1@7", "c1 a2 b2 e1"),
    ("group nest",
     begin("start").where(d)
     .followed_by(begin("middle1").where(a).followed_by(
         begin("middle2").where(b).followed_by("middle3").where(c)).one_or_more().optional())
     .optional().followed_by("end").where(e),
     "d1@1 a1@2 b1@3 c1@4 b2@5 c2@6 e1@7",
     "d1 e1 | d1 a1 e1 | d1 a1 b1 c1 e1 | d1 a1 b1 c1 b2 c2 e1"),
    ("group nest times",
     begin("start").where(d)
     .followed_by_any(begin("middle1").where(a).followed_by(
         begin("middle2").where(b).followed_by("middle3").where(c)).times(3))
     .times(0, 2).followed_by("end").where(e),
     "d1@1 a1@2 b1@3 c1@4 b2@5 c2@6 b3@7 c3@8 a2@9 b4@10 c4@11 b5@12 c5@13 b6@14 c6@15 e1@16",
     "d1 e1 | d1 a1 b1 c1 b2 c2 b3 c3 e1 | d1 a2 b4 c4 b5 c5 b6 c6 e1 | d1 a1 b1 c1 b2 c2 b3 "
     "c3 a2 b4 c4 b5 c5 b6 c6 e1"),
    ("group nest times consecutive",
     begin("start").where(d)
     .followed_by_any(begin("middle1").where(a).followed_by(
         begin("middle2").where(b).followed_by("middle3").where(c)).times(3).consecutive())
     .times(0, 2).consecutive().followed_by("end").where(e),
     "d1@1 a1@2 b1@3 c1@4 b2@5 c2@6 b3@7 c3@8 a2@9 b4@10 c4@11 "
     "breaking1@12 b5@13 c5@14 b6@15 c6@16 e1@17",
     "d1 e1 | d1 a1 b1 c1 b2 c2 b3 c3 e1"),
    ("group begin",
     begin(begin("middle1").where(a).followed_by("middle2").where(b)).times(1, 2)
     .followed_by("end").where(d),
     "a1@1 b1@2 a2@3 b2@4 d1@5", "a1 b1 d1 | a2 b2 d1 | a1 b1 a2 b2 d1"),
    ("group followed by one or more with until condition",
     begin("start").where(c)
     .followed_by(begin("middle1").where(a).followed_by("middle2").where(b)).one_or_more()
     .until(d).followed_by("end").where(d),
     "c1@1 a1@2 b1@3 a2@4 b2@5 d1@6", "c1 a1 b1 d1 | c1 a1 b1 a2 b2 d1"),
    ("group starts with optional pattern",
     begin("start").where(a).next(begin("middle1").where(b).optional().next("middle2").where(c))
     .next("d").where(d),
     "a1@1 c1@2 d1@3", "a1 c1 d1"),
    ("followed by optional group pattern",
     begin("start").where(a).followed_by(begin("middle1").where(b).next("middle2").where(c))
     .optional().next("d").where(d),
     "a1@1 d1@2 d2@3", "a1 d1"),
]  # fmt: skip

SAME_TIME = [
    ("eager zero or more same element",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().optional()
     .followed_by("end1").where(b),
     "c1@1 a1@3 a1@3 a1@3 a2@4 d1@5 a3@6 a3@6 b1@7",
     "c1 a1 a1 a1 a2 a3 a3 b1 | c1 a1 a1 a1 a2 a3 b1 | c1 a1 a1 a1 a2 b1 | c1 a1 a1 a1 b1 | c1 "
     "a1 a1 b1 | c1 a1 b1 | c1 b1"),
    ("clearing buffer",
     begin("a").where(a).followed_by("b").where(b).followed_by("c").where(c).followed_by("d")
     .where(d),
     "a1@1 b1@2 c1@2 d1@2", "a1 b1 c1 d1"),
    ("simple pattern wsame element",
     begin("start").where(c).followed_by_any("middle").where(a).followed_by("end1").where(b),
     "c1@1 a1@3 a1@3 b1@7", "c1 a1 b1 | c1 a1 b1"),
    ("end wlooping wsame element",
     begin("start").where(c).followed_by_any("middle").where(a).one_or_more().optional(),
     "c1@1 a1@3 a2@3 a3@3 b1@7",
     "c1 | c1 a1 | c1 a2 | c1 a3 | c1 a1 a2 | c1 a2 a3 | c1 a1 a2 a3"),
    ("repeating pattern wsame element",
     begin("start").where(c).followed_by("middle1").where(a).one_or_more().optional()
     .followed_by("middle2").where(b).optional().followed_by("end").where(a),
     "c1@1 a1@3 a1@3 a2@3 d1@5 b1@6 a3@7",
     "c1 a1 | c1 a1 a1 | c1 b1 a3 | c1 a1 a1 a2 | c1 a1 b1 a3 | c1 a1 a1 a2 a3 | c1 a1 a1 b1 "
     "a3 | c1 a1 a1 a2 b1 a3"),
]  # fmt: skip
