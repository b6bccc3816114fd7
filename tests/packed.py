"""Poundlock as a file that Python imports from without unpacking it, as `--py-files` ships it."""

from __future__ import annotations

import zipfile
from pathlib import Path

_SOURCE = Path(__file__).parents[1] / "src"


def make_wheel(directory: Path) -> Path:
    """Write the package's files into a wheel, and return its path."""
    wheel = directory / "poundlock-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in sorted((_SOURCE / "poundlock").rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                archive.write(file, file.relative_to(_SOURCE))
    return wheel
