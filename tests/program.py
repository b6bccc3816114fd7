"""The command line as users call it: in a process of its own, which shares nothing with the test's."""

from __future__ import annotations

import os
import subprocess
import sys

_MAIN = "from poundlock.cli import main; main()"


def call_program(
    *arguments: object, text: str | None = None, python: str = sys.executable, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `poundlock` with these arguments to its end, with this text as its standard input."""
    return subprocess.run(
        [python, "-c", _MAIN, *map(str, arguments)],
        input=text or "",
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
