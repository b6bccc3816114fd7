"""One connection to a Redis or Valkey server or cluster, and the translation of its errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

import redis
from redis import exceptions

from poundlock.core.reach import Address
from poundlock.errors import InDoubt, NotAuthorised, PoundlockError, Unavailable, UsageError
from poundlock.secret import is_cut, resolve

STAGE, MOVE, ABORT = (
    (files("poundlock.sinks.redis") / f"{name}.lua").read_text()
    for name in ("stage", "move", "abort")
)

_PORT = 6379  # of a URL without one
_FORBIDDEN = (
    exceptions.AuthenticationError,
    exceptions.NoPermissionError,
    exceptions.AuthorizationError,
)
_TEMPORARY = (
    exceptions.ConnectionError,  # includes "busy loading"
    exceptions.TimeoutError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
    exceptions.MasterDownError,
    exceptions.ReadOnlyError,  # a failover is under way
    exceptions.RedisClusterException,
)
# Of other errors the text tells more: a script's errors all have one class.
_FROM_SCRIPT = "POUNDLOCK "  # how our scripts begin their own errors
_FULL = "OOM command not allowed"  # inside a script, servers before 7 put it in the middle
_FORBIDDEN_BEGIN = ("NOAUTH", "WRONGPASS", "NOPERM")
_FORBIDDEN_INSIDE = (  # a script that lacks a permission, from 7 on and before
    "ACL failure in script",
    "The user executing the script can't",
)
_TEMPORARY_BEGIN = ("LOADING", "BUSY", "MISCONF", "NOREPLICAS")
_TEMPORARY_INSIDE = (  # a script while servers change places
    "access a non local key",  # a slot is moving to another node
    "while the cluster is down",
    "against a read only replica",  # in the middle too, before 7
)


class Client:
    """Runs commands and scripts. Connects when it is created."""

    def __init__(self, url: str, timeout: float, sink: str):
        self._sink = sink
        self._timeout = timeout
        with self.errors("connecting"):
            self._client, self.clustered = self._connect(resolve("url", url))

    def _connect(self, url: str) -> tuple[Any, bool]:
        settings: dict[str, Any] = {
            "socket_timeout": self._timeout,
            "socket_connect_timeout": min(self._timeout, 10.0),
        }
        try:
            # A socket's path follows the user and password.
            if is_cut(url) and not url.startswith("unix://"):
                raise ValueError
            client = redis.Redis.from_url(url, **settings)
            client.connection_pool.make_connection()  # which finds an unknown parameter
        except (ValueError, TypeError):
            raise UsageError(
                "url is not a valid address: write redis://[user:password@]host:port/database, "
                "rediss:// for TLS, or unix://path. Percent-encode / ? # @ inside its parts, such "
                "as / as %2F in a password, and give only parameters that redis-py knows",
                sink=self._sink,
            ) from None
        clustered = bool(client.info("cluster").get("cluster_enabled"))  # type: ignore[union-attr]
        if not clustered:
            return client, False
        client.close()
        return redis.RedisCluster.from_url(url, **settings), True

    def run(self, script: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        return self._client.eval(script, len(keys), *keys, *arguments)

    def execute(self, *command: Any, key: str) -> Any:
        """Run a command at the node that has `key`."""
        if not self.clustered:
            return self._client.execute_command(*command)
        node = self._client.get_node_from_key(key)
        return self._client.execute_command(*command, target_nodes=node)

    def slot(self, key: str) -> int:
        return self._client.keyslot(key) if self.clustered else 0

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def errors(self, doing: str) -> Iterator[None]:
        """Translate the errors of the server and of the connection."""
        try:
            yield
        except _FORBIDDEN as error:
            raise NotAuthorised(
                f"{doing}: the server refuses the user, the password or a command ({error}). The "
                "user needs permission for EVAL, TYPE, EXISTS, UNLINK, PEXPIRE, the commands of hashes "
                "and sets, and the commands that write the sink's target",
                sink=self._sink,
            ) from error
        except _TEMPORARY as error:
            text = str(error)
            if "max number of clients" in text:
                text = (
                    "the server has no connection left. Raise its maxclients, or run fewer tasks "
                    "at once"
                )
            raise Unavailable(f"{doing}: {text}", sink=self._sink) from error
        except exceptions.ResponseError as error:
            raise self._translate_text(doing, error) from error

    def _translate_text(self, doing: str, error: exceptions.ResponseError) -> PoundlockError:
        text = str(error)
        if isinstance(error, exceptions.OutOfMemoryError) or _FULL in text:
            return Unavailable(
                f"{doing}: the server has no memory left (maxmemory) and changed nothing. Nothing "
                "is lost: free some memory or raise maxmemory, then it can be tried again",
                sink=self._sink,
            )
        if text.startswith(_FORBIDDEN_BEGIN) or _contains(text, _FORBIDDEN_INSIDE):
            return NotAuthorised(f"{doing}: {text}", sink=self._sink)
        if text.startswith(_TEMPORARY_BEGIN) or _contains(text, _TEMPORARY_INSIDE):
            return Unavailable(f"{doing}: {text}", sink=self._sink)
        if not text.startswith(_FROM_SCRIPT):
            return InDoubt(f"{doing}: {text}", sink=self._sink)
        text = text.removeprefix(_FROM_SCRIPT).partition(" script: ")[0]
        return InDoubt(
            f"{doing}: {text}. Nothing was changed. Correct this and start the pipeline again: it "
            "continues from here",
            sink=self._sink,
        )


def address_of(url: str) -> Sequence[Address]:
    """Return the server's address, none for a socket of Unix or a URL that cannot be read."""
    try:
        parts = urlsplit(resolve("url", url))
        port = parts.port or _PORT
    except ValueError:
        return ()
    if parts.scheme not in ("redis", "rediss"):
        return ()
    return [(parts.hostname or "localhost", port)]


def as_text(answer: Any) -> str:
    return answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)


def as_pairs(answer: Any) -> dict[str, str]:
    """Read an answer of names and values: a dictionary, or names and values in turn."""
    if isinstance(answer, Mapping):
        return {as_text(name): as_text(value) for name, value in answer.items()}
    flat = [as_text(it) for it in answer]
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _contains(text: str, parts: Sequence[str]) -> bool:
    return any(part in text for part in parts)
