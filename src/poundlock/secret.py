"""Settings that name a secret instead of holding it: `env:NAME` and `file:PATH`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from poundlock.errors import UsageError

# Settings whose names match hold a secret. Their values are never shown.
SECRET_NAME = re.compile(
    r"password|passwd|secret|token|credential|passphrase|jaas|(api|access|private)[-_.]?key"
    r"|\.pem$|\.config$|authori[sz]ation|(http|basic|bearer|proxy)[-_.]?auth|keystore[-_.]key|cookie"
    r"|begin [a-z ]*private key"
)


def is_cut(url: str) -> bool:
    """Return whether a bare /, ? or # in the password of a URL may end its host part too early.

    A client would take a part of the login for the host, and show parts of the password in errors.
    """
    _, _, rest = url.partition("://")
    _, *after = re.split("[/?#]", rest, maxsplit=1)
    return any("@" in text for text in after)


def resolve(name: str, value: str) -> str:
    """Return the value of a setting, read from where it points to. No error shows the value."""
    scheme, _, target = value.partition(":")
    if scheme == "env":
        if target not in os.environ:
            raise UsageError(
                f"{name} is read from the environment, but the variable {target} is not set: set it"
            )
        return os.environ[target]
    if scheme == "file" and not target.startswith("//"):
        try:
            return Path(target).read_text().strip()
        except OSError as error:
            raise UsageError(f"{name} cannot be read from its file: {error}") from error
    return value


def resolve_within(name: str, value: Any) -> Any:
    """Resolve a setting, also each value in lists and tables."""
    if isinstance(value, str):
        return resolve(name, value)
    if isinstance(value, Mapping):
        table = cast("Mapping[str, Any]", value)
        return {key: resolve_within(f"{name}.{key}", each) for key, each in table.items()}
    if isinstance(value, list | tuple):
        found = [resolve_within(name, each) for each in cast("Sequence[Any]", value)]
        return found if isinstance(value, list) else tuple(found)
    return value


def resolve_all(settings: Mapping[str, str]) -> dict[str, str]:
    """Resolve every setting."""
    return {str(name): resolve(str(name), str(value)) for name, value in settings.items()}
