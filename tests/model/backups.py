"""Copies of log and checkpoint, which people restore, and what they delete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .disk import File
from .kafka import KafkaServer

if TYPE_CHECKING:
    from .world import World


@dataclass
class Backup:
    """A copy of log and checkpoint, and the oracle's account of that log."""

    records: dict[int, bytes]
    disk: dict[str, bytes]
    query: str | None
    plans: dict[int, bytes]
    commits: set[int]
    account: dict[str, Any]


class Backups:
    """The copies of one world: one after each record and each plan, if any is ever restored."""

    def __init__(self, world: World, log: str, *, wanted: bool):
        self._world, self._log, self._wanted = world, log, wanted
        self._copies: list[Backup] = []
        self._nothing = Backup({}, {}, None, {}, set(), world.oracle.account())
        self.newest: Backup | None = None  # what was there before an older copy was restored

    def keep(self) -> None:
        if self._wanted:
            self._copies.append(self._copy())

    def _copy(self) -> Backup:
        world = self._world
        disk = {
            path: file.data
            for path, file in world.disk.live.items()
            if file and path.startswith(f"{self._log}/")
        }
        saved = world.checkpoint
        return Backup(
            *(dict(world.records), disk, saved.query, saved.plans, saved.commits),
            world.oracle.account(),
        )

    def rewind(self, arg: int) -> bool:
        """Restore an older copy of log and checkpoint, with no driver running."""
        if not self._copies:
            return False
        if not self._go_back(self._copies[-1 - min(arg, len(self._copies) - 1)]):
            return False
        self._world.oracle.count("log and checkpoint restored together")
        return True

    def vanish(self) -> bool:
        """Delete log and checkpoint, with no driver running, after a commit."""
        if not self._world.oracle.has_committed() or not self._go_back(self._nothing):
            return False
        self._world.oracle.count("log and checkpoint deleted together")
        return True

    def _go_back(self, backup: Backup) -> bool:
        world = self._world
        if not all(server.remembers for server in world.servers.values()):
            return False
        if world.config.keep < 2 and any(
            isinstance(server, KafkaServer) for server in world.servers.values()
        ):
            return (
                False  # the last uses of ids are compared, and they alternate between two batches
            )
        for driver in world.drivers:
            driver.dead = True
        world.limbo.clear()
        world.requests.clear()
        now = self._copy()
        if self.newest is None or now.account["owner"] > self.newest.account["owner"]:
            self.newest = now
        self._restore(backup)
        return True

    def restore_newest(self) -> None:
        """Put back what was there before an older copy was restored."""
        assert self.newest is not None
        self._restore(self.newest)
        self.newest = None

    def _restore(self, backup: Backup) -> None:
        world = self._world
        world.records.clear()
        world.records.update(backup.records)
        for files in (world.disk.live, world.disk.kept):
            for path in [path for path in files if path.startswith(f"{self._log}/")]:
                del files[path]
        for path, data in backup.disk.items():
            world.disk.live[path] = file = File(data)
            world.disk.kept[path] = file
            file.synced = data
        world.checkpoint.put(backup.query, backup.plans, backup.commits)
        world.oracle.go_back(backup.account)
