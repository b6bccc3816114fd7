"""A server that pretends to be MySQL, asks for the password, and keeps all that it gets."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading

from certificates import Certificate

_SSL = 0x0800
_CAPABILITIES = 0x000FF7FF | 0x00200000  # all of a usual server's, and its form of long answers
_SALT = b"abcdefgh", b"ijklmnopqrst"
CLEAR, DIALOG, SHA256, CACHING, OLD = (
    "mysql_clear_password",
    "dialog",
    "sha256_password",
    "caching_sha2_password",
    "mysql_old_password",
)


class RogueServer:
    """Listens on the loopback. `greets` with one way to log in, and switches to another.

    With `caching_sha2_password` it says that it needs the password in full, and offers a key.
    """

    def __init__(
        self,
        asks: str,
        *,
        greets: str = "mysql_native_password",
        certificate: Certificate | None = None,
    ):
        self.asks, self.greets = asks, greets
        self.received = b""  # in plain text, after the end of TLS
        self.encrypted = False
        self._certificate = certificate
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> RogueServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Wakes the thread. Closing the socket alone would not.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with client, contextlib.suppress(OSError, EOFError):
                client.settimeout(10)
                self._talk(client)

    def _talk(self, client: socket.socket) -> None:
        _send(client, 0, self._greeting())
        number, answer = self._receive(client)
        if len(answer) == 32:  # the client wants TLS
            assert self._certificate is not None
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._certificate.file, self._certificate.key)
            client = context.wrap_socket(client, server_side=True)
            self.encrypted = True
            number, _ = self._receive(client)
        if self.greets != self.asks:
            demand = b"\xfe" + self.asks.encode() + b"\0"
            demand += b"\x04Password: " if self.asks == DIALOG else b"".join(_SALT) + b"\0"
            _send(client, number + 1, demand)
            number, _ = self._receive(client)
        if self.asks == CACHING:
            _send(client, number + 1, b"\x01\x04")  # the hash is not enough
            number, answer = self._receive(client)
            if answer == b"\x02":
                _send(client, number + 1, b"\x01-----BEGIN PUBLIC KEY-----")
                self._receive(client)
        _send(client, number + 1, b"\0\0\0\2\0\0\0")  # welcome
        self._receive(client)

    def _greeting(self) -> bytes:
        flags = _CAPABILITIES | (_SSL if self._certificate else 0)
        if not self._certificate:
            flags &= ~_SSL
        return b"".join(
            (
                b"\x0a8.0.36\0",
                struct.pack("<I", 1),
                _SALT[0] + b"\0",
                struct.pack("<HBHHB", flags & 0xFFFF, 45, 2, flags >> 16, 21),
                bytes(10),
                _SALT[1] + b"\0",
                self.greets.encode() + b"\0",
            )
        )

    def _receive(self, client: socket.socket) -> tuple[int, bytes]:
        head = _read(client, 4)
        payload = _read(client, int.from_bytes(head[:3], "little"))
        self.received += payload
        return head[3], payload


def _read(client: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        block = client.recv(size - len(found))
        if not block:
            raise EOFError
        found += block
    return found


def _send(client: socket.socket, number: int, payload: bytes) -> None:
    client.sendall(len(payload).to_bytes(3, "little") + bytes([number]) + payload)
