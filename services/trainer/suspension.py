"""Training state that waits in the transfer layer while its policy holds no device.

Unlike what `StateStore` keeps, it is of no version alone: gradients that have accumulated, the
step's statistics and the names of its leases go with weights and optimizer. It is not durable and
need not be: whoever cannot have it goes on from the committed version, and the step's samples are
free again by then. It has one owner: who resumes takes it out, and nobody can a second time.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import torch

from services.chassis.transfer import HostTransfer
from services.trainer.residence import Residence
from troupe.rpc import DataLoss, FailedPrecondition, NotFound, new_id
from troupe.transfer import Corrupt, KeyNotFound, Manifest
from troupe.v1 import trainer_pb2

Tensors = dict[str, torch.Tensor]
FORMAT: Final = 1
# Of the manifest's metadata.
_DOCUMENT: Final = "training"


@dataclass(frozen=True)
class HalfStep:
    """A step that stopped between two micro-batches, as far as the experience store knows it."""

    step: int
    version: int
    oldest_version: int | None
    claimant: str
    # Claims whose samples are in the gradients.
    claim_ids: list[str] = field(default_factory=list)
    # The last question for samples, whose answer was not used: asked again under the same id it is
    # answered with the same samples.
    question: str = ""
    micro_batches: int = 0
    samples: int = 0
    tokens: int = 0
    # Samples that were dropped since their values are gone.
    gone: int = 0
    # Columns by reference that go with the step's samples.
    refs: list[str] = field(default_factory=list)
    # Seconds that it was at work so far.
    seconds: float = 0.0


@dataclass(frozen=True)
class Luggage:
    """What a policy takes along: tensors, and a document of plain values."""

    tensors: Tensors
    document: dict[str, Any]


class Suspension:
    """Where one policy's state waits. Blocking, in any thread."""

    def __init__(
        self, transfer: HostTransfer, residence: Residence, job_id: str, policy: str
    ) -> None:
        self._transfer, self._residence = transfer, residence
        self._prefix = f"{job_id}/{policy}/training@"
        self._policy = policy

    def store(
        self, version: int, luggage: Luggage, half: HalfStep | None, lease: float
    ) -> trainer_pb2.SuspendedState:
        """Put a copy there; `luggage` may be used again. Raises StorageFull."""
        document = {
            **luggage.document,
            "format": FORMAT,
            "step": None if half is None else asdict(half),
        }
        # Every suspension has a key of its own: tensors alone do not tell two of one version apart.
        # Samples without an advantage leave gradients as they were.
        manifest: Manifest = self._transfer.set(
            f"{self._prefix}{version}-{new_id()}",
            luggage.tensors,
            metadata={_DOCUMENT: json.dumps(document)},
        )
        state = trainer_pb2.SuspendedState(
            key=manifest.key,
            checksum=manifest.checksum,
            num_bytes=manifest.num_bytes,
            version=version,
            lease_seconds=lease,
            holders=self._transfer.holders,
        )
        if half is not None:
            state.step, state.claimant = half.step, half.claimant
            state.claims, state.samples = len(half.claim_ids), half.samples
        return state

    def fetch(self, state: trainer_pb2.SuspendedState) -> Luggage:
        """A copy of what `state` says, on the device, from wherever it is; it stays there.

        Raises NotFound of kind "suspended_state_gone", DataLoss of kind "suspended_state_changed".
        """
        if not state.key.startswith(self._prefix):
            raise FailedPrecondition(
                f"{state.key} is not a state of policy {self._policy}",
                kind="suspended_state_mismatch",
                field="state.key",
                value=state.key,
                remedy="Resume a policy from what its own suspension returned.",
            )
        self._transfer.hint(state.key, state.holders)
        try:
            tensors, manifest = self._transfer.get(
                state.key, expected_checksum=state.checksum, lasting=True
            )
            document = json.loads(manifest.metadata[_DOCUMENT])
            if document["format"] != FORMAT:
                raise ValueError(f"its format is {document['format']}")
            return Luggage(self._residence.bring(tensors), document)
        except KeyNotFound as error:
            raise self._gone(state.key) from error
        except (Corrupt, KeyError, ValueError) as error:
            raise DataLoss(
                f"the suspended state {state.key} is not what was suspended: {error}",
                kind="suspended_state_changed",
                field="state.checksum",
                value=state.checksum,
                remedy="Bind the policy afresh: its step begins again from the committed version.",
            ) from error

    def take(self, state: trainer_pb2.SuspendedState) -> None:
        """Make it the caller's alone. Raises NotFound of kind "suspended_state_gone"."""
        if not self._transfer.delete(state.key):
            raise self._gone(state.key)

    def forget(self) -> None:
        """Nobody needs what is there of this policy."""
        for key in self._transfer.keys(self._prefix):
            self._transfer.delete(key)

    def _gone(self, key: str) -> NotFound:
        return NotFound(
            f"the suspended state {key} is gone",
            kind="suspended_state_gone",
            field="state.key",
            value=key,
            remedy="Bind the policy afresh: its step begins again from the committed version.",
        )
