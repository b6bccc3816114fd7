"""Peak memory of a driver's processes, by role."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

_EVERY_S = 0.05


class Watch:
    """Samples a process and all its descendants; `peaks_mb` has the highest sum seen for each role."""

    def __init__(self, root: int):
        self._root = root
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.peaks_mb: dict[str, float] = {}

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_S):
            sums: dict[str, float] = {}
            for pid in _family(self._root):
                try:
                    role = self._role(pid)
                    if role is not None:
                        sums[role] = sums.get(role, 0.0) + _resident_mb(pid)
                except (FileNotFoundError, ProcessLookupError):
                    continue  # it has just ended
            for role, size in sums.items():
                self.peaks_mb[role] = round(max(self.peaks_mb.get(role, 0.0), size), 1)

    def _role(self, pid: int) -> str | None:
        """Return None for a short-lived child that shares the JVM's memory, such as Hadoop's `ls`."""
        if pid == self._root:
            return "driver"
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        return {"java": "jvm", "python": "python_workers", "python3": "python_workers"}.get(name)


def _family(root: int) -> Iterator[int]:
    yield root
    children: list[str] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
        for task in Path(f"/proc/{root}/task").iterdir():
            children += (task / "children").read_text().split()
    for child in children:
        yield from _family(int(child))


def _resident_mb(pid: int) -> float:
    """Return its private memory. Pages shared with the parent that forked it count only there."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(
        int(line.split()[1]) / 1024
        for line in rollup.splitlines()
        if line.startswith(("Private_Clean", "Private_Dirty"))
    )
