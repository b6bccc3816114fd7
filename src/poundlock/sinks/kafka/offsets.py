"""Consumer-group offsets as a branch of the decision."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from typing import Any

from poundlock.core.model import Branch, Fingerprint, Receipt
from poundlock.core.participant import Column, Commitment, Writer
from poundlock.errors import Rejected, Unavailable, UsageError
from poundlock.sinks.kafka.branches import KafkaBranches, transactional_id
from poundlock.sinks.kafka.client import Evidence, Outcome, Written
from poundlock.sinks.kafka.producer import ArrowProducer

Offsets = Mapping[tuple[str, int], int]

_TIMEOUT_MS = 60_000  # the driver opens this branch last and commits it at once
_TIMEOUT_S = 30.0
_IDS = 64


class GroupOffsetsParticipant(KafkaBranches):
    """Consumer-group offsets as a branch of the decision. The witness is a stable offset fetch."""

    commitment = Commitment.TRANSACTIONAL

    def __init__(self, name: str, group: str, settings: Mapping[str, str]):
        super().__init__(name, settings)
        self.group = group

    def project(self, columns: Mapping[str, Column]) -> dict[str, str]:
        return {}  # takes no rows

    def begin(self, branch: Branch) -> Writer:
        raise UsageError("offsets are written by the driver, not by tasks", sink=self.name)

    def written(self, receipt: Receipt) -> list[Written]:
        return []  # offsets go to the group's own topic, which we do not read

    def witness(self, receipt: Receipt) -> Evidence:
        handle: Mapping[str, Any] = receipt.handle
        wanted = {(topic, number): offset for topic, number, offset in handle["offsets"]}
        found = self.client.stable_group_offsets(self.group, wanted)
        if found.pending:
            return Evidence(Outcome.OPEN, "a transaction is about to change the group's offsets")
        # Only this pipeline moves the group, only forwards, and all of a batch's offsets at once: all
        # at or past ours is committed, and any before ours is not. Were it wrong about the last (for a
        # person has set the group back), the repair would only set it forward again.
        if any(found.offsets.get(at, -1) < offset for at, offset in wanted.items()):
            return Evidence(Outcome.ABORTED, "no transaction is open and the offsets are older")
        return Evidence(Outcome.COMMITTED, "the group's offsets have reached the branch's")


class GroupOffsetsBranch:
    """One batch's offsets, to be prepared by the driver after the tasks have voted."""

    def __init__(self, participant: GroupOffsetsParticipant, offsets: Offsets):
        self._participant = participant
        self._offsets = offsets
        self.name = participant.name

    def fingerprint(self) -> Fingerprint:
        text = json.dumps(sorted((*at, offset) for at, offset in self._offsets.items()))
        digest = hashlib.sha256(text.encode()).digest()
        return Fingerprint(len(self._offsets), int.from_bytes(digest[:8], "big"))

    def prepare(self, branch: Branch) -> Receipt:
        for last_try in (False, False, True):
            try:
                return self._prepare(branch)
            except (Rejected, Unavailable):
                # A group's coordinator may still be moving in. This is cheaper than the whole batch.
                if last_try:
                    raise
        raise AssertionError("unreachable")

    def _prepare(self, branch: Branch) -> Receipt:
        participant, began_at = self._participant, time.time()
        id_ = transactional_id(branch, _IDS)
        settings = participant.settings | {"transaction.timeout.ms": str(_TIMEOUT_MS)}
        producer = ArrowProducer(settings, transactional_id=id_)
        try:
            producer.begin(_TIMEOUT_S)
            producer.send_offsets(participant.group, self._offsets, _TIMEOUT_S)
            identity = producer.identity()
        except BaseException:
            producer.abort(timeout_s=5.0)
            raise
        producer.drop()
        return Receipt(
            sink=self.name,
            id=id_,
            task=branch.task,
            fingerprint=self.fingerprint(),
            handle={
                "producer_id": identity.producer_id,
                "epoch": identity.epoch,
                "group": participant.group,
                "offsets": [[*at, offset] for at, offset in sorted(self._offsets.items())],
            },
            began_at=began_at,
            expires_at=began_at + _TIMEOUT_MS / 1000,
            system=participant.system,
        )
