"""The driver's connection to a Kafka cluster: requests, routing, time limits and errors.

A question to Kafka is a coroutine whose first argument is a `KafkaClient`, such as `transactions.end`.
`KafkaClient.run` runs it and returns its result. Calls come from one thread at a time. The sockets
belong to a thread of kafka-python, on which the coroutines run.

Most questions use `KafkaClient.collect`. It finds the node of every item and asks all nodes at once. It
asks again about the items whose answer was `TryAgain`, until all are answered or the time is up.

Errors are Poundlock's: `Unavailable` where a repeat may help, `NotAuthorised` with the missing
permission, `UsageError` for settings and brokers that cannot work.
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
from itertools import chain
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from poundlock.core.reach import Address, parse_address
from poundlock.errors import NotAuthorised, Unavailable, UsageError
from poundlock.secret import resolve_all
from poundlock.sinks.kafka.kafka_python import (
    IN_FLIGHT,
    Link,
    LoginCut,
    check_parts,
    error_name,
    errors,
    metadata,
)
from poundlock.sinks.kafka.settings import PORT, servers, to_kafka_python

Item = TypeVar("Item", bound=Hashable)
T = TypeVar("T")
P = ParamSpec("P")

_BRIEF_SECONDS = 5.0  # for questions that must not wait for a dead partition
_SHARE = 3  # one request gets this fraction of a call's time, so that a hung broker can be replaced
_GRACE_SECONDS = 5.0  # beyond a call's limit, before its thread is given up
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5  # seconds between rounds
_KEYS = 500  # in one FindCoordinator request
_CHECK_LOGIN = "check sasl.mechanism, sasl.username and sasl.password"


class CoordinatorKind(IntEnum):
    """What a coordinator coordinates. The numbers are Kafka's."""

    GROUP = 0
    TRANSACTION = 1


class TryAgain(Exception):
    """An answer that another try may change. `stale`: the item may be on another node by now."""

    def __init__(self, reason: str, *, stale: bool = True):
        super().__init__(reason)
        self.stale = stale


@dataclass(frozen=True, slots=True)
class Collected(Generic[Item, T]):
    """The answers about some items, and the reasons why the other items have none."""

    answers: Mapping[Item, T]
    missing: Mapping[Item, TryAgain]

    def require_all(self, about: str) -> Mapping[Item, T]:
        """Return the answers. Raises `Unavailable` if one is missing."""
        if self.missing:
            item, reason = next(iter(self.missing.items()))
            more = f" and {len(self.missing) - 1} more" if len(self.missing) > 1 else ""
            raise Unavailable(
                f"Kafka gave no answer about {about} of {item}{more} in time: {reason}. Check that "
                "every broker is up and reachable; it is safe to repeat this step"
            )
        return self.answers


class KafkaClient:
    """Asks a cluster. Connects when first used, and again after a lost connection."""

    def __init__(self, settings: Mapping[str, str], *, time_limit: float = 30.0):
        """Take librdkafka's settings, and the seconds that each call may take. Does not connect."""
        self._servers = ",".join(servers(settings))
        self._config = to_kafka_python(settings)
        check_parts()
        self._time_limit = time_limit
        self._limit = time_limit  # of the running call
        self._deadline = 0.0
        self._link: Link | None = None
        self._connected = False
        self._in_doubt = False  # an item got no answer: the addresses we know may be old
        self._coordinators: dict[tuple[CoordinatorKind, str], int] = {}

    def __repr__(self) -> str:
        return f"KafkaClient({self._servers})"

    def __enter__(self) -> KafkaClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. The next call opens them again."""
        link, self._link = self._link, None
        self._coordinators.clear()
        if link is not None:
            link.close()

    def run(
        self,
        work: Callable[Concatenate[KafkaClient, P], Awaitable[T]],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> T:
        """Run `work(client, ...)` within the time limit and return its result.

        After `TryAgain` all of it is run again, so it must be safe to repeat.
        """
        return self._run(partial(work, self, *arguments, **named), self._time_limit)

    def run_briefly(
        self,
        work: Callable[Concatenate[KafkaClient, P], Awaitable[T]],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> T:
        """Run `work` as `run` does, but for a few seconds at most: the caller will ask again."""
        limit = min(_BRIEF_SECONDS, self._time_limit)
        return self._run(partial(work, self, *arguments, **named), limit)

    def _run(self, work: Callable[[], Awaitable[T]], limit: float) -> T:
        self._limit, self._deadline = limit, time.monotonic() + limit
        done, outcome = threading.Event(), dict[str, Any]()

        async def job() -> None:
            try:
                outcome["value"] = await self._repeat(work)
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
                raise TryAgain(f"the client's own time limit of {limit:g} s did not work")
            if "error" in outcome:
                raise outcome["error"]
            answered = True
            return outcome["value"]
        except (errors.KafkaError, TryAgain) as error:
            raise Unavailable(
                f"Kafka at {self._servers} did not answer: {_text_of(error)}. Check that the brokers "
                "are up and reachable from the driver; it is safe to repeat this step"
            ) from error
        finally:
            if self._in_doubt or not answered:
                # Connect again next time: kafka-python uses only the addresses that it knows.
                self.close()

    # What follows runs on the link's thread.

    @property
    def seconds_left(self) -> float:
        """The time that the running call still has."""
        return max(0.0, self._deadline - time.monotonic())

    @property
    def _request_seconds(self) -> float:
        return min(self.seconds_left, self._limit / _SHARE)

    async def _repeat(self, work: Callable[[], Awaitable[T]]) -> T:
        await self._connect()
        assert self._link is not None
        pause = _FIRST_PAUSE
        while True:
            try:
                return await work()
            except TryAgain:
                if self.seconds_left <= pause:
                    raise
            await self._link.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _connect(self) -> None:
        if self._connected:
            return
        assert self._link is not None
        # kafka-python retries until its time is up, whatever the reason. Try each address once first,
        # so that a wrong password is reported at once.
        reasons = await self._link.try_addresses(self.seconds_left)
        for reason in reasons:
            _raise_if_refused(reason)
        if reasons and all(isinstance(reason, LoginCut) for reason in reasons):
            raise NotAuthorised(f"Kafka cut off every login of the driver: {_CHECK_LOGIN}")
        try:
            await self._link.bootstrap(self.seconds_left)
        except errors.KafkaTimeoutError as late:
            raise (reasons or [late])[0] from late
        self._connected = True

    async def send(self, node: int | None, request: Any) -> Any:
        """Send one request to a node, or to any node, and return the answer. Raises `TryAgain`."""
        assert self._link is not None
        try:
            return await self._link.send(request, node, self._request_seconds)
        except errors.UnknownBrokerIdError as error:
            await self._link.refresh(self._request_seconds)
            raise TryAgain(f"broker {node} is not known") from error
        except errors.KafkaError as error:
            _raise_if_refused(error)
            raise TryAgain(_text_of(error)) from error

    async def gather(self, jobs: Iterable[Callable[[], Awaitable[T]]]) -> list[T]:
        """Run coroutines at the same time. Return their results in order."""
        assert self._link is not None
        futures = [self._link.post(job) for job in jobs]
        return [await future for future in futures]

    async def collect(
        self,
        items: Iterable[Item],
        locate: Callable[[Sequence[Item]], Awaitable[Mapping[Item, int | TryAgain]]],
        ask: Callable[[int, Sequence[Item]], Awaitable[Mapping[Item, T | TryAgain]]],
        mark_moved: Callable[[Item], None] = lambda item: None,
    ) -> Collected[Item, T]:
        """Ask about every item at its node, until all are answered or the time is up.

        `mark_moved` is called with every item that may have moved to another node.
        """
        assert self._link is not None
        waiting, pause = list(dict.fromkeys(items)), _FIRST_PAUSE
        answers: dict[Item, T] = {}
        missing: dict[Item, TryAgain] = {}
        while waiting:
            by_node = await _group_by_node(waiting, locate, missing)
            asked = sum(map(len, by_node.values()))
            requests = [partial(_ask, ask, node, group) for node, group in by_node.items()]
            parts = await self.gather(requests)
            for item, answer in chain.from_iterable(part.items() for part in parts):
                if not isinstance(answer, TryAgain):
                    answers[item] = answer
                    continue
                missing[item] = answer
                if answer.stale:
                    mark_moved(item)
            before, waiting = len(waiting), [item for item in waiting if item not in answers]
            if not waiting or self.seconds_left <= pause:
                break
            all_answered = asked and before - len(waiting) >= asked
            if not all_answered:  # otherwise the rest waited only because of `IN_FLIGHT`
                await self._link.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        return self._collected(answers, waiting, missing)

    def _collected(
        self, answers: Mapping[Item, T], waiting: Iterable[Item], missing: Mapping[Item, TryAgain]
    ) -> Collected[Item, T]:
        missing = {item: missing.get(item, TryAgain("not asked in time")) for item in waiting}
        self._in_doubt |= any(again.stale for again in missing.values())
        return Collected(answers, missing)

    async def ask_coordinators(
        self,
        kind: CoordinatorKind,
        grant: str,
        keys: Iterable[str],
        ask: Callable[[int, Sequence[str]], Awaitable[Mapping[str, T | TryAgain]]],
    ) -> Collected[str, T]:
        """Ask about every transactional id, or every group, at its coordinator."""
        return await self.collect(
            keys,
            partial(self.find_coordinators, kind, grant),
            ask,
            partial(self.forget_coordinator, kind),
        )

    async def find_coordinators(
        self, kind: CoordinatorKind, grant: str, keys: Sequence[str]
    ) -> Mapping[str, int | TryAgain]:
        """Find the coordinators of transactional ids or groups. Keeps what it finds."""
        unknown = [key for key in keys if (kind, key) not in self._coordinators]
        failed: dict[str, TryAgain] = {}
        for start in range(0, len(unknown), _KEYS):
            request = metadata.FindCoordinatorRequest(
                key_type=kind, coordinator_keys=unknown[start : start + _KEYS], min_version=4
            )
            for row in (await self.send(None, request)).coordinators:
                again = check_error(row.error_code, f"the coordinator of {row.key}", grant)
                if again is None:
                    self._coordinators[kind, row.key] = row.node_id
                else:
                    failed[row.key] = again
        unnamed = TryAgain("no coordinator was named")
        return {key: self._coordinators.get((kind, key), failed.get(key, unnamed)) for key in keys}

    def forget_coordinator(self, kind: CoordinatorKind, key: str) -> None:
        """Have the next `find_coordinators` ask again."""
        self._coordinators.pop((kind, key), None)

    async def metadata(self, topics: Iterable[str] | None) -> Any:
        """Ask for the cluster's brokers and these topics, as they are now. None: brokers only."""
        topic = metadata.MetadataRequest.MetadataRequestTopic
        request = metadata.MetadataRequest(
            topics=[topic(name=name) for name in sorted(set(topics or ()))],
            allow_auto_topic_creation=False,
            min_version=10,  # the first with topic ids
        )
        return await self.send(None, request)


class ClientOwner:
    """Has Kafka settings, and a client that is made when first needed. A copy has its own client."""

    settings: dict[str, str]
    _client: KafkaClient | None = None

    @property
    def client(self) -> KafkaClient:
        if self._client is None:
            self._client = KafkaClient(resolve_all(self.settings))
        return self._client

    def addresses(self) -> Sequence[Address]:
        """Return the bootstrap servers."""
        given = [parse_address(text, PORT) for text in servers(resolve_all(self.settings))]
        return [address for address in given if address is not None]

    def close(self) -> None:
        """Close the connections. They may be opened again."""
        if self._client is not None:
            self._client.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_client": None}  # connections stay on the driver


async def _group_by_node(
    items: Sequence[Item],
    locate: Callable[[Sequence[Item]], Awaitable[Mapping[Item, int | TryAgain]]],
    missing: dict[Item, TryAgain],
) -> Mapping[int, list[Item]]:
    """Return what to ask each node. Note in `missing` why an item has no node."""
    by_node: dict[int, list[Item]] = defaultdict(list)
    try:
        located = await locate(items)
    except TryAgain as again:
        missing.update(dict.fromkeys(items, again))
        return by_node
    for item, node in located.items():
        if isinstance(node, TryAgain):
            missing[item] = node
        elif len(by_node[node]) < IN_FLIGHT:
            by_node[node].append(item)
    return by_node


async def _ask(ask: Callable[..., Awaitable[Any]], node: int, items: Sequence[Any]) -> Any:
    try:
        return await ask(node, items)
    except TryAgain as again:
        return dict.fromkeys(items, again)


def check_error(code: int, about: str, grant: str) -> TryAgain | None:
    """Return None for no error and `TryAgain` for one that may pass. Raises the others."""
    error = errors.for_code(code)
    if error is errors.NoError:
        return None
    name = error_name(code)
    if issubclass(error, errors.AuthorizationError):
        raise NotAuthorised(f"Kafka refused {about} ({name}): grant {grant} to the driver's user")
    if error.retriable:
        return TryAgain(name)
    raise Unavailable(
        f"Kafka answered {name} when asked for {about}; the real answer is unknown. Look in the "
        "brokers' logs for the cause"
    )


def _text_of(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _raise_if_refused(error: Exception) -> None:
    """Raise an error that no other try will cure: credentials, certificates, versions."""
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
            "4.0.2 or later with transaction.version 2"
        ) from error
