"""The learner of one policy, which accumulates the gradients of micro-batches, then steps once.

Pure computation, no I/O and no event loop: the worker calls it from its compute thread. In reading
order: the sums of a step (`StepSums`), the conversion of rows to gradients (`Accumulation`), and
the learner itself with its training state and suspension.
"""

from __future__ import annotations

import contextlib
import functools
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

from services.trainer.learning.advantages import AdvantageEstimator
from services.trainer.learning.critic import Critic, critic_module
from services.trainer.learning.forward import TrainedModel
from services.trainer.learning.frozen_base import AdaptedBase, occupy, vacate
from services.trainer.learning.interface import Applied, PolicyLearner
from services.trainer.learning.joint_pairs import JointPairs
from services.trainer.learning.lora import adapter_of
from services.trainer.learning.model import load_teacher, positions_of
from services.trainer.learning.optimizer import (
    Gradients,
    Moments,
    export_moments,
    import_moments,
    learning_rates,
    make_optimizer,
)
from services.trainer.learning.passes import Passes
from services.trainer.learning.ranks import ELSEWHERE, RankGroup
from services.trainer.learning.samples import (
    BatchSummary,
    GroupBuffer,
    Load,
    Row,
    TrainingBatch,
    by_token,
    columns_of,
    content_key,
    not_finite,
    parse_rows,
    response_lengths,
    taught_logprobs,
)
from services.trainer.state import suspension
from services.trainer.state.parameter_memory import PooledParameters
from services.trainer.state.training_state import KeptState, Snapshot
from troupe.algorithms.losses import SideSums, normalizer, preference_weights
from troupe.algorithms.registry import AlgorithmFunctions, FunctionFault
from troupe.algorithms.statistics import TokenStatistics
from troupe.checkpoints.adapters import Tensors
from troupe.checkpoints.proof import Proof, Proven
from troupe.contracts import metric_names
from troupe.job import JobSpec
from troupe.job.sections.algorithm import DistillationSpec
from troupe.mixtures import Routers
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.workflow.errors import EntrypointError, as_invalid_argument


@dataclass
class StepSums:
    """The state of a step other than gradients: counts, statistics, rows held back."""

    # Loss normalizer of the current update, and the sum over the step's earlier updates.
    normalizer: int = 0
    updated: int = 0
    # Updates made so far, and the sums of their norms and learning rates, by metric.
    updates: int = 0
    norms: dict[str, float] = field(default_factory=dict)
    tokens: TokenStatistics = field(default_factory=TokenStatistics)
    summary: BatchSummary = field(default_factory=BatchSummary)
    groups: GroupBuffer = field(default_factory=GroupBuffer)
    # Rows whose advantages, or joint pairs, need all of the step's rows.
    held: list[Row] = field(default_factory=list)
    joint: JointPairs = field(default_factory=JointPairs)
    micro_batches: int = 0
    seconds: float = 0.0
    # Why the step cannot be applied (a loss is not finite); further rows are then only counted.
    broken: str = ""
    # The job's field whose function is at fault for that, if one is.
    fault: str = ""


@dataclass
class BrokenStep:
    """Why a step is not applied, and the job's field whose function is at fault; merged over the
    ranks of a gang, since only one may have the reason."""

    reason: str = ELSEWHERE
    fault: str = ""


class Accumulation:
    """The conversion of one policy's rows to gradients: advantages, forward and backward passes."""

    def __init__(
        self,
        spec: JobSpec,
        policy: str,
        passes: Passes,
        gradients: Gradients,
        critic: Critic | None,
        *,
        functions: AlgorithmFunctions,
        skip_zero_advantages: bool,
    ) -> None:
        self._job = spec
        self._constant = spec.constant_tokens(policy)
        self._passes, self._gradients, self._critic = passes, gradients, critic
        self._functions, self._skip_zero = functions, skip_zero_advantages
        self.advantages = AdvantageEstimator(spec.algorithm, functions.advantage)
        self.sums = StepSums()
        # Whether rows are held back until the step is complete.
        self._holds = self.advantages.needs_whole_step or spec.algorithm.updates > 1
        # Whether tokens are kept for display: a rank of a gang sees only a part of them.
        self._keeps = passes.alone

    def add(self, rows: Sequence[Row], stop: threading.Event | None) -> None:
        """Add the gradient of these rows' summed loss, or hold them back. Raises `Stopped`."""
        started = time.perf_counter()
        self.sums.micro_batches += 1
        if self._job.joins_policies and any(row.preference for row in rows):
            self._hold_pairs(rows, stop)
        elif self._holds:
            self.sums.held.extend(rows)
        else:
            self._train(rows, stop)
        self.sums.seconds += time.perf_counter() - started

    def _hold_pairs(self, rows: Sequence[Row], stop: threading.Event | None) -> None:
        """Add up the log-ratios of replies whose pairs have replies of other policies, and hold
        the rows back until these are known. Raises `Stopped`."""
        deterministic = self._job.pipeline.deterministic
        for unit in self.sums.groups.add(rows) if deterministic else [rows]:
            with self._reproducibly():
                self.sums.joint.add(unit, self._passes.log_ratios(unit, stop))
            self.sums.held.extend(unit)

    def complete(self, stop: threading.Event | None) -> None:
        """Add the gradients of rows that were held back: the step is complete. Raises `Stopped`."""
        started = time.perf_counter()
        held, self.sums.held = self.sums.held, []
        if held:
            held = self._penalised(held, stop)
            self.advantages.measure(held)
        size = self._job.pipeline.micro_batch_samples
        for start in range(0, len(held), size):
            self._train(held[start : start + size], stop)
        for unit in self.sums.groups.rest():
            self._add(unit, stop)
        self.sums.seconds += time.perf_counter() - started

    def batches(self, stop: threading.Event | None) -> list[TrainingBatch]:
        """Return all rows of the step as one batch per group, for several updates.

        Batches are in order of content; advantages, values and old log-probs are computed with the
        current weights. Raises `Stopped`.
        """
        held, self.sums.held = self.sums.held, []
        if self.advantages.needs_whole_step:
            held = self._penalised(held, stop)
            self.advantages.measure(held)
        groups = GroupBuffer()
        units = sorted([*groups.add(held), *groups.rest()], key=lambda unit: content_key(unit[0]))
        found = [batch for unit in units for batch in self._measured(unit, stop)]
        if self._job.algorithm.old_logprobs == "recomputed":
            found = [self._with_old_logprobs(batch, stop) for batch in found]
        return [batch for batch in found if any(response_lengths(batch.rows))]

    def _train(self, rows: Sequence[Row], stop: threading.Event | None) -> None:
        if self._job.pipeline.deterministic:
            for unit in self.sums.groups.add(rows):
                self._add(unit, stop)
        elif self._critic is not None or self.advantages.needs_whole_groups:
            if rows := [row for unit in self.sums.groups.add(rows) for row in unit]:
                self._add(rows, stop)
        else:
            # Both sides of a pair are needed.
            paired = self.sums.groups.add([row for row in rows if row.preference])
            whole = [row for unit in paired for row in unit]
            if rows := [*(row for row in rows if not row.preference), *whole]:
                self._add(rows, stop)

    def _add(self, rows: Sequence[Row], stop: threading.Event | None) -> None:
        for batch in self._measured(rows, stop):
            self.backward(batch, stop)

    def _measured(self, rows: Sequence[Row], stop: threading.Event | None) -> list[TrainingBatch]:
        """Compute the advantages of rows, and add the rows to the step's metrics.

        Demonstrations form a separate batch, whose loss has the weight one. So do the
        demonstrations of pairs, whose weights come with their passes (`_weighed`).
        """
        given = [row for row in rows if row.demonstration and not row.preference]
        paired = [row for row in rows if row.preference]
        played = [row for row in rows if not row.demonstration]
        batches = [self._estimated(played, stop)] if played else []
        batches += [
            TrainingBatch(some, torch.ones(len(some), dtype=torch.float64))
            for some in (given, paired)
            if some
        ]
        for batch in batches:
            self.sums.summary.add(batch.rows, batch.advantages.numpy())
            if self._keeps:
                self._passes.kept.measured(batch)
            self.sums.broken = self.sums.broken or not_finite(batch.rows, batch.advantages)
        return batches

    def _penalised(self, rows: Sequence[Row], stop: threading.Event | None) -> list[Row]:
        """Return `rows` with the penalty for divergence from the first version (`kl_penalty`), if
        the job has one. Raises `Stopped`."""
        weight = self._job.algorithm.kl_penalty
        found = list(rows)
        mine = [
            i
            for i, row in enumerate(rows)
            if weight and row.penalty is None and not row.demonstration
        ]
        if unknown := [i for i in mine if rows[i].reference is None]:
            some = [rows[i] for i in unknown]
            with self._reproducibly():
                scores = self._passes.logprobs(some, stop, reference=True)
            parts = torch.split(scores, response_lengths(some))
            for i, part in zip(unknown, parts, strict=True):
                found[i] = replace(rows[i], reference=part.numpy())
        for i in mine:
            row = found[i]
            assert row.reference is not None, "brought or computed"
            gap = row.behaviour.astype(np.float64) - row.reference
            found[i] = replace(row, penalty=weight * gap)
        return found

    def _estimated(self, rows: Sequence[Row], stop: threading.Event | None) -> TrainingBatch:
        rows = self._penalised(rows, stop)
        if self._critic is None:
            try:
                batch = self.advantages.estimate(rows)
            except FunctionFault as fault:
                self._note(fault)
                batch = TrainingBatch(rows, torch.zeros(len(rows), dtype=torch.float64))
        else:
            with self._reproducibly():
                estimate = functools.partial(self._critic.estimate, rows, stop)
                batch = self._passes.budget.fitting(estimate, rows)
        if self._job.algorithm.distillation is not None and batch.rows:
            batch = self._taught(batch, self._job.algorithm.distillation)
        return batch

    def _taught(self, batch: TrainingBatch, spec: DistillationSpec) -> TrainingBatch:
        """Return `batch` with advantages from teachers' log-probs; rewards count where the job says
        so."""
        parts = []
        for row, advantage in zip(batch.rows, batch.advantages.tolist(), strict=True):
            own = np.full(row.response_length, advantage)
            own = own if row.advantages is None else row.advantages
            if row.agent in spec.teachers:
                own = own if spec.rewards else np.zeros_like(own)
                if spec.divergence == "sampled":
                    gap = taught_logprobs(row) - row.behaviour
                    own = own + spec.coefficient * gap
                    self.sums.tokens.add_divergence(torch.from_numpy(-gap))
            parts.append(own)
        found = by_token(batch.rows, torch.from_numpy(np.concatenate(parts)))
        return replace(batch, rows=found.rows, advantages=found.advantages)

    def backward(self, batch: TrainingBatch, stop: threading.Event | None) -> None:
        """Add the gradient of a batch's summed loss; in deterministic mode to exact sums.

        Raises `Stopped` between passes.
        """
        sums, algorithm = self.sums, self._job.algorithm
        statistics = sums.tokens
        if batch.rows and batch.rows[0].preference:
            # Cross-entropy and ratios of these tokens have no meaning.
            batch, statistics = self._weighed(batch, stop), TokenStatistics()
        else:
            lengths = response_lengths(batch.rows)
            sums.normalizer += normalizer(lengths, algorithm.normalize, self._constant)
        chosen = self._with_gradient(batch)
        self._gradients.open()
        if self._critic is not None:
            self._critic.gradients.open()
        with self._reproducibly():
            if not sums.broken and chosen:
                some = [batch.rows[i] for i in chosen]
                advantages = batch.advantages[chosen]
                sums.broken = self._passes.backward(some, advantages, statistics, stop)
                if self._passes.fault is not None:
                    self._note(self._passes.fault)
            if not sums.broken and self._critic is not None and batch.values is not None:
                add = functools.partial(self._critic.backward, batch, stop)
                trained = self._critic.parameters
                sums.broken = self._passes.budget.fitting(add, batch.rows, trained)
        if self._job.pipeline.deterministic:
            problem = self._gradients.accumulate_exact()
            if self._critic is not None:
                problem = self._critic.gradients.accumulate_exact() or problem
            sums.broken = sums.broken or problem

    def _weighed(self, batch: TrainingBatch, stop: threading.Event | None) -> TrainingBatch:
        """Return `batch`, which contains pairs, with the weights of its replies' log-probs as
        advantages; add the pairs to the normalizer and to the metrics. Raises `Stopped`."""
        sums, spec, rows = self.sums, self._job.preferences, batch.rows
        assert spec is not None, "its samples are pairs"
        if sums.broken:
            return batch
        numbers = {group: n for n, group in enumerate(dict.fromkeys(row.group for row in rows))}
        pairs = torch.tensor([numbers[row.group] for row in rows])
        chosen = torch.tensor([row.reward > 0 for row in rows])
        if self._job.joins_policies:
            sides = sums.joint.sides(numbers)
        else:
            with self._reproducibly():
                log_ratios = self._passes.log_ratios(rows, stop)
            sides = SideSums.of(log_ratios, torch.tensor(response_lengths(rows)), pairs, chosen)
            sums.normalizer += int(sides.whole.sum())
        found = preference_weights(sides, pairs, chosen, loss=spec.loss, beta=spec.beta)
        sums.summary.add_pairs(found)
        if not torch.isfinite(found.losses).all():
            sums.broken = "the loss of a pair of preferences is not finite"
        return replace(batch, advantages=found.weights)

    def _note(self, fault: FunctionFault) -> None:
        """Break the step off, because of a user's function."""
        self.sums.broken, self.sums.fault = str(fault), fault.field

    def _reproducibly(self) -> contextlib.AbstractContextManager[None]:
        return _deterministic() if self._job.pipeline.deterministic else contextlib.nullcontext()

    def _with_gradient(self, batch: TrainingBatch) -> list[int]:
        """Return the indices of rows whose loss has a gradient; a zero advantage may have none."""
        algorithm, balanced = self._job.algorithm, self._passes.balances
        pure = not (algorithm.kl_loss or algorithm.entropy_coefficient or balanced)
        if self._skip_zero and pure and self._functions.scales_with_advantage:
            pairs = enumerate(zip(batch.rows, batch.advantages.tolist(), strict=True))
            return [i for i, (row, a) in pairs if a != 0.0 or self._passes.is_taught(row)]
        return list(range(len(batch.rows)))

    def _with_old_logprobs(
        self, batch: TrainingBatch, stop: threading.Event | None
    ) -> TrainingBatch:
        with self._reproducibly():
            found = self._passes.logprobs(batch.rows, stop)
        parts = torch.split(found, response_lengths(batch.rows))
        rows = [replace(r, old=old.numpy()) for r, old in zip(batch.rows, parts, strict=True)]
        return replace(batch, rows=rows)

    def clear(self) -> None:
        """Discard the gradients of the finished update, and begin the next one."""
        self.sums.updated, self.sums.normalizer = self.sums.updated + self.sums.normalizer, 0
        self._gradients.discard()
        if self._critic is not None:
            self._critic.clear()

    def discard(self) -> None:
        """Discard all state of the current step."""
        self._gradients.discard()
        if self._critic is not None:
            self._critic.discard()
        self.advantages.discard()
        self._passes.kept.take()
        self._passes.budget.forget()
        self._passes.forget_weights()
        self.sums = StepSums()

    # Suspension.

    def step_state(self) -> tuple[Tensors, dict[str, Any]]:
        """Return the current step as tensors, not copied, and plain values (JSON), for
        `restore_step`."""
        sums = self.sums
        gradients, bounds = self._gradients.state()
        tokens, of_tokens = suspension.split_fields(sums.tokens)
        held, of_held = suspension.pack_rows(sums.held)
        waiting, of_waiting = suspension.pack_rows(sums.groups.waiting)
        parts = {"gradients": gradients, "tokens": tokens, "held": held, "waiting": waiting}
        values = {
            "bounds": bounds,
            "tokens": of_tokens,
            "summary": suspension.split_fields(sums.summary)[1],
            "held": of_held,
            "joint": sums.joint.state(),
            "waiting": of_waiting,
            "normalizer": sums.normalizer,
            "micro_batches": sums.micro_batches,
            "seconds": sums.seconds,
            "broken": sums.broken,
            "fault": sums.fault,
            "advantages": self.advantages.step_state(),
        }
        if self._critic is not None:
            parts["critic"], values["critic"] = self._critic.step_state()
        named = [suspension.under(name, tensors) for name, tensors in parts.items()]
        return {name: t for tensors in named for name, t in tensors.items()}, values

    def restore_step(self, tensors: Tensors, values: Mapping[str, Any]) -> None:
        """Continue the step that `step_state` returned, using the given tensors themselves."""
        part = {
            name: suspension.below(name, tensors)
            for name in ("gradients", "tokens", "held", "waiting", "critic")
        }
        self._gradients.restore(part["gradients"], values["bounds"])
        if self._critic is not None:
            self._critic.restore_step(part["critic"], values["critic"])
        self.advantages.restore_step(values["advantages"])
        self.sums = sums = StepSums(
            normalizer=values["normalizer"],
            held=suspension.unpack_rows(part["held"], values["held"]),
            joint=JointPairs.restored(values["joint"]),
            micro_batches=values["micro_batches"],
            seconds=values["seconds"],
            broken=values["broken"],
            fault=values["fault"],
        )
        suspension.join_fields(sums.tokens, part["tokens"], values["tokens"])
        suspension.join_fields(sums.summary, {}, values["summary"])
        sums.groups.add(suspension.unpack_rows(part["waiting"], values["waiting"]))


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Context that allows only kernels with bitwise reproducible results."""
    before = torch.are_deterministic_algorithms_enabled()
    # Off, since in this mode torch would fill every new tensor to find reads of uninitialized
    # memory.
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def schedule(units: int, epochs: int, minibatches: int, seed: str) -> Iterator[list[int]]:
    """Schedule the minibatch updates of a step: yields the indices of each update's units.

    Every epoch splits all units into `minibatches` parts of about equal size, in an order drawn
    from `seed` and the epoch; into fewer parts where there are fewer units.
    """
    parts = min(minibatches, units)
    for epoch in range(epochs):
        order = list(range(units))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        yield from (order[units * k // parts : units * (k + 1) // parts] for k in range(parts))


def _functions_of(spec: JobSpec) -> AlgorithmFunctions:
    """Return the job's loss, correction and advantage. Raises InvalidArgument naming the field."""
    try:
        return AlgorithmFunctions.of(spec)
    except EntrypointError as error:
        raise as_invalid_argument(error) from error


class Learner(PolicyLearner[Row]):
    """The learner of one policy's language model on one device, or of one rank's part of it.

    With `pipeline.deterministic` the weights after a step are a function, bit for bit, of the
    weights before it and of the set of its samples, independent of the order in which they arrive
    and of the division into micro-batches (`GroupBuffer`, `ExactSum`). That holds on one kind of
    machine with one number of threads (`TROUPE_THREADS`): both change how sums are laid out.
    """

    _critic_module = staticmethod(critic_module)

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
        ranks: RankGroup | None = None,
    ) -> None:
        """Train `model` in the dtype of its parameters: float32, or float64 for exactness tests.

        `model`: a Hugging Face model or a `TrainedModel`. `ranks`: the ranks with the other parts
        of a sharded model; default: none.
        """
        self._ranks = ranks or RankGroup()
        self._job, self._name = spec, policy
        self._policy = spec.policies[policy]
        # Before the model goes to the device, which unused bases leave.
        adapter = adapter_of(model)
        occupy(self, None if adapter is None else adapter.base)
        if not isinstance(model, TrainedModel):
            dtype = getattr(torch, self._policy.language_model.weight_dtype)
            model = TrainedModel(model, device or torch.device("cpu"), dtype)
        self._trained: TrainedModel = model
        # Number of token embeddings: token ids are below it.
        self.vocabulary = self._trained.vocabulary
        offload = self._policy.trainer.offload
        self._optimizer = make_optimizer(self.model, self._policy.optimizer, offload)
        self._gradients = Gradients(self._trained.parameters, self._ranks)
        functions = _functions_of(spec)
        self._passes = Passes(
            self._trained,
            spec,
            policy,
            functions=functions,
            forward_tokens=forward_tokens,
            share_prefixes=share_prefixes,
            ranks=self._ranks,
        )
        if self._policy.trainable and self._policy.simulated is None:
            for teacher in spec.teachers_of(policy):
                self._passes.add_teacher(teacher, self._load_teacher(teacher))
        self._critic: Critic | None = None
        value_function = spec.algorithm.value_function
        if value_function and self._policy.trainable and self._policy.simulated is None:
            module, pack = self._critic_module(self.model), self._passes.rank_batches
            half = self._policy.language_model.weight_dtype == "bfloat16"
            where = self._trained.device, half, self._ranks
            self._critic = Critic(module, value_function, pack, offload, *where)
        self._step = Accumulation(
            spec,
            policy,
            self._passes,
            self._gradients,
            self._critic,
            functions=functions,
            skip_zero_advantages=skip_zero_advantages,
        )
        self._pooled = PooledParameters(self._trained.named, offload)

    @property
    def num_parameters(self) -> int:
        """See `PolicyLearner`."""
        return self._trained.num_parameters

    @property
    def model(self) -> Any:
        """The Hugging Face model that is trained."""
        return self._trained.module

    @property
    def base(self) -> AdaptedBase | None:
        """See `PolicyLearner`."""
        return self._trained.base

    @property
    def needs_reference(self) -> bool:
        """See `PolicyLearner`."""
        return self._job.needs_reference

    def set_reference(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Keep a frozen copy of the model with these weights for the divergence."""
        self._pooled.arrive()
        self._passes.set_reference(weights)

    def _load_teacher(self, name: str) -> Any:
        """Return the frozen model of a teacher, on the device. Raises InvalidArgument."""
        model = load_teacher(name, self._job, self.vocabulary).to(self._trained.device)
        return model if model.dtype == torch.bfloat16 else model.to(self._trained.dtype)

    def read(self, claimed: Iterable[store_pb.ClaimedSample], load: Load) -> list[Row]:
        """Parse the samples of a claim for `accumulate`. Raises as `parse_rows`."""
        columns, longest = columns_of(self._job.algorithm), positions_of(self.model)
        routing = Routers.shape_of(self.model)
        return parse_rows(
            claimed,
            self.vocabulary,
            load,
            columns,
            longest=longest,
            routing=routing,
            user_columns=self._job.algorithm.user_columns,
            payload_kinds=self._passes.payload_kinds,
        )

    # Accumulation.

    def accumulate(self, rows: Sequence[Row], stop: threading.Event | None = None) -> None:
        """Add the gradient of these rows' summed loss. Raises `Stopped` between passes.

        In deterministic mode, and with a critic, a group's rows are computed once all of them have
        arrived; with an advantage that needs the whole step, in `complete`; in a step with several
        updates, in `apply`.
        """
        self._pooled.arrive()
        self._step.add(rows, stop)

    def complete(self, stop: threading.Event | None = None) -> None:
        """Add the gradients of rows that were held back: the step is complete. Raises `Stopped`.

        `apply` calls it too.
        """
        if self._job.algorithm.updates == 1:
            self._step.complete(stop)

    def pair_sums(self) -> store_pb.PairSums:
        """See `PolicyLearner`."""
        return self._step.sums.joint.own()

    def join_pairs(self, sums: store_pb.PairSums) -> None:
        """See `PolicyLearner`."""
        # Over which the loss is a mean, also over pairs without replies of this policy.
        self._step.sums.normalizer += self._step.sums.joint.join(sums)

    # The step.

    def apply(
        self,
        version: int,
        stop: threading.Event | None = None,
        rates: Mapping[str, float] | None = None,
    ) -> Applied:
        """Make the step from the accumulated gradients, if they are finite.

        A step that is not applied leaves weights and optimizer bitwise unchanged, unless the result
        has `moved` set: then the caller must `restore`. `rates`: see `PolicyLearner.apply`. Raises
        `Stopped`.
        """
        self._pooled.arrive()
        self.complete(stop)
        started = time.perf_counter()
        several = self._job.algorithm.updates > 1
        own, rates = learning_rates(self._job, self._name, version, version), rates or {}
        if self._critic is None:
            own.pop(metric_names.CRITIC_LEARNING_RATE, None)
        rates = {name: rates.get(name, own[name]) for name in own}
        reason = self._run_updates(version, rates, stop) if several else self._update(rates)
        sums = self._step.sums
        sums.tokens = self._ranks.merged(sums.tokens)
        why = BrokenStep(reason, sums.fault)
        if reason:  # on all ranks
            why = self._ranks.merged(why)
        metrics = sums.summary.metrics(version) | self._step.advantages.metrics()
        if sums.tokens.tokens or not sums.summary.pairs:
            metrics |= sums.tokens.metrics()
        if self._critic is not None:
            metrics |= self._critic.metrics()
        if sums.tokens.tokens:
            weight = max(sums.updated + sums.normalizer, 1)
            metrics[metric_names.POLICY_LOSS] = float(sums.tokens.loss) / weight
        metrics |= {name: total / sums.updates for name, total in sums.norms.items()}
        if sums.updates:
            metrics |= rates
        if several:
            metrics["train/updates"] = float(sums.updates)
        if not reason:
            self._step.advantages.applied()
        seconds = sums.seconds + time.perf_counter() - started
        metrics[metric_names.TRAIN_SECONDS] = seconds
        metrics[metric_names.MICRO_BATCHES] = float(sums.micro_batches)
        metrics |= self._passes.metrics()
        digest, moved = sums.summary.digest, bool(reason) and sums.updates > 0
        kept = self._passes.kept.take()
        self.discard()
        self._pooled.leave()
        return Applied(not reason, why.reason, metrics, digest, moved, why.fault, kept)

    def _update(self, rates: Mapping[str, float]) -> str:
        """Make one update from the accumulated gradient at these learning rates.

        Returns the reason if the result cannot be used, else an empty text. A gradient that is not
        finite changes nothing. A finite one may still make weights overflow: then the update was
        made, and its weights must not be published.
        """
        sums = self._step.sums
        if sums.broken or not sums.normalizer:
            return sums.broken or "no sample has a response token"
        self._passes.forget_weights()
        norm = self._gradients.finish(sums.normalizer, self._policy.optimizer.max_grad_norm)
        if not math.isfinite(norm):
            return f"the norm of the gradient is {norm}"
        made = {metric_names.GRAD_NORM: norm}
        if self._critic is not None:
            made["critic/grad_norm"] = norm = self._critic.finish()
            if not math.isfinite(norm):
                return f"the norm of the critic's gradient is {norm}"
            self._critic.step(rates[metric_names.CRITIC_LEARNING_RATE])
        for group in self._optimizer.param_groups:
            group["lr"] = rates[metric_names.LEARNING_RATE]
        self._optimizer.step()
        sums.updates += 1
        sums.norms = {name: sums.norms.get(name, 0.0) + value for name, value in made.items()}
        norms = {"weights": self._gradients.weights_norm()}
        if self._critic is not None:
            norms["critic's weights"] = self._critic.gradients.weights_norm()
        for name, norm in norms.items():
            if not math.isfinite(norm):
                return f"the norm of the {name} is {norm} after the step"
        return ""

    def _run_updates(
        self, version: int, rates: Mapping[str, float], stop: threading.Event | None
    ) -> str:
        """Make all updates of a step that has several; return the reason if one failed.

        Advantages, values and old log-probs use the weights at the beginning of the step.
        """
        algorithm, sums = self._job.algorithm, self._step.sums
        batches = self._step.batches(stop)
        reason = sums.broken or ("" if batches else "no sample has a response token")
        seed = f"{self._job.seed}/{self._name}/{version}"
        for part in schedule(len(batches), algorithm.epochs, algorithm.minibatches, seed):
            if reason:
                break
            self._step.clear()
            for i in part:
                self._step.backward(batches[i], stop)
            reason = self._update(rates)
        return reason

    def discard(self) -> None:
        """Discard the current step: gradients, statistics, rows."""
        self._step.discard()

    # State.

    def published(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors that engines load (`TrainedModel.published`)."""
        return self._trained.published()

    def proof(self, passage: Sequence[int], what: Proven = "published") -> Proof | None:
        """See `PolicyLearner`."""
        return self._trained.proof(passage, what)

    def weights(self) -> Tensors:
        """Trained weights in full precision; not copies (`TrainedModel.weights`)."""
        return self._trained.weights()

    def moments(self) -> Moments:
        """Return the state of optimizer, critic and baselines by name; not copies."""
        critic = {} if self._critic is None else self._critic.state()
        return export_moments(self.model, self._optimizer) | self._step.advantages.state() | critic

    def snapshot(self) -> Snapshot:
        """See `PolicyLearner`."""
        return Snapshot(self.weights(), self.moments())

    def load(self, state: KeptState) -> None:
        """See `PolicyLearner`."""
        self.restore(state.weights, state.moments)

    def load_reference(self, state: KeptState) -> None:
        """See `PolicyLearner`."""
        self.set_reference(state.weights)

    def restore(self, weights: Mapping[str, torch.Tensor], moments: Moments) -> None:
        """Copy `weights` and `moments` into the learner, and discard the current step."""
        self.discard()
        self._trained.load(weights)
        moments = self._step.advantages.restore(moments)
        if self._critic is not None:
            moments = self._critic.restore(moments)
        import_moments(self.model, self._optimizer, moments)

    # Suspension, possible in the middle of a step.

    def suspended(self) -> tuple[Tensors, dict[str, Any]]:
        """Return the whole state as tensors, not copied, and plain values (JSON), for `adopt`."""
        tensors, values = self._step.step_state()
        weights = suspension.under("weights", self.weights())
        return weights | suspension.under("moments", self.moments()) | tensors, values

    def adopt(self, tensors: Tensors, values: Mapping[str, Any]) -> None:
        """Continue from a state of `suspended`, using the given tensors; they are on the device."""
        occupy(self, self.base)
        self._passes.arrive()
        weights = suspension.below("weights", tensors)
        if self._pooled.attach(weights):
            self._trained.load(weights)
        moments = self._step.advantages.restore(suspension.below("moments", tensors))
        if self._critic is not None:
            moments = self._critic.restore(moments, copy=False)
        import_moments(self.model, self._optimizer, moments, copy=False)
        self._step.restore_step(tensors, values)

    def release(self) -> list[torch.Tensor]:
        """Release and return the device memory; only `adopt` may be called afterwards. Frozen
        models move to host memory, but a shared base stays for now (frozen_base.py)."""
        left = [*export_moments(self.model, self._optimizer).values(), *self._pooled.release()]
        self._optimizer.state.clear()
        self.discard()
        self._gradients.restore({}, [])
        self._passes.leave()
        vacate(self)
        return left if self._critic is None else [*left, *self._critic.release()]
