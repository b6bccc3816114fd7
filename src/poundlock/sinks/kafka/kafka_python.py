"""Everything that we use of kafka-python: its protocol classes, and its connections as `Link`.

The connection manager is not part of kafka-python's documented API. So it is used only here, and
`check_parts` checks it before use: a release that changed it is refused by name, not in the middle of a
commit. We do not use kafka-python's admin client. It asks one node after another, chooses versions by
itself, and raises an error for a whole batch when one item failed.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from importlib import import_module
from typing import Any

from poundlock.errors import UsageError


def _module(name: str) -> Any:
    # By name, because type checkers use the types of kafka-python 2, which was different.
    try:
        return import_module(f"kafka.{name}")
    except ImportError as error:
        raise UsageError(
            f"the Kafka sink needs kafka-python 3 ({error}): pip install 'poundlock[kafka]'"
        ) from error


errors = _module("errors")
admin = _module("protocol.admin")
consumer = _module("protocol.consumer")
metadata = _module("protocol.metadata")
producer = _module("protocol.producer")
record = _module("record")
_versions = _module("protocol.broker_version_data")
_keys = _module("protocol.api_key")
_Manager = _module("net.manager").KafkaConnectionManager
_Net = _module("net.selector").NetworkSelector

IN_FLIGHT = 1000  # requests to one node at a time
_STOP_MS = 5000
# How often, and after how many seconds, a login that was cut off is tried before it counts as refused.
_LOGINS, _LOGIN_PAUSE = 3, 0.2

# The methods that we use, and the arguments that we pass to them by name.
_PARTS = (
    (_Manager, "send", ("node_id", "request_timeout_ms")),
    (_Manager, "get_connection", ("timeout_ms",)),
    (_Manager, "bootstrap_async", ("timeout_ms",)),
    (_Manager, "call_soon", ()),
    (_Manager, "wait_for", ()),
    (_Manager, "close", ()),
    (_Net, "start", ()),
    (_Net, "stop", ("timeout_ms",)),
    (_Net, "sleep", ()),
)
# The versions of requests that we need.
_VERSIONS = (
    (producer.EndTxnRequest, 5),
    (metadata.FindCoordinatorRequest, 4),
    (consumer.FetchRequest, 13),
)


def check_parts() -> None:
    """Raise `UsageError` if this release of kafka-python lacks a part that we use."""
    missing = [
        f"{owner.__name__}.{name}({', '.join(arguments)})"
        for owner, name, arguments in _PARTS
        if not _takes(getattr(owner, name, None), arguments)
    ]
    missing += [
        f"{request.__name__} version {version}"
        for request, version in _VERSIONS
        if request.max_version < version
    ]
    if missing:
        raise UsageError(
            f"this release of kafka-python has no {', no '.join(missing)}: install one that Poundlock "
            "supports: pip install 'poundlock[kafka]'"
        )


def _takes(part: Any, arguments: tuple[str, ...]) -> bool:
    return part is not None and set(arguments) <= inspect.signature(part).parameters.keys()


def error_name(code: int) -> str:
    """Spell an error code as Kafka's documentation does."""
    known = errors.kafka_errors.get(code)
    return known.message if known is not None else f"error {code}"


def release_of(apis: Mapping[int, tuple[int, int]]) -> tuple[int, ...]:
    """Guess a broker's release, major and minor, from the versions of its APIs."""
    return _versions.infer_broker_version_from_api_versions(apis)


def api_key(api: str) -> int:
    """Return the number of an API, such as "EndTxn"."""
    return _keys.ApiKey[api].value


class LoginCut(errors.KafkaConnectionError):
    """The broker closed the connection during the login.

    A broker that refuses a login sends the reason and closes. If both arrive together, kafka-python 3.0
    drops the reason. The next try tells the cases apart: a broker that died does not answer it.
    """


class Link:
    """Connections to the nodes of one cluster, and the thread that serves them."""

    def __init__(self, config: Mapping[str, Any]):
        check_parts()
        _silence_wire_dumps()
        self._logs_in = config["security_protocol"].startswith("SASL")
        config = {
            **config,
            # Above this the library refuses to send, so it must be more than our own limit.
            "max_in_flight_requests_per_connection": 2 * IN_FLIGHT,
            "receive_message_max_bytes": 100_000_000,
            "reconnect_backoff_max_ms": 1000,
        }
        self._net = _Net(**config)
        self._manager = _Manager(self._net, **config)
        self._net.start()

    def post(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """Start a coroutine on the link's thread. Return its awaitable future."""
        try:
            return self._manager.call_soon(work)
        except Exception as error:  # the thread has ended, with this error
            raise errors.KafkaConnectionError(f"the client has stopped: {error}") from error

    # To be awaited on the link's thread.

    def sleep(self, seconds: float) -> Awaitable[None]:
        return self._net.sleep(seconds)

    async def send(self, request: Any, node: int | None, seconds: float) -> Any:
        """Send to a node, or to any node. Connects first if necessary."""
        answer = self._manager.send(request, node_id=node, request_timeout_ms=_ms(seconds))
        # Its own limit begins when the connection is open, and a TLS handshake has no limit.
        return await self._manager.wait_for(answer, _ms(seconds))

    async def try_addresses(self, seconds: float) -> list[Exception]:
        """Try the bootstrap addresses until one opens. Return why none did."""
        reasons = list[Exception]()
        for broker in self._manager.cluster.bootstrap_brokers():
            for _ in range(_LOGINS):
                reason = await self._try(broker.node_id, seconds)
                if reason is None:
                    return []
                reasons.append(reason)
                if not isinstance(reason, LoginCut):
                    break
                await self.sleep(_LOGIN_PAUSE)
        return reasons

    async def _try(self, node: Any, seconds: float) -> Exception | None:
        connection: Any = None
        try:
            connection = self._manager.get_connection(node, timeout_ms=_ms(seconds))
            await self._manager.wait_for(connection.init_future, _ms(seconds))
        except errors.KafkaConnectionError as error:
            # The versions are asked for before the login. If they are known, the login was cut off.
            if self._logs_in and connection is not None and connection.broker_version is not None:
                return LoginCut(str(error))
            return error
        except errors.KafkaError as error:
            return error
        return None

    async def bootstrap(self, seconds: float) -> None:
        """Learn the nodes of the cluster from its bootstrap addresses."""
        learned = self._manager.bootstrap_async(timeout_ms=_ms(seconds))
        await self._manager.wait_for(learned, _ms(seconds))

    async def refresh(self, seconds: float) -> None:
        """Try to learn the nodes of the cluster again."""
        learned = self.post(self._manager.cluster.refresh_metadata)
        with contextlib.suppress(errors.KafkaError):
            await self._manager.wait_for(learned, _ms(seconds))

    def close(self) -> None:
        async def close() -> None:
            self._manager.close()

        # An error says that the thread has ended and has closed everything.
        with contextlib.suppress(errors.KafkaError):
            self.post(close)
        self._net.stop(timeout_ms=_STOP_MS)


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1000))


class _NoDumps(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.DEBUG


_NO_DUMPS = _NoDumps()


def _silence_wire_dumps() -> None:
    # At DEBUG these two log every request and every byte, including SASL/PLAIN passwords and rows.
    for name in ("kafka.protocol.parser", "kafka.net.connection"):
        logging.getLogger(name).addFilter(_NO_DUMPS)  # adding the same filter twice changes nothing
