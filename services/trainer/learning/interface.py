"""The interface of a learner: the operations with which the trainer trains one policy.

Four classes implement it: `Learner` (one device), `GangLearner` (the ranks of a gang),
`NetworkLearner` (small networks) and the testbed's `SimulatedLearner`. A further kind of learner
implements the abstract members, overrides the others where their defaults do not hold, and gets a
line in learner_factory.py.

The trainer calls the methods one after another in its compute thread, except where a method says
otherwise. A step is `read` and `accumulate` for each micro-batch, then `complete`, then `apply` or
`discard`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from services.trainer.gang.gang import GangHosts
from services.trainer.learning.frozen_base import AdaptedBase
from services.trainer.learning.samples import Load
from services.trainer.state.training_state import KeptState, Snapshot
from troupe.checkpoints.adapters import Tensors
from troupe.checkpoints.proof import Proof, Proven
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb


class TrainingRow(Protocol):
    """A sample that its learner has parsed."""

    @property
    def size(self) -> int:
        """Number of tokens, or of environment steps for a network."""


R = TypeVar("R", bound=TrainingRow)


@dataclass(frozen=True)
class Applied:
    """The result of a step."""

    applied: bool
    # The reason why the step was not applied; empty if it was.
    reason: str
    metrics: dict[str, float]
    # `samples_digest` of the samples that were accumulated.
    digest: int = 0
    # Whether the weights have changed although the step failed: an earlier update was made.
    moved: bool = False
    # The job's field whose function is at fault, if one is: the job cannot continue.
    fault: str = ""
    # Tokens of the step for the panel.
    kept: Sequence[orchestrator_pb.TrainedTurn] = ()


class PolicyLearner(ABC, Generic[R]):
    """A learner, which trains the weights of one policy on any devices.

    `R` is the learner's type of a parsed sample. Every method that computes may raise Aborted of
    kind "gang_lost" in a learner whose state other processes hold; it is `lost` then.
    """

    # Facts.

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Number of the model's parameters, frozen ones included."""

    @property
    @abstractmethod
    def model(self) -> Any:
        """The model that writes the configuration of checkpoints; it may have no weights.

        It has `state_dict()` and `save_pretrained(directory, state_dict=...)`, as Hugging Face's
        models do. Read in any thread.
        """

    @property
    def base(self) -> AdaptedBase | None:
        """The frozen weights under an adapter; None where all weights are trained."""
        return None

    @property
    def lost(self) -> bool:
        """Whether the state was lost with a process that held it; `load` and `adopt` end that."""
        return False

    @property
    def copies(self) -> bool:
        """Whether a `snapshot` can be copied, and the copy be written while later steps run."""
        return True

    @property
    def gathers(self) -> bool:
        """Whether `published` gathers the tensors from several processes, which takes long and
        holds all of them."""
        return False

    @property
    @abstractmethod
    def needs_reference(self) -> bool:
        """Whether the loss compares the policy with its first version (`load_reference`)."""

    # One step.

    @abstractmethod
    def read(self, claimed: Iterable[store_pb.ClaimedSample], load: Load) -> list[R]:
        """Parse the samples of a claim; `load` returns the value of a column by its key.

        Raises ChecksumError, FailedPrecondition of kind "malformed_sample", or the errors of
        `load`.
        """

    @abstractmethod
    def accumulate(self, rows: Sequence[R], stop: threading.Event | None = None) -> None:
        """Add the gradient of the summed loss of a micro-batch to the step, or hold the rows back.

        Raises `Stopped` soon after `stop` is set; the step must be discarded then.
        """

    @abstractmethod
    def complete(self, stop: threading.Event | None = None) -> None:
        """Add the gradients of rows that were held back: the step has all of its rows.

        Raises `Stopped`.
        """

    def pair_sums(self) -> store_pb.PairSums:
        """Return what the rows that were accumulated add to the step's joint pairs
        (`preferences.joint`), for trainers of other policies. Empty if there is none."""
        return store_pb.PairSums()

    def join_pairs(self, sums: store_pb.PairSums) -> None:
        """Take the sums over all policies, with which `complete` learns the joint pairs."""

    @abstractmethod
    def apply(
        self,
        version: int,
        stop: threading.Event | None = None,
        rates: Mapping[str, float] | None = None,
    ) -> Applied:
        """Step from `version` to the next version with the accumulated gradients, then forget them.

        `rates`: the step's learning rates, by their metrics, among which others may be: of a step
        that was made before, all metrics that it had. Default: by the schedule, of a step whose
        number is `version`.

        A step that is not applied leaves weights and moments unchanged, bit for bit, unless the
        result has `moved` set. Raises `Stopped`.
        """

    @abstractmethod
    def discard(self) -> None:
        """Forget the current step: gradients, statistics, rows."""

    # The weights.

    @abstractmethod
    def published(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors that engines load, by their names in a checkpoint, in the published
        dtype."""

    def proof(self, passage: Sequence[int], what: Proven = "published") -> Proof | None:
        """Return the log-probs that a server of the published tensors, or of the base under an
        adapter, must give a prompt, computed on the devices. None where there is no language model.

        `passage`: token ids of a text, of which the prompt is made; empty without a tokenizer.
        """
        return None

    @abstractmethod
    def weights(self) -> Tensors:
        """Return the trained weights, whole and in the dtype of training; not copies."""

    # The state of a version, which outlives the process.

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Return the current weights and moments without copying; they are valid until the next
        `apply`."""

    @abstractmethod
    def load(self, state: KeptState) -> None:
        """Continue from a kept state, and forget the current step.

        Raises ValueError or DataLoss of kind "state_corrupt" for the state of another model.
        """

    @abstractmethod
    def load_reference(self, state: KeptState) -> None:
        """Keep a frozen model with the weights of `state`; called if the learner needs one."""

    # Suspension: another policy takes the device, also in the middle of a step.

    @abstractmethod
    def suspended(self) -> tuple[Tensors, dict[str, Any]]:
        """Return the whole state with the current step: tensors, not copied, and plain values
        (JSON). A learner in other processes has them store the tensors, and returns the description
        of these parts (`state.parts.PARTS`).

        In any thread while the learner computes nothing.
        """

    @abstractmethod
    def adopt(self, tensors: Tensors, values: Mapping[str, Any]) -> None:
        """Continue from the result of `suspended`, here or in another process.

        `tensors`: on the device; the learner may use them themselves as its memory.
        """

    @abstractmethod
    def release(self) -> list[torch.Tensor]:
        """Free the devices, and return tensors whose memory other policies may use.

        Only `adopt`, or `load` where the learner allows it, may be called afterwards. In any thread
        while the learner computes nothing.
        """

    # Processes on other devices or hosts that hold a part of the policy.

    def move_to(self, hosts: GangHosts) -> None:
        """Let such processes run on these hosts when the policy is next resumed."""

    def close(self) -> None:
        """Remove the policy from such processes, because it leaves this worker. Idempotent."""
