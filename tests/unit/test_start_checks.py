"""Errors of a start are gathered, and addresses are asked before a client waits for them."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from poundlock.core.faults import Faults
from poundlock.core.reach import parse_address, require_open
from poundlock.errors import NotAuthorised, PoundlockError, Unavailable, UsageError
from poundlock.sinks import Kafka, Redis


@pytest.fixture
def closed() -> tuple[str, int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()


@pytest.fixture
def opened() -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()


def gathered(*errors: PoundlockError) -> PoundlockError:
    faults = Faults()
    for error in errors:
        with faults.gather(sink="out"):
            raise error
    with pytest.raises(PoundlockError) as caught:
        faults.raise_any()
    return caught.value


def test_no_fault_raises_nothing_and_one_is_raised_as_it_is() -> None:
    Faults().raise_any()
    error = NotAuthorised("no")
    assert gathered(error) is error
    assert str(error) == "[sink out] no"


@pytest.mark.parametrize(
    ("kinds", "kind"),
    [
        ((Unavailable, Unavailable), Unavailable),
        ((NotAuthorised, NotAuthorised), NotAuthorised),
        ((Unavailable, NotAuthorised), UsageError),
        ((UsageError, NotAuthorised), UsageError),
    ],
)
def test_several_faults_are_listed_in_one_error(
    kinds: tuple[type[PoundlockError], ...], kind: type[PoundlockError]
) -> None:
    error = gathered(*[it(f"fault {number}") for number, it in enumerate(kinds)])
    assert type(error) is kind
    assert [type(fault) for fault in error.faults] == list(kinds)
    assert str(error).splitlines()[1:] == ["  1. [sink out] fault 0", "  2. [sink out] fault 1"]
    again = gathered(error, UsageError("the third"))  # a list in a list is one list
    assert len(again.faults) == 3 and str(again).startswith("3 things are wrong")


def test_only_addresses_that_all_refuse_are_told(
    closed: tuple[str, int], opened: tuple[str, int]
) -> None:
    with pytest.raises(Unavailable, match=rf"^127\.0\.0\.1:{closed[1]} refuses connections"):
        require_open([closed, closed])
    with pytest.raises(Unavailable, match=rf"localhost:{closed[1]}, 127.*refuse connections"):
        require_open([("localhost", closed[1]), closed])
    for addresses in ([], [opened], [closed, opened], [("no.such.host.invalid", 1), closed]):
        require_open(addresses)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("host:1", ("host", 1)),
        ("host", ("host", 9092)),
        (" [::1]:7 ", ("::1", 7)),
        ("[::1]", ("::1", 9092)),
        ("host:x", None),
        ("host:70000", None),
        (":1", None),
    ],
)
def test_an_address_is_read(text: str, address: tuple[str, int] | None) -> None:
    assert parse_address(text, 9092) == address


def test_sinks_name_their_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKERS", "one:1,two")
    assert Kafka("t", bootstrap_servers="env:BROKERS").addresses() == [("one", 1), ("two", 9092)]
    for url, addresses in {
        "redis://:secret@host/0": [("host", 6379)],
        "rediss://host:7": [("host", 7)],
        "unix:///socket": [],
        "redis://host:port": [],
    }.items():
        assert list(Redis(list="l", value="v", url=url).addresses()) == addresses
