"""Servers that refuse to run as root: started by root, they run as `nobody`.

Root's own directories are closed to others, and the cache and a test's scratch directory are often
below one. So `nobody` keeps a single one of root's powers, to pass through directories; the data is its
own. Started by anybody else, nothing changes.
"""

from __future__ import annotations

import os
import pwd
import shutil
from collections.abc import Sequence
from pathlib import Path

from poundlock.errors import UsageError

USER = "nobody"
_POWERS = {2: "dac_read_search", 1: "dac_override"}  # the first that this machine lets us hand on


def demoted(command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command` without root's powers, under the same pid."""
    if os.geteuid() != 0:
        return list(command)
    tool = shutil.which("setpriv")
    if tool is None:
        raise UsageError(
            "this server does not run as root, and setpriv (util-linux), which would run it as "
            f"{USER}, is missing: install it, or run as an ordinary user"
        )
    user = pwd.getpwnam(USER)
    kept = [f"+{name}" for number, name in _POWERS.items() if _may_hand_on(number)][:1]
    powers = ",".join(["-all", *kept])
    # Without this bit the question whether a file may be read (access) is answered without the power.
    return [
        *(
            tool,
            "--securebits=+no_setuid_fixup",
            f"--reuid={user.pw_uid}",
            f"--regid={user.pw_gid}",
            "--clear-groups",
        ),
        *(f"--inh-caps={powers}", f"--ambient-caps={powers}", "--no-new-privs", "--"),
        *command,
    ]


def hand_over(directory: Path) -> None:
    """Make a directory, and all in it, the demoted server's own; nobody else may look inside."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    if os.geteuid() != 0:
        return
    user = pwd.getpwnam(USER)
    for place in (directory, *directory.rglob("*")):
        os.chown(place, user.pw_uid, user.pw_gid, follow_symlinks=False)


def _may_hand_on(number: int) -> bool:
    status = Path("/proc/self/status").read_text()
    bounds = next(line.split()[1] for line in status.splitlines() if line.startswith("CapBnd"))
    return bool(int(bounds, 16) >> number & 1)
