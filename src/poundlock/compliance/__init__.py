"""The compliance suite: tests of the contract that every sink must fulfil, for our sinks and yours.

Your project needs one test module. It defines how to create the sink and how to look at its system
without the sink's own code, and it imports the tests from here:

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

# Before the imports, because pytest shows compared values only in modules registered here.
pytest.register_assert_rewrite(f"{__name__}.requirements", f"{__name__}.faults")

from poundlock.compliance.fault import FAULTS, FaultCase, empty, fill, small_disk  # noqa: E402
from poundlock.compliance.subject import Subject  # noqa: E402

__all__ = ["FAULTS", "FaultCase", "Subject", "empty", "fill", "small_disk"]
