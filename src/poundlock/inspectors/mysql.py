"""MySQL and MariaDB, as a person looks into them."""

from __future__ import annotations

from poundlock.core.inspector import Found, Inspector
from poundlock.core.model import Namespace, Receipt, Stray
from poundlock.mysql.branches import every
from poundlock.mysql.link import connect, drop, said
from poundlock.sinks.mysql import MySQL


class MySQLInspector(Inspector):
    """A server, and every XA branch of ours that it holds prepared."""

    system = "MySQL"

    def __init__(self, url: str):
        self._url = url

    def open(self, namespace: Namespace | None = None) -> list[Found]:
        link = connect(self._url, sink="any", lock_timeout=10)
        try:
            with said("any"):
                listed = every(link, namespace)
        finally:
            drop(link)
        return [
            Found(
                name.namespace,
                Stray(name.sink, str(name), name.generation, "prepared",
                      {"mode": "xa", "task": branch.task}),
            )
            for name, branch in listed
            if namespace in (None, name.namespace)
        ]  # fmt: skip

    def participant(self, sink: str, receipt: Receipt | None = None) -> MySQL | None:
        # A staged branch is moved with the others of its batch, as its pipeline knows how.
        if receipt is not None and receipt.handle.get("mode") != "xa":
            return None
        return MySQL("any", url=self._url, name=sink, mode="xa")
