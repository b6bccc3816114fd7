"""What the coordinator is given beside its log and its sinks: limits, time, and whom it reports to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from poundlock.core.protocol import Step
from poundlock.errors import PoundlockError

logger = logging.getLogger("poundlock")


@dataclass(frozen=True, slots=True)
class Settings:
    """Limits and intervals of the coordinator."""

    tries: int = 3  # attempts at a batch before the error is raised
    keep_batches: int = 100  # at least as many as Spark keeps
    most_records: int = 1000  # in the log, about
    least_time_left_s: float = 10.0  # for a branch at the decision, beside what its turn takes
    commits_at_once: int | None = None  # None: as many as the sink takes
    retry_first_s: float = 0.05
    retry_most_s: float = 5.0
    warn_first_s: float = 2.0  # that a commit waits before its first warning
    warn_every_s: float = 30.0
    sweep_every_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The driver's settings, clock, observer, and whether its query has been asked to stop."""

    settings: Settings
    observe: Callable[[Step, Mapping[str, object]], None]
    stopping: Callable[[], bool]
    clock: Callable[[], float]  # in seconds since 1970; it may be set back or forward
    sleep: Callable[[float], None]
    monotonic: Callable[[], float]  # for durations within this driver

    def report(self, step: Step, **facts: object) -> None:
        self.observe(step, facts)

    def retry(
        self,
        attempt: Callable[[], str | None],
        give_up: Callable[[str], PoundlockError],
        *,
        warn_after_s: float = 0,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """Call `attempt` with growing pauses until it returns None.

        Anything else is what it still waits for: this is logged soon, and then at intervals. Raises the
        error of `give_up` when the query has been asked to stop. `between` is called before each pause.
        """
        delay = self.settings.retry_first_s
        warn_at = self.monotonic() + warn_after_s
        while (problem := attempt()) is not None:
            if self.stopping():
                raise give_up(problem)
            if self.monotonic() >= warn_at:
                warn_at = self.monotonic() + self.settings.warn_every_s
                logger.warning("%s", problem)
            between()
            self.sleep(delay)
            delay = min(delay * 2, self.settings.retry_most_s)
