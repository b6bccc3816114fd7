"""Whether the driver before runs no more is said only with proof: otherwise a new one waits."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from poundlock.core import owner
from poundlock.core.owner import has_ended, this_process

_SAY = "from poundlock.core.owner import this_process; print(this_process(), flush=True); input()"


def test_a_process_has_ended_when_it_is_gone() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _SAY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        name = other.stdout.readline().strip()
        assert f":{other.pid}." in name
        assert not has_ended(name)
        other.communicate("\n")
    assert has_ended(name)


def test_this_process_has_ended_its_own_query() -> None:
    assert has_ended(this_process())


def test_a_process_that_got_the_number_of_another_is_not_that_one() -> None:
    parent = this_process()
    started = re.sub(r"\.(\d+)@", lambda it: f".{int(it[1]) - 1}@", parent)
    assert started != parent and has_ended(started)


@pytest.mark.parametrize(
    "name",
    [
        "adopted by root@vm:4004",
        "vm:4004",  # of an older release
        "here",
        "",
        re.sub(r"@.*", "@0123456789ab", this_process()),  # another boot, or another container
        re.sub(r"^[^:]*", "another-host", this_process()),
    ],
)
def test_it_is_not_known_of_any_other_owner(name: str) -> None:
    assert not has_ended(name)


def test_it_is_not_known_where_processes_cannot_be_told_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Such as on macOS, or where /proc belongs to other containers."""
    before = this_process()
    monkeypatch.setattr(owner, "_PROC", str(tmp_path))
    plain = this_process()
    assert re.fullmatch(r".+:\d+", plain) and before.startswith(plain)
    assert has_ended(plain), "this very process"
    assert not has_ended(before) and not has_ended(plain[:-1])
