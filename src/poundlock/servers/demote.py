"""Runs servers as `nobody` if the program runs as root, because some refuse to run as root.

Other users cannot enter root's directories, and the cache and a test's scratch directory are often
below one. So the server keeps one of root's capabilities, the one to pass through directories. It owns
its data. If the program does not run as root, nothing changes.
"""

from __future__ import annotations

import os
import pwd
import shutil
from collections.abc import Sequence
from pathlib import Path

from poundlock.errors import UsageError

USER = "nobody"
_CAPABILITIES = {2: "dac_read_search", 1: "dac_override"}  # the first that may be passed on is used


def demoted(command: Sequence[str]) -> list[str]:
    """Return a command line that runs `command` without root's privileges, under the same pid."""
    if os.geteuid() != 0:
        return list(command)
    tool = shutil.which("setpriv")
    if tool is None:
        raise UsageError(
            "this server refuses to run as root: install setpriv (util-linux), so that it can run "
            f"as {USER}, or run this command as an ordinary user"
        )
    user = pwd.getpwnam(USER)
    kept = [f"+{name}" for number, name in _CAPABILITIES.items() if _may_pass_on(number)][:1]
    capabilities = ",".join(["-all", *kept])
    return [
        tool,
        # Without this bit, access() answers as if the capability were missing.
        "--securebits=+no_setuid_fixup",
        *(f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"),
        *(f"--inh-caps={capabilities}", f"--ambient-caps={capabilities}", "--no-new-privs", "--"),
        *command,
    ]


def hand_over(directory: Path) -> None:
    """Create a directory that only the demoted server may read, and make it own all of the content."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    if os.geteuid() != 0:
        return
    user = pwd.getpwnam(USER)
    for place in (directory, *directory.rglob("*")):
        os.chown(place, user.pw_uid, user.pw_gid, follow_symlinks=False)


def _may_pass_on(number: int) -> bool:
    status = Path("/proc/self/status").read_text()
    bounds = next(line.split()[1] for line in status.splitlines() if line.startswith("CapBnd"))
    return bool(int(bounds, 16) >> number & 1)
