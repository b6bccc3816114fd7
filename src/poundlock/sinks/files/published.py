"""Which branches the manifest names, without holding the names of all.

Of each pipeline and sink, the names of the newest batches are kept. About an older batch the caller
must ask the manifest itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from poundlock.core.model import Namespace
from poundlock.core.naming import BranchName, parse_name

_KEPT = 10  # batches


@dataclass(slots=True)
class _Group:
    """The published branches of one sink of one pipeline."""

    generation: int = 0  # the newest
    forgotten: int = -1  # the newest batch whose names are not kept
    names: dict[int, set[str]] = field(default_factory=dict[int, set[str]])  # by batch

    def of(self, name: BranchName) -> set[str]:
        """Return the names of a branch's batch, to which it is to be added."""
        self.generation = max(self.generation, name.generation)
        found = self.names.setdefault(name.batch, set())
        while len(self.names) > _KEPT:
            oldest = min(self.names)
            del self.names[oldest]
            self.forgotten = max(self.forgotten, oldest)
        return found


class Published:
    """The branches in the records that were read so far."""

    def __init__(self) -> None:
        self._groups: dict[tuple[Namespace, str], _Group] = {}
        # Most names differ from the one before in the task alone, so not every name is parsed.
        self._last = ("", set[str]())

    def add(self, text: str) -> None:
        attempt = text.rpartition(".")[0]
        if attempt != self._last[0]:
            name = parse_name(text)
            if name is None:
                return
            group = self._groups.setdefault((name.namespace, name.sink), _Group())
            self._last = (attempt, group.of(name))
        self._last[1].add(text)

    def has(self, text: str) -> bool | None:
        """Say whether a branch was published. None: its batch is too old to tell."""
        name = parse_name(text)
        if name is None:
            return False
        group = self._groups.get((name.namespace, name.sink), _Group())
        if text in group.names.get(name.batch, ()):
            return True
        return None if name.batch <= group.forgotten else False

    def newest(self, namespace: Namespace, sink: str) -> list[str]:
        """Return the branches of the newest batches."""
        group = self._groups.get((namespace, sink), _Group())
        return [name for batch in sorted(group.names) for name in group.names[batch]]

    def generation(self, namespace: Namespace, sink: str) -> int:
        """Return the newest generation that published. 0 if none did."""
        return self._groups.get((namespace, sink), _Group()).generation

    def logs_of(self, pipeline: str, sink: str) -> frozenset[str]:
        """Return the identities of the pipeline's logs whose branches were published."""
        return frozenset(
            namespace.identity
            for namespace, name in self._groups
            if (namespace.pipeline, name) == (pipeline, sink)
        )
