"""One connection to a Redis or Valkey, alone or in a cluster, and its errors in our words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import redis
import redis.exceptions as said

from poundlock.errors import InDoubt, NotAuthorised, Unavailable, UsageError
from poundlock.secret import resolve

STAGE, MOVE, ABORT = (
    (files("poundlock.sinks.redis") / f"{name}.lua").read_text()
    for name in ("stage", "move", "abort")
)

_PASSING = (
    said.ConnectionError,  # busy loading, too
    said.TimeoutError,
    said.ClusterDownError,
    said.TryAgainError,
    said.MasterDownError,
    said.ReadOnlyError,  # a failover is under way
    said.RedisClusterException,
)
_OURS = "POUNDLOCK "  # how a script of ours begins its errors
_FULL = "OOM command not allowed"  # which servers before 7 put in the middle, if a script met it
_AWAY = (  # what a script meets while servers change places
    "access a non local key",  # a slot is on its way to another node
    "while the cluster is down",
    "against a read only replica",  # in the middle too, before 7
)
_FORBIDDEN = (  # what a script meets without a right, from 7 on and before
    "ACL failure in script",
    "The user executing the script can't",
)


class Client:
    """Runs our scripts. Connects when it is first asked."""

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
            client = redis.Redis.from_url(url, **settings)
        except ValueError:
            raise UsageError(
                "url cannot be understood: write redis://[user:password@]host:port/database, "
                "rediss:// for TLS, or unix://path",
                sink=self._sink,
            ) from None
        clustered = bool(client.info("cluster").get("cluster_enabled"))  # type: ignore[union-attr]
        if not clustered:
            return client, False
        client.close()
        return redis.RedisCluster.from_url(url, **settings), True

    def run(self, script: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        return self._client.eval(script, len(keys), *keys, *arguments)

    def ask(self, *command: Any, key: str) -> Any:
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
        """Tell in our words what the server or the way to it refused."""
        try:
            yield
        except (said.AuthenticationError, said.NoPermissionError, said.AuthorizationError) as error:
            raise NotAuthorised(
                f"{doing}: the server refuses the user, the password or a command ({error}). The "
                "sink needs the commands of its target, EVAL, TYPE, EXISTS, UNLINK, PEXPIRE, and those "
                "of hashes and sets",
                sink=self._sink,
            ) from error
        except _PASSING as error:
            text = str(error)
            if "max number of clients" in text:
                text = (
                    "the server has no connection left. Raise its maxclients, or let fewer tasks run "
                    "at once"
                )
            raise Unavailable(f"{doing}: {text}", sink=self._sink) from error
        except said.ResponseError as error:
            text = str(error)
            if isinstance(error, said.OutOfMemoryError) or _FULL in text:
                raise Unavailable(
                    f"{doing}: the server has no memory left (maxmemory) and changed nothing. Nothing "
                    "is lost: make room there, or raise maxmemory, and the same can be done again",
                    sink=self._sink,
                ) from error
            if text.startswith(("NOAUTH", "WRONGPASS", "NOPERM")) or _has(text, _FORBIDDEN):
                raise NotAuthorised(f"{doing}: {text}", sink=self._sink) from error
            passing = text.startswith(("LOADING", "BUSY", "MISCONF", "NOREPLICAS"))
            if passing or _has(text, _AWAY):
                raise Unavailable(f"{doing}: {text}", sink=self._sink) from error
            if not text.startswith(_OURS):
                raise InDoubt(f"{doing}: {text}", sink=self._sink) from error
            text = text.removeprefix(_OURS).partition(" script: ")[0]
            raise InDoubt(
                f"{doing}: {text}. Nothing was changed. Put that right, and start the "
                "pipeline again: it goes on from here",
                sink=self._sink,
            ) from error


def as_text(answer: Any) -> str:
    return answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)


def _has(text: str, parts: Sequence[str]) -> bool:
    return any(part in text for part in parts)
