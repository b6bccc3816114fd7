"""The operator that runs a pattern over keyed rows."""

from __future__ import annotations

import pytest
from nfa_rows import Item, a, b, items

from poundlock.errors import OperatorFailed, UsageError
from poundlock.stream.machine import Machine
from poundlock.stream.matching import MatchOperator, TimedOut
from poundlock.stream.nfa import Matcher
from poundlock.stream.operator import Event, Page
from poundlock.stream.pattern import begin
from poundlock.stream.rows import row_type
from poundlock.stream.times import END, Clock, Domain

PAIR = begin("s").where(a).followed_by("e").where(b).within("10 ms")


def joined(match, ctx):
    text = " ".join(row.label for rows in match.values() for row in rows)
    return (ctx.key.k, text, ctx.timestamp)


def operator(pattern=PAIR, **options):
    options = {"select": joined, "fields": ("k", "rows", "at")} | options
    return MatchOperator(pattern, columns=Item._fields, key_fields=("k",), **options)


def page(operator, data, text, watermark=-1, now=0, key=("k",)):
    events = {key: sorted(items(text), key=lambda event: event.time)} if text else {}
    return Page(operator, data, Clock(watermark, now)).run(events)


def test_rows_wait_for_the_watermark_and_are_matched_in_time_order():
    op = operator()
    first = page(op, None, "b1@5 a1@3")
    assert first.outputs == {} and first.due[Domain.EVENT] == 3
    second = page(op, first.data, "a2@4", watermark=2)
    third = page(op, second.data, "", watermark=5)
    assert third.outputs == {"main": [("k", "a1 b1", 5), ("k", "a2 b1", 5)]}
    assert third.data is None


def test_late_rows_go_to_their_own_output_or_are_counted():
    op = operator(late_output="late")
    assert op.outputs["late"] == Item._fields
    done = page(op, None, "a1@5 a2@6", watermark=5)
    assert done.outputs == {"late": [("a", 0.0, "a1")]}
    op = operator()
    done = page(op, None, "a1@4 a2@5", watermark=5)
    assert done.outputs == {} and done.data is None and op.late_dropped == 2


def test_timed_out_matches_go_to_their_own_output():
    op = operator(timed_out=TimedOut("partial", joined, ("k", "rows", "at")))
    first = page(op, None, "a1@3 a2@4 b1@12")
    done = page(op, first.data, "", watermark=12)
    assert done.outputs == {"main": [("k", "a1 b1", 12), ("k", "a2 b1", 12)]}
    first = page(op, None, "a1@3 a2@4")
    second = page(op, first.data, "", watermark=12)
    assert second.outputs == {} and second.due[Domain.EVENT] == 13
    third = page(op, second.data, "", watermark=13)
    assert third.outputs == {"partial": [("k", "a1", 13)]} and third.due[Domain.EVENT] == 14
    last = page(op, third.data, "", watermark=14)
    assert last.outputs == {"partial": [("k", "a2", 14)]} and last.data is None


def test_rows_are_matched_immediately_in_processing_time():
    op = operator(domain=Domain.PROCESSING, timed_out=("partial", joined, ("k", "rows", "at")))
    first = page(op, None, "a1 a2", now=100)
    assert first.due[Domain.PROCESSING] == 110
    second = page(op, first.data, "b1", now=109)
    assert second.outputs["main"] == [("k", "a1 b1", 109), ("k", "a2 b1", 109)]
    again = page(op, first.data, "b1", now=110)
    assert again.outputs == {"partial": [("k", "a1", 110), ("k", "a2", 110)]}


def test_a_match_can_produce_no_row_or_several():
    kinds = {
        "none": lambda match, ctx: None,
        "row": lambda match, ctx: {"x": match["s"][0].label},
        "rows": lambda match, ctx: [("one",), ("two",)],
        "flow": lambda match, ctx: ((row.label,) for rows in match.values() for row in rows),
    }
    given = {}
    for kind, select in kinds.items():
        op = operator(select=select, fields=("x",))
        first = page(op, None, "a1@1 b1@2")
        given[kind] = page(op, first.data, "", watermark=2).outputs.get("main", [])
    assert given == {
        "none": [],
        "row": [("a1",)],
        "rows": [("one",), ("two",)],
        "flow": [("a1",), ("b1",)],
    }


def test_a_match_without_select_is_emitted_as_its_rows():
    op = operator(select=None, fields=None)
    assert op.outputs == {"main": ("k", "match_start", "match_end", "s", "e")}
    first = page(op, None, "a1@1000 b1@1002")
    [(key, start, end, s, e)] = page(op, first.data, "", watermark=1002).outputs["main"]
    assert (key, s, e) == ("k", [("a", 0.0, "a1")], [("b", 0.0, "b1")])
    assert start.isoformat() == "1970-01-01T00:00:01+00:00" and (end - start).microseconds == 2000


def test_sql_conditions_are_read_from_columns_that_matches_do_not_show():
    pattern = begin("s").where("name = 'a'").followed_by("e").where("name = 'b'")
    pattern = pattern.where(lambda row: row.price > 1)
    columns = (*Item._fields, "_0", "_1")
    bound = pattern.bind({"name = 'a'": "_0", "name = 'b'": "_1"})
    op = MatchOperator(bound, columns=columns, late_output="late")
    assert op.outputs == {"main": ("match_start", "match_end", "s", "e"), "late": Item._fields}
    row = row_type(columns)
    rows = [
        Event(time, row((*event.row, event.row.name == "a", event.row.name == "b" or None)))
        for time, event in enumerate(items("b0=2 a1 b1=1 b2=2"), 1)
    ]
    first = Page(op, None, Clock(0)).run({(): rows})
    done = Page(op, first.data, Clock(4)).run({(): [Event(2, rows[0].row)]})
    assert done.outputs["main"][0][2:] == ([("a", 0.0, "a1")], [("b", 2.0, "b2")])
    assert done.outputs["late"] == [("b", 2.0, "b0")]
    with pytest.raises(UsageError, match="is in SQL: bind it"):
        MatchOperator(pattern, columns=columns)
    with pytest.raises(UsageError, match="there is no column '_0'"):
        MatchOperator(bound, columns=Item._fields)


def test_rows_can_consist_of_condition_columns_only():
    pattern = begin("s").where("a").followed_by("e").where("b").bind({"a": "_0", "b": "_1"})
    op = MatchOperator(pattern, columns=("_0", "_1"))
    row = row_type(("_0", "_1"))
    first = Page(op, None, Clock(0)).run({(): [Event(1, row((True, False)))]})
    second = Page(op, first.data, Clock(1)).run({(): [Event(2, row((False, True)))]})
    last = Page(op, second.data, Clock(2)).run({})
    assert [found[2:] for found in last.outputs["main"]] == [([()], [()])]


def test_keys_are_matched_separately():
    op = operator()
    rows = {
        (k,): items(text) for k, text in (("x", "a1@1"), ("y", "b1@2 a2@3"), ("z", "a3@1 b2@2"))
    }
    first = Page(op, None, Clock(0)).run(rows)
    assert Page(op, first.data, Clock(5)).run({}).outputs["main"] == [("z", "a3 b2", 2)]


@pytest.mark.timeout(10)
@pytest.mark.parametrize("pattern", [begin("s").where(a), begin("s").where(a).within("5 ms")])
def test_the_final_watermark_ends_a_stream(pattern):
    pattern = pattern.followed_by("e").where(b)
    op = operator(pattern)
    first = page(op, None, "a1@1 b1@2 a2@3")
    last = page(op, first.data, "", watermark=END)
    assert last.outputs["main"] == [("k", "a1 b1", 2)]
    machine = Machine(pattern, Item._fields, timed_out=True)
    matcher = Matcher(machine)
    matcher.feed([3], [items("a2@3")[0].row])
    matcher.advance(END)
    assert len(matcher.timed_out) == (1 if pattern.length else 0)


def test_a_condition_that_fails_names_the_operator():
    op = operator(begin("s").where(lambda row: row.nothing), name="pairs")
    first = page(op, None, "a1@1")
    with pytest.raises(OperatorFailed, match=r"'pairs' failed: NoColumn: .*no column 'nothing'"):
        page(op, first.data, "", watermark=1)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda: operator("s"), "start one with begin"),
        (lambda: operator(fields=None), "select= needs fields="),
        (
            lambda: operator(begin("s"), timed_out=("x", joined, ("k",))),
            "needs a time limit, and the pattern has none",
        ),
        (
            lambda: operator(late_output="x", domain=Domain.PROCESSING),
            "late_output= needs event time",
        ),
        (lambda: operator(late_output="main"), "'main' needs a name of its own"),
        (lambda: operator(fields=("k", "k")), "same name"),
        (lambda: operator(begin("s").not_followed_by("e")), "say until when"),
    ],
)
def test_wrong_use_is_rejected(wrong, reason):
    with pytest.raises(UsageError, match=reason):
        wrong()
