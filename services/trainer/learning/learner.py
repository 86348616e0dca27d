"""One policy's model, gradients and optimizer: accumulate micro-batches, then step once.

No I/O and no event loop: the worker calls it from its compute thread.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils import deterministic

from services.trainer.learning.advantages import Baselines
from services.trainer.learning.critic import Critic, Estimate
from services.trainer.learning.forward import TrainedModel
from services.trainer.learning.lora_bases import FrozenBase
from services.trainer.learning.model import positions_of
from services.trainer.learning.optimizer import (
    Gradients,
    Moments,
    export_moments,
    import_moments,
    learning_rate,
    make_optimizer,
)
from services.trainer.learning.passes import Passes
from services.trainer.learning.ranks import RankGroup
from services.trainer.learning.samples import Load, Row, columns_of, parse_rows, response_lengths
from services.trainer.state import suspension
from services.trainer.state.suspension import PooledParameters
from troupe.adapters.merge import Tensors
from troupe.algorithms import TokenStatistics, normalizer
from troupe.experience import samples_digest
from troupe.job import JobSpec
from troupe.v1 import experience_store_pb2 as store_pb


def content_key(row: Row) -> tuple[Any, ...]:
    """Sorts rows by what they say; rows with equal keys are interchangeable."""
    prompt = row.ids[: row.prompt_length].astype(">i8").tobytes()
    response = row.ids[row.prompt_length :].astype(">i8").tobytes()
    tail = (row.behaviour.tobytes(), row.reward, row.temperature)
    return (row.trajectory, row.agent, prompt, response, *tail)


class GroupBuffer:
    """Holds rows back until all members of their group are there."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Row]] = {}

    def add(self, rows: Sequence[Row]) -> list[list[Row]]:
        """Take `rows`; returns the groups that they complete, each in order of content."""
        complete = []
        for row in rows:
            members = self._waiting.setdefault(row.group, [])
            members.append(row)
            if len(members) >= len(row.group_rewards):
                complete.append(sorted(self._waiting.pop(row.group), key=content_key))
        return complete

    @property
    def waiting(self) -> list[Row]:
        """The rows that are held back."""
        return [row for members in self._waiting.values() for row in members]

    def rest(self) -> list[list[Row]]:
        """The groups that some members never came of, in order of content; then it is empty."""
        left = [sorted(members, key=content_key) for members in self._waiting.values()]
        self._waiting.clear()
        return left


@dataclass
class BatchSummary:
    """Sums over the samples of a step."""

    samples: int = 0
    tokens: int = 0
    response_tokens: int = 0
    # Response tokens of samples with advantage zero.
    idle_tokens: int = 0
    reward: float = 0.0
    reward_squares: float = 0.0
    advantage: float = 0.0
    versions: int = 0
    oldest: int | None = None
    # Samples that an earlier step has trained before.
    reused: int = 0
    # `samples_digest` of the ids; the store compares it with that of what it handed out.
    digest: int = 0

    def add(self, rows: Sequence[Row], advantages: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        """Add n rows with their advantages [n]."""
        for row, advantage in zip(rows, advantages.tolist(), strict=True):
            self.samples += 1
            self.tokens += len(row.ids)
            self.response_tokens += row.response_length
            self.idle_tokens += row.response_length if advantage == 0.0 else 0
            self.reward += row.reward
            self.reward_squares += row.reward * row.reward
            self.advantage += abs(advantage)
            self.versions += row.version
            self.oldest = row.version if self.oldest is None else min(self.oldest, row.version)
            self.reused += int(row.uses > 0)
        self.digest = (self.digest + samples_digest(row.sample_id for row in rows)) % (1 << 64)

    def metrics(self, version: int) -> dict[str, float]:
        """By the names that the field uses; `version` is the one that the step starts from."""
        n = self.samples
        if n == 0:
            return {"samples": 0.0, "tokens": 0.0}
        mean = self.reward / n
        return {
            "samples": float(n),
            "tokens": float(self.tokens),
            "response_tokens": float(self.response_tokens),
            "response_length/mean": self.response_tokens / n,
            "reward/mean": mean,
            "reward/std": math.sqrt(max(0.0, self.reward_squares / n - mean * mean)),
            "advantage/abs_mean": self.advantage / n,
            "advantage/zero_fraction": self.idle_tokens / max(self.response_tokens, 1),
            "staleness/mean": version - self.versions / n,
            "staleness/max": float(version - (self.oldest or 0)),
            "reused_fraction": self.reused / n,
        }


GradientTensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TrainingBatch:
    """Rows whose advantages are known."""

    rows: Sequence[Row]
    # float64 [n]: of each row; with a critic, whose differ by token, their mean size.
    advantages: torch.Tensor
    estimate: Estimate | None = None


@dataclass
class Sums:
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


class Accumulation:
    """Rows of one policy on their way to gradients; an update takes what has come of them."""

    def __init__(
        self,
        spec: JobSpec,
        policy: str,
        passes: Passes,
        gradients: Gradients,
        critic: Critic | None,
        *,
        skip_zero_advantages: bool,
    ) -> None:
        """`passes` leave gradients where `gradients` takes them."""
        self._job = spec
        self._constant = spec.constant_tokens(policy)
        self._passes, self._gradients, self._critic = passes, gradients, critic
        self._skip_zero = skip_zero_advantages
        self.baselines = Baselines(spec.algorithm)
        self.sums = Sums()
        # Whether the first gradient needs all of the step's rows.
        self._holds = self.baselines.needs_whole_step or spec.algorithm.updates > 1

    def add(self, rows: Sequence[Row], stop: threading.Event | None) -> None:
        """Add the gradient of these rows' summed loss, or hold them. Raises `Stopped`."""
        started = time.perf_counter()
        self.sums.micro_batches += 1
        if self._holds:
            self.sums.held.extend(rows)
        else:
            self._train(rows, stop)
        self.sums.seconds += time.perf_counter() - started

    def complete(self, stop: threading.Event | None) -> None:
        """All of the step's rows have come: add what waited for that. Raises `Stopped`."""
        started = time.perf_counter()
        held, self.sums.held = self.sums.held, []
        if held:
            self.baselines.measure(held)
        size = self._job.pipeline.micro_batch_samples
        for start in range(0, len(held), size):
            self._train(held[start : start + size], stop)
        for unit in self.sums.groups.rest():
            self._add(unit, stop)
        self.sums.seconds += time.perf_counter() - started

    def batches(self, stop: threading.Event | None) -> list[TrainingBatch]:
        """All of the step's rows, for several updates: a batch per group, in order of content.

        Advantages, values and old log-probs are of the weights now. Raises `Stopped`.
        """
        held, self.sums.held = self.sums.held, []
        if self.baselines.needs_whole_step:
            self.baselines.measure(held)
        groups = GroupBuffer()
        units = sorted([*groups.add(held), *groups.rest()], key=lambda unit: content_key(unit[0]))
        found = [self._measured(unit, stop) for unit in units]
        if self._job.algorithm.old_logprobs == "recomputed":
            found = [self._with_old_logprobs(batch, stop) for batch in found]
        return [batch for batch in found if any(response_lengths(batch.rows))]

    def _train(self, rows: Sequence[Row], stop: threading.Event | None) -> None:
        if self._job.pipeline.deterministic:
            for unit in self.sums.groups.add(rows):
                self._add(unit, stop)
        elif self._critic is not None:
            if rows := [row for unit in self.sums.groups.add(rows) for row in unit]:
                self._add(rows, stop)
        else:
            self._add(rows, stop)

    def _add(self, rows: Sequence[Row], stop: threading.Event | None) -> None:
        self.backward(self._measured(rows, stop), stop)

    def _measured(self, rows: Sequence[Row], stop: threading.Event | None) -> TrainingBatch:
        """Rows with their advantages, counted among the step's."""
        estimate = None
        if self._critic is None:
            advantages = self.baselines.advantages(rows)
        else:
            with self._reproducibly():
                estimate = self._critic.estimate(rows, stop)
            rows = estimate.rows
            advantages = estimate.sizes
        self.sums.summary.add(rows, advantages.numpy())
        self.sums.broken = self.sums.broken or _not_finite(rows, advantages)
        return TrainingBatch(rows, advantages, estimate)

    def backward(self, batch: TrainingBatch, stop: threading.Event | None) -> None:
        """Add a batch's gradient; in deterministic mode exactly: one that depends on nothing else.

        Raises `Stopped` between passes.
        """
        sums, algorithm = self.sums, self._job.algorithm
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

    def _with_old_logprobs(
        self, batch: TrainingBatch, stop: threading.Event | None
    ) -> TrainingBatch:
        with self._reproducibly():
            found = self._passes.logprobs(batch.rows, stop)
        parts = torch.split(found.cpu(), response_lengths(batch.rows))
        rows = [replace(r, old=old.numpy()) for r, old in zip(batch.rows, parts, strict=True)]
        estimate = batch.estimate and replace(batch.estimate, rows=rows)
        return TrainingBatch(rows, batch.advantages, estimate)

    def clear(self) -> None:
        """Forget the gradients of an update."""
        self.sums.updated, self.sums.normalizer = self.sums.updated + self.sums.normalizer, 0
        self._gradients.discard()
        if self._critic is not None:
            self._critic.clear()

    def discard(self) -> None:
        """Forget the step."""
        self._gradients.discard()
        if self._critic is not None:
            self._critic.discard()
        self.baselines.discard()
        self.sums = Sums()

    # Suspension.

    def of_step(self) -> tuple[GradientTensors, dict[str, Any]]:
        """Tensors, not copied, and plain values (JSON) from which `resume_step` goes on."""
        sums = self.sums
        gradients, bounds = self._gradients.state()
        tokens, told = suspension.take_apart(sums.tokens)
        held, of_held = suspension.rows_apart(sums.held)
        waiting, of_waiting = suspension.rows_apart(sums.groups.waiting)
        parts = {"gradients": gradients, "tokens": tokens, "held": held, "waiting": waiting}
        values = {
            "bounds": bounds,
            "tokens": told,
            "summary": suspension.take_apart(sums.summary)[1],
            "held": of_held,
            "waiting": of_waiting,
            "normalizer": sums.normalizer,
            "micro_batches": sums.micro_batches,
            "seconds": sums.seconds,
            "broken": sums.broken,
            "baselines": self.baselines.of_step(),
        }
        if self._critic is not None:
            parts["critic"], values["critic"] = self._critic.of_step()
        named = [suspension.under(name, tensors) for name, tensors in parts.items()]
        return {name: t for tensors in named for name, t in tensors.items()}, values

    def resume_step(self, tensors: GradientTensors, values: Mapping[str, Any]) -> None:
        """Inverse of `of_step`, in these very tensors."""
        part = {
            name: suspension.below(name, tensors)
            for name in ("gradients", "tokens", "held", "waiting", "critic")
        }
        self._gradients.restore(part["gradients"], values["bounds"])
        if self._critic is not None:
            self._critic.resume_step(part["critic"], values["critic"])
        self.baselines.resume_step(values["baselines"])
        self.sums = sums = Sums(
            normalizer=values["normalizer"],
            held=suspension.rows_together(part["held"], values["held"]),
            micro_batches=values["micro_batches"],
            seconds=values["seconds"],
            broken=values["broken"],
        )
        suspension.put_together(sums.tokens, part["tokens"], values["tokens"])
        suspension.put_together(sums.summary, {}, values["summary"])
        sums.groups.add(suspension.rows_together(part["waiting"], values["waiting"]))


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


def schedule(units: int, epochs: int, minibatches: int, seed: str) -> Iterator[list[int]]:
    """For each update the units (0 .. `units` - 1) of its gradient.

    Every epoch cuts all of them into `minibatches` parts of about equally many, no part empty (so
    that there are fewer where units are), in an order drawn from `seed` and the epoch.
    """
    parts = min(minibatches, units)
    for epoch in range(epochs):
        order = list(range(units))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        yield from (order[units * k // parts : units * (k + 1) // parts] for k in range(parts))


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

    A stand-in (simulated.py, networks/learner.py) has to offer what `Binding` and `StepRun` use:
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
        peers: RankGroup | None = None,
    ) -> None:
        """Train `model` in the type of its parameters: float32, or float64 for proofs.

        `peers`: those that hold the other parts of a model that is sharded.
        """
        self._peers = peers or RankGroup()
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
        if value_function and self._policy.trainable and self._policy.simulated is None:
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
        self._lodger = PooledParameters(self._trained.weights(), self._trained.parameters)

    @property
    def model(self) -> Any:
        """The Hugging Face model."""
        return self._trained.module

    @property
    def base(self) -> FrozenBase | None:
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
        weights = suspension.under("weights", self.weights())
        return weights | suspension.under("moments", self.moments()) | tensors, values

    def adopt(self, tensors: Tensors, values: Mapping[str, Any]) -> None:
        """Go on from what `suspended` gave, in these very tensors, which are on the device."""
        weights = suspension.below("weights", tensors)
        if self._lodger.enter(weights):
            self._trained.load(weights)
        moments = self._step.baselines.restore(suspension.below("moments", tensors))
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
