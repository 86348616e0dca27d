"""The committed version of one policy, and the next one until it is committed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import structlog
import torch
from google.protobuf.json_format import MessageToDict, ParseDict

from services.trainer.fields import below, on_host, under
from services.trainer.gang.learner import GangLearner
from services.trainer.learners import AnyLearner
from services.trainer.policy_model import policy_seed
from services.trainer.publication import Publication
from services.trainer.randomness import Generators, Randomness, seeded
from services.trainer.settings import TrainerSettings
from services.trainer.state import Frontier, StateStore, TrainingState
from services.trainer.suspension import Luggage
from troupe.job import JobSpec
from troupe.rpc import DataLoss, FailedPrecondition
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as store_pb

log = structlog.get_logger("troupe.trainer")


class Versions:
    """Keeps memory, disk and what is published of one policy at one version.

    All methods are *blocking*: they belong into the compute thread or, where they say so, any.
    """

    def __init__(
        self,
        job_id: str,
        policy: str,
        spec: JobSpec,
        settings: TrainerSettings,
        device: torch.device,
        states: StateStore,
        publication: Publication,
    ) -> None:
        self._job_id, self._policy, self._spec = job_id, policy, spec
        self._settings = settings
        self._device = device
        self._states, self._publication = states, publication
        self._learner: AnyLearner | None = None
        self.tokenizer: Any = None
        self.weights = pb.WeightsRef()
        # Where the committed version comes from, and whether its commit was seen to agree.
        self.frontier = Frontier()
        self.verified = False
        # The model in memory may be ahead of the committed version.
        self.dirty = False
        self.randomness = Randomness({}, device)

    @property
    def committed(self) -> int:
        """The committed version."""
        return self.weights.version

    @property
    def learner(self) -> AnyLearner:
        """What trains it; only after `of`."""
        assert self._learner is not None, "no model was loaded yet"
        return self._learner

    @property
    def made(self) -> bool:
        """Whether there is a learner."""
        return self._learner is not None

    def of(self, learner: AnyLearner, tokenizer: Any) -> None:
        """These are the versions of `learner`'s model."""
        self._learner, self.tokenizer = learner, tokenizer

    def load(self, version: int, checksum: str) -> None:
        """Go to `version`, and publish its weights.

        `checksum` is the ledger's, or empty on a new job. Raises FailedPrecondition or DataLoss for
        state that is not there.
        """
        trained = self._spec.policies[self._policy].trainable
        kept = trained and self._states.exists(version, checksum)
        if version > 0 or kept:
            self._restore(version, checksum)
        else:
            self.randomness = Randomness(self._seeded(), self._device)
        tensors = self.learner.published()
        self._publication.ensure_base(self.learner.base)
        self.weights = self._publication.ensure(version, tensors, checksum)
        if trained and not kept:
            self._states.save(self._snapshot(self.weights, self.frontier))

    def set_reference(self) -> None:
        """Have the learner keep the first version beside its model, where a loss needs it."""
        if not self.learner.needs_reference or not self._spec.policies[self._policy].trainable:
            return
        if isinstance(self.learner, GangLearner):
            self.learner.load_reference(_path_of(self._states.load(0, whole=False)))
        else:
            self.learner.set_reference(self._states.load(0).weights)

    def ensure_published(self) -> None:
        """Publish the committed version again if it has gone."""
        checksum = self.weights.checksum
        self._publication.ensure_base(self.learner.base)
        self._publication.ensure(self.committed, self.learner.published(), checksum)

    def persist(self, frontier: Frontier) -> pb.WeightsRef:
        """Publish the stepped weights as the next version and make its state durable.

        Neither is the truth before the commit. Raises StorageFull, ResourceExhausted.
        """
        weights = self._publication.publish(self.committed + 1, self.learner.published())
        self._states.save(self._snapshot(weights, frontier))
        return weights

    def restart(self, version: int, checksum: str) -> None:
        """Make the first version's state the one after `version`, without a step. Repeatable.

        What the policy was trained on so far stays its frontier, and generators go on drawing.
        `checksum`: that of version 0 in the ledger. Raises FailedPrecondition of kind "not_bound"
        at another version, "state_not_found" when version 0 is not kept, "weights_changed" when it
        is another one; StorageFull, ResourceExhausted.
        """
        if self.committed == version + 1 and self.weights.checksum == checksum:
            return
        if self.committed != version:
            raise FailedPrecondition(
                f"policy {self._policy} is bound at version {self.committed}",
                kind="not_bound",
                field="version",
                value=version,
                remedy="Bind the policy at the ledger's version first.",
            )
        frontier, verified, randomness = self.frontier, self.verified, self.randomness
        randomness.rewind()
        self._restore(0, checksum)
        self.dirty = True  # of the next version in memory, until all of it is durable
        self.frontier, self.verified, self.randomness = frontier, verified, randomness
        weights = self._publication.ensure(version + 1, self.learner.published(), checksum)
        self._states.save(self._snapshot(weights, frontier))
        # The version that is left stays: the ledger may not hear of this.
        self.weights, self.dirty = weights, False

    def adopt(self, commit: store_pb.StepCommit) -> None:
        """Make what a commit names the committed version.

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
                remedy="Restore the directory from a copy and resume the job; or begin a new one "
                "with the newest checkpoint as its policy's `model.path`.",
            )

    def confirm(self, weights: pb.WeightsRef, frontier: Frontier | None) -> None:
        """The step in memory was committed as `weights`. In any thread.

        `frontier`: what `persist` was told; None when the weights are the ones before.
        """
        self.dirty = False
        if frontier is None:  # as the state on disk, from which a restarted worker goes on
            self.randomness.rewind()
        else:
            self.randomness.commit()
        self.weights = weights
        self.frontier = frontier or self.frontier
        self.verified = True
        self._prune()

    def reset(self) -> None:
        """Go back to the committed version, without gradients."""
        if self.dirty or self.learner.lost:
            self._restore(self.committed, self.weights.checksum)
        else:
            self.learner.discard()
            self.randomness.rewind()

    def leave(self) -> None:
        """Let published versions go that nobody needs any more: all but the newest.

        Bind publishes again what is missing, wherever the policy is bound next.
        """
        self._publication.prune(self.committed, keep=1)

    def pack(self) -> Luggage:
        """What goes with a suspended policy besides what its learner holds."""
        return Luggage(
            under("drawn", self.randomness.now) | under("committed", self.randomness.committed),
            {
                "weights": MessageToDict(self.weights, preserving_proto_field_name=True),
                "frontier": [self.frontier.step, self.frontier.samples_digest],
                "verified": self.verified,
            },
        )

    def unpack(self, luggage: Luggage) -> None:
        """Inverse of `pack`; the learner's part is not looked at."""
        self.randomness = Randomness(on_host(below("committed", luggage.tensors)), self._device)
        self.randomness.now = on_host(below("drawn", luggage.tensors))
        step, digest = luggage.document["frontier"]
        self.weights, self.frontier = packed_weights(luggage), Frontier(step, digest)
        self.verified, self.dirty = luggage.document["verified"], False

    def _restore(self, version: int, checksum: str) -> None:
        self.dirty = True  # until all of it is back
        parts = isinstance(self.learner, GangLearner)
        state = self._states.load(version, checksum, whole=not parts)
        if isinstance(self.learner, GangLearner):
            self.learner.load(_path_of(state))
        else:
            self.learner.restore(state.weights, state.moments)
        self.randomness = Randomness(state.generators or self._seeded(), self._device)
        self.frontier, self.verified = state.frontier, False
        self.dirty = False
        log.info("state loaded", job_id=self._job_id, policy=self._policy, version=version)

    def _seeded(self) -> Generators:
        return seeded(policy_seed(self._spec.seed, self._policy), self._device)

    def _snapshot(self, weights: pb.WeightsRef, frontier: Frontier) -> TrainingState:
        learner = self.learner
        parts = learner.save if isinstance(learner, GangLearner) else None
        return TrainingState(
            weights.version,
            weights.checksum,
            {} if parts else learner.weights(),
            {} if parts else learner.moments(),
            self.randomness.now,
            frontier,
            write_parts=parts,
        )

    def _prune(self) -> None:
        keep = self._settings.trainer_keep_states
        population = self._spec.population
        again = population is not None and population.restart == "base"
        self._states.prune(self.committed, keep, first=again or self.learner.needs_reference)
        self._publication.prune(self.committed, keep)


def packed_weights(luggage: Luggage) -> pb.WeightsRef:
    """The committed version that `pack` found."""
    return ParseDict(luggage.document["weights"], pb.WeightsRef())


def _path_of(state: TrainingState) -> Path:
    assert state.path is not None, "it was read from a directory"
    return state.path
