"""Opens sessions for `test_session.py`, which looks at the sockets of the JVM from outside.

Prints the JVM's process id and the master, and ends when its input ends. Arguments: masters, one
session for each; `-` for none.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import poundlock as lock
from poundlock.errors import UsageError


def main(masters: list[str]) -> None:
    for master in masters:
        try:
            spark = lock.session(
                None if master == "-" else master, kafka=False, conf={"spark.ui.port": "0"}
            )
        except UsageError as error:
            print(json.dumps({"error": str(error)}), flush=True)
            continue
        assert spark.range(1000, numPartitions=3).count() == 1000
        java: Any = spark._jvm
        told = {
            "pid": int(java.java.lang.ProcessHandle.current().pid()),
            "master": spark.sparkContext.master,
            "ui": spark.sparkContext.uiWebUrl,
        }
        print(json.dumps(told), flush=True)
        sys.stdin.readline()
        spark.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
