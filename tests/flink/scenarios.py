"""The input of both Flink and our operators: rows, watermarks, and an operator, all as plain data.

    {"name": "...", "operator": {"kind": "window", ...}, "events": [
        ["row", key, time, value], ["watermark", time], ...]}

Times are in milliseconds. The final watermark follows the last event on both sides.
"""
# ruff: noqa: E501 (the scenarios are tables)

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

Scenario = dict[str, Any]


def events(text: str, key: str = "a") -> list[list[Any]]:
    """Read "1@5 b:2@7 |9": 1 of key a at 5, 2 of key b at 7, then the watermark 9.

    A value may be a number, a letter with a number, or words with "_" for a blank.
    """
    found: list[list[Any]] = []
    for word in text.split():
        if word.startswith("|"):
            found.append(["watermark", int(word[1:])])
            continue
        rest, _, time = word.partition("@")
        name, _, value = rest.rpartition(":")
        value = value.replace("_", " ")
        found.append(
            ["row", name or key, int(time), int(value) if value.lstrip("-").isdigit() else value]
        )
    return found


def window(name: str, windows: dict[str, Any], text: str, **more: Any) -> Scenario:
    operator = {"kind": "window", "windows": windows, "result": "rows", **more}
    return {"name": name, "operator": operator, "events": events(text)}


def tumbling(size: int, offset: int = 0) -> dict[str, Any]:
    return {"kind": "tumbling", "size": size, "offset": offset}


def sliding(size: int, slide: int, offset: int = 0) -> dict[str, Any]:
    return {"kind": "sliding", "size": size, "slide": slide, "offset": offset}


def session(gap: int) -> dict[str, Any]:
    return {"kind": "session", "gap": gap}


def count(size: int, slide: int | None = None) -> dict[str, Any]:
    return {"kind": "count", "size": size, **({} if slide is None else {"slide": slide})}


GLOBAL = {"kind": "global"}
LATE = {"late": True}
EVENT = {"kind": "event"}
LONG = " ".join(f"{n}@{n}" for n in range(1, 26))


def by_count(size: int) -> dict[str, Any]:
    return {"kind": "count", "size": size}


def continuous(interval: int) -> dict[str, Any]:
    return {"kind": "continuous", "interval": interval}


def purging(inner: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "purging", "inner": inner}


TWO_KEYS = "1@1 b:2@3 3@9 b:4@10 |8 5@4 |9 b:6@12 7@19 |19 8@25"
SOME_LATE = "1@1 2@9 |9 3@5 4@8 |14 5@2 |15 6@3 7@11 |40 8@12 9@41"


def windows() -> list[Scenario]:
    return [*plain_windows(), *triggered_windows(), *evicting_windows()]


def plain_windows() -> list[Scenario]:
    """Return windows of time and of rows, with lateness and with rows that are too late."""
    return [
        window("tumbling", tumbling(10), TWO_KEYS),
        window("tumbling, aggregate", tumbling(10), TWO_KEYS, result="aggregate"),
        window("tumbling, edges", tumbling(10), "1@0 2@9 3@10 4@-1 5@-10 |-2 |-1 |8 |9 |10 |18 |19"),
        window("tumbling, offset 3", tumbling(10, 3), "1@2 2@3 3@12 4@13 |2 |12 |22"),
        window("tumbling, offset -3", tumbling(10, -3), "1@6 2@7 3@16 4@17 5@-4 |6 |16"),
        window("tumbling, late rows dropped", tumbling(10), SOME_LATE),
        window("tumbling, late rows aside", tumbling(10), SOME_LATE, **LATE),
        window("tumbling, lateness 6", tumbling(10), SOME_LATE, lateness=6, **LATE),
        window("tumbling, lateness 6, aggregate", tumbling(10), SOME_LATE, lateness=6, result="aggregate"),
        window("tumbling, lateness, only a late row", tumbling(10), "|12 1@5 |15 2@5", lateness=6, **LATE),
        window("tumbling, states of window and key", tumbling(10), SOME_LATE, lateness=6, result="states"),
        window("sliding", sliding(10, 5), TWO_KEYS),
        window("sliding, aggregate", sliding(10, 5), TWO_KEYS, result="aggregate"),
        window("sliding, size no multiple", sliding(7, 3), "1@0 2@6 3@7 4@-1 |5 5@8 |8 |100"),
        window("sliding, holes", sliding(2, 5), "1@0 2@1 3@2 4@4 5@5 6@7 |6 7@3 8@6 9@9", **LATE),
        window("sliding, offset", sliding(10, 5, 2), "1@1 2@2 3@7 4@11 5@12 |6 |11"),
        window("sliding, late for some windows", sliding(10, 5), "1@1 2@8 |9 3@8 4@3 |14 5@8", **LATE),
        window("sliding, lateness 7", sliding(10, 5), "1@1 2@8 |9 3@8 4@3 |14 5@8 |16 6@9 7@4", lateness=7, **LATE),
        window("sliding, lateness, states", sliding(10, 5), SOME_LATE, lateness=7, result="states"),
        window("session", session(10), "1@0 2@5 b:3@7 4@30 |14 5@26 |16 |39 b:6@40 |50"),
        window("session, touching", session(10), "1@0 2@10 3@21 4@31 |100"),
        window("session, a row bridges two", session(10), "1@0 2@18 |5 3@9 |27 |28"),
        window("session, aggregate, bridge", session(10), "1@0 2@18 |5 3@9 |27 |28", result="aggregate"),
        window("session, late rows", session(10), "1@0 2@5 |14 3@1 4@5 5@15 |30 6@6", **LATE),
        window("session, lateness, late row extends", session(10), "1@0 |10 2@3 |12 3@4 |14 4@9 |40", lateness=10, **LATE),
        window("session, late row bridges two in lateness", session(10), "1@0 2@18 |10 3@9 |40 4@20", lateness=20, **LATE),
        window("session, late row bridges two that fired", session(10), "1@0 2@18 |28 3@9 |40 4@20", lateness=20, **LATE),
        window("session, late row saved by a session", session(10), "1@20 |25 2@12 3@5 4@0", **LATE),
        window("session, three become one", session(5), "1@0 2@8 3@16 |4 4@4 |6 5@12 |30", lateness=3, **LATE),
        window("session, own gaps", {"kind": "own gaps"}, "5@0 9@3 2@4 |7 4@11 |11 30@12 1@20 3@41 |42 2@46"),
        window("count 5", count(5), LONG),
        window("count 5, two keys", count(5), "1@1 b:2@1 3@2 b:4@2 5@3 6@4 7@5 b:8@1 b:9@1 b:10@9 11@6"),
        window("count 10, 2", count(10, 2), LONG),
        window("count 3, 5", count(3, 5), LONG),
        window("count 5, aggregate", count(5), LONG, result="aggregate"),
        window("count 10, 2, aggregate", count(10, 2), LONG, result="aggregate"),
        window("count 4, out of order", count(4), "1@9 2@5 |8 3@1 4@30 |31 5@2 6@2 7@2 8@2"),
    ]  # fmt: skip


def triggered_windows() -> list[Scenario]:
    """Return windows with triggers other than their own."""
    return [
        window("global, trigger by count", GLOBAL, LONG, trigger=by_count(4)),
        window("global, purging by count", GLOBAL, LONG, trigger=purging(by_count(4))),
        window("global, delta", GLOBAL, "1@1 3@2 6@3 7@4 12@5 11@6 18@7", trigger={"kind": "delta", "threshold": 4}),
        window("tumbling, trigger by count", tumbling(10), LONG + " |9 26@5 |30", trigger=by_count(3)),
        window("tumbling, purging by count", tumbling(10), LONG + " |9 26@5 |30", trigger=purging(by_count(3))),
        window("tumbling, purging at the end", tumbling(10), SOME_LATE, trigger=purging(EVENT), lateness=6, **LATE),
        window("tumbling, purging, states", tumbling(10), SOME_LATE, trigger=purging(EVENT), lateness=6, result="states"),
        window("tumbling, continuous", tumbling(10), "1@1 |2 2@4 |3 |5 3@6 |8 |9 4@12 |25", trigger=continuous(3)),
        window("tumbling, continuous, jump", tumbling(20), "1@1 2@7 |13 3@15 |40", trigger=continuous(4)),
        window("tumbling, purging continuous", tumbling(10), "1@1 |2 2@4 |3 |5 3@6 |8 |9 4@12 |25", trigger=purging(continuous(3))),
        window("tumbling, continuous, lateness", tumbling(10), "1@1 |4 2@6 |9 3@4 |12 4@5 |40", trigger=continuous(3), lateness=5, **LATE),
        window("sliding, continuous", sliding(10, 5), "1@1 |2 2@4 |3 |5 3@6 |8 |9 4@12 |25", trigger=continuous(3)),
        window("session, trigger by count", session(10), "1@0 2@18 |5 3@9 4@10 5@11 |40 6@50", trigger=by_count(2)),
        window("session, purging by count", session(10), "1@0 2@18 |5 3@9 4@10 5@11 |40 6@50", trigger=purging(by_count(2))),
        window("session, purging at the end", session(10), "1@0 |9 2@8 |12 3@18 |40", trigger=purging(EVENT), lateness=9, **LATE),
        window("session, continuous", session(10), "1@0 |4 2@18 |5 3@9 |13 |20 |40", trigger=continuous(6)),
    ]  # fmt: skip


def evicting_windows() -> list[Scenario]:
    """Return windows with evictors."""
    return [
        window("tumbling, evict by count", tumbling(10), SOME_LATE, evictor=by_count(2), lateness=6, **LATE),
        window("tumbling, evict by count after", tumbling(10), SOME_LATE, evictor={**by_count(1), "after": True}, lateness=6),
        window("tumbling, evict by time", tumbling(20), "1@1 2@9 3@14 4@12 5@4 |19", evictor={"kind": "time", "size": 5}),
        window("tumbling, evict by time after", tumbling(20), "1@1 2@9 3@14 |19 4@18 |21 5@3", evictor={"kind": "time", "size": 5, "after": True}, lateness=9),
        window("tumbling, evict by delta", tumbling(10), "1@1 5@2 9@3 6@4 |9", evictor={"kind": "delta", "threshold": 3}),
        window("tumbling, evict by delta after", tumbling(10), "1@1 5@2 9@3 6@4 |9 7@5", evictor={"kind": "delta", "threshold": 3, "after": True}, lateness=4),
        window("sliding, evict by count, aggregate", sliding(10, 5), TWO_KEYS, evictor=by_count(1), result="aggregate"),
        window("global, by count, evict by time", GLOBAL, LONG, trigger=by_count(4), evictor={"kind": "time", "size": 6}),
        window("session, evict by count", session(10), "1@0 2@5 3@9 |30 4@40 |60", evictor=by_count(2)),
    ]  # fmt: skip


def process(name: str, text: str) -> Scenario:
    return {"name": name, "operator": {"kind": "process"}, "events": events(text)}


def processes() -> list[Scenario]:
    """Timers of event time: set, set twice, deleted, set again by themselves; state; a side output."""
    return [
        process("timers", "set_10@0 |5 set_10@6 |9 |10 |15 |16"),
        process("a timer set twice is one", "set_10@0 set_9@1 |10"),
        process("a deleted timer", "set_10@0 set_20@0 delete_10@0 |30"),
        process("a timer that is not there is deleted", "delete_10@0 set_10@0 |9 |10 delete_10@0"),
        process("a timer that sets the next", "again_10@0 |10 count@15 |20 |50"),
        process("a timer that sets the next, in one jump", "again_10@0 set_15@0 |100 count@101"),
        process(
            "several keys",
            "set_10@0 b:set_5@0 c:again_7@0 b:count@2 |8 c:delete_17@0 |11 b:set_3@12 |40",
        ),
        process("a late row", "set_10@10 |15 set_10@7 |16 count@3 |20"),
    ]


def already_due() -> list[Scenario]:
    """Timers that are due when they are set, by a function and by a trigger: see the README."""
    return [
        process("timer before the watermark", "count@1 |20 set_5@10 set_30@10 |21 |50"),
        window(
            "continuous, row behind the watermark",
            tumbling(20),
            "|9 1@2 2@3 |12 |40",
            trigger=continuous(4),
        ),
    ]


def join(name: str, lower: int, upper: int, text: str, **more: bool) -> Scenario:
    """Of keys "l" and "r" make the two inputs of the key a."""
    rows = [
        [*event[:1], "a", *event[2:], "lr".index(event[1])] if event[0] == "row" else event
        for event in events(text)
    ]
    operator = {"kind": "join", "lower": lower, "upper": upper, **more}
    return {"name": name, "operator": operator, "events": rows}


def joins() -> list[Scenario]:
    """Rows of two inputs that are close in time. No row is late, as Flink does not order the inputs."""
    text = "l:1@10 r:2@8 r:3@7 r:4@15 r:5@16 |6 l:6@9 r:7@12 |11 l:8@13 r:9@20 |15 l:10@20 r:11@18 |30 l:12@31"
    return [
        join("join, both bounds", -2, 5, text),
        join("join, lower exclusive", -2, 5, text, lower_exclusive=True),
        join("join, upper exclusive", -2, 5, text, upper_exclusive=True),
        join("join, right after left", 1, 6, text),
        join("join, right before left", -6, -1, text),
        join("join, same time", 0, 0, text),
    ]


def stage(name: str, letters: str, how: str = "next", **more: Any) -> dict[str, Any]:
    return {"name": name, "is": letters, "how": how, **more}


def match(name: str, stages: list[dict[str, Any]], text: str, **more: Any) -> Scenario:
    return {
        "name": name,
        "operator": {"kind": "match", "stages": stages, **more},
        "events": events(text),
    }


def letters(text: str) -> str:
    """Number the rows of "ab|c": one a millisecond, each with its place as its number."""
    words, at = [], 0
    for symbol in text:
        if symbol == "|":
            words.append(f"|{at}")
        else:
            at += 1
            words.append(f"{symbol}{at}@{at}")
    return " ".join(words)


def matches() -> list[Scenario]:
    """Patterns: contiguity, quantifiers, negation, groups, what is skipped, and time limits."""
    a, b, c = stage("a", "a"), stage("b", "b"), stage("c", "c")
    near, far = {"how": "followed_by"}, {"how": "followed_by_any"}
    text = letters("abxabbc|aaabc|abcabc|acbbc")
    found = [
        match("next", [a, b], text),
        match("followed by", [a, b | near, c | near], text),
        match("followed by any", [a, b | far, c | far], text),
        match("not next", [a, b | {"how": "not_next"}, c | near], text),
        match("not followed by", [a, b | {"how": "not_followed_by"}, c | near], text),
        match("not followed by, at the end", [a, b | {"how": "not_followed_by"}], text, within=3),
        match("one or more", [a | {"more": 1}, b | near], text),
        match("one or more, consecutive", [a | {"more": 1, "consecutive": True}, b], text),
        match("one or more, combinations", [a | {"more": 1, "combinations": True}, b | near], text),
        match("greedy", [a | {"more": 1, "consecutive": True, "greedy": True}, b | near], text),
        match("optional", [a, b | near | {"optional": True}, c | near], text),
        match("times", [a, b | near | {"times": [2, 3]}, c | near], text),
        match("until", [a, b | near | {"more": 1, "until": "c"}], text),
        match("rising", [a, stage("r", "ab", "followed_by", more=1, above="a"), c | near], text),
        match("group", [{"group": [a, b | near], "times": [2, 2]}, c | near], text),
        match("within", [a, b | near, c | near], text, within=4),
        match("within since the row before", [a, b | near | {"gap": 2}, c | near], text),
        match("late rows", [a, b | near], "a1@5 b2@7 |6 b3@6 a4@4 |10 a5@10 b6@11 a7@11 |12"),
        match("rows out of order", [a, b], "b1@5 a2@3 b3@9 a4@7 a5@5 |6 b6@8 |20"),
        match("two keys", [a, b], "a1@1 b:a2@2 b3@3 b:b4@4 |2 a5@5 b:x6@5 |5 b7@6 b:b8@6"),
    ]
    for skip in ("next", "past", "first", "last"):
        to = [skip, "b"] if skip in ("first", "last") else [skip]
        found += [
            match(f"skip {skip}", [a | {"more": 1}, b | near | {"more": 1}], text, skip=to),
            match(f"skip {skip}, any", [a, b | far | {"times": [1, 2]}, c | far], text, skip=to),
        ]
    return found


# At random


def stream(rng: random.Random, length: int, spread: int) -> Iterator[list[Any]]:
    """Yield rows of two keys, out of order and late, and watermarks between them."""
    base, watermark, rows = 0, -1000, []
    in_order = rng.random() < 0.5  # between two watermarks: then they may go as one batch

    def flush() -> Iterator[list[Any]]:
        yield from sorted(rows, key=lambda row: row[2]) if in_order else rows
        rows.clear()

    for number in range(1, length + 1):
        base += rng.randrange(spread // 4 + 1)
        time = base - rng.choice([0, 0, rng.randrange(spread), rng.randrange(3 * spread)])
        rows.append(["row", rng.choice("aab"), time, number])
        if rng.random() < 0.25:
            watermark = max(watermark, base - rng.randrange(spread))
            yield from flush()
            yield ["watermark", watermark]
    yield from flush()


def random_windows(kind: str, number: int) -> Iterator[Scenario]:
    for seed in range(number):
        rng = random.Random(f"{kind} {seed}")
        operator: dict[str, Any] = {"kind": "window", "late": True, "result": "rows"}
        size = rng.randrange(3, 25)
        if kind == "tumbling":
            operator["windows"] = tumbling(size, rng.randrange(-size + 1, size))
            operator["result"] = rng.choice(["rows", "aggregate", "states"])
        elif kind == "sliding":
            slide = rng.randrange(2, size + 3)
            operator["windows"] = sliding(size, slide, rng.randrange(slide))
            operator["result"] = rng.choice(["rows", "aggregate", "states"])
        elif kind == "session":
            operator["windows"] = session(rng.randrange(2, 15))
            operator["result"] = rng.choice(["rows", "aggregate"])
        elif kind == "count":
            size, slide = rng.randrange(1, 8), rng.choice([None, rng.randrange(1, 8)])
            operator |= {"windows": count(size, slide), "late": False}
        elif kind == "trigger":
            operator["windows"] = rng.choice([tumbling(size), sliding(size, 7), session(6)])
            inner = rng.choice([EVENT, by_count(rng.randrange(1, 5))])
            operator["trigger"] = rng.choice([inner, purging(inner)])
        elif kind == "continuous":
            operator["windows"] = rng.choice([tumbling(size), sliding(size, 7), session(9)])
            inner = continuous(rng.randrange(2, 9))
            operator["trigger"] = rng.choice([inner, purging(inner)])
        else:
            operator["windows"] = rng.choice([tumbling(size), sliding(size, 7)])
            operator["evictor"] = rng.choice(
                [by_count(rng.randrange(1, 5)), {"kind": "time", "size": rng.randrange(2, 9)}]
            ) | {"after": rng.random() < 0.5}
        if kind != "count":
            operator["lateness"] = rng.choice([0, 0, rng.randrange(1, 20)])
        rows = list(stream(rng, rng.randrange(10, 26), 12))
        if kind == "continuous":
            rows = on_time(rows)  # else its timers are due when they are set: see `already_due`
        yield {"name": f"random {kind} {seed}", "operator": operator, "events": rows}


def on_time(given: list[list[Any]]) -> list[list[Any]]:
    """Move the rows that are late to just after the watermark, and all to after 1970."""
    made, watermark = [], 0
    for event in given:
        if event[0] == "watermark":
            watermark = event[1] + 1000
            made.append(["watermark", watermark])
        else:
            _, key, time, value = event
            made.append(["row", key, max(time + 1000, watermark + 1), value])
    return made


def random_processes(number: int) -> Iterator[Scenario]:
    for seed in range(number):
        rng = random.Random(f"process {seed}")
        made, watermark, timers = [], -1000, [0]
        for event in stream(rng, rng.randrange(10, 26), 12):
            if event[0] == "watermark":
                watermark = event[1]
                made.append(event)
                continue
            _, key, time, _ = event
            word = rng.choice(["set", "set", "delete", "again", "count"])
            after = max(time, watermark) + 1 + rng.randrange(20)
            if word == "delete":
                after = rng.choice(timers)
            timers.append(after)
            made.append(["row", key, time, word if word == "count" else f"{word} {after - time}"])
        yield {"name": f"random process {seed}", "operator": {"kind": "process"}, "events": made}


def random_joins(number: int) -> Iterator[Scenario]:
    for seed in range(number):
        rng = random.Random(f"join {seed}")
        lower = rng.randrange(-10, 6)
        operator = {"kind": "join", "lower": lower, "upper": lower + rng.randrange(2, 12)}
        for bound in ("lower_exclusive", "upper_exclusive"):
            operator[bound] = rng.random() < 0.3
        base, watermark, made = 0, -1, []
        for number in range(1, rng.randrange(12, 30)):
            base += rng.randrange(4)
            time = max(watermark + 1, base - rng.randrange(8))
            made.append(["row", rng.choice("ab"), time, number, rng.randrange(2)])
            if rng.random() < 0.25:
                watermark = max(watermark, base - rng.randrange(8))
                made.append(["watermark", watermark])
        yield {"name": f"random join {seed}", "operator": operator, "events": made}


def random_stages(rng: random.Random, number: int, names: Iterator[str]) -> list[dict[str, Any]]:
    stages: list[dict[str, Any]] = []
    for at in range(number):
        how = rng.choice(["next", "followed_by", "followed_by", "followed_by_any"])
        if at and rng.random() < 0.15:
            how = rng.choice(["not_next", "not_followed_by"])
        made = stage(next(names), rng.choice(["a", "b", "c", "ab", "bc"]), how)
        stages.append(made)
        if how.startswith("not"):
            continue
        if rng.random() < 0.1:
            del made["is"]
            made["group"] = random_stages(rng, 2, names)
        repeat = rng.random()
        if repeat < 0.25:
            made["more"] = rng.randrange(1, 3)
        elif repeat < 0.5:
            low = rng.randrange(1, 3)
            made["times"] = [low, low + rng.randrange(3)]
        if repeat < 0.5:
            inner = rng.random()
            if inner < 0.5:
                made["consecutive" if inner < 0.3 else "combinations"] = True
            if rng.random() < 0.3 and "is" in made:
                made["greedy"] = True
            if "more" in made and rng.random() < 0.2:
                made["until"] = rng.choice("bcd")
        if rng.random() < 0.2:
            made["optional"] = True
        if at and "is" in made and rng.random() < 0.15 and "is" in stages[0]:
            made["above"] = stages[0]["name"]
    return stages


def random_matches(number: int) -> Iterator[Scenario]:
    for seed in range(number):
        rng = random.Random(f"match {seed}")
        stages = random_stages(rng, rng.randrange(1, 5), iter("pqrstuvwxyz"))
        operator: dict[str, Any] = {"kind": "match", "stages": stages}
        if rng.random() < 0.5:
            operator["within"] = rng.randrange(3, 25)
        named = [each["name"] for each in stages if "is" in each and "not" not in each["how"]]
        skip = rng.choice([None, "next", "past", "first", "last"])
        if skip in ("first", "last"):
            skip = [skip, rng.choice(named)] if named else None
        elif skip:
            skip = [skip]
        if skip:
            operator["skip"] = skip
        time, made = 0, []
        for at in range(rng.randrange(6, 15)):
            time += rng.randrange(1, 5)
            word = f"{rng.choice('aabbccd')}{rng.randrange(9) * 100 + at}"
            made.append(["row", "a", time - rng.choice([0, 0, 0, rng.randrange(6)]), word])
            if rng.random() < 0.25:
                made.append(["watermark", time - rng.randrange(5)])
        rising, watermark = [], -1000
        for event in made:
            if event[0] == "watermark":
                watermark = max(watermark, event[1])
                event = ["watermark", watermark]
            rising.append(event)
        yield {"name": f"random match {seed}", "operator": operator, "events": rising}


def groups() -> dict[str, list[Scenario]]:
    """Return all scenarios, by the file that Flink's answers to them are in."""
    return {
        "windows": windows(),
        "processes": processes(),
        "already_due": already_due(),
        "joins": joins(),
        "matches": matches(),
        "random_windows": [
            scenario
            for kind in (
                "tumbling",
                "sliding",
                "session",
                "count",
                "trigger",
                "evictor",
                "continuous",
            )
            for scenario in random_windows(kind, 40)
        ],
        "random_processes": list(random_processes(40)),
        "random_joins": list(random_joins(30)),
        "random_matches": list(random_matches(200)),
    }
