"""Windows and patterns as text: `sliding 15 seconds by 5 seconds`, `warm{3} followed_by hot`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from poundlock.errors import UsageError
from poundlock.stream import pattern as patterns
from poundlock.stream import windows as kinds
from poundlock.stream.pattern import Pattern, Skip
from poundlock.stream.times import Duration
from poundlock.stream.windows import Assigner

_WINDOWS = (
    "'tumbling 1 minute', 'sliding 15 seconds by 5 seconds', 'sessions 10 minutes', 'count 5' or "
    "'count 10 by 2'"
)
_STAGE = re.compile(r"([A-Za-z_]\w*)(\?|\*|\+|\{\d+(?:,\d*)?\})?")
_LINKS = ("next", "followed_by", "followed_by_any", "not_next", "not_followed_by")
_SKIPS = ("no_skip", "skip_to_next", "skip_past_last_event", "skip_to_first", "skip_to_last")


def windows(text: str) -> Assigner:
    """Return the windows that a text describes."""
    kind, _, rest = " ".join(text.lower().split()).partition(" ")
    size, by, slide = rest.partition(" by ")
    if not size or (by and not slide) or (by and kind not in ("sliding", "count")):
        raise UsageError(f"windows={text!r} cannot be read: write {_WINDOWS}")
    if kind == "tumbling":
        return kinds.tumbling(size)
    if kind == "sliding" and by:
        return kinds.sliding(size, slide)
    if kind == "sessions":
        return kinds.sessions(size)
    if kind == "count" and size.isdecimal() and (slide or size).isdecimal():
        return kinds.count(int(size), int(slide) if by else None)
    raise UsageError(f"windows={text!r} cannot be read: write {_WINDOWS}")


def pattern(
    text: str, define: Mapping[str, str], *, within: Duration | None = None, skip: str = "no_skip"
) -> Pattern:
    """Return the pattern that a text describes. A stage without a condition takes any row."""
    words = text.split()
    if len(words) % 2 == 0:
        raise UsageError(
            f"pattern={text!r} cannot be read: write stages with {', '.join(_LINKS)} between them, "
            "such as 'warm{3} followed_by hot'"
        )
    made, names = None, []
    for at in range(0, len(words), 2):
        stage = _STAGE.fullmatch(words[at])
        if stage is None or words[at] in _LINKS:
            raise UsageError(
                f"pattern={text!r}: {words[at]!r} is not a stage: write a name, followed by ?, +, *, "
                "{3}, {2,} or {2,4} if it does not occur exactly once"
            )
        name, quantifier = stage.groups()
        if made is None:
            made = patterns.begin(name, _skip(skip))
        elif words[at - 1] in _LINKS:
            made = getattr(made, words[at - 1])(name)
        else:
            raise UsageError(
                f"pattern={text!r}: {words[at - 1]!r} is not one of {', '.join(_LINKS)}"
            )
        if name in define:
            made = made.where(define[name])
        made = _repeat(made, quantifier)
        names.append(name)
    assert made is not None
    unknown = [name for name in define if name not in names]
    if unknown:
        raise UsageError(
            f"define has {unknown[0]!r}, but pattern={text!r} has no stage of that name: it has "
            f"{', '.join(names)}"
        )
    made = made if within is None else made.within(within)
    made.check()
    return made


def _repeat(made: Pattern, quantifier: str | None) -> Pattern:
    if quantifier is None:
        return made
    if quantifier == "?":
        return made.optional()
    if quantifier in "+*":
        made = made.one_or_more()
        return made.optional() if quantifier == "*" else made
    low, comma, high = quantifier[1:-1].partition(",")
    if comma and not high:
        return made.times_or_more(int(low))
    return made.times(int(low), int(high) if high else None)


def _skip(text: str) -> Skip:
    name, *stage = text.split()
    if name not in _SKIPS or len(stage) != name.endswith(("first", "last")):
        raise UsageError(
            f"skip={text!r} is not known: give no_skip, skip_to_next, skip_past_last_event, "
            "'skip_to_first STAGE' or 'skip_to_last STAGE'"
        )
    return getattr(patterns, name)(*stage)
