"""The local Valkey and OpenSearch: private, on the loopback, with data that survives restarts."""

from __future__ import annotations

import json
import os
import pwd
import stat
import urllib.request
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner

from poundlock.cli import poundlock
from poundlock.errors import UsageError
from poundlock.servers import base, opensearch, valkey


def owner_of(home: Path) -> str:
    """Return the user that the server runs as."""
    state = base.State.load(home)
    assert state is not None
    process = state.processes["1"]
    return pwd.getpwuid(os.stat(f"/proc/{process.pid}").st_uid).pw_name


def listening(home: Path) -> set[str]:
    """Return the addresses on which the server listens, in the kernel's format."""
    state = base.State.load(home)
    assert state is not None
    lines = [
        line.split()
        for file in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(file).read_text().splitlines()[1:]
    ]
    places = [line[1].split(":") for line in lines if line[3] == "0A"]
    return {address for address, port in places if int(port, 16) in state.ports.values()}


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}  # in IPv4, and IPv4 mapped to IPv6
EXPECTED = "nobody" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name


def test_valkey_keeps_its_address_and_data_over_a_restart(tmp_path: Path) -> None:
    try:
        node = valkey.up(tmp_path)
        url, home = node.address, node.directory
        redis.Redis.from_url(url).set("key", "value")
        assert owner_of(home) == EXPECTED
        assert listening(home) and listening(home) <= LOOPBACK
        assert stat.S_IMODE((home / "password").stat().st_mode) == 0o600
        password = (home / "password").read_text()
        assert password not in (home / "state.json").read_text()
        state = base.State.load(home)
        assert (
            state and password not in Path(f"/proc/{state.processes['1'].pid}/cmdline").read_text()
        )
        with pytest.raises(redis.exceptions.AuthenticationError):
            redis.Redis.from_url(node.url).get("key")
        result = CliRunner().invoke(poundlock, ["servers", "env", "--dir", str(tmp_path)])
        assert result.output == f"export REDIS_URL={url}\n", "only the servers that run"
        result = CliRunner().invoke(poundlock, ["servers", "env", "--dir", str(tmp_path), "--json"])
        assert json.loads(result.output) == {"REDIS_URL": url}
        down = ["servers", "down", "valkey", "kafka", "--dir", str(tmp_path), "--json"]
        assert json.loads(CliRunner().invoke(poundlock, down).output) == {
            "valkey": {"created": True, "ended": True, "wiped": False},
            "kafka": {"created": False, "ended": False, "wiped": False},
        }
        assert not base.status(base.home_of("valkey", tmp_path)).running
        result = CliRunner().invoke(poundlock, ["servers", "env", "valkey", "--dir", str(tmp_path)])
        assert result.exit_code == 1 and "servers up valkey" in result.output
        again = valkey.up(tmp_path)
        assert again.address == url and redis.Redis.from_url(url).get("key") == b"value"
        again.kill()  # acknowledged writes are on disk
        again.start()
        assert redis.Redis.from_url(url).get("key") == b"value"
    finally:
        base.down(base.home_of("valkey", tmp_path), wipe=True)
    assert sorted(entry.name for entry in home.iterdir()) == ["lock"]


def test_wrong_calls_for_valkey_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POUNDLOCK_VALKEY_BIN", str(tmp_path / "missing"))
    with pytest.raises(UsageError, match="POUNDLOCK_VALKEY_BIN"):
        valkey.binary()
    with pytest.raises(UsageError, match="cluster=True"):
        valkey.ValkeyServer(3)


def test_opensearch_keeps_its_address_and_data_over_a_restart(tmp_path: Path) -> None:
    def ask(path: str, body: bytes | None = None) -> dict[str, object]:
        request = urllib.request.Request(f"{url}{path}", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    try:
        node = opensearch.up(tmp_path)
        url, home = node.url, node.directory
        ask("/index/_doc/1", b'{"a": 1}')
        assert owner_of(home) == EXPECTED
        assert listening(home) and listening(home) <= LOOPBACK
        node.kill()  # acknowledged writes are on disk
        node.start()
        assert ask("/index/_doc/1")["_source"] == {"a": 1}
        base.down(base.home_of("opensearch", tmp_path))
        assert not base.status(base.home_of("opensearch", tmp_path)).running
        assert opensearch.up(tmp_path).url == url
        assert ask("/index/_doc/1")["_source"] == {"a": 1}
    finally:
        base.down(base.home_of("opensearch", tmp_path), wipe=True)
