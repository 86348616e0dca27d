"""What accumulates in a step: gradients, and the sums that tell of them."""

from __future__ import annotations

import contextlib
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
from services.trainer.critic import Critic, Estimate
from services.trainer.gradients import Gradients
from services.trainer.passes import Passes
from services.trainer.rows import Row, response_lengths
from services.trainer.summary import BatchSummary
from services.trainer.units import GroupBuffer, content_key
from troupe.algorithms import TokenStatistics, normalizer
from troupe.job import JobSpec

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Batch:
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

    def batches(self, stop: threading.Event | None) -> list[Batch]:
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

    def _measured(self, rows: Sequence[Row], stop: threading.Event | None) -> Batch:
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
        return Batch(rows, advantages, estimate)

    def backward(self, batch: Batch, stop: threading.Event | None) -> None:
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

    def _with_old_logprobs(self, batch: Batch, stop: threading.Event | None) -> Batch:
        with self._reproducibly():
            found = self._passes.logprobs(batch.rows, stop)
        parts = torch.split(found.cpu(), response_lengths(batch.rows))
        rows = [replace(r, old=old.numpy()) for r, old in zip(batch.rows, parts, strict=True)]
        estimate = batch.estimate and replace(batch.estimate, rows=rows)
        return Batch(rows, batch.advantages, estimate)

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

    def of_step(self) -> tuple[Tensors, dict[str, Any]]:
        """Tensors, not copied, and plain values (JSON) from which `resume_step` goes on."""
        sums = self.sums
        gradients, bounds = self._gradients.state()
        tokens, told = fields.take_apart(sums.tokens)
        held, of_held = fields.rows_apart(sums.held)
        waiting, of_waiting = fields.rows_apart(sums.groups.waiting)
        parts = {"gradients": gradients, "tokens": tokens, "held": held, "waiting": waiting}
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
            "baselines": self.baselines.of_step(),
        }
        if self._critic is not None:
            parts["critic"], values["critic"] = self._critic.of_step()
        named = [fields.under(name, tensors) for name, tensors in parts.items()]
        return {name: t for tensors in named for name, t in tensors.items()}, values

    def resume_step(self, tensors: Tensors, values: Mapping[str, Any]) -> None:
        """Inverse of `of_step`, in these very tensors."""
        part = {
            name: fields.below(name, tensors)
            for name in ("gradients", "tokens", "held", "waiting", "critic")
        }
        self._gradients.restore(part["gradients"], values["bounds"])
        if self._critic is not None:
            self._critic.resume_step(part["critic"], values["critic"])
        self.baselines.resume_step(values["baselines"])
        self.sums = sums = Sums(
            normalizer=values["normalizer"],
            held=fields.rows_together(part["held"], values["held"]),
            micro_batches=values["micro_batches"],
            seconds=values["seconds"],
            broken=values["broken"],
        )
        fields.put_together(sums.tokens, part["tokens"], values["tokens"])
        fields.put_together(sums.summary, {}, values["summary"])
        sums.groups.add(fields.rows_together(part["waiting"], values["waiting"]))


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
