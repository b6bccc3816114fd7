"""An at-least-once sink in a dozen lines: each task sends its rows as lines over TCP."""

from __future__ import annotations

import json
import socket
from typing import Any

import pyarrow as pa

from poundlock.sinks import Simple


class Lines(Simple):
    """Sends rows as lines of JSON to a listening server."""

    def __init__(self, host: str, port: int, *, name: str = "lines", **options: Any):
        super().__init__(name, **options)
        self.address = (host, port)

    def open(self, facts: Any) -> None:
        self.connection = socket.create_connection(self.address, timeout=10)

    def write(self, rows: pa.RecordBatch) -> None:
        lines = [json.dumps(row, default=str) + "\n" for row in rows.to_pylist()]
        self.connection.sendall("".join(lines).encode())

    def close(self) -> None:
        self.connection.close()
