"""The compliance suite: what every sink owes, as tests that anybody can run on a sink of his own.

A project of yours has one test module, which says how to make the sink and how to look at its system
with other eyes than its own, and takes the tests from here:

    from poundlock.compliance import FaultCase, Subject
    from poundlock.compliance.requirements import *
    from poundlock.compliance.faults import *

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
pytest.register_assert_rewrite(f"{__name__}.requirements", f"{__name__}.faults")

from poundlock.compliance.fault import FAULTS, FaultCase, empty, fill, small_disk  # noqa: E402
from poundlock.compliance.subject import Subject  # noqa: E402

__all__ = ["FAULTS", "FaultCase", "Subject", "empty", "fill", "small_disk"]
