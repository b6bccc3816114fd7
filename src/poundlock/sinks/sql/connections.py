"""How many connections a sink will open, beside how many its server has."""

from __future__ import annotations

from collections.abc import Mapping

from poundlock.errors import UsageError


def check(
    told: int | None, *, tasks: int | None, driver: int, limits: Mapping[str, int], sink: str
) -> list[str]:
    """Compare what is wanted with what the server allows; return what to warn of.

    Wanted is what the user `told`, or what the tasks need: each has one connection, which it opens when
    it starts, so it cannot wait for one. How many run at once is Spark's guess, so whoever knows better
    is believed. `limits` are named as an operator would look for them.
    """
    needed = tasks + driver if tasks else 1
    why = f"one for each task that runs at once, and {driver} for the driver"
    wanted = told or needed
    for name, allowed in sorted(limits.items(), key=lambda limit: limit[1]):
        if allowed < wanted:
            raise UsageError(
                f"{wanted} connections are wanted ({why}), and {name} allows {allowed}: raise it, run "
                "fewer tasks at once, or say with connections= how many there really are",
                sink=sink,
            )
    if wanted < needed:
        return [f"connections={wanted}, but {needed} may be opened ({why})"]
    return []
