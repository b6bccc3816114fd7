"""What the server must have: its version and its settings, looked at before anything starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from poundlock.errors import NotAuthorised, PoundlockError, UsageError
from poundlock.sinks.redis.client import Client, as_text

_OLDEST = (6, 2)


def check_version(client: Client, here: str, sink: str) -> None:
    told = client.ask("INFO", "server", key=here)
    version = str(told.get("redis_version", ""))  # Valkey tells one too: that of its likeness
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1]), int(numbers[2])) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise UsageError(
            f"the server is Redis {version}, but the sink needs {oldest} or later, or Valkey",
            sink=sink,
        )


def check_settings(client: Client, here: str) -> tuple[list[str], int | None]:
    """Return warnings, and the bytes that a value can have, if the server tells them."""
    names = (
        "appendonly", "appendfsync", "maxmemory", "maxmemory-policy", "proto-max-bulk-len",
    )  # fmt: skip
    try:
        with client.errors("reading the configuration"):
            found: dict[str, str] = {}
            for name in names:
                found |= _pairs(client.ask("CONFIG", "GET", name, key=here))
    except PoundlockError as error:
        if not isinstance(error, NotAuthorised) and "unknown command" not in str(error):
            raise
        told = (
            "the server does not tell its configuration: make sure that it has appendonly yes, "
            "appendfsync always and maxmemory-policy noeviction"
        )
        return [told], None
    warnings: list[str] = []
    if found.get("appendonly") != "yes":
        warnings.append(
            "appendonly is off: what the server has acknowledged is lost when it ends. Set "
            "appendonly yes and appendfsync always"
        )
    elif found.get("appendfsync") != "always":
        warnings.append(
            f"appendfsync is {found.get('appendfsync')}: a crash of the machine loses the last "
            "second of what was acknowledged. Set appendfsync always"
        )
    policy = found.get("maxmemory-policy", "")
    if policy.startswith("allkeys") and found.get("maxmemory", "0") != "0":
        warnings.append(
            f"maxmemory-policy is {policy}: the server may drop staged rows, which are then "
            "replayed, and witnesses, which stops the pipeline. Set maxmemory-policy noeviction"
        )
    longest = found.get("proto-max-bulk-len")
    return warnings, int(longest) if longest else None


def _pairs(answer: Any) -> dict[str, str]:
    """Read what CONFIG GET says: a dictionary, or names and values in turn."""
    if isinstance(answer, Mapping):
        return {as_text(name): as_text(value) for name, value in answer.items()}
    flat = [as_text(it) for it in answer]
    return dict(zip(flat[::2], flat[1::2], strict=True))
