"""The columns that a sink takes from a DataFrame, gathered one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from poundlock.core.participant import Column, frame_mismatch


class Projection:
    """Expressions in Spark SQL for a writer's columns, and the problems found on the way."""

    def __init__(self, columns: Mapping[str, Column]):
        self.columns = columns
        self.expressions: dict[str, str] = {}
        self.problems: list[str] = []

    def add(
        self,
        role: str,
        name: str | None,
        spell: Callable[[Column], str | None],
        needs: str = "",
        *,
        option: str = "",
    ) -> None:
        """Take a column for a role, such as `key`, if one is named.

        `spell` returns the expression, or None for a type that does not fit. `needs` says which do.
        Errors call the role by the `option` that names the column, if that is another word.
        """
        called = option or role
        if name is None:
            return
        column = self.columns.get(name)
        if column is None:
            self.problems.append(f"there is no column {name!r} for the {called}")
            return
        expression = spell(column)
        if expression is None:
            self.problems.append(
                f"column {name!r} has type {column.type}, but the {called} needs {needs}"
            )
        else:
            self.expressions[role] = expression

    def check(self, sink: str) -> None:
        """Raise `UsageError` with every problem, if there is any."""
        if self.problems:
            raise frame_mismatch(sink, self.problems, self.columns)
