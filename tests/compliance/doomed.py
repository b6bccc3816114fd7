"""A task that dies just after it has prepared its branch: nobody gets its receipt.

python -m tests.compliance.doomed < (sink, branch, rows), pickled by the suite
"""

from __future__ import annotations

import os
import pickle
import signal
import sys


def main() -> None:
    sink, branch, rows = pickle.load(sys.stdin.buffer)
    writer = sink.begin(branch)
    writer.write(rows)
    assert writer.prepare() is not None
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
