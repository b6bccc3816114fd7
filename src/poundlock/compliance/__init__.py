"""The compliance suite: what every sink owes, as tests that anybody can run on a sink of his own.

A project of yours has one test module, which says how to make the sink and how to look at its system
with other eyes than its own, and takes the tests from here:

    from poundlock.compliance import Subject, Tried
    from poundlock.compliance.demands import *
    from poundlock.compliance.troubles import *

    class MySubject(Subject): ...

    @pytest.fixture(scope="session")
    def subject(tmp_path_factory):
        with my_server_running() as server:
            yield MySubject(server)

It needs pytest: `pip install 'poundlock[compliance]'`.
"""

from __future__ import annotations

import pytest

# Before they are imported: what an assertion compared is shown only in modules that were announced.
pytest.register_assert_rewrite(f"{__name__}.demands", f"{__name__}.troubles")

from poundlock.compliance.subject import Subject  # noqa: E402
from poundlock.compliance.trouble import TROUBLES, Tried, empty, fill, small_disk  # noqa: E402

__all__ = ["TROUBLES", "Subject", "Tried", "empty", "fill", "small_disk"]
