"""One policy's model, gradients and optimizer: accumulate micro-batches, then step once.

No I/O and no event loop: the worker calls it from its compute thread.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from services.trainer import fields
from services.trainer.accumulation import Accumulation, Sums
from services.trainer.bases import Base
from services.trainer.critic import Critic
from services.trainer.gradients import Gradients
from services.trainer.named import Tensors
from services.trainer.optimizer import (
    Moments,
    export_moments,
    import_moments,
    learning_rate,
    make_optimizer,
)
from services.trainer.passes import Passes
from services.trainer.peers import Peers
from services.trainer.policy_model import positions_of
from services.trainer.residence import Lodger
from services.trainer.rows import Load, Row, columns_of, parse_rows
from services.trainer.trained_model import TrainedModel
from services.trainer.updates import schedule
from troupe.job import JobSpec
from troupe.v1 import experience_store_pb2 as store_pb


@dataclass(frozen=True)
class Applied:
    """What became of a step's gradients."""

    applied: bool
    # Why not, when not.
    reason: str
    metrics: dict[str, float]
    # Of the ids of the samples that were accumulated (`BatchSummary.digest`).
    digest: int = 0
    # Whether an update of the step was made before it failed: weights are not the version's then.
    moved: bool = False


class Learner:
    """Trains the model of one policy on one device.

    With `pipeline.deterministic` the weights after a step are a function, bit for bit, of the
    weights before it and of the set of its samples: whatever the order in which they come and
    however they are cut into micro-batches (units.py, exact_sum.py). That holds on one kind of
    machine with one number of threads (`TROUPE_THREADS`): both change how sums are laid out.

    A stand-in (paced.py, networks/learner.py) has to offer what `Binding` and `StepRun` use:
    `model`, `base`, `lost`, `num_parameters`, `needs_reference`, `set_reference`, `read`,
    `accumulate`, `complete`, `apply` (whose `digest` the store checks), `discard`, `published`,
    `weights`, `moments`, `restore`, and `suspended`, `adopt`, `leave`.
    """

    # Whether the state in memory has gone with a process that held it.
    lost = False

    def __init__(
        self,
        model: Any,
        spec: JobSpec,
        policy: str,
        *,
        device: torch.device | None = None,
        forward_tokens: int = 0,
        share_prefixes: bool = True,
        skip_zero_advantages: bool = True,
        peers: Peers | None = None,
    ) -> None:
        """Train `model` in the type of its parameters: float32, or float64 for proofs.

        `peers`: those that hold the other parts of a model that is sharded.
        """
        self._peers = peers or Peers()
        self._job, self._name = spec, policy
        self._policy = spec.policies[policy]
        if not isinstance(model, TrainedModel):
            dtype = getattr(torch, self._policy.language_model.dtype)
            model = TrainedModel(model, device or torch.device("cpu"), dtype)
        self._trained: TrainedModel = model
        self._optimizer = make_optimizer(self.model, self._policy.optimizer)
        self._gradients = Gradients(self._trained.parameters)
        self._passes = Passes(
            self._trained,
            spec,
            policy,
            forward_tokens=forward_tokens,
            share_prefixes=share_prefixes,
            peers=self._peers,
        )
        self._critic: Critic | None = None
        value_function = spec.algorithm.value_function
        if value_function and self._policy.trainable and self._policy.paced is None:
            bfloat16 = self._policy.language_model.dtype == "bfloat16"
            pieces = self._passes.pieces
            self._critic = Critic(self.model, value_function, pieces, bfloat16=bfloat16)
        self._step = Accumulation(
            spec,
            policy,
            self._passes,
            self._gradients,
            self._critic,
            skip_zero_advantages=skip_zero_advantages,
        )
        self._lodger = Lodger(self._trained.weights(), self._trained.parameters)

    @property
    def model(self) -> Any:
        """The Hugging Face model."""
        return self._trained.module

    @property
    def base(self) -> Base | None:
        """The frozen weights under an adapter; None where all weights are trained."""
        return self._trained.base

    @property
    def vocabulary(self) -> int:
        """Token ids are below it."""
        return self._trained.vocabulary

    @property
    def num_parameters(self) -> int:
        """Distinct parameters."""
        return self._trained.num_parameters

    @property
    def needs_reference(self) -> bool:
        """Whether the loss contains a divergence from the first version."""
        brought = "reference_logprobs" in self._job.pipeline.required_columns
        return self._job.algorithm.kl_coefficient > 0 and not brought

    def set_reference(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Keep a frozen copy of the model with these weights for the divergence."""
        self._passes.set_reference(weights)

    def read(self, claimed: Iterable[store_pb.ClaimedSample], load: Load) -> list[Row]:
        """What `accumulate` takes of a claim. Raises as `parse_rows`."""
        columns, longest = columns_of(self._job.algorithm), positions_of(self.model)
        return parse_rows(claimed, self.vocabulary, load, columns, longest=longest)

    # Accumulation.

    def accumulate(self, rows: Sequence[Row], stop: threading.Event | None = None) -> None:
        """Add the gradient of these rows' summed loss. Raises `Stopped` between passes.

        In deterministic mode, and with a critic, the rows of a group are computed when all of them
        have come; with an advantage that needs the whole step, all rows in `complete`; where the
        step consists of several updates, in `apply`.
        """
        self._step.add(rows, stop)

    def complete(self, stop: threading.Event | None = None) -> None:
        """All of the step's rows have come: add what waited for that. Raises `Stopped`.

        `apply` does it where nobody did.
        """
        if self._job.algorithm.updates == 1:
            self._step.complete(stop)

    @property
    def _sums(self) -> Sums:
        """Of the step that accumulates."""
        return self._step.sums

    # The step.

    def apply(self, version: int, stop: threading.Event | None = None) -> Applied:
        """Step with what was accumulated since the last step, if it is finite.

        A step that is not applied leaves weights and optimizers bitwise as they were, unless it is
        `moved`: then `restore` has to follow. Raises `Stopped` where there was more to compute.
        """
        self.complete(stop)
        started = time.perf_counter()
        several = self._job.algorithm.updates > 1
        reason = self._update_often(version, stop) if several else self._update(version)
        sums = self._sums
        sums.tokens = self._peers.merged(sums.tokens)
        metrics = sums.summary.metrics(version) | sums.tokens.metrics()
        metrics |= self._step.baselines.metrics()
        if self._critic is not None:
            metrics |= self._critic.metrics()
        if sums.tokens.tokens:
            metrics["loss/policy"] = float(sums.tokens.loss) / max(
                sums.updated + sums.normalizer, 1
            )
        metrics |= {name: total / sums.updates for name, total in sums.norms.items()}
        if several:
            metrics["train/updates"] = float(sums.updates)
        if not reason:
            self._step.baselines.applied()
        seconds = sums.seconds + time.perf_counter() - started
        metrics["train/seconds"] = seconds
        metrics["train/micro_batches"] = float(sums.micro_batches)
        digest, moved = sums.summary.digest, bool(reason) and sums.updates > 0
        self.discard()
        return Applied(not reason, reason, metrics, digest, moved)

    def _update(self, version: int) -> str:
        """One update with what accumulated; why not, if it is not finite.

        Nothing moves for a gradient that is not. Of finite ones a step may still overflow: then it
        was made, but nobody may be given its weights.
        """
        sums, optimizer, steps = self._sums, self._policy.optimizer, self._job.pipeline.steps
        if sums.broken or not sums.normalizer:
            return sums.broken or "no sample has a response token"
        norm = self._gradients.finish(sums.normalizer, optimizer.max_grad_norm)
        if not math.isfinite(norm):
            return f"the norm of the gradient is {norm}"
        rate = learning_rate(optimizer, version, steps)
        made = {"grad_norm": norm, "lr": rate}
        if self._critic is not None:
            made["critic/grad_norm"] = norm = self._critic.finish()
            if not math.isfinite(norm):
                return f"the norm of the critic's gradient is {norm}"
            self._critic.step(version, steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        sums.updates += 1
        sums.norms = {name: sums.norms.get(name, 0.0) + value for name, value in made.items()}
        norms = {"weights": self._gradients.weights_norm()}
        if self._critic is not None:
            norms["critic's weights"] = self._critic.gradients.weights_norm()
        return next(
            (
                f"the norm of the {name} is {norm} after the step"
                for name, norm in norms.items()
                if not math.isfinite(norm)
            ),
            "",
        )

    def _update_often(self, version: int, stop: threading.Event | None) -> str:
        """All updates of a step of several; why they ended before the last, if they did.

        Advantages, values and old log-probs are of the weights that the step began with.
        """
        algorithm, sums = self._job.algorithm, self._sums
        batches = self._step.batches(stop)
        reason = sums.broken or ("" if batches else "no sample has a response token")
        seed = f"{self._job.seed}/{self._name}/{version}"
        for part in schedule(len(batches), algorithm.epochs, algorithm.minibatches, seed):
            if reason:
                break
            self._step.clear()
            for i in part:
                self._step.backward(batches[i], stop)
            reason = self._update(version)
        return reason

    def discard(self) -> None:
        """Forget what was accumulated."""
        self._step.discard()

    # State.

    def published(self) -> Mapping[str, torch.Tensor]:
        """What engines load (`TrainedModel.published`)."""
        return self._trained.published()

    def weights(self) -> Tensors:
        """In full precision; not a copy (`TrainedModel.weights`)."""
        return self._trained.weights()

    def moments(self) -> Moments:
        """The state of the optimizer and the critic, not a copy, and of the baselines."""
        critic = {} if self._critic is None else self._critic.state()
        return export_moments(self.model, self._optimizer) | self._step.baselines.state() | critic

    def restore(self, weights: Mapping[str, torch.Tensor], moments: Moments) -> None:
        """Take over weights and moments; forgets accumulated gradients."""
        self.discard()
        self._trained.load(weights)
        moments = self._step.baselines.restore(moments)
        if self._critic is not None:
            moments = self._critic.restore(moments)
        import_moments(self.model, self._optimizer, moments)

    # Suspension: all of it, in the middle of a step too.

    def suspended(self) -> tuple[Tensors, dict[str, Any]]:
        """Tensors, not copied, and plain values (JSON) from which `adopt` goes on."""
        tensors, values = self._step.of_step()
        weights = fields.under("weights", self.weights())
        return weights | fields.under("moments", self.moments()) | tensors, values

    def adopt(self, tensors: Tensors, values: Mapping[str, Any]) -> None:
        """Go on from what `suspended` gave, in these very tensors, which are on the device."""
        weights = fields.below("weights", tensors)
        if self._lodger.enter(weights):
            self._trained.load(weights)
        moments = self._step.baselines.restore(fields.below("moments", tensors))
        if self._critic is not None:
            moments = self._critic.restore(moments, copy=False)
        import_moments(self.model, self._optimizer, moments, copy=False)
        self._step.resume_step(tensors, values)

    def leave(self) -> list[torch.Tensor]:
        """Give the device's memory up; only `adopt` makes a learner of this again."""
        left = [*export_moments(self.model, self._optimizer).values(), *self._lodger.leave()]
        self._optimizer.state.clear()
        self.discard()
        self._gradients.restore({}, [])
        return left if self._critic is None else [*left, *self._critic.leave()]
