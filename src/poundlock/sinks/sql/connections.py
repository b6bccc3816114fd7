"""How many connections a sink opens, compared with how many its server allows."""

from __future__ import annotations

from collections.abc import Mapping

from poundlock.errors import UsageError


def check(
    told: int | None, *, tasks: int | None, driver: int, limits: Mapping[str, int], sink: str
) -> list[str]:
    """Compare the needed connections with those that the server allows; return warnings.

    `told` is the user's number. Without it, one connection is counted for each task, which opens it at
    its start and cannot wait for it. Spark only guesses how many tasks run at once, so the user's
    number comes first. `limits` is keyed by the names of the server's settings.
    """
    needed = tasks + driver if tasks else 1
    why = f"one for each task that runs at once, and {driver} for the driver"
    wanted = told or needed
    for name, allowed in sorted(limits.items(), key=lambda limit: limit[1]):
        if allowed < wanted:
            raise UsageError(
                f"{wanted} connections are needed ({why}), but {name} allows {allowed}: raise it, run "
                "fewer tasks at once, or set connections= to the real number",
                sink=sink,
            )
    if wanted < needed:
        return [f"connections={wanted}, but {needed} may be opened ({why})"]
    return []
