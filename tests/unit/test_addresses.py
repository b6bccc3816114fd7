"""The URL of a server: a bare character in a password never makes it another address."""

from __future__ import annotations

import pytest

from poundlock.errors import UsageError
from poundlock.secret import is_cut
from poundlock.sinks.mysql.link import connect_arguments
from poundlock.sinks.opensearch.client import connect
from poundlock.sinks.redis.client import Client

LOGINS = (
    "user:12/45secret",
    "u:p@x/45secret",
    ":12#45secret",
    "u:12?45secret",
    ":/45secret",
    "u:1/45secret@x",
)


@pytest.mark.parametrize("login", LOGINS)
def test_a_password_with_a_bare_separator_is_refused(login: str) -> None:
    place = f"{login}@127.0.0.1:1"
    calls = (
        lambda: Client(f"redis://{place}/0", 1.0, "out"),
        lambda: connect(f"https://{place}", {}, 1.0, "out"),
        lambda: connect_arguments(f"mysql://{place}/db"),
    )
    for call in calls:
        with pytest.raises(UsageError, match="ercent-encode / ") as raised:
            call()
        assert "45secret" not in str(raised.value) and raised.value.__cause__ is None


def test_a_parameter_that_redis_does_not_know_is_refused() -> None:
    with pytest.raises(UsageError, match="only parameters that redis-py knows") as raised:
        Client("redis://127.0.0.1:1/0?foo=hunter2", 1.0, "out")
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "cut"),
    [
        ("redis://user:p%2Fw@h:1/0", False),
        ("redis://h:1/0", False),
        ("https://u:p@h:1/path?x=a", False),
        ("mysql://u:p@x?y@h/db", True),
        ("no url with @", False),
        ("redis://u:1/2@h", True),
    ],
)
def test_only_a_cut_address_is_told(url: str, cut: bool) -> None:
    assert is_cut(url) is cut
