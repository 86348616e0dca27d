"""One policy's model, gradients and optimizer: accumulate micro-batches, then step once.

No I/O and no event loop: the worker calls it from its compute thread.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils import deterministic

from services.trainer import fields
from services.trainer.baselines import Baselines
from services.trainer.bases import Base
from services.trainer.critic import Critic, Estimate
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
from services.trainer.residence import Lodger
from services.trainer.rows import Row, response_lengths
from services.trainer.summary import BatchSummary
from services.trainer.trained_model import TrainedModel
from services.trainer.units import GroupBuffer, content_key
from services.trainer.updates import schedule
from troupe.algorithms import TokenStatistics, normalizer
from troupe.job import JobSpec


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


@dataclass(frozen=True)
class _Batch:
    """Rows whose advantages are known."""

    rows: Sequence[Row]
    # float64 [n]: of each row; with a critic, whose differ by token, their mean size.
    advantages: torch.Tensor
    estimate: Estimate | None = None


@dataclass
class _Sums:
    """What accumulates between two steps, besides the gradients themselves."""

    # Of the update that accumulates, and of those of the step before it.
    normalizer: int = 0
    updated: int = 0
    updates: int = 0
    # Sums over updates, by metric.
    norms: dict[str, float] = field(default_factory=dict)
    tokens: TokenStatistics = field(default_factory=TokenStatistics)
    summary: BatchSummary = field(default_factory=BatchSummary)
    groups: GroupBuffer = field(default_factory=GroupBuffer)
    # Rows whose advantages are not known before all of the step's are there.
    held: list[Row] = field(default_factory=list)
    micro_batches: int = 0
    seconds: float = 0.0
    # Set once a loss is not finite: the rest of the step is only counted.
    broken: str = ""


class Learner:
    """Trains the model of one policy on one device.

    With `pipeline.deterministic` the weights after a step are a function, bit for bit, of the
    weights before it and of the set of its samples: whatever the order in which they come and
    however they are cut into micro-batches (units.py, exact_sum.py). That holds on one kind of
    machine with one number of threads (`TROUPE_THREADS`): both change how sums are laid out.

    A stand-in (paced.py) has to offer what `Binding` and `StepRun` use: `model`, `vocabulary`,
    `num_parameters`, `needs_reference`, `set_reference`, `accumulate`, `complete`, `apply` (whose
    `digest` the store checks), `discard`, `published`, `weights`, `moments`, `restore`, and
    `suspended`, `adopt`, `leave`.
    """

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
            dtype = getattr(torch, self._policy.model.dtype)
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
        self._baselines = Baselines(spec.algorithm)
        self._critic: Critic | None = None
        value_function = spec.algorithm.value_function
        if value_function and self._policy.trainable and self._policy.paced is None:
            bfloat16 = self._policy.model.dtype == "bfloat16"
            pieces = self._passes.pieces
            self._critic = Critic(self.model, value_function, pieces, bfloat16=bfloat16)
        # Whether the first gradient needs all of the step's rows.
        self._holds = self._baselines.needs_whole_step or spec.algorithm.updates > 1
        self._constant = spec.constant_tokens(policy)
        self._sums = _Sums()
        self._skip_zero = skip_zero_advantages
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

    # Accumulation.

    def accumulate(self, rows: Sequence[Row], stop: threading.Event | None = None) -> None:
        """Add the gradient of these rows' summed loss. Raises `Stopped` between passes.

        In deterministic mode, and with a critic, the rows of a group are computed when all of them
        have come; with an advantage that needs the whole step, all rows in `complete`; where the
        step consists of several updates, in `apply`.
        """
        started = time.perf_counter()
        self._sums.micro_batches += 1
        if self._holds:
            self._sums.held.extend(rows)
        else:
            self._train(rows, stop)
        self._sums.seconds += time.perf_counter() - started

    def complete(self, stop: threading.Event | None = None) -> None:
        """All of the step's rows have come: add what waited for that. Raises `Stopped`.

        `apply` does it where nobody did.
        """
        if self._job.algorithm.updates > 1:
            return
        started = time.perf_counter()
        held, self._sums.held = self._sums.held, []
        if held:
            self._baselines.measure(held)
        size = self._job.pipeline.micro_batch_samples
        for start in range(0, len(held), size):
            self._train(held[start : start + size], stop)
        for unit in self._sums.groups.rest():
            self._add(unit, stop)
        self._sums.seconds += time.perf_counter() - started

    def _train(self, rows: Sequence[Row], stop: threading.Event | None) -> None:
        if self._job.pipeline.deterministic:
            for unit in self._sums.groups.add(rows):
                self._add(unit, stop)
        elif self._critic is not None:
            if rows := [row for unit in self._sums.groups.add(rows) for row in unit]:
                self._add(rows, stop)
        else:
            self._add(rows, stop)

    def _add(self, rows: Sequence[Row], stop: threading.Event | None) -> None:
        self._backward(self._measured(rows, stop), stop)

    def _measured(self, rows: Sequence[Row], stop: threading.Event | None) -> _Batch:
        """Rows with their advantages, counted among the step's."""
        estimate = None
        if self._critic is None:
            advantages = self._baselines.advantages(rows)
        else:
            with self._reproducibly():
                estimate = self._critic.estimate(rows, stop)
            rows = estimate.rows
            advantages = estimate.sizes
        self._sums.summary.add(rows, advantages.numpy())
        self._sums.broken = self._sums.broken or _not_finite(rows, advantages)
        return _Batch(rows, advantages, estimate)

    def _backward(self, batch: _Batch, stop: threading.Event | None) -> None:
        """Add a batch's gradient; in deterministic mode exactly: one that depends on nothing else.

        Raises `Stopped` between passes.
        """
        sums, algorithm = self._sums, self._job.algorithm
        lengths = response_lengths(batch.rows)
        sums.normalizer += normalizer(lengths, algorithm.normalize, self._constant)
        chosen = self._with_gradient(batch.advantages)
        with self._reproducibly():
            if not sums.broken and chosen:
                some = [batch.rows[i] for i in chosen]
                advantages = batch.advantages[chosen]
                sums.broken = self._passes.backward(some, advantages, sums.tokens, stop)
            if not sums.broken and self._critic is not None and batch.estimate is not None:
                sums.broken = self._critic.backward(batch.estimate, stop)
        if self._job.pipeline.deterministic:
            problem = self._gradients.settle()
            if self._critic is not None:
                problem = self._critic.gradients.settle() or problem
            sums.broken = sums.broken or problem

    def _reproducibly(self) -> contextlib.AbstractContextManager[None]:
        return _deterministic() if self._job.pipeline.deterministic else contextlib.nullcontext()

    def _with_gradient(self, advantages: torch.Tensor) -> list[int]:
        """Rows whose loss has a gradient: all, unless only the advantage makes one."""
        algorithm = self._job.algorithm
        pure = algorithm.kl_coefficient == 0 and algorithm.entropy_coefficient == 0
        if self._skip_zero and pure:
            return [i for i, a in enumerate(advantages.tolist()) if a != 0.0]
        return list(range(len(advantages)))

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
        metrics |= self._baselines.metrics()
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
            self._baselines.applied()
        seconds = sums.seconds + time.perf_counter() - started
        metrics["train/seconds"] = seconds
        metrics["train/micro_batches"] = float(sums.micro_batches)
        digest, moved = sums.summary.digest, bool(reason) and sums.updates > 0
        self.discard()
        return Applied(not reason, reason, metrics, digest, moved)

    def _update(self, version: int) -> str:
        """One update with what accumulated; why not, if it is not finite: then nothing moves."""
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
        return ""

    def _update_often(self, version: int, stop: threading.Event | None) -> str:
        """All updates of a step of several; why they ended before the last, if they did.

        Advantages, values and old log-probs are of the weights that the step began with.
        """
        algorithm, sums = self._job.algorithm, self._sums
        held, sums.held = sums.held, []
        if self._baselines.needs_whole_step:
            self._baselines.measure(held)
        groups = GroupBuffer()
        units = sorted([*groups.add(held), *groups.rest()], key=lambda unit: content_key(unit[0]))
        batches = [self._measured(unit, stop) for unit in units]
        if algorithm.old_logprobs == "recomputed":
            batches = [self._with_old_logprobs(batch, stop) for batch in batches]
        batches = [batch for batch in batches if any(response_lengths(batch.rows))]
        reason = sums.broken or ("" if batches else "no sample has a response token")
        seed = f"{self._job.seed}/{self._name}/{version}"
        for part in schedule(len(batches), algorithm.epochs, algorithm.minibatches, seed):
            if reason:
                break
            sums.updated, sums.normalizer = sums.updated + sums.normalizer, 0
            self._clear()
            for i in part:
                self._backward(batches[i], stop)
            reason = self._update(version)
        return reason

    def _with_old_logprobs(self, batch: _Batch, stop: threading.Event | None) -> _Batch:
        with self._reproducibly():
            found = self._passes.logprobs(batch.rows, stop)
        parts = torch.split(found.cpu(), response_lengths(batch.rows))
        rows = [replace(r, old=old.numpy()) for r, old in zip(batch.rows, parts, strict=True)]
        estimate = batch.estimate and replace(batch.estimate, rows=rows)
        return _Batch(rows, batch.advantages, estimate)

    def _clear(self) -> None:
        """Forget the gradients of an update."""
        self._gradients.discard()
        if self._critic is not None:
            self._critic.clear()

    def discard(self) -> None:
        """Forget what was accumulated."""
        self._gradients.discard()
        if self._critic is not None:
            self._critic.discard()
        self._baselines.discard()
        self._sums = _Sums()

    # State.

    def published(self) -> Tensors:
        """What engines load (`TrainedModel.published`)."""
        return self._trained.published()

    def weights(self) -> Tensors:
        """In full precision; not a copy (`TrainedModel.weights`)."""
        return self._trained.weights()

    def moments(self) -> Moments:
        """The state of the optimizer and the critic, not a copy, and of the baselines."""
        critic = {} if self._critic is None else self._critic.state()
        return export_moments(self.model, self._optimizer) | self._baselines.state() | critic

    def restore(self, weights: Mapping[str, torch.Tensor], moments: Moments) -> None:
        """Take over weights and moments; forgets accumulated gradients."""
        self.discard()
        self._trained.load(weights)
        moments = self._baselines.restore(moments)
        if self._critic is not None:
            moments = self._critic.restore(moments)
        import_moments(self.model, self._optimizer, moments)

    # Suspension: all of it, in the middle of a step too.

    def suspended(self) -> tuple[Tensors, dict[str, Any]]:
        """Tensors, not copied, and plain values (JSON) from which `adopt` goes on."""
        sums = self._sums
        gradients, bounds = self._gradients.state()
        tokens, told = fields.take_apart(sums.tokens)
        held, of_held = fields.rows_apart(sums.held)
        waiting, of_waiting = fields.rows_apart(sums.groups.waiting)
        parts = {
            "weights": self.weights(),
            "moments": self.moments(),
            "gradients": gradients,
            "tokens": tokens,
            "held": held,
            "waiting": waiting,
        }
        values = {
            "bounds": bounds,
            "tokens": told,
            "summary": fields.take_apart(sums.summary)[1],
            "held": of_held,
            "waiting": of_waiting,
            "normalizer": sums.normalizer,
            "micro_batches": sums.micro_batches,
            "seconds": sums.seconds,
            "broken": sums.broken,
            "baselines": self._baselines.of_step(),
        }
        if self._critic is not None:
            parts["critic"], values["critic"] = self._critic.of_step()
        named = [fields.under(name, tensors) for name, tensors in parts.items()]
        return {name: t for tensors in named for name, t in tensors.items()}, values

    def adopt(self, tensors: Tensors, values: Mapping[str, Any]) -> None:
        """Go on from what `suspended` gave, in these very tensors, which are on the device."""
        part = {
            name: fields.below(name, tensors)
            for name in ("weights", "moments", "gradients", "tokens", "held", "waiting", "critic")
        }
        rest = self._lodger.enter(part["weights"])
        if rest:
            self._trained.load(part["weights"])
        moments = self._baselines.restore(part["moments"])
        if self._critic is not None:
            moments = self._critic.restore(moments, copy=False)
            self._critic.resume_step(part["critic"], values["critic"])
        import_moments(self.model, self._optimizer, moments, copy=False)
        self._gradients.restore(part["gradients"], values["bounds"])
        self._baselines.resume_step(values["baselines"])
        self._sums = sums = _Sums(
            normalizer=values["normalizer"],
            held=fields.rows_together(part["held"], values["held"]),
            micro_batches=values["micro_batches"],
            seconds=values["seconds"],
            broken=values["broken"],
        )
        fields.put_together(sums.tokens, part["tokens"], values["tokens"])
        fields.put_together(sums.summary, {}, values["summary"])
        sums.groups.add(fields.rows_together(part["waiting"], values["waiting"]))

    def leave(self) -> list[torch.Tensor]:
        """Give the device's memory up; only `adopt` makes a learner of this again."""
        left = [*export_moments(self.model, self._optimizer).values(), *self._lodger.leave()]
        self._optimizer.state.clear()
        self.discard()
        self._gradients.restore({}, [])
        return left if self._critic is None else [*left, *self._critic.leave()]


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Only kernels that give the same bits every time they are given the same numbers."""
    before = torch.are_deterministic_algorithms_enabled()
    # Else every fresh tensor is filled: a search for reads of what nobody wrote.
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _not_finite(rows: Sequence[Row], advantages: torch.Tensor) -> str:
    """Which sample has a reward or a log-prob that no gradient can be made of."""
    # In the loss they are of single precision.
    usable = torch.isfinite(advantages.to(torch.float32)).tolist()
    for row, fine in zip(rows, usable, strict=True):
        if not fine:
            worst = max(row.group_rewards, key=abs)
            return (
                f"the advantage of sample {row.sample_id} is not finite, so the loss is not: its "
                f"reward is {row.reward:g}, its group's largest {worst:g}"
            )
        if not np.isfinite(row.behaviour).all():
            return f"a log-prob of sample {row.sample_id} is not finite, so the loss is not"
    return ""
