"""Runs servers as `nobody` if the program runs as root: they keep none of root's rights.

So a server cannot enter root's directories. `rooms` gives it a place for its data, and `programs` one
for its program. If the program does not run as root, nothing changes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from poundlock.errors import UsageError
from poundlock.servers import rooms
from poundlock.servers.rooms import hand_over

__all__ = ["demoted", "hand_over"]


def demoted(command: Sequence[str]) -> list[str]:
    """Return a command line that runs `command` without root's privileges, under the same pid."""
    if os.geteuid() != 0:
        return list(command)
    tool = shutil.which("setpriv")
    if tool is None:
        raise UsageError(
            "a server must not run as root: install setpriv (util-linux), so that it can run "
            f"as {rooms.USER}, or run this command as an ordinary user"
        )
    for word in command:
        if word.startswith("/") and os.path.exists(word) and not rooms.reachable(Path(word)):
            raise UsageError(
                f"{word} cannot be reached by the user {rooms.USER}, who runs servers that root "
                "starts: move it to a directory that every user can enter, or run this command "
                "as an ordinary user"
            )
    user = rooms.user()
    return [
        tool,
        *(f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"),
        *("--inh-caps=-all", "--ambient-caps=-all", "--no-new-privs", "--"),
        *command,
    ]
