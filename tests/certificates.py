"""Authorities and certificates for the tests of TLS, made by openssl."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from poundlock.servers.demote import hand_over


@dataclass(frozen=True)
class Certificate:
    file: Path
    key: Path


class Authority:
    """A certificate authority in a directory of its own."""

    def __init__(self, directory: Path, name: str = "poundlock"):
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.file, self._key = directory / "ca.pem", directory / "ca.key"
        new = ("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}")
        self._openssl(*new, "-x509", "-days", "2", "-keyout", "ca.key", "-out", "ca.pem")

    def certify(self, name: str, *hosts: str) -> Certificate:
        """Create a key, and a certificate for hosts such as `IP:127.0.0.1` and `DNS:example.org`."""
        new = ("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}")
        self._openssl(*new, "-keyout", f"{name}.key", "-out", f"{name}.csr")
        (self.directory / "san").write_text(f"subjectAltName={','.join(hosts)}")
        self._openssl(
            *("x509", "-req", "-days", "2", "-in", f"{name}.csr", "-CA", "ca.pem"),
            *("-CAkey", "ca.key", "-CAcreateserial", "-extfile", "san", "-out", f"{name}.pem"),
        )
        return Certificate(self.directory / f"{name}.pem", self.directory / f"{name}.key")

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.directory, check=True, capture_output=True)


@contextmanager
def readable_by_servers(*files: Path) -> Iterator[Path]:
    """Copy files to a directory where a server that is not root can read them."""
    outer = Path(tempfile.mkdtemp())
    try:
        outer.chmod(0o755)
        place = outer / "certificates"
        place.mkdir()
        for file in files:
            shutil.copy(file, place)
            (place / file.name).chmod(0o600)
        hand_over(place)
        yield place
    finally:
        shutil.rmtree(outer)
