"""The systems that a pipeline can write to: one file each, its driver an extra of its own."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from poundlock.errors import UsageError

if TYPE_CHECKING:
    from poundlock.sinks.kafka import Kafka
    from poundlock.sinks.memory import Memory

# Name to module and extra. A sink is loaded when it is asked for: the others' drivers may be missing.
_SINKS = {"Kafka": ("kafka", "kafka"), "Memory": ("memory", None)}

__all__ = ["Kafka", "Memory"]


def __getattr__(name: str) -> Any:
    if name not in _SINKS:
        raise AttributeError(f"module 'poundlock.sinks' has no attribute {name!r}")
    module, extra = _SINKS[name]
    try:
        return getattr(import_module(f"poundlock.sinks.{module}"), name)
    except ModuleNotFoundError as missing:
        if missing.name and missing.name.startswith("poundlock"):
            raise
        raise UsageError(
            f"the {name} sink needs a driver that is not installed ({missing.name}): "
            f"pip install 'poundlock[{extra}]'"
        ) from missing
