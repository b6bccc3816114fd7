"""Requests to a Kafka cluster and their answers: connections, routing, time limits, errors.

Theory of operation. Calls come from one thread at a time; the sockets belong to a thread of
kafka-python's, on which coroutines run. `Wire.collect` is the one loop: it finds the node of every
item, asks all nodes at once, and asks again for the items whose answer was `Again`, until all are
answered or the call's time is up.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, Generic, TypeVar

from poundlock.errors import NotAuthorised, Unavailable, UsageError
from poundlock.sinks.kafka import settings as _kafka_settings
from poundlock.sinks.kafka.kafka_python import (
    IN_FLIGHT,
    Link,
    LoginCut,
    check_parts,
    error_name,
    errors,
    metadata,
)

Item = TypeVar("Item", bound=Hashable)
T = TypeVar("T")

_SHARE = 3  # of a call's time for one request: a hung broker leaves time to find its successor
_GRACE_SECONDS = 5.0  # beyond a call's limit, before its thread is given up
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5  # seconds between rounds
_KEYS = 500  # in one FindCoordinator
_CHECK_LOGIN = "check sasl.mechanism, sasl.username and sasl.password"


class Kind(IntEnum):
    """What is coordinated; the numbers are Kafka's."""

    GROUP = 0
    TRANSACTION = 1


class Again(Exception):
    """An answer that another try may cure. `stale`: the item may live on another node by now."""

    def __init__(self, reason: str, *, stale: bool = True):
        super().__init__(reason)
        self.stale = stale


@dataclass(frozen=True, slots=True)
class Collected(Generic[Item, T]):
    """What a round of asking came to: the answers, and why the rest have none."""

    answers: Mapping[Item, T]
    missing: Mapping[Item, Again]

    def all(self, about: str) -> Mapping[Item, T]:
        """Return the answers, or raise `Unavailable` if one is missing."""
        if self.missing:
            item, reason = next(iter(self.missing.items()))
            more = f" and {len(self.missing) - 1} more" if len(self.missing) > 1 else ""
            raise Unavailable(
                f"Kafka gave no answer about {about} of {item}{more} in time: {reason}. Check that "
                "every broker is up and reachable; the same step may be repeated"
            )
        return self.answers


class Wire:
    """Asks a cluster. Connects when first used and again after any loss."""

    def __init__(self, settings: Mapping[str, str], seconds: float):
        self.servers = ",".join(_kafka_settings.servers(settings))
        self._config = _kafka_settings.translate(settings)
        check_parts()
        self._seconds = seconds
        self._limit = seconds  # of the running call
        self._deadline = 0.0
        self._link: Link | None = None
        self._connected = False
        self._in_doubt = False  # an item got no answer: the addresses we know may be old
        self._homes: dict[tuple[Kind, str], int] = {}

    def run(self, work: Callable[[], Awaitable[T]], seconds: float | None = None) -> T:
        """Do asynchronous work on the link's thread and return its result, within the time limit.

        All of it is done again after `Again`, so it must be safe to repeat.
        """
        limit = self._seconds if seconds is None else min(seconds, self._seconds)
        self._limit, self._deadline = limit, time.monotonic() + limit
        done, outcome = threading.Event(), dict[str, Any]()

        async def job() -> None:
            try:
                outcome["value"] = await self._persist(work)
            except BaseException as error:  # noqa: BLE001 (raised again in the caller's thread)
                outcome["error"] = error
            finally:
                done.set()

        self._in_doubt, answered = False, False
        try:
            if self._link is None:
                self._link, self._connected = Link(self._config), False
            self._link.post(job)
            if not done.wait(limit + _GRACE_SECONDS):
                raise Again(f"the client's own time limit of {limit:g} s did not work")
            if "error" in outcome:
                raise outcome["error"]
            answered = True
            return outcome["value"]
        except (errors.KafkaError, Again) as error:
            raise Unavailable(
                f"Kafka at {self.servers} did not answer: {_spelled(error)}. Check that the brokers "
                "are up and reachable from the driver; the same step may be repeated"
            ) from error
        finally:
            if self._in_doubt or not answered:
                # Connect afresh next time: kafka-python only ever goes by the addresses it knows.
                self.close()

    def close(self) -> None:
        link, self._link = self._link, None
        self._homes.clear()
        if link is not None:
            link.close()

    # What follows runs on the link's thread.

    @property
    def left(self) -> float:
        """Seconds left to the running call."""
        return max(0.0, self._deadline - time.monotonic())

    @property
    def _patience(self) -> float:
        return min(self.left, self._limit / _SHARE)

    async def _persist(self, work: Callable[[], Awaitable[T]]) -> T:
        await self._connect()
        assert self._link is not None
        pause = _FIRST_PAUSE
        while True:
            try:
                return await work()
            except Again:
                if self.left <= pause:
                    raise
            await self._link.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _connect(self) -> None:
        if self._connected:
            return
        assert self._link is not None
        # The library tries on until its time is up, whatever the reason. Knock first, so that a wrong
        # password is named at once and not tried a hundred times.
        reasons = await self._link.knock(self.left)
        for reason in reasons:
            _raise_if_refused(reason)
        if reasons and all(isinstance(reason, LoginCut) for reason in reasons):
            raise NotAuthorised(f"Kafka cut off the driver's login each time: {_CHECK_LOGIN}")
        try:
            await self._link.bootstrap(self.left)
        except errors.KafkaTimeoutError as late:
            raise (reasons or [late])[0] from late
        self._connected = True

    async def send(self, node: int | None, request: Any) -> Any:
        """Send one request and return its answer. Raises `Again` for what another try may cure."""
        assert self._link is not None
        try:
            return await self._link.send(request, node, self._patience)
        except errors.UnknownBrokerIdError as error:
            await self._link.refresh(self._patience)
            raise Again(f"broker {node} is not known") from error
        except errors.KafkaError as error:
            _raise_if_refused(error)
            raise Again(_spelled(error)) from error

    async def gather(self, jobs: Iterable[Callable[[], Awaitable[T]]]) -> list[T]:
        """Run coroutines at the same time; return their results in order."""
        assert self._link is not None
        futures = [self._link.post(job) for job in jobs]
        return [await future for future in futures]

    async def collect(
        self,
        items: Iterable[Item],
        locate: Callable[[Sequence[Item]], Awaitable[Mapping[Item, int | Again]]],
        ask: Callable[[int, Sequence[Item]], Awaitable[Mapping[Item, T | Again]]],
        lost: Callable[[Item], None] = lambda item: None,
    ) -> Collected[Item, T]:
        """Ask about every item at its node, until all are answered or the time is up.

        `lost` is told of every item that may have moved to another node.
        """
        assert self._link is not None
        waiting, pause = list(dict.fromkeys(items)), _FIRST_PAUSE
        answers: dict[Item, T] = {}
        missing: dict[Item, Again] = {}
        while waiting:
            by_node: dict[int, list[Item]] = defaultdict(list)
            try:
                for item, node in (await locate(waiting)).items():
                    if isinstance(node, Again):
                        missing[item] = node
                    elif len(by_node[node]) < IN_FLIGHT:
                        by_node[node].append(item)
            except Again as again:
                missing = dict.fromkeys(waiting, again)
            asked = sum(map(len, by_node.values()))
            for part in await self.gather(
                partial(_ask, ask, node, group) for node, group in by_node.items()
            ):
                for item, answer in part.items():
                    if isinstance(answer, Again):
                        missing[item] = answer
                        if answer.stale:
                            lost(item)
                    else:
                        answers[item] = answer
            before, waiting = len(waiting), [item for item in waiting if item not in answers]
            if not waiting or self.left <= pause:
                break
            if before - len(waiting) < asked or not asked:  # else only the cap on requests held us
                await self._link.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        missing = {item: missing.get(item, Again("not asked in time")) for item in waiting}
        self._in_doubt |= any(again.stale for again in missing.values())
        return Collected(answers, missing)

    # Where things live.

    async def homes(self, kind: Kind, grant: str, keys: Sequence[str]) -> Mapping[str, int | Again]:
        """Find the coordinators of transactional ids or groups; `forget` makes it look again."""
        unknown = [key for key in keys if (kind, key) not in self._homes]
        found: dict[str, int | Again] = {}
        for start in range(0, len(unknown), _KEYS):
            request = metadata.FindCoordinatorRequest(
                key_type=kind, coordinator_keys=unknown[start : start + _KEYS], min_version=4
            )
            for row in (await self.send(None, request)).coordinators:
                again = judge(row.error_code, f"the coordinator of {row.key}", grant)
                if again is None:
                    self._homes[kind, row.key] = row.node_id
                else:
                    found[row.key] = again
        unnamed = Again("no coordinator was named")
        return {key: self._homes.get((kind, key), found.get(key, unnamed)) for key in keys}

    def forget(self, kind: Kind, key: str) -> None:
        self._homes.pop((kind, key), None)

    async def metadata(self, topics: Iterable[str] | None) -> Any:
        """Ask for the cluster's brokers and these topics, as they are now. None: brokers only."""
        topic = metadata.MetadataRequest.MetadataRequestTopic
        request = metadata.MetadataRequest(
            topics=[topic(name=name) for name in sorted(set(topics or ()))],
            allow_auto_topic_creation=False,
            min_version=10,  # the first with topic ids
        )
        return await self.send(None, request)


async def _ask(ask: Callable[..., Awaitable[Any]], node: int, items: Sequence[Any]) -> Any:
    try:
        return await ask(node, items)
    except Again as again:
        return dict.fromkeys(items, again)


def judge(code: int, about: str, grant: str) -> Again | None:
    """None for no error, `Again` for one that may pass; raises for one that will not."""
    error = errors.for_code(code)
    if error is errors.NoError:
        return None
    name = error_name(code)
    if issubclass(error, errors.AuthorizationError):
        raise NotAuthorised(f"Kafka refused {about} ({name}): grant {grant} to the driver's user")
    if error.retriable:
        return Again(name)
    raise Unavailable(
        f"Kafka answered {name} when asked for {about}; nothing was concluded from it"
    )


def _spelled(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _raise_if_refused(error: Exception) -> None:
    """Raise at once for what no other try will cure: credentials, certificates, versions."""
    refusals = (
        errors.SaslAuthenticationFailedError,
        errors.UnsupportedSaslMechanismError,
        errors.IllegalSaslStateError,
    )
    if isinstance(error, refusals):
        raise NotAuthorised(
            f"Kafka refused the driver's login ({type(error).__name__}): {_CHECK_LOGIN}"
        ) from error
    if isinstance(error.__context__, ssl.SSLCertVerificationError):
        raise UsageError(
            f"the broker's certificate was not accepted: {error.__context__.verify_message}. Check "
            "ssl.ca.location, and that bootstrap.servers names the hosts as the certificate does"
        ) from error
    if isinstance(error, errors.IncompatibleBrokerVersion):
        raise UsageError(
            f"the brokers are too old or too new for this request: {error}. Poundlock needs Kafka "
            "4.0.1 or later with transaction.version 2"
        ) from error
