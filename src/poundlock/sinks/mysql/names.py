"""Identifiers and literals of MySQL, which its driver cannot quote."""

from __future__ import annotations

from poundlock.errors import UsageError


def quoted(*parts: str) -> str:
    """Quote an identifier, or one of several parts."""
    for part in parts:
        if not part or "\0" in part or len(part) > 64 or part.endswith(" "):
            raise UsageError(
                f"{part!r} cannot be a name in MySQL: take 1 to 64 characters, none of them NUL, "
                "and no blank at the end"
            )
    return ".".join("`" + part.replace("`", "``") + "`" for part in parts)


def columns(names: list[str] | tuple[str, ...], of: str = "") -> str:
    """Quote a list of columns, each of the table alias `of`."""
    before = f"{of}." if of else ""
    return ", ".join(before + quoted(name) for name in names)
