"""`poundlock doctor` says what the encryption of a connection protects from, on real servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from click.testing import CliRunner
from fix_mysql import Place

from certificates import Authority, readable_by_servers
from poundlock.cli import poundlock
from poundlock.servers import postgres


def ask(option: str, address: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Return what doctor finds about the one database."""
    monkeypatch.setenv("ADDRESS", address)
    outcomes = []
    for given in ("env:ADDRESS", address):  # which must not be shown
        result = CliRunner().invoke(poundlock, ["doctor", option, given, "--json"])
        assert not isinstance(result.exception, AssertionError) and address not in result.output
        outcomes.append(json.loads(result.stdout)[-1])
    indirect, direct = outcomes
    assert indirect["found"] == direct["found"] and "env:ADDRESS" in indirect["what"]
    return indirect


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def node(authority: Authority) -> Iterator[postgres.Postgres]:
    """A server whose certificate names 127.0.0.1, but not localhost."""
    made = authority.certify("right", "IP:127.0.0.1")
    with readable_by_servers(made.file, made.key) as place:
        settings = {
            "ssl": "on",
            "ssl_cert_file": str(place / made.file.name),
            "ssl_key_file": str(place / made.key.name),
        }
        with postgres.running(settings=settings) as running:
            yield running


class TestPostgres:
    @pytest.mark.parametrize(
        ("mode", "encrypted", "says"),
        [
            ("disable", False, "whoever is on the network"),
            ("allow", False, "protects from nobody"),
            ("prefer", True, "listeners only"),
            (None, True, "sslmode=prefer"),
            ("require", True, "listeners only"),
            ("verify-ca", True, "for any host"),
            ("verify-full", True, "from false servers"),
        ],
    )
    def test_every_mode_is_explained(
        self,
        node: postgres.Postgres,
        authority: Authority,
        mode: str | None,
        encrypted: bool,
        says: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        options = f"?sslmode={mode}" if mode else ""
        if mode and mode.startswith("verify"):
            options += f"&sslrootcert={quote(str(authority.file))}"
        found = ask("--postgres", node.dsn() + options, monkeypatch)
        assert found["good"] and says in str(found["found"])
        assert str(found["found"]).startswith("encrypted" if encrypted else "not encrypted")

    def test_with_a_ca_require_verifies_it(
        self, node: postgres.Postgres, authority: Authority, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        options = f"?sslmode=require&sslrootcert={quote(str(authority.file))}"
        assert "as verify-ca" in str(ask("--postgres", node.dsn() + options, monkeypatch)["found"])

    def test_a_false_server_is_reported(
        self,
        node: postgres.Postgres,
        authority: Authority,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        stranger = Authority(tmp_path / "stranger")
        elsewhere = node.dsn().replace("127.0.0.1", "localhost") + "?hostaddr=127.0.0.1"
        for address, root in ((node.dsn() + "?", stranger), (elsewhere + "&", authority)):
            options = f"sslmode=verify-full&sslrootcert={quote(str(root.file))}"
            found = ask("--postgres", address + options, monkeypatch)
            assert (found["good"], found["found"]) == (False, "UsageError"), found
            assert "certificate" in str(found["cure"])

    def test_a_server_without_tls_is_reported(
        self, postgres_node: postgres.Postgres, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = ask("--postgres", postgres_node.dsn() + "?sslmode=require", monkeypatch)
        assert "does not support SSL" in str(found["cure"]) and not found["good"]


class TestMySQL:
    def test_the_mode_is_explained(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        address = place.server.address.partition("?")[0]
        found = ask("--mysql", f"{address}?ssl_mode=DISABLED", monkeypatch)
        assert str(found["found"]).startswith("not encrypted; ssl_mode=DISABLED: no TLS")
        missing = ask("--mysql", f"{address}?ssl_ca=/none", monkeypatch)
        assert not missing["good"] and "ssl_ca=" in str(missing["cure"])
