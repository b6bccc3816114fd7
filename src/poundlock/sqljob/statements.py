"""Splits SQL text into statements. Spark parses the statements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_SHOWN = 60
_QUOTES = "'\"`"


@dataclass(frozen=True)
class Statement:
    """One statement, and the line of the file where it begins."""

    text: str
    line: int = 1

    @property
    def padded(self) -> str:
        """The text after as many empty lines as precede it, so Spark's errors name the file's lines."""
        return "\n" * (self.line - 1) + self.text

    def __str__(self) -> str:
        words = " ".join(self.text.split())
        return words if len(words) <= _SHOWN else words[: _SHOWN - 3] + "..."


def split(text: str, line: int = 1) -> tuple[list[Statement], str]:
    """Return the statements of a text, and the rest after the last semicolon.

    A semicolon in a string, a quoted name or a comment does not end a statement.
    """
    found: list[Statement] = []
    start, filled = 0, False  # filled: there is more than comments
    for at, char in _code(text):
        if char == ";":
            if filled:
                found.append(_statement(text, start, at, line))
            start, filled = at + 1, False
        elif not char.isspace():
            filled = True
    return found, text[start:] if filled else ""


def split_all(text: str, line: int = 1) -> list[Statement]:
    """Return the statements of a whole text. The last one needs no semicolon."""
    found, rest = split(text, line)
    if rest:
        found.append(_statement(text, len(text) - len(rest), len(text), line))
    return found


def _statement(text: str, start: int, end: int, line: int) -> Statement:
    body = text[start:end]
    start += len(body) - len(body.lstrip())
    return Statement(body.strip(), line + text.count("\n", 0, start))


def _code(text: str) -> Iterator[tuple[int, str]]:
    """Yield the characters outside comments. Of a quoted part, yield the first quote only."""
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
    depth = 0  # comments nest
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
