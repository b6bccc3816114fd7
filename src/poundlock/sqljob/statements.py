"""SQL text, cut into statements. What a statement means is for Spark's own parser to say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_SHOWN = 60
_QUOTES = "'\"`"


@dataclass(frozen=True)
class Statement:
    """One statement, and the line of its file that it begins in."""

    text: str
    line: int = 1

    @property
    def padded(self) -> str:
        """The text with as many lines before it as in its file: Spark's errors then name its lines."""
        return "\n" * (self.line - 1) + self.text

    def __str__(self) -> str:
        words = " ".join(self.text.split())
        return words if len(words) <= _SHOWN else words[: _SHOWN - 3] + "..."


def split(text: str, line: int = 1) -> tuple[list[Statement], str]:
    """Return the statements of a text, and the rest that no semicolon has ended.

    A semicolon in a string, a quoted name or a comment ends nothing.
    """
    found: list[Statement] = []
    start, filled = 0, False  # filled: there is more than comments
    for at, char in _outside(text):
        if char == ";":
            if filled:
                found.append(_statement(text, start, at, line))
            start, filled = at + 1, False
        elif not char.isspace():
            filled = True
    return found, text[start:] if filled else ""


def split_all(text: str, line: int = 1) -> list[Statement]:
    """Return the statements of a whole text, of which the last needs no semicolon."""
    found, rest = split(text, line)
    if rest:
        found.append(_statement(text, len(text) - len(rest), len(text), line))
    return found


def _statement(text: str, start: int, end: int, line: int) -> Statement:
    body = text[start:end]
    start += len(body) - len(body.lstrip())
    return Statement(body.strip(), line + text.count("\n", 0, start))


def _outside(text: str) -> Iterator[tuple[int, str]]:
    """Yield the characters that stand in no comment, a quoted part as its first quote alone."""
    at = 0
    while at < len(text):
        if text.startswith("--", at):
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        elif text.startswith("/*", at):
            at = _after_comment(text, at)
        else:
            yield at, text[at]
            at = _after_quoted(text, at) if text[at] in _QUOTES else at + 1


def _after_comment(text: str, at: int) -> int:
    depth = 0  # they nest
    while at < len(text):
        if text.startswith("/*", at):
            depth, at = depth + 1, at + 2
        elif text.startswith("*/", at):
            depth, at = depth - 1, at + 2
            if not depth:
                break
        else:
            at += 1
    return at


def _after_quoted(text: str, at: int) -> int:
    quote, raw = text[at], at > 0 and text[at - 1] in "rR" and not text[at - 2 : at - 1].isalnum()
    at += 1
    while at < len(text) and text[at] != quote:
        at += 2 if text[at] == "\\" and quote != "`" and not raw else 1
    return at + 1
