"""A policy that holds this worker's device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from google.protobuf.json_format import MessageToDict, ParseDict

from services.chassis.transfer import HostTransfer
from services.trainer.checkpoint import checkpoint_path, lineage_of, save_checkpoint
from services.trainer.compute import memory_of
from services.trainer.fields import below, under
from services.trainer.gang.gangs import Gangs
from services.trainer.gang.learner import GangLearner
from services.trainer.learner import Applied, Learner
from services.trainer.paced import PacedLearner, stand_in
from services.trainer.policy_model import (
    check_tokenizer,
    load_adapted,
    load_model,
    load_tokenizer,
    policy_seed,
)
from services.trainer.publication import Publication
from services.trainer.randomness import Generators, Randomness, seeded
from services.trainer.residence import Residence
from services.trainer.rows import Row
from services.trainer.settings import TrainerSettings
from services.trainer.state import Frontier, StateStore, TrainingState
from services.trainer.suspension import HalfStep, Luggage, Suspension
from troupe.job import JobSpec
from troupe.rpc import DataLoss, FailedPrecondition, new_id
from troupe.states import BINDING, check
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import trainer_pb2

log = structlog.get_logger("troupe.trainer")

# A host whose worker is started again is back within this, mostly.
_AWAY_SECONDS = 10.0


class Binding:
    """The training state of one policy, in memory and on disk, at one committed version.

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
        residence: Residence | None = None,
        states: StateStore | None = None,
        gangs: Gangs | None = None,
    ) -> None:
        self.job_id, self.policy, self.spec, self.spec_json = job_id, policy, spec, spec_json
        # Distinguishes this binding's claims from those of any earlier one.
        self.claimant = f"{settings.worker_id}/{new_id('binding')}"
        self.state: pb.BindingState.ValueType = pb.BINDING_STATE_BINDING
        self.weights = pb.WeightsRef()
        # Of the training state on the device.
        self.state_bytes = 0
        self.step = 0
        self.samples = 0
        self.on_change: Callable[[], None] = lambda: None
        # Where the committed version comes from, and whether its commit was seen to agree.
        self.frontier = Frontier()
        self.verified = False
        # The model in memory may be ahead of the committed version.
        self.dirty = False
        self._settings = settings
        self._device = device
        self._states = states or StateStore(
            settings.data_dir, job_id, policy, sync=settings.trainer_sync_files
        )
        self._transfer = transfer
        self._publication = Publication(transfer, job_id, policy)
        self._gangs = gangs
        self._learner: Learner | GangLearner | None = None
        self._tokenizer: Any = None
        self._randomness = Randomness({}, device)
        self._residence = residence or Residence(device)
        self._suspension = Suspension(transfer, self._residence, job_id, policy)
        # Fetched ahead of `resume`: the checksum of a suspended state, and a copy of it.
        self._fetched: tuple[str, Luggage] | None = None
        # The state that this went on from; and the step in whose middle that was.
        self.resumed_from = ""
        self.half: HalfStep | None = None
        # Where its state is while it holds no device.
        self.suspended: trainer_pb2.SuspendedState | None = None
        self.swaps, self.swap_seconds = 0, 0.0

    @property
    def trainable(self) -> bool:
        """False for a frozen policy, which is only published."""
        return self.spec.policies[self.policy].trainable

    @property
    def version(self) -> int:
        """The committed version."""
        return self.weights.version

    @property
    def learner(self) -> Learner | GangLearner:
        """The policy's learner; only after `load`."""
        assert self._learner is not None, "load() comes first"
        return self._learner

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
        if self._learner is None:
            self._learner = self._make_learner()
        kept = self.trainable and self._states.exists(version, checksum)
        if version > 0 or kept:
            self._restore(version, checksum)
        else:
            self._randomness = Randomness(self._seeded(), self._device)
        tensors = self._learner.published()
        self._publication.ensure_base(self._learner.base)
        self.weights = self._publication.ensure(version, tensors, checksum)
        if self.trainable and not kept:
            self._states.save(self._snapshot(self.weights, self.frontier))
        self._set_reference()
        self._note_bytes()
        # Whatever waits there is of a binding before this one.
        self._suspension.forget()

    def _set_reference(self) -> None:
        if not self.learner.needs_reference or not self.trainable:
            return
        if isinstance(self.learner, GangLearner):
            self.learner.load_reference(_path_of(self._states.load(0, whole=False)))
        else:
            self.learner.set_reference(self._states.load(0).weights)

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

        Raises FailedPrecondition of kind "not_suspendable", or StorageFull; then it stays as it is.
        """
        began = time.perf_counter()
        if not hasattr(self.learner, "suspended"):
            raise FailedPrecondition(
                f"policy {self.policy} is trained by a gang, which is not suspended within a step",
                kind="not_suspendable",
                field="policy",
                value=self.policy,
                remedy="Release it when its step is over.",
            )
        tensors, values = self.learner.suspended()
        luggage = Luggage(
            tensors
            | under("drawn", self._randomness.now)
            | under("committed", self._randomness.committed),
            {
                "learner": values,
                "weights": MessageToDict(self.weights, preserving_proto_field_name=True),
                "frontier": [self.frontier.step, self.frontier.samples_digest],
                "verified": self.verified,
            },
        )
        lease = self._settings.trainer_lease_seconds
        state = self._suspension.store(self.version, luggage, half, lease)
        self._residence.give_back(self.learner.leave())
        self.resumed_from, self.half = "", None
        self._swapped(began)
        state.seconds = time.perf_counter() - began
        self.suspended = state
        return state

    def prefetch(self, state: trainer_pb2.SuspendedState) -> None:
        """Do what `resume` needs and nobody has to wait for. Blocking, in any thread."""
        if self._fetched is None or self._fetched[0] != state.checksum:
            self._fetched = (state.checksum, self._suspension.fetch(state))

    def resume(self, state: trainer_pb2.SuspendedState, version: int, checksum: str) -> None:
        """Go on where `suspend` stopped, here or in another process. Blocking.

        `version`, `checksum`: the ledger's. Raises NotFound of kind "suspended_state_gone",
        DataLoss of kind "suspended_state_changed", FailedPrecondition of kind
        "suspended_state_mismatch"; then nobody can go on from it, and `load` begins afresh.
        """
        began = time.perf_counter()
        if self._learner is None:
            self._learner = self._make_learner()
            self._set_reference()
        self.prefetch(state)
        assert self._fetched is not None
        luggage, self._fetched = self._fetched[1], None
        weights = ParseDict(luggage.document["weights"], pb.WeightsRef())
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
        self._randomness = Randomness(_on_host(below("committed", luggage.tensors)), self._device)
        self._randomness.now = _on_host(below("drawn", luggage.tensors))
        step, digest = luggage.document["frontier"]
        self.weights, self.frontier = weights, Frontier(step, digest)
        self.verified, self.dirty = luggage.document["verified"], False
        half = luggage.document["step"]
        self.half = None if half is None else HalfStep(**half)
        self.resumed_from, self.suspended = state.checksum, None
        self._note_bytes()
        self._swapped(began)

    def _swapped(self, began: float) -> None:
        self.swaps += 1
        self.swap_seconds += time.perf_counter() - began

    def accumulate(self, rows: Sequence[Row], stop: threading.Event) -> None:
        """`Learner.accumulate`, drawing from this policy's generators. Blocking."""
        with self._randomness.drawing():
            self.learner.accumulate(rows, stop)

    def complete(self, stop: threading.Event) -> None:
        """`Learner.complete`, drawing from this policy's generators. Blocking."""
        with self._randomness.drawing():
            self.learner.complete(stop)

    def apply(self, stop: threading.Event) -> Applied:
        """`Learner.apply` on the committed version. Blocking."""
        with self._randomness.drawing():
            return self.learner.apply(self.version, stop)

    def ensure_published(self) -> None:
        """Publish the committed version again if it has gone. Blocking."""
        checksum = self.weights.checksum
        self._publication.ensure_base(self.learner.base)
        self._publication.ensure(self.version, self.learner.published(), checksum)

    def persist(self, frontier: Frontier) -> pb.WeightsRef:
        """Publish the stepped weights as the next version and make its state durable. Blocking.

        Neither is the truth before the commit. Raises StorageFull, ResourceExhausted.
        """
        weights = self._publication.publish(self.version + 1, self.learner.published())
        self._states.save(self._snapshot(weights, frontier))
        return weights

    def adopt(self, commit: store_pb.StepCommit) -> None:
        """Make what a commit names the version of this binding. Blocking.

        Loads it from disk where it is not what memory holds. Raises DataLoss of kind
        "state_mismatch" when that was trained on other samples than the commit says.
        """
        weights = commit.weights
        ours = (self.weights.version, self.weights.checksum)
        if self.dirty or ours != (weights.version, weights.checksum):
            self._restore(weights.version, weights.checksum)
            self.verify(commit)
            self.weights = weights
            self.ensure_published()
        self._prune()

    def verify(self, commit: store_pb.StepCommit | None) -> None:
        """Compare the state that was loaded with the commit of its step, as far as both tell.

        Raises DataLoss of kind "state_mismatch" when it was trained on other samples: weights,
        optimizer and the store's frontier belong together, or none of them is used.
        """
        mine = self.frontier
        self.verified = True
        if commit is None or commit.outcome != store_pb.STEP_OUTCOME_APPLIED:
            return  # these weights are not of that step
        if mine.samples_digest is None or not commit.HasField("samples_digest"):
            return
        if (mine.step, mine.samples_digest) != (commit.step, commit.samples_digest):
            self.dirty, self.verified = True, False
            raise DataLoss(
                f"the state of version {commit.weights.version} comes from step {mine.step} and "
                f"samples {mine.samples_digest:016x}; its commit is of step {commit.step} and "
                f"samples {commit.samples_digest:016x}",
                kind="state_mismatch",
                field="version",
                value=commit.weights.version,
                remedy="Restore the state directory, or resume the job from an older version.",
            )

    def confirm(self, weights: pb.WeightsRef, frontier: Frontier | None) -> None:
        """The step in memory was committed as `weights`. Blocking, in any thread.

        `frontier`: what `persist` was told; None when the weights are the ones before.
        """
        self.dirty = False
        if frontier is None:  # as the state on disk, from which a restarted worker goes on
            self._randomness.rewind()
        else:
            self._randomness.commit()
        self.weights = weights
        self.frontier = frontier or self.frontier
        self.verified = True
        self._prune()

    def reset(self) -> None:
        """Go back to the committed version, without gradients. Blocking."""
        if self.dirty or self.learner.lost:
            self._restore(self.version, self.weights.checksum)
        else:
            self.learner.discard()
            self._randomness.rewind()

    def leave(self) -> None:
        """Let published versions go that nobody needs any more: all but the newest. Blocking.

        Bind publishes again what is missing, wherever the policy is bound next.
        """
        self._fetched = None
        self._suspension.forget()
        self._publication.prune(self.version, keep=1)
        if isinstance(self._learner, GangLearner):
            self._learner.leave()

    def save_checkpoint(self, version: int) -> tuple[str, int]:
        """Write the checkpoint of a kept version: its path and bytes. Blocking, in any thread.

        Raises FailedPrecondition of kind "version_not_kept", ResourceExhausted of kind
        "storage_full".
        """
        path = checkpoint_path(self._settings.data_dir, self.job_id, self.policy, version)
        weights: dict[str, torch.Tensor] = {}
        step, checksum = -1, self.weights.checksum if version == self.version else ""
        if not path.is_dir():
            if self._states.exists(version):
                state = self._states.load(version, checksum)
                weights, step, checksum = state.weights, state.frontier.step, state.checksum
            elif not self.trainable and version == self.version:
                weights = self.learner.weights()
            else:
                kept = ", ".join(map(str, self._states.versions())) or "none"
                raise FailedPrecondition(
                    f"version {version} of policy {self.policy} is not kept",
                    kind="version_not_kept",
                    field="version",
                    value=version,
                    remedy=f"Ask for one of: {kept}.",
                )
        dtype = getattr(torch, self.spec.policies[self.policy].model.dtype)
        weights = {n: t.to(dtype) if t.is_floating_point() else t for n, t in weights.items()}
        keep = self.spec.checkpoint.keep
        model = self.learner.model
        whence = (self.job_id, self.policy, version, step, checksum)
        lineage = lineage_of(self.spec, *whence, model)
        size = save_checkpoint(path, model, weights, self._tokenizer, keep=keep, lineage=lineage)
        return str(path), size

    def _make_learner(self) -> Learner | GangLearner:
        policy = self.spec.policies[self.policy]
        settings = self._settings
        paced = policy.paced is not None
        gang = policy.trainable and not paced and policy.trainer.gang > 1
        model: Any
        if paced or gang:
            model = stand_in(self.policy, self.spec)
        elif policy.lora is not None:
            model = load_adapted(self.policy, policy, self.spec.seed, self._device)
        else:
            model = load_model(self.policy, policy, self.spec.seed)
        self._check_size(model)
        self._tokenizer = load_tokenizer(self.policy, policy)
        check_tokenizer(self.policy, policy, self._tokenizer, model)
        if paced:
            where = settings.paced_trace_dir
            return PacedLearner(model, self.spec, self.policy, settings.worker_id, where)
        options: dict[str, Any] = {
            "forward_tokens": settings.trainer_forward_tokens,
            "share_prefixes": settings.trainer_share_prefixes,
            "skip_zero_advantages": settings.trainer_skip_zero_advantages,
        }
        if gang:
            assert self._gangs is not None, "a worker has them"
            key = f"{self.job_id}/{self.policy}"
            return GangLearner(self._gangs, key, self.spec, self.policy, options)
        return Learner(model, self.spec, self.policy, device=self._device, **options)

    def _check_size(self, model: Any) -> None:
        """Before any of it is on the device."""
        room = memory_of(self._device, self._settings.trainer_memory_bytes)
        sizes = [(p.nbytes, p.requires_grad) for p in model.parameters()]
        # Gradients and both moments of what is trained.
        needed = sum(size * (4 if trained and self.trainable else 1) for size, trained in sizes)
        if room and needed > room:
            raise FailedPrecondition(
                f"policy {self.policy} needs {needed:,} bytes for its training state; this trainer "
                f"has {room:,}",
                kind="policy_too_large",
                field=f"policies.{self.policy}.model",
                value=needed,
                remedy="Use a smaller model, an adapter (`lora`) or a larger gang "
                "(`trainer.gang`), or add a trainer with more memory "
                "(TROUPE_TRAINER_MEMORY_BYTES says how much it may use).",
            )

    def _restore(self, version: int, checksum: str) -> None:
        self.dirty = True  # until all of it is back
        parts = isinstance(self.learner, GangLearner)
        state = self._states.load(version, checksum, whole=not parts)
        if isinstance(self.learner, GangLearner):
            self.learner.load(_path_of(state))
        else:
            self.learner.restore(state.weights, state.moments)
        self._randomness = Randomness(state.generators or self._seeded(), self._device)
        self.frontier, self.verified = state.frontier, False
        self.dirty = False
        log.info("state loaded", job_id=self.job_id, policy=self.policy, version=version)

    def _seeded(self) -> Generators:
        return seeded(policy_seed(self.spec.seed, self.policy), self._device)

    def load_column(self, key: str) -> np.ndarray[Any, Any]:
        """A value that a sample keeps by reference. Blocking. Raises TransferError.

        TransferTimeout, which repetition may cure, while the host that keeps it is away.
        """
        patience = _AWAY_SECONDS if self._settings.shares_states else 0.0
        value: np.ndarray[Any, Any] = self._transfer.get(key, timeout=patience)[0]["value"].numpy()
        return value

    def drop_columns(self, keys: Iterable[str]) -> None:
        """Delete values of this job's samples that nobody needs any more. Blocking.

        Keys outside `{job}/`, and those of weights and states, are not samples' to delete.
        """
        mine = f"{self.job_id}/"
        self._transfer.drop(key for key in keys if key.startswith(mine) and "@" not in key)

    def _snapshot(self, weights: pb.WeightsRef, frontier: Frontier) -> TrainingState:
        learner = self.learner
        parts = learner.save if isinstance(learner, GangLearner) else None
        return TrainingState(
            weights.version,
            weights.checksum,
            {} if parts else learner.weights(),
            {} if parts else learner.moments(),
            self._randomness.now,
            frontier,
            write_parts=parts,
        )

    def _prune(self) -> None:
        keep = self._settings.trainer_keep_states
        self._states.prune(self.version, keep, first=self.learner.needs_reference)
        self._publication.prune(self.version, keep)


def _on_host(generators: Generators) -> Generators:
    return {name: tensor.cpu() for name, tensor in generators.items()}


def _path_of(state: TrainingState) -> Path:
    assert state.path is not None, "it was read from a directory"
    return state.path
