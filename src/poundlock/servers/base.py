"""What all local servers share.

A server is one or more processes (nodes) with their data under one directory, its home:

    home/state.json    ports, and for each node its process
    home/lock          held while the state is read, changed and written
    home/NODE.log      what the node printed
    home/...           configuration and data, in the server's own layout

Ports are chosen at the first start and kept, so that addresses stay valid across restarts. Data stays
until it is wiped. Processes run in sessions of their own and outlive the program that started them.
Signals go only to processes that are recorded here and are still the same ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from poundlock import ownership
from poundlock.errors import Unavailable, UsageError
from poundlock.servers import rooms
from poundlock.servers.process import Process, spawn, stop_all

START_TIMEOUT = 120.0
STOP_TIMEOUT = 20.0


class Server(Protocol):
    """What is specific to one kind of server."""

    @property
    def name(self) -> str: ...

    @property
    def nodes(self) -> Sequence[str]:
        """The names of the nodes in the order of their start. Each is one process."""
        ...

    @property
    def port_names(self) -> Sequence[str]: ...

    @property
    def options(self) -> Mapping[str, Any]:
        """What the data on disk depends on: a later start must use the same. No secrets."""
        ...

    @property
    def stop_timeout(self) -> float:
        """How many seconds the nodes may take to shut down together."""
        ...

    def prepare(self, home: Path, ports: Mapping[str, int]) -> None:
        """Write the configuration, and create missing data. No node is running."""
        ...

    def command(self, home: Path, node: str) -> list[str]:
        """Return the command line of a node, which must stay in the foreground."""
        ...

    def probe(self, home: Path, ports: Mapping[str, int], nodes: Sequence[str]) -> None:
        """Send a real request to the server. Any error means that the nodes are not ready yet."""
        ...

    def url(self, ports: Mapping[str, int]) -> str:
        """Return the address for clients."""
        ...


def home_of(name: str, directory: Path | str | None = None) -> Path:
    """Return the home of the server of this name that outlives the program."""
    chosen = directory or os.environ.get("POUNDLOCK_SERVERS_DIR")
    root = Path(chosen) if chosen else Path.home() / ".local" / "state" / "poundlock" / "servers"
    return root.absolute() / name


# --- ports ---


def free_ports(count: int, besides: Container[int] = ()) -> list[int]:
    """Choose unused ports on the loopback interface, below the ephemeral range.

    A client that keeps trying to reach a dead server on an ephemeral port is sooner or later assigned
    that very port. It then connects to itself, and the server cannot start again.
    """
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    low, high = (10_000, ephemeral) if ephemeral > 11_000 else (20_000, 32_000)
    found: list[int] = []
    for port in random.sample(range(low, high), high - low):
        if len(found) == count:
            return found
        if port not in besides and port_is_free(port):
            found.append(port)
    raise Unavailable(f"fewer than {count} ports of 127.0.0.1 are free between {low} and {high}")


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: ignore connections of a former owner that are still closing.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


# --- state ---


@dataclass
class State:
    """What is recorded about a server between two commands."""

    server: str
    options: dict[str, Any] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    url: str = ""
    stop_timeout: float = STOP_TIMEOUT
    stop_signal: str = "SIGTERM"
    owner: str = ""  # who last started a private server; see guard.py
    processes: dict[str, Process] = field(default_factory=dict)

    @classmethod
    def load(cls, home: Path) -> State | None:
        file = home / "state.json"
        try:
            content = json.loads(file.read_text())
            processes = {node: Process(**it) for node, it in content.pop("processes").items()}
            return cls(**content, processes=processes)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(
                f"{file} cannot be read ({error}), so the server's processes are not known. "
                f"Find and end any that still run, then delete {home}"
            ) from error

    def save(self, home: Path) -> None:
        write_private(home / "state.json", json.dumps(asdict(self), indent=2) + "\n")

    def running(self) -> list[str]:
        return [node for node, process in self.processes.items() if process.alive]


def write_private(file: Path, text: str) -> None:
    """Replace a file as a whole. Only its owner may read it, because it may contain passwords."""
    temporary = file.with_name(file.name + ".new")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as stream:
        stream.write(text)
    os.replace(temporary, file)


@contextlib.contextmanager
def locked(home: Path) -> Iterator[None]:
    with ownership.locked(ownership.own_directory(home, rooms.home_mode()) / "lock"):
        yield


# --- one server in its home ---


class Instance:
    """A server in its home. Any thread and any process may call any method."""

    def __init__(self, server: Server, home: Path, owner: str = ""):
        self.server = server
        self.home = home.absolute()
        self.owner = owner

    @property
    def state(self) -> State:
        return State.load(self.home) or State(self.server.name)

    @property
    def url(self) -> str:
        """The address without the password."""
        return self.state.url

    def running(self) -> list[str]:
        """Return the nodes whose processes are alive."""
        return self.state.running()

    def up(self, timeout: float = START_TIMEOUT) -> None:
        """Start every node that is not running, and wait until the server answers."""
        with locked(self.home):
            state = self.state
            if state.options not in ({}, self.server.options):
                raise UsageError(
                    f"the data of {state.server} in {self.home} was made for {_text(state.options)}"
                    f", not for {_text(self.server.options)}. Use the same options, choose another "
                    "directory, or delete the data with: poundlock servers down --wipe"
                )
            running = state.running()
            if not running:
                state.ports = self._ports(state)
                self.server.prepare(self.home, state.ports)
                state.url = self.server.url(state.ports)
                state.options = dict(self.server.options)
                state.stop_timeout = self.server.stop_timeout
                # On SIGTERM, PostgreSQL waits for the last client to disconnect.
                state.stop_signal = getattr(self.server, "stop_signal", "SIGTERM")
                state.owner = self.owner
            started = [node for node in self.server.nodes if node not in running]
            for node in started:
                self._spawn(state, node)
        try:
            self.wait_ready(self.server.nodes, timeout=timeout)
        except BaseException:
            # End only the nodes that this call started, not those that ran before.
            with locked(self.home):
                _stop(self.home, started, self.server.stop_timeout)
            raise

    def start(self, node: int | str = 1, *, wait: bool = True) -> None:
        """Start a node again, with the same data and ports.

        Do not wait if too few other nodes run to form a cluster.
        """
        name = self._check(node)
        with locked(self.home):
            state = self.state
            if name not in state.running():
                self._spawn(state, name)
        if wait:
            self.wait_ready([name])

    def stop(self, node: int | str = 1) -> None:
        """Shut a node down."""
        name = self._check(node)
        with locked(self.home):
            _stop(self.home, [name], STOP_TIMEOUT)

    def kill(self, node: int | str = 1) -> None:
        """Send SIGKILL: the node ends at once and loses what it had only in memory."""
        name = self._check(node)
        with locked(self.home):
            _stop(self.home, [name], 0)

    def pause(self, node: int | str = 1) -> None:
        """Stop all of the node's threads: it keeps its connections and does not answer."""
        self._process(node).pause()

    def resume(self, node: int | str = 1) -> None:
        """Send SIGCONT."""
        self._process(node).send(signal.SIGCONT)

    def wait_ready(
        self, nodes: Sequence[str] | None = None, *, timeout: float = START_TIMEOUT
    ) -> None:
        """Wait until these nodes, or all that were started, answer."""
        deadline = time.monotonic() + timeout
        while True:
            state = self.state
            wanted = list(state.processes if nodes is None else nodes)
            if not wanted:
                raise UsageError(
                    f"no node of {self.server.name} was started, so none can become ready"
                )
            dead = [node for node in wanted if node not in state.running()]
            if dead:
                raise Unavailable(self._failure(dead, "ended before it was ready"))
            try:
                self.server.probe(self.home, state.ports, wanted)
                return
            except UsageError:
                raise
            except Exception as error:  # whatever the client raises, the node is not ready yet
                if time.monotonic() > deadline:
                    reason = f"did not answer within {timeout:.0f} seconds ({error!r})"
                    raise Unavailable(self._failure(wanted, reason)) from error
            time.sleep(0.1)

    def log(self, node: int | str = 1) -> Path:
        return self.home / f"{node}.log"

    def _ports(self, state: State) -> dict[str, int]:
        """Keep the ports of the last start, and replace those that are in use now."""
        names = self.server.port_names
        kept = {name: port for name, port in state.ports.items() if port_is_free(port)}
        new = [name for name in names if name not in kept]
        return kept | dict(zip(new, free_ports(len(new), kept.values()), strict=True))

    def _spawn(self, state: State, node: str) -> None:
        command = self.server.command(self.home, node)
        state.processes[node] = spawn(command, cwd=self.home, log=self.log(node))
        state.save(self.home)

    def _check(self, node: int | str) -> str:
        """Return the name of a node. Raises `UsageError` if there is none of that name."""
        if str(node) not in self.server.nodes:
            raise UsageError(
                f"{self.server.name} has no node '{node}'; it has: {', '.join(self.server.nodes)}"
            )
        return str(node)

    def _process(self, node: int | str) -> Process:
        process = self.state.processes.get(self._check(node))
        if process is None or not process.alive:
            raise UsageError(f"node {node} of {self.server.name} is not running")
        return process

    def _failure(self, nodes: Sequence[str], reason: str) -> str:
        log = self.log(nodes[0])
        return f"{self.server.name} (node {', '.join(nodes)}) {reason}. The end of {log}:\n{_tail(log)}"


@dataclass(frozen=True)
class Status:
    """What a home contains, as data that can be printed."""

    created: bool
    running: bool  # every node that was started still runs
    url: str
    directory: str
    nodes: dict[str, dict[str, Any]]  # of each running node: pid and log


def status(home: Path) -> Status:
    state = State.load(home)
    if state is None:
        return Status(created=False, running=False, url="", directory=str(home), nodes={})
    nodes = {
        node: {"pid": state.processes[node].pid, "log": str(home / f"{node}.log")}
        for node in state.running()
    }
    running = bool(nodes) and len(nodes) == len(state.processes)
    return Status(True, running, state.url, str(home), nodes)


def down(home: Path, *, wipe: bool = False, owner: str | None = None) -> list[str]:
    """End the recorded processes of the server in a home, and return the nodes that were running.

    If `owner` is given, do so only if it still owns the server.
    """
    if not home.exists():
        return []
    with locked(home):
        state = State.load(home)
        if state is None or owner not in (None, state.owner):
            return []
        running = state.running()
        _stop(home, list(state.processes), state.stop_timeout)
        if wipe:
            # The lock file stays: another process may be waiting for it.
            for entry in home.iterdir():
                if entry.name != "lock":
                    rooms.delete(entry)
        return running


def _stop(home: Path, nodes: Sequence[str], seconds: float) -> None:
    """End these nodes together, and forget their processes. The caller holds the lock."""
    state = State.load(home)
    if state is None:
        return
    ending = {node: state.processes[node] for node in nodes if node in state.processes}
    stop_all(list(ending.values()), seconds, signal.Signals[state.stop_signal])
    left = {node: process.pid for node, process in ending.items() if process.alive}
    for node in ending.keys() - left.keys():
        del state.processes[node]
    state.save(home)
    if left:
        raise Unavailable(f"{state.server} still runs after SIGKILL (pid of each node: {left})")


# --- what servers run and import ---


def run_tool(command: Sequence[str], problem: str, **options: Any) -> None:
    """Run a program to its end. If it fails, raise `Unavailable` with the end of its output."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode != 0:
        output = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise Unavailable(f"{problem}. The end of its output:\n{output}")


def import_client(extra: str, name: str, *submodules: str) -> Any:
    """Import the client library that a server is probed with."""
    try:
        for submodule in submodules:
            import_module(f"{name}.{submodule}")
        return import_module(name)
    except ImportError as error:
        raise UsageError(
            f"the package {name} is not installed. Run: pip install 'poundlock[{extra}]'"
        ) from error


def _text(options: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in options.items())


def _tail(log: Path, lines: int = 20) -> str:
    try:
        with open(log, "rb") as stream:
            stream.seek(max(0, log.stat().st_size - 64_000))
            text = stream.read().decode(errors="replace")
    except FileNotFoundError:
        return "(the file does not exist)"
    return "\n".join(text.splitlines()[-lines:])
