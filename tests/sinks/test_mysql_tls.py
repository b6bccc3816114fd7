"""TLS of the MySQL sink: what its options demand, against real servers and against a rogue one."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import pytest
from fix_mysql import OPEN, OURS, Place, batch_of, begin
from rogue_mysql import CACHING, CLEAR, DIALOG, OLD, SHA256, RogueServer

from certificates import Authority, Certificate, readable_by_servers
from mysqld import running
from poundlock.errors import PoundlockError, UsageError
from poundlock.sinks import MySQL
from poundlock.sinks.mysql.link import Link, connect

PASSWORD = "Geheim-€-123"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """An authority that signed nothing of ours, under the same name."""
    return Authority(tmp_path_factory.mktemp("stranger"))


@pytest.fixture(scope="module")
def right(authority: Authority) -> Certificate:
    return authority.certify("right", "IP:127.0.0.1")


@pytest.fixture(scope="module")
def wrong(authority: Authority) -> Certificate:
    return authority.certify("wrong", "DNS:elsewhere.example")


@pytest.fixture(scope="module")
def readable(authority: Authority, right: Certificate, wrong: Certificate) -> Iterator[Path]:
    files = (authority.file, right.file, right.key, wrong.file, wrong.key)
    with readable_by_servers(*files) as place:
        yield place


@pytest.fixture(scope="module", params=["right"])
def certified(
    request: pytest.FixtureRequest, readable: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    """A database on a server with TLS, whose certificate names our host or another."""
    variables = {
        "ssl_ca": str(readable / "ca.pem"),
        "ssl_cert": str(readable / f"{request.param}.pem"),
        "ssl_key": str(readable / f"{request.param}.key"),
    }
    with running(tmp_path_factory.mktemp("mysql"), variables=variables) as server:
        yield Place(server)


WRONG_HOST = pytest.mark.parametrize("certified", ["wrong"], indirect=True)


def open_link(place: Place, **options: object) -> Link:
    return connect(with_options(place.server.address, **options), sink="out", lock_timeout=1)


def with_options(url: str, **options: object) -> str:
    pairs = [f"{name}={quote(str(value))}" for name, value in options.items()]
    return f"{url.partition('?')[0]}?{'&'.join(pairs)}"


def cipher(link: Link) -> str:
    return link.run("SHOW STATUS LIKE 'Ssl_cipher'")[0][1]


class TestARealServer:
    @pytest.mark.parametrize("mode", [None, "VERIFY_IDENTITY", "verify_ca"])
    def test_a_server_of_the_authority_is_accepted(
        self, certified: Place, authority: Authority, mode: str | None
    ) -> None:
        options = {"ssl_ca": authority.file} | ({"ssl_mode": mode} if mode else {})
        with closing(open_link(certified, **options)) as link:
            assert cipher(link)

    def test_a_server_of_another_authority_is_refused(
        self, certified: Place, stranger: Authority
    ) -> None:
        for options in ({}, {"ssl_mode": "VERIFY_CA"}):
            with pytest.raises(UsageError, match=r"certificate was not accepted.*ssl_ca="):
                open_link(certified, ssl_ca=stranger.file, **options)

    def test_a_client_certificate_is_sent(
        self, certified: Place, authority: Authority, right: Certificate
    ) -> None:
        name = f"holder_{certified.database}"
        certified.ask(f"CREATE USER {name}@'127.0.0.1' IDENTIFIED BY 'p' REQUIRE X509")
        port = certified.server.connect_arguments()["port"]
        url = f"mysql://{name}:p@127.0.0.1:{port}/"
        with pytest.raises(PoundlockError, match="refuses the connection"):
            connect(with_options(url, ssl_ca=authority.file), sink="out", lock_timeout=1)
        options = {"ssl_ca": authority.file, "ssl_cert": right.file, "ssl_key": right.key}
        with closing(connect(with_options(url, **options), sink="out", lock_timeout=1)) as link:
            assert cipher(link)

    @pytest.mark.parametrize(
        ("mode", "encrypted"), [("DISABLED", False), ("PREFERRED", True), ("REQUIRED", True)]
    )
    def test_modes_that_verify_nothing_accept_any_certificate(
        self, certified: Place, mode: str, encrypted: bool
    ) -> None:
        with closing(open_link(certified, ssl_mode=mode)) as link:
            assert bool(cipher(link)) == encrypted

    def test_a_sink_writes_and_no_receipt_holds_a_secret(
        self, certified: Place, authority: Authority
    ) -> None:
        certified.ask("CREATE TABLE IF NOT EXISTS t (x INT)")
        url = with_options(certified.server.address, ssl_ca=authority.file)
        for mode in ("xa", "staged"):
            sink = certified.sink(url=url, mode=mode)
            writer = begin(sink)
            writer.write(batch_of({"x": [1]}))
            receipt = writer.prepare()
            assert receipt is not None
            password = certified.server.connect_arguments()["password"]
            assert password not in f"{receipt} {sink!r}"
            assert sink.abort(sink.find(OURS)) != [OPEN]

    @WRONG_HOST
    def test_a_certificate_for_another_host_is_refused(
        self, certified: Place, authority: Authority
    ) -> None:
        for options in ({}, {"ssl_mode": "VERIFY_IDENTITY"}):
            with pytest.raises(UsageError, match=r"not accepted.*127\.0\.0\.1.*names the host"):
                open_link(certified, ssl_ca=authority.file, **options)
        with closing(open_link(certified, ssl_ca=authority.file, ssl_mode="VERIFY_CA")) as link:
            assert cipher(link)


class TestARogueServer:
    """It may end the connection, but it must not learn the password."""

    @pytest.mark.parametrize("mode", [None, "DISABLED", "PREFERRED", "REQUIRED"])
    @pytest.mark.parametrize("asks", [CLEAR, DIALOG, SHA256, CACHING, OLD, "unheard_of"])
    @pytest.mark.parametrize("at_once", [False, True])
    def test_an_unverified_server_never_gets_the_password(
        self, stranger: Authority, asks: str, mode: str | None, at_once: bool
    ) -> None:
        certificate = stranger.certify("rogue", "IP:127.0.0.1")
        greets = asks if at_once else "mysql_native_password"
        with RogueServer(asks, greets=greets, certificate=certificate) as server:
            options = {"ssl_mode": mode} if mode else {}
            problem = refusal(server, **options)
        assert PASSWORD.encode() not in server.received
        # If it greets with a way that the client does not know, the client sends no password at all.
        asked = not at_once or asks not in (OLD, "unheard_of")
        assert ("asks for the password itself" in str(problem)) == asked

    @pytest.mark.parametrize("asks", [CLEAR, DIALOG, SHA256, CACHING])
    def test_without_tls_neither(self, asks: str) -> None:
        with RogueServer(asks) as server:
            assert "asks for the password itself" in str(refusal(server))
        assert server.received and PASSWORD.encode() not in server.received

    @pytest.mark.parametrize("mode", [None, "VERIFY_CA", "VERIFY_IDENTITY"])
    def test_a_server_that_cannot_be_verified_learns_nothing(
        self, authority: Authority, stranger: Authority, mode: str | None
    ) -> None:
        certificate = stranger.certify("rogue", "IP:127.0.0.1")
        options = {"ssl_ca": authority.file} | ({"ssl_mode": mode} if mode else {})
        with RogueServer(CLEAR, certificate=certificate) as server:
            assert "certificate was not accepted" in str(refusal(server, **options))
        assert b"somebody" not in server.received

    @pytest.mark.parametrize("options", ["ssl_mode=REQUIRED", "ssl_ca={}"])
    def test_a_server_that_denies_tls_learns_nothing(
        self, authority: Authority, options: str
    ) -> None:
        with RogueServer(CLEAR) as server:
            url = f"{address(server)}?{options.format(authority.file)}"
            with pytest.raises(UsageError, match="offers no TLS"):
                connect(url, sink="out", lock_timeout=1)
        assert server.received == b""

    @pytest.mark.parametrize("asks", [CLEAR, DIALOG, SHA256, CACHING])
    def test_a_verified_server_gets_the_password(
        self, authority: Authority, right: Certificate, asks: str
    ) -> None:
        with RogueServer(asks, certificate=right) as server:
            refusal(server, ssl_ca=authority.file)  # it answers no statement
        assert server.encrypted and PASSWORD.encode() in server.received


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ("ssl_mode=on", "not known"),
            ("ssl_mode=", "is empty"),
            ("ssl_ca=", "is empty"),
            ("ssl_mode=DISABLED&ssl_ca=/ca", "contradicts"),
            ("ssl_mode=PREFERRED&ssl_ca=/ca", "contradicts"),
            ("ssl_mode=REQUIRED&ssl_ca=/ca", "contradicts"),
            ("ssl_mode=DISABLED&ssl_cert=/c", "contradicts"),
            ("ssl_mode=VERIFY_CA", "needs ssl_ca="),
            ("ssl_mode=VERIFY_IDENTITY", "needs ssl_ca="),
            ("ssl_key=/k", "needs ssl_cert="),
            ("ssl_ca=/a&ssl_ca=/b", "twice"),
            ("ssl_verify_identity=true", "unknown options"),
            ("connect_timeout=soon", "not a number"),
        ],
    )
    def test_contradictions_are_refused(self, options: str, says: str) -> None:
        with pytest.raises(UsageError, match=says):
            MySQL("t", url=f"mysql://u:p@h/d?{options}")

    def test_files_that_cannot_be_used_are_named_by_their_option(self, tmp_path: Path) -> None:
        nonsense = tmp_path / "ca.pem"
        nonsense.write_text("nonsense")
        for file in (nonsense, tmp_path / "none"):
            for option in ("ssl_ca", "ssl_cert"):
                with pytest.raises(UsageError, match=f"{option}="):
                    connect(f"mysql://u:p@127.0.0.1:1/d?{option}={file}", sink="s", lock_timeout=1)

    def test_a_bare_question_mark_in_the_password_is_not_shown(self) -> None:
        with pytest.raises(UsageError, match="%3F") as caught:
            MySQL("t", url="mysql://u:12?Geheim@h/d")
        assert "Geheim" not in str(caught.value)

    def test_a_setting_from_the_environment_does_not_travel(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SOME_URL", "mysql://u:Geheim@h/d?ssl_ca=/etc/geheim.pem")
        sink = MySQL("t", url="env:SOME_URL")
        assert b"eheim" not in pickle.dumps(sink) and sink.database == "d"
        assert "Geheim" in os.environ["SOME_URL"]


def address(server: RogueServer) -> str:
    return f"mysql://somebody:{quote(PASSWORD)}@127.0.0.1:{server.port}/d"


def refusal(server: RogueServer, **options: object) -> PoundlockError:
    url = with_options(address(server), **options)
    with pytest.raises(PoundlockError) as caught:
        connect(url, sink="out", lock_timeout=1, answer_timeout=10).close()
    assert PASSWORD not in str(caught.value)
    return caught.value
