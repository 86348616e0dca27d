"""The binding of one policy to this worker: learner, committed version, suspension, values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from services.chassis.heartbeat import host_id
from services.chassis.transfer import HostTransfer
from services.trainer.claims import Array, Values
from services.trainer.gang.gang import GangHosts, Gangs, ranks_here
from services.trainer.learner_factory import make_learner, memory_needed, resolved_settings
from services.trainer.learning.interface import PolicyLearner
from services.trainer.publication import Publication
from services.trainer.settings import TrainerSettings
from services.trainer.state.checkpoint import Checkpoints
from services.trainer.state.suspension import (
    ParameterPool,
    SuspendedStep,
    SuspendedTensors,
    Suspension,
)
from services.trainer.state.training_state import StateStore
from services.trainer.versions import Versions, packed_weights
from troupe.devices import find_devices
from troupe.doctor.interpreters import running_environment
from troupe.job import JobSpec
from troupe.rpc import FailedPrecondition, new_id
from troupe.scheduling.memory import RankMemory
from troupe.states import BINDING, check
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import trainer_pb2 as trainer_pb

T = TypeVar("T")


class PolicyBinding:
    """The training state of one policy and its learner, on this device or suspended.

    Methods marked *blocking* run in the compute thread (or, if they say so, in any thread), all
    others in the event loop.
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
        pool: ParameterPool,
        states: StateStore,
        gangs: Gangs,
        hosts: GangHosts,
    ) -> None:
        """Create the binding. `hosts`: the other hosts of its gang, if it has one."""
        self.job_id, self.policy, self.spec, self.spec_json = job_id, policy, spec, spec_json
        # Whether the policy is trained; a frozen policy is only published.
        self.trainable = spec.policies[policy].trainable
        # Distinguishes this binding's claims from earlier bindings'.
        self.claimant = f"{settings.worker_id}/{new_id('binding')}"
        self.state: common_pb.BindingState.ValueType = common_pb.BINDING_STATE_BINDING
        # Size of the training state on the device.
        self.state_bytes = 0
        self._memory: RankMemory | None = None
        # While a gang's ranks load the model: its loaded and total bytes.
        self._load = (0, 0)
        # The resolved values of settings that the job may leave open; empty before `load`.
        self.resolved: list[common_pb.ResolvedSetting] = []
        self.step = 0
        self.samples = 0
        self.on_change: Callable[[], None] = lambda: None
        self._settings = settings
        self._device = device
        self._transfer = transfer
        self._gangs = gangs
        self.hosts = hosts
        packages = running_environment()
        trained_on = common_pb.DeviceWeights(
            trainer=settings.address,
            host_id=host_id(),
            device=device.type,
            torch=packages.packages.get("torch", ""),
            nccl=packages.nccl or "",
        )
        if device.type == "cuda" and (own := find_devices()):
            trained_on.device_uuid = own[0].uuid  # of a gang, too: this process sends
        publication = Publication(transfer, job_id, policy, trained_on)
        self.versions = Versions(spec, settings, device, states, publication)
        self.checkpoints = Checkpoints(spec, settings.data_dir, states, self.versions)
        self._pool = pool
        self._gang = spec.policies[policy].trainer.ranks
        self._suspension = Suspension(transfer, self._pool, job_id, policy, gang=self._gang > 1)
        # The state prefetched for `resume`: its key, and a copy of it on the device.
        self._fetched: tuple[str, SuspendedTensors] | None = None
        # The key of the suspended state that this binding resumed from, and its unfinished step.
        self.resumed_from = ""
        self.unfinished: SuspendedStep | None = None
        # Reference to the suspended state while the policy is suspended.
        self.suspended: trainer_pb.SuspendedState | None = None
        self.swaps, self.swap_seconds, self.last_swap_seconds = 0, 0.0, 0.0

    @property
    def learner(self) -> PolicyLearner[Any]:
        """The policy's learner; only after `load`."""
        return self.versions.learner

    def move(self, target: common_pb.BindingState.ValueType) -> None:
        """Change the state. Raises IllegalTransition for a move that `troupe.states` forbids."""
        if target != self.state:
            check(BINDING, self.state, target)
            self.state = target
            self.on_change()

    def status(self) -> trainer_pb.BindingStatus:
        """Return the status in ListBindings and heartbeats."""
        return trainer_pb.BindingStatus(
            job_id=self.job_id,
            policy=self.policy,
            state=self.state,
            version=self.versions.committed,
            step=self.step,
            samples=self.samples,
            prefetched=self._fetched is not None,
            state_bytes=self.state_bytes,
            swaps=self.swaps,
            swap_seconds=self.swap_seconds,
            checkpoint_written_bytes=self.checkpoints.progress.written,
            checkpoint_bytes=self.checkpoints.progress.total,
            loaded_bytes=self._load[0],
            load_bytes=self._load[1],
        )

    def load(self, version: int, checksum: str) -> None:
        """Load model and state of `version`, and publish its weights. Blocking.

        `checksum`: as committed, or empty for a new job. Idempotent: a repeated call only restores
        what is missing. Raises InvalidArgument for a model or tokenizer that cannot be used,
        FailedPrecondition or DataLoss if the state is missing or damaged.
        """
        if not self.versions.made:
            self._make_learner()
        self.versions.load(version, checksum)
        self.versions.set_reference()
        self._note_bytes()
        # Suspended states of earlier bindings are obsolete.
        self._suspension.forget()

    def _make_learner(self) -> None:
        self._memory = self._needed()
        learner, tokenizer = make_learner(
            self.job_id,
            self.policy,
            self.spec,
            self._settings,
            self._device,
            self._gangs,
            self.hosts,
            self.spec_json,
            loaded=self._note_load,
        )
        self.versions.of(learner, tokenizer)
        self.resolved = resolved_settings(self.policy, self.spec, self._settings, self._device)

    def _needed(self) -> RankMemory | None:
        hosts = 1 if self._gangs is None else self._gangs.hosts_of(self.hosts)
        return memory_needed(self.policy, self.spec, self._settings, self._device, hosts)

    def _note_load(self, done: int, total: int) -> None:
        self._load = (done, total) if done < total else (0, 0)

    def move_to(self, hosts: GangHosts) -> None:
        """Let the ranks of a parked policy run on these hosts when it is resumed. Blocking."""
        self.hosts, self._memory = hosts, self._needed()
        if self.versions.made:
            self.learner.move_to(hosts)

    def _note_bytes(self) -> None:
        """Set the bytes of training state on each device, without the base that policies share."""
        if self._memory is not None:
            self.state_bytes = self._memory.state - self._memory.base
            return
        size = sum(t.nbytes for t in self.learner.weights().values())
        # A network's gradients and both moments.
        self.state_bytes = 4 * size if self.trainable else size

    def suspend(self, unfinished: SuspendedStep | None) -> trainer_pb.SuspendedState:
        """Move the state, with the `unfinished` step if there is one, off the device.

        Blocking, in any thread while this policy computes nothing. Raises StorageFull, and then
        changes nothing.
        """
        tensors, values = self.learner.suspended()
        packed = self.versions.pack()
        suspended = SuspendedTensors(
            tensors | packed.tensors, {"learner": values} | packed.document
        )
        lease = self._settings.trainer_lease_seconds
        state = self._suspension.store(self.versions.committed, suspended, unfinished, lease)
        self._pool.give_back(self.learner.release())
        self.resumed_from, self.unfinished = "", None
        self.suspended = state
        return state

    def prefetch(self, state: trainer_pb.SuspendedState) -> None:
        """Fetch a suspended state for a later `resume`. Blocking, in any thread."""
        if self._fetched is not None and self._fetched[0] != state.key:
            # The prefetched state is obsolete: the policy was resumed from it elsewhere.
            self._pool.give_back(self._fetched[1].tensors.values())
            self._fetched = None
        if self._fetched is None:
            here = ranks_here(self._settings) >= self._gang
            self._fetched = (state.key, self._suspension.fetch(state, bring_parts=here))

    def resume(self, state: trainer_pb.SuspendedState, version: int, checksum: str) -> None:
        """Continue from a suspended state of this process or of another one. Blocking.

        `version`, `checksum`: as committed. Raises NotFound of kind "suspended_state_gone",
        DataLoss of kind "suspended_state_changed", FailedPrecondition of kind
        "suspended_state_mismatch"; then only `load` can bind the policy.
        """
        if not self.versions.made:
            self._make_learner()
            self.versions.set_reference()
        self.prefetch(state)
        assert self._fetched is not None
        suspended, self._fetched = self._fetched[1], None
        weights = packed_weights(suspended)
        if (weights.version, weights.checksum) != (version, checksum or weights.checksum):
            raise FailedPrecondition(
                f"policy {self.policy} was suspended at version {weights.version} "
                f"({weights.checksum}); version {version} ({checksum or 'any'}) is committed",
                kind="suspended_state_mismatch",
                field="state.version",
                value=weights.version,
                remedy="Bind the policy afresh at its committed version.",
            )
        self._suspension.take(state)
        try:
            self.learner.adopt(suspended.tensors, suspended.document["learner"])
        finally:
            self._suspension.drop(suspended.parts)
        self.versions.unpack(suspended)
        unfinished = suspended.document["step"]
        self.unfinished = None if unfinished is None else SuspendedStep(**unfinished)
        self.resumed_from, self.suspended = state.key, None
        self._note_bytes()

    def swapped(self, seconds: float) -> None:
        """Record a suspension or resumption that kept the device idle for `seconds`."""
        self.swaps += 1
        self.swap_seconds += seconds
        self.last_swap_seconds = seconds

    def draw(self, call: Callable[..., T], *args: Any) -> T:
        """Call a learner's method, which draws from this policy's generators. Blocking."""
        with self.versions.randomness.drawing():
            return call(*args)

    def release(self) -> None:
        """Delete everything that the next binding does not need. Blocking.

        Deletes published versions except the newest, suspended states, and the policy on the ranks
        of a gang.
        """
        self._fetched = None
        if self.suspended is None and self.versions.committed:
            self.versions.flush()
        self._suspension.forget()
        self.versions.release()
        self.leave_ranks()

    def leave(self) -> None:
        """Ensure that the state is on disk, since another binding of the policy takes over.
        Blocking."""
        if self.versions.committed:
            self.versions.flush()
        self.versions.durability.close()
        self.leave_ranks()

    def leave_ranks(self) -> None:
        """Delete the policy on the ranks of its gang, if it has one. Blocking."""
        if self.versions.made:
            self.learner.close()

    def values(self) -> Values:
        """Return a loader of column values for one attempt at a step."""
        # On a single host a missing value cannot reappear, so it is not waited for.
        shared = self._settings.shares_states
        return Values(self._column, self._settings.trainer_value_wait_seconds if shared else 0.0)

    def _column(self, key: str, wait_seconds: float) -> Array:
        value: Array = self._transfer.get(key, timeout=wait_seconds)[0]["value"].numpy()
        return value

    def drop_columns(self, keys: Iterable[str]) -> None:
        """Delete column values of this job's samples. Blocking.

        Keys of other jobs, and of weights and states, are ignored.
        """
        mine = f"{self.job_id}/"
        self._transfer.drop(key for key in keys if key.startswith(mine) and "@" not in key)
