"""Notices in an idle driver that another one has taken over."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from poundlock.core.owner import LOOK_EVERY_S
from poundlock.errors import Fenced

logger = logging.getLogger("poundlock")


class Lookout:
    """Looks at intervals, in a thread of its own, until `end` or until the driver is replaced.

    A driver without new rows has no batch in which it would notice. When rows arrive, it would plan a
    batch at the same time as its successor, and Spark would stop one of the two, perhaps the successor.
    """

    def __init__(self, name: str, look: Callable[[], None], replaced: Callable[[Fenced], None]):
        self._look, self._replaced = look, replaced
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"poundlock-{name}-lookout")
        self._thread.daemon = True

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            try:
                self._look()
            except Fenced as fenced:
                self._replaced(fenced)
                return
            except Exception as error:  # noqa: BLE001 (a sink of the user's own may raise any)
                # It is unknown: the next look may tell.
                logger.debug("the log could not be looked at: %s", error)
