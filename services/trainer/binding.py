"""A policy that holds this worker's device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from services.chassis.transfer import HostTransfer
from services.trainer.claims import Array, Values
from services.trainer.gang.gang import Gangs
from services.trainer.gang.learner import GangLearner
from services.trainer.learner_factory import AnyLearner, make_learner
from services.trainer.learning.learner import Applied
from services.trainer.settings import TrainerSettings
from services.trainer.state.checkpoint import Checkpoints
from services.trainer.state.suspension import HalfStep, ParameterPool, SuspendedTensors, Suspension
from services.trainer.state.training_state import StateStore
from services.trainer.versions import Publication, Versions, packed_weights
from troupe.job import JobSpec
from troupe.rpc import FailedPrecondition, new_id
from troupe.states import BINDING, check
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import trainer_pb2


class PolicyBinding:
    """The training state of one policy and its learner, here or suspended.

    Methods that say *blocking* belong into the compute thread (or, where they say so, any
    thread); the rest into the event loop.
    """

    def __init__(
        self,
        job_id: str,
        policy: str,
        spec: JobSpec,
        spec_json: str,
        settings: TrainerSettings,
        transfer: HostTransfer,
        device: torch.device,
        residence: ParameterPool | None = None,
        states: StateStore | None = None,
        gangs: Gangs | None = None,
    ) -> None:
        self.job_id, self.policy, self.spec, self.spec_json = job_id, policy, spec, spec_json
        # Distinguishes this binding's claims from those of any earlier one.
        self.claimant = f"{settings.worker_id}/{new_id('binding')}"
        self.state: pb.BindingState.ValueType = pb.BINDING_STATE_BINDING
        # Of the training state on the device.
        self.state_bytes = 0
        self.step = 0
        self.samples = 0
        self.on_change: Callable[[], None] = lambda: None
        self._settings = settings
        self._device = device
        states = states or StateStore(
            settings.data_dir, job_id, policy, sync=settings.trainer_sync_files
        )
        self._transfer = transfer
        self._gangs = gangs
        publication = Publication(transfer, job_id, policy)
        self.versions = Versions(job_id, policy, spec, settings, device, states, publication)
        self.checkpoints = Checkpoints(spec, settings.data_dir, states, self.versions)
        self._residence = residence or ParameterPool(device)
        self._suspension = Suspension(transfer, self._residence, job_id, policy)
        # Fetched ahead of `resume`: the key of a suspended state, and a copy of it.
        self._fetched: tuple[str, SuspendedTensors] | None = None
        # The key of the state that this went on from; and the step in whose middle that was.
        self.resumed_from = ""
        self.half: HalfStep | None = None
        # Where its state is while it holds no device.
        self.suspended: trainer_pb2.SuspendedState | None = None
        self.swaps, self.swap_seconds, self.last_swap_seconds = 0, 0.0, 0.0

    @property
    def trainable(self) -> bool:
        """False for a frozen policy, which is only published."""
        return self.spec.policies[self.policy].trainable

    @property
    def weights(self) -> pb.WeightsRef:
        """The committed version, as published."""
        return self.versions.weights

    @property
    def version(self) -> int:
        """The committed version."""
        return self.versions.committed

    @property
    def learner(self) -> AnyLearner:
        """The policy's learner; only after `load`."""
        return self.versions.learner

    def move(self, target: pb.BindingState.ValueType) -> None:
        """Go to `target`; raises IllegalTransition where the table has no such move."""
        if target != self.state:
            check(BINDING, self.state, target)
            self.state = target
            self.on_change()

    def status(self) -> trainer_pb2.BindingStatus:
        """What ListBindings and heartbeats tell."""
        return trainer_pb2.BindingStatus(
            job_id=self.job_id,
            policy=self.policy,
            state=self.state,
            version=self.version,
            step=self.step,
            samples=self.samples,
            prefetched=self._fetched is not None,
            state_bytes=self.state_bytes,
            swaps=self.swaps,
            swap_seconds=self.swap_seconds,
        )

    def load(self, version: int, checksum: str) -> None:
        """Load model and state of `version`, and publish its weights. Blocking.

        `checksum` is the ledger's, or empty on a new job. Repeating it on a loaded binding
        changes nothing but what is missing. Raises InvalidArgument for a model or tokenizer
        that cannot be used, FailedPrecondition or DataLoss for state that is not there.
        """
        if not self.versions.made:
            self._make_learner()
        self.versions.load(version, checksum)
        self.versions.set_reference()
        self._note_bytes()
        # Whatever waits there is of a binding before this one.
        self._suspension.forget()

    def _make_learner(self) -> None:
        where = (self.job_id, self.policy)
        made = make_learner(*where, self.spec, self._settings, self._device, self._gangs)
        self.versions.of(*made)

    def _note_bytes(self) -> None:
        """What weights, gradients and both moments take, once all of them are there."""
        if isinstance(self.learner, GangLearner):  # it would gather them
            size = self.learner.num_parameters * torch.float32.itemsize
        else:
            size = sum(t.nbytes for t in self.learner.weights().values())
        self.state_bytes = 4 * size if self.trainable else size

    def suspend(self, half: HalfStep | None) -> trainer_pb2.SuspendedState:
        """Move all of it out of the device, `half` a step too. Blocking, in any thread while this
        policy computes nothing.

        Raises StorageFull; then it stays as it is.
        """
        tensors, values = self.learner.suspended()
        packed = self.versions.pack()
        luggage = SuspendedTensors(tensors | packed.tensors, {"learner": values} | packed.document)
        lease = self._settings.trainer_lease_seconds
        state = self._suspension.store(self.version, luggage, half, lease)
        self._residence.give_back(self.learner.leave())
        self.resumed_from, self.half = "", None
        self.suspended = state
        return state

    def prefetch(self, state: trainer_pb2.SuspendedState) -> None:
        """Do what `resume` needs and nobody has to wait for. Blocking, in any thread."""
        if self._fetched is not None and self._fetched[0] != state.key:
            # It went on elsewhere from that one.
            self._residence.give_back(self._fetched[1].tensors.values())
            self._fetched = None
        if self._fetched is None:
            self._fetched = (state.key, self._suspension.fetch(state))

    def resume(self, state: trainer_pb2.SuspendedState, version: int, checksum: str) -> None:
        """Go on where `suspend` stopped, here or in another process. Blocking.

        `version`, `checksum`: the ledger's. Raises NotFound of kind "suspended_state_gone",
        DataLoss of kind "suspended_state_changed", FailedPrecondition of kind
        "suspended_state_mismatch"; then nobody can go on from it, and `load` begins afresh.
        """
        if not self.versions.made:
            self._make_learner()
            self.versions.set_reference()
        self.prefetch(state)
        assert self._fetched is not None
        luggage, self._fetched = self._fetched[1], None
        weights = packed_weights(luggage)
        if (weights.version, weights.checksum) != (version, checksum or weights.checksum):
            raise FailedPrecondition(
                f"policy {self.policy} was suspended at version {weights.version} "
                f"({weights.checksum}); the ledger is at {version} ({checksum or 'any'})",
                kind="suspended_state_mismatch",
                field="state.version",
                value=weights.version,
                remedy="Bind the policy afresh at the ledger's version.",
            )
        self._suspension.take(state)
        self.learner.adopt(luggage.tensors, luggage.document["learner"])
        self.versions.unpack(luggage)
        half = luggage.document["step"]
        self.half = None if half is None else HalfStep(**half)
        self.resumed_from, self.suspended = state.key, None
        self._note_bytes()

    def swapped(self, seconds: float) -> None:
        """It left or came, and for so long its device did not compute."""
        self.swaps += 1
        self.swap_seconds += seconds
        self.last_swap_seconds = seconds

    def read(
        self, claimed: Sequence[store_pb.ClaimedSample], values: Values
    ) -> tuple[Sequence[Any], list[store_pb.Sample]]:
        """`Learner.read` of those that it can read, and those of which values are gone. Blocking.

        Raises as `Values.read`.
        """
        return values.read(claimed, self.learner.read)

    def accumulate(self, rows: Sequence[Any], stop: threading.Event) -> None:
        """`Learner.accumulate`, drawing from this policy's generators. Blocking."""
        with self.versions.randomness.drawing():
            self.learner.accumulate(rows, stop)

    def complete(self, stop: threading.Event) -> None:
        """`Learner.complete`, drawing from this policy's generators. Blocking."""
        with self.versions.randomness.drawing():
            self.learner.complete(stop)

    def apply(self, stop: threading.Event) -> Applied:
        """`Learner.apply` on the committed version. Blocking."""
        with self.versions.randomness.drawing():
            return self.learner.apply(self.version, stop)

    def leave(self) -> None:
        """Let published versions go that nobody needs any more: all but the newest. Blocking.

        Bind publishes again what is missing, wherever the policy is bound next.
        """
        self._fetched = None
        self._suspension.forget()
        self.versions.leave()
        self.leave_ranks()

    def leave_ranks(self) -> None:
        """Have the ranks of a gang forget this policy. Blocking."""
        if self.versions.made and isinstance(self.learner, GangLearner):
            self.learner.leave()

    def values(self) -> Values:
        """Of samples that keep some by reference, for one attempt at a step."""
        # With one host, what is not there is nowhere.
        shared = self._settings.shares_states
        return Values(self._column, self._settings.trainer_value_wait_seconds if shared else 0.0)

    def _column(self, key: str, patience: float) -> Array:
        value: Array = self._transfer.get(key, timeout=patience)[0]["value"].numpy()
        return value

    def drop_columns(self, keys: Iterable[str]) -> None:
        """Delete values of this job's samples that nobody needs any more. Blocking.

        Keys outside `{job}/`, and those of weights and states, are not samples' to delete.
        """
        mine = f"{self.job_id}/"
        self._transfer.drop(key for key in keys if key.startswith(mine) and "@" not in key)
