"""Checks of the server's version and settings, before anything starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from poundlock.errors import NotAuthorised, PoundlockError, UsageError
from poundlock.sinks.redis.client import Client, as_text

_OLDEST = (6, 2)
_SETTINGS = ("appendonly", "appendfsync", "maxmemory", "maxmemory-policy", "proto-max-bulk-len")


def check_version(client: Client, key: str, sink: str) -> None:
    info = client.execute("INFO", "server", key=key)
    version = str(info.get("redis_version", ""))  # Valkey has one too, of the Redis that it equals
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1]), int(numbers[2])) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise UsageError(
            f"the server is Redis {version}, but the sink needs {oldest} or later, or Valkey",
            sink=sink,
        )


def check_settings(client: Client, key: str) -> tuple[list[str], int | None]:
    """Return warnings, and the maximum length of a value if the server shows it."""
    try:
        with client.errors("reading the configuration"):
            found: dict[str, str] = {}
            for name in _SETTINGS:
                found |= _pairs(client.execute("CONFIG", "GET", name, key=key))
    except PoundlockError as error:
        if not isinstance(error, NotAuthorised) and "unknown command" not in str(error):
            raise
        warning = (
            "the server does not show its configuration: make sure that it has appendonly yes, "
            "appendfsync always and maxmemory-policy noeviction"
        )
        return [warning], None
    warnings: list[str] = []
    if found.get("appendonly") != "yes":
        warnings.append(
            "appendonly is off: acknowledged writes are lost when the server stops. Set "
            "appendonly yes and appendfsync always"
        )
    elif found.get("appendfsync") != "always":
        warnings.append(
            f"appendfsync is {found.get('appendfsync')}: a crash of the machine loses the last "
            "second of acknowledged writes. Set appendfsync always"
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
    """Read the answer to CONFIG GET: a dictionary, or names and values in turn."""
    if isinstance(answer, Mapping):
        return {as_text(name): as_text(value) for name, value in answer.items()}
    flat = [as_text(it) for it in answer]
    return dict(zip(flat[::2], flat[1::2], strict=True))
