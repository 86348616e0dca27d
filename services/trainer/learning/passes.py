"""Forward and backward passes of one policy: gradients of the summed loss over rows.

`Passes` runs rows through the model in batches that fit the device, in parallel over CPU threads or
the ranks of a gang.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import structlog
import torch

from services.trainer.compute import gpu_memory
from services.trainer.learning.cpu_threads import CpuThreads, split_rows, worth_splitting
from services.trainer.learning.forward import (
    Forward,
    Teaching,
    TrainedModel,
    costs_of,
    payload_kinds_of,
)
from services.trainer.learning.kernels.half import HalfWeights
from services.trainer.learning.kernels.setup import (
    checkpointed_layers,
    choose_kernels,
    configure_model,
)
from services.trainer.learning.model import shape_of_model
from services.trainer.learning.pass_budget import PassBudget
from services.trainer.learning.ranks import RankBatches, RankGroup
from services.trainer.learning.samples import Row, response_lengths
from services.trainer.learning.sequences.packing import PackedBatch, one_token, plan
from services.trainer.learning.token_loss import KeptTokens, TokenColumns, TokenLoss
from services.trainer.state.parameter_memory import MovableParameters
from troupe.algorithms.expert_load import ExpertLoad
from troupe.algorithms.linear_loss import Scores
from troupe.algorithms.registry import AlgorithmFunctions, FunctionFault
from troupe.algorithms.statistics import TokenStatistics
from troupe.job import JobSpec
from troupe.job.sizing import setup_of, shape_of_config
from troupe.rpc import FailedPrecondition
from troupe.scheduling.defaults import CPU, CPU_UNCUT, defaults_of

log = structlog.get_logger("troupe.trainer")
# Bytes of the float32 logits of one forward pass, for models that compute them all at once.
_LOGITS_BYTES = 256 << 20


@dataclass(frozen=True)
class _ThreadModel:
    """The model that one thread uses: the policy's own, or a twin that shares its weights."""

    forward: Forward
    # The reference model (first version), if the loss has a KL term.
    reference: Forward | None
    # The frozen policies that it learns from, by name.
    teachers: Mapping[str, Forward]
    # For a twin: pairs (policy's parameter, twin's parameter); only gradients are separate.
    pairs: tuple[tuple[torch.nn.Parameter, torch.nn.Parameter], ...] = ()

    def twin(self) -> _ThreadModel:
        """Return a thread model over the same weights."""
        forward = self.forward.twin()
        named = zip(self.forward.model.parameters(), forward.model.parameters(), strict=True)
        teachers = {name: teacher.twin() for name, teacher in self.teachers.items()}
        reference = self.reference and self.reference.twin()
        return _ThreadModel(forward, reference, teachers, tuple(named))

    def attach(self) -> None:
        """Point the twin at the policy's weights, which may have moved to other memory."""
        for parameter, own in self.pairs:
            own.data, own.grad = parameter.data, None

    def add_gradients(self) -> None:
        """Add the twin's gradients to the policy's, and drop them."""
        for parameter, own in self.pairs:
            if own.grad is not None:
                before, own.grad = own.grad, None
                parameter.grad = before if parameter.grad is None else parameter.grad.add_(before)

    def detach(self) -> None:
        """Drop the twin's gradients and references to weights, so that the policy can free them."""
        for _, own in self.pairs:
            own.data, own.grad = own.data.new_empty(0), None


class Passes:
    """Runs rows through the model of one policy, in batches that fit its device."""

    def __init__(
        self,
        model: TrainedModel,
        spec: JobSpec,
        policy: str,
        *,
        functions: AlgorithmFunctions,
        forward_tokens: int = 0,
        share_prefixes: bool = True,
        ranks: RankGroup | None = None,
    ) -> None:
        self._model = model
        self._losses = TokenLoss(spec.algorithm, functions)
        self.kept = KeptTokens(spec)
        self._ranks = ranks or RankGroup()
        self._job = spec
        self._policy, self._name = spec.policies[policy], policy
        # Whether passes are made under autocast to bfloat16.
        self._half = self._policy.language_model.weight_dtype == "bfloat16"
        own = defaults_of(gpu_memory(model.device))
        configure_model(policy, model.module, self._policy.trainer, own)
        self._reference: Forward | None = None
        # Whether the loss has a divergence from the reference.
        self._penalised = spec.algorithm.kl_loss > 0
        # By name of the teacher: its model, and the agents that it teaches.
        self._teachers: dict[str, Forward] = {}
        distillation = spec.algorithm.distillation
        taught = {} if distillation is None else distillation.teachers
        self._teacher_of = {a: t for a, t in taught.items() if t in spec.teachers_of(policy)}
        wanted = self._policy.trainer.forward_tokens or forward_tokens
        config = getattr(model.module, "config", None)  # a simulated model has none
        tokens = wanted or own.tokens_of(getattr(config, "hidden_size", 0))
        self.budget = PassBudget(tokens, spec, policy, model.module, model.device, self._ranks)
        # Budgets of tokens beyond which a sequence is cut.
        self._uncut = 1 if wanted or own is not CPU else CPU_UNCUT
        # Where the defaults of this device are shown.
        log.info(
            "passes",
            policy=policy,
            device=str(model.device),
            forward_tokens=tokens,
            checkpointed_layers=checkpointed_layers(model.module),
        )
        self._shares = share_prefixes

    @functools.cached_property
    def _forward(self) -> Forward:
        # Made on first use: frozen and simulated policies never compute a loss.
        model = self._model
        found = Forward(
            model.module, half=self._half, routers=model.routers, copies=self._half_weights
        )
        self._warn(found, self._name)
        return found

    @functools.cached_property
    def _half_weights(self) -> HalfWeights | None:
        """Copies of the weights in bfloat16, kept where the device has room for them. None: passes
        are not in bfloat16, or not on a GPU; or a gang gathers weights in bfloat16."""
        model, where = self._model.module, self._model.device
        if where.type != "cuda":
            return None
        shape = shape_of_config(model.config.to_dict()) or shape_of_model(model)
        setup = setup_of(
            self._job,
            self._name,
            shape,
            device=where.type,
            memory=gpu_memory(where) or 0,
            forward_tokens=self.budget.tokens,
        )
        half = setup.half_weights
        return HalfWeights(model, keeps=half == "kept") if half else None

    @functools.cached_property
    def _frozen(self) -> MovableParameters:
        """The parameters of reference and teachers, without a base that policies share."""
        base = self._model.base
        shared = set() if base is None else {id(p) for p in base.module.parameters()}
        models = [*self._teachers.values(), *filter(None, [self._reference])]
        own = (p for one in models for p in one.model.parameters() if id(p) not in shared)
        return MovableParameters(own, frozen=True)

    def leave(self) -> None:
        """Move frozen models to host memory until `arrive`, and free copies of weights: others
        need the device."""
        self.forget_weights()
        self._frozen.leave()

    def arrive(self) -> None:
        """Move frozen models back to the device."""
        self._frozen.arrive()

    def forget_weights(self) -> None:
        """Free copies of the weights, which are about to change or to leave the device."""
        found = self.__dict__.get("_half_weights")
        if found is not None:
            found.drop()

    def _warn(self, forward: Forward, policy: str) -> None:
        """Say in the log that a model's rows are padded, and why. Raises FailedPrecondition of kind
        "model_unsupported" where ranks cannot divide its passes."""
        if why := forward.capabilities.unpacked:
            log.warning("rows_not_packed", policy=policy, why=why)
        if self.balances:
            why = why or "`algorithm.router_aux_loss` is over all tokens of a row"
        if why and self._ranks.slices is not None:
            raise FailedPrecondition(
                f"ranks cannot divide the passes of policy {policy}: {why}",
                kind="model_unsupported",
                field=f"policies.{policy}.trainer.context_parallel",
                value=self._ranks.slices.size,
                remedy="Set it to 1, or use a model with full or sliding attention, and no "
                "auxiliary loss of routers.",
            )

    def metrics(self) -> dict[str, float]:
        """Return how passes are made: `train/packed` is 0 where rows are padded instead, else
        absent."""
        found, made = self.budget.metrics(), self.__dict__.get("_layout")
        return found if made is None or made["packed"] else found | {"train/packed": 0.0}

    @functools.cached_property
    def _own_model(self) -> _ThreadModel:
        return _ThreadModel(self._forward, self._reference, self._teachers)

    @functools.cached_property
    def _threads(self) -> CpuThreads | None:
        """Threads that compute rows in parallel; None where one pass follows the other."""
        # Deterministic sums depend on how rows are laid out, which is by group.
        alone = self._ranks.size == 1 and not self._job.pipeline.deterministic
        compiled = self._policy.trainer.compile == "on"  # kernels are compiled per module
        lora = self._policy.lora
        # Threads share one generator: dropout would not be reproducible, nor when recomputed.
        draws = lora is not None and lora.dropout > 0
        threads = torch.get_num_threads()
        fits = alone and not compiled and not draws
        splits = fits and worth_splitting(self._model.parameters, threads)
        return CpuThreads(threads) if splits else None

    @functools.cached_property
    def _thread_models(self) -> list[_ThreadModel]:
        """The model of each thread; the first is the policy's own."""
        assert self._threads is not None
        return [self._own_model, *(self._own_model.twin() for _ in range(self._threads.size - 1))]

    @functools.cached_property
    def _layout(self) -> dict[str, Any]:
        """Arguments of `plan` that suit the model."""
        models = [self._forward, *self._teachers.values()]
        packs = all(one.capabilities.packs for one in models)
        layout: dict[str, Any] = {"packed": packs, "slices": self._ranks.slices}
        if self._shares and packs:
            layout["sharing"] = costs_of(self._model.module)
        if not all(one.capabilities.linear_head for one in models):
            layout["limit"] = max(1, _LOGITS_BYTES // (4 * self._model.vocabulary))
        return layout

    @property
    def payload_kinds(self) -> Collection[str]:
        """The kinds of payloads that the model and all of its teachers take."""
        teachers = [payload_kinds_of(one.model) for one in self._teachers.values()]
        return set(self._model.payload_kinds).intersection(*teachers)

    @property
    def fault(self) -> FunctionFault | None:
        """The first fault of a user's loss or correction in the last `backward`."""
        return self._losses.fault

    def set_reference(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Keep a frozen copy of the model with these weights as the reference of the divergence."""
        frozen = self._model.frozen_copy(weights)
        choose_kernels(frozen, self._policy.trainer)
        self._reference = Forward(frozen, self._forward.capabilities)
        self._forget_models()

    def add_teacher(self, name: str, module: Any) -> None:
        """Learn from the frozen model `module`, which is on the device."""
        choose_kernels(module, self._policy.trainer)
        self._teachers[name] = Forward(module, half=self._half)
        self._warn(self._teachers[name], name)
        self._forget_models()

    def _forget_models(self) -> None:
        for made in ("_own_model", "_thread_models", "_layout", "_frozen"):
            self.__dict__.pop(made, None)

    @property
    def balances(self) -> bool:
        """Whether the loss evens out the experts of the model, also of rows without advantage."""
        return self._job.algorithm.router_aux_loss > 0 and self._model.routers is not None

    @property
    def alone(self) -> bool:
        """Whether this process computes all rows: there are no other ranks."""
        return self._ranks.size == 1

    def is_taught(self, row: Row) -> bool:
        """Return whether the row's loss has a divergence from a teacher, also without an
        advantage."""
        return not row.demonstration and row.agent in self._teacher_of

    def backward(
        self,
        rows: list[Row],
        advantages: torch.Tensor,
        statistics: TokenStatistics,
        stop: threading.Event | None,
    ) -> str:
        """Add the gradient of these rows' summed loss.

        Returns the reason if the gradient cannot be used, else an empty text. `advantages`: float64
        [n]. In a gang every rank gets all rows and computes its share. Raises `Stopped`.
        """
        self._losses.fault = None
        mine = self._ranks.share(rows)
        rows, advantages = [rows[i] for i in mine], advantages[mine]
        # Rows with one teacher go together. In a gang all ranks pass through all of them.
        teachers = [self._teacher_of[row.agent] if self.is_taught(row) else "" for row in rows]
        every = {"", *self._teachers} if self._ranks.size > 1 else set(teachers)
        for teacher in sorted(every):
            some = [i for i, one in enumerate(teachers) if one == teacher]
            taught = [rows[i] for i in some]
            compute = functools.partial(self._backward, taught, advantages[some], teacher, stop)
            problem, found = self.budget.fitting(compute, taught, self._model.parameters)
            for added in found:
                statistics.add(**added)
            if problem:
                return problem
        return ""

    def _backward(
        self,
        rows: list[Row],
        advantages: torch.Tensor,
        teacher: str,
        stop: threading.Event | None,
    ) -> tuple[str, list[dict[str, Any]]]:
        """Return `backward` for the rows of this rank with one `teacher` (empty: with none): why
        the gradient cannot be used, and the statistics of each pass."""
        self._losses.fault = None
        if rows and self._threads is not None:
            return self._in_threads(self._threads, rows, advantages, teacher, stop)
        columns = self._columns(rows, advantages) if rows else None
        batches = self._ranks.batches(self._plan(rows), stop)
        found: list[dict[str, Any]] = []
        for batch in batches:
            if batches.keeping:
                elsewhere = functools.partial(self._keep_elsewhere, batch, teacher)
                keep: Callable[[], None] = elsewhere
                if batch is not None:
                    keep = functools.partial(self._keep, self._own_model, batch, columns, teacher)
                batches.run(keep, elsewhere)
                continue
            smallest = functools.partial(
                self._empty_pass, teacher, batch, self._merges(batch), batches.seeing
            )
            if batch is None or columns is None:
                batches.run(smallest, smallest)
                continue
            one = functools.partial(self._pass, rows, batch, columns, teacher, batches)
            if (added := batches.run(one, smallest)) is not None and self.fault is None:
                found.append(added)
        return batches.problem, found

    def _pass(
        self,
        rows: list[Row],
        batch: PackedBatch,
        columns: TokenColumns,
        teacher: str,
        batches: RankBatches,
    ) -> dict[str, Any]:
        """Return the statistics of one pass."""
        loss, logprobs, added = self._loss(self._own_model, batch, columns, teacher)
        self.kept.scored(rows, batch.order, logprobs)
        # Also for a loss that is not finite, which is discarded: other ranks need this pass.
        torch.autograd.backward(loss)
        batches.note(loss)
        batches.problem = "" if self.fault is None else str(self.fault)
        return added

    def _plan(self, rows: Sequence[Row], *, gradients: bool = True) -> Sequence[PackedBatch]:
        """Return the passes over `rows` that the budget allows, in order."""
        tokens, layout = self.budget.tokens, self._layout
        cut = self._uncut * tokens if self._cuts else None
        coupled = gradients and self._losses.couples_tokens
        make = functools.partial(
            plan, rows, tokens, cut=cut, gradients=gradients, coupled=coupled, **layout
        )
        batches = self._ranks.planned(make) if self.payload_kinds else make()
        return self.budget.planned(batches, cuts=self._cuts)

    @property
    def _cuts(self) -> bool:
        """Whether sequences may be cut. With dropout a piece's two passes would differ, and a row's
        imbalance of experts is measured over all its tokens."""
        lora = self._policy.lora
        return self._layout["packed"] and not (lora and lora.dropout) and not self.balances

    def _in_threads(
        self,
        threads: CpuThreads,
        rows: list[Row],
        advantages: torch.Tensor,
        teacher: str,
        stop: threading.Event | None,
    ) -> tuple[str, list[dict[str, Any]]]:
        """Like `_backward`, with a part of the rows per thread; the order of sums is fixed."""
        calls = [
            functools.partial(
                self._in_thread, model, [rows[i] for i in part], advantages[part], teacher, stop
            )
            for model, part in zip(
                self._thread_models, split_rows(rows, threads.size), strict=False
            )
        ]
        try:
            results = threads.run(calls)
            for model, _ in zip(self._thread_models, results, strict=False):
                model.add_gradients()
        finally:
            for model in self._thread_models:
                model.detach()
        problem = next((problem for _, problem in results if problem), "")
        return problem, [added for found, _ in results for added in found]

    def _in_thread(
        self,
        model: _ThreadModel,
        rows: list[Row],
        advantages: torch.Tensor,
        teacher: str,
        stop: threading.Event | None,
    ) -> tuple[list[dict[str, Any]], str]:
        """Return statistics of each batch, and why a loss cannot be used."""
        statistics: list[dict[str, Any]] = []
        columns = self._columns(rows, advantages)
        model.attach()
        batches = RankBatches(self._plan(rows), stop)
        for batch in batches:
            assert batch is not None  # there are no other ranks
            if batches.keeping:
                self._keep(model, batch, columns, teacher)
                continue
            loss, logprobs, added = self._loss(model, batch, columns, teacher)
            self.kept.scored(rows, batch.order, logprobs)
            if self._losses.fault is not None:
                return statistics, str(self._losses.fault)
            statistics.append(added)
            torch.autograd.backward(loss)
            batches.note(loss)
        return statistics, batches.problem

    def _keep(
        self,
        model: _ThreadModel,
        batch: PackedBatch,
        columns: TokenColumns | None,
        teacher: str,
    ) -> None:
        """Run a piece without gradients, for the results that later pieces read: keys and values,
        and scores of the tokens in `columns`, if there are any."""
        here = batch.to(self._model.device)
        history = here.history
        scores = self._losses.couples_tokens and history is not None
        with self._autocast():
            if scores and columns is not None and history is not None and here.within is not None:
                own = columns.at(here.order)
                found = model.forward.scores(here, own.temperatures)
                theirs = self._reference_logprobs(model, here, own)
                history.score(here.within, found.logprobs, found.entropy, theirs)
            else:
                model.forward.keep(here)
                if self._penalised and model.reference is not None:
                    model.reference.keep(here)
            if teacher:
                model.teachers[teacher].keep(here)

    def _keep_elsewhere(self, batch: PackedBatch | None, teacher: str) -> None:
        """Take part in a pass of other ranks that keeps; `batch`: what this one gave up."""
        self._keep(self._own_model, one_token(self._model.device, batch), None, teacher)

    def _columns(self, rows: list[Row], advantages: torch.Tensor) -> TokenColumns:
        device, dtype = self._model.device, self._model.dtype
        return TokenColumns.of(
            rows, advantages, self._job.algorithm.normalize, device=device, dtype=dtype
        )

    def _loss(
        self, model: _ThreadModel, batch: PackedBatch, columns: TokenColumns, teacher: str
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Return the summed loss of a batch, differentiable, the log-probs of its tokens, and
        arguments for `TokenStatistics`."""
        here = batch.to(self._model.device)
        own = columns.at(here.order)
        own = replace(own, reference=self._reference_logprobs(model, here, own))
        loss_of, load = self._losses.of(own), self._expert_load(here, own.weights)
        whole = self._losses.couples_tokens
        history = here.history if whole else None
        total: torch.Tensor | None = None
        if history is not None and here.within is not None:
            # Of a piece, a loss that couples tokens is linear in their scores.
            everything = columns.at(history.order.to(self._model.device))
            if self._merges(here):
                history.merge(self._ranks.summed_over_slices)
                everything = replace(everything, reference=history.reference)
                total = history.differentiate(self._losses.of(everything))
            loss_of = history.linear(here.within)
        teaching = self._teaching(model, teacher, own.weights, own.temperatures)
        with self._autocast():
            loss, scores = model.forward.loss(
                here,
                own.temperatures,
                loss_of,
                whole=whole and history is None,
                teaching=teaching,
                load=load,
            )
        if history is None:
            return loss, scores.logprobs, self._losses.statistics(own, loss, scores, load)
        # The tokens of all pieces count with the first that is differentiated.
        slices = self._ranks.slices
        counts = total is not None and (slices is None or slices.rank == 0)
        part = slice(None) if counts else slice(0, 0)
        known = Scores(*(one[part] for one in history.scores()))
        summed = loss if total is None else total
        found = self._losses.statistics(everything.at(part), summed, known, load)
        return loss, scores.logprobs, found

    def _merges(self, batch: PackedBatch | None) -> bool:
        """Return whether the pass over `batch` begins with merging scores of the ranks that divide
        it."""
        history = None if batch is None else batch.history
        return self._losses.couples_tokens and history is not None and history.slopes is None

    def _expert_load(self, batch: PackedBatch, weights: torch.Tensor) -> ExpertLoad | None:
        """Measure a pass of a mixture over tokens with these weights; None for dense
        models."""
        if self._model.routers is None:
            return None
        shape, coefficient = self._model.routers.shape, self._job.algorithm.router_aux_loss
        scaled = coefficient * weights if coefficient else None
        return ExpertLoad(
            shape.layers, shape.experts, batch.positions, batch.spans, scaled, batch.routes
        )

    def _teaching(
        self,
        model: _ThreadModel,
        teacher: str,
        weights: torch.Tensor,
        temperatures: torch.Tensor,
    ) -> Teaching | None:
        """Return a teacher's part in a pass over tokens with these weights; None without a
        teacher."""
        distillation = self._job.algorithm.distillation
        if not teacher or distillation is None:
            return None
        scaled = distillation.coefficient * weights
        return Teaching(model.teachers[teacher], scaled, temperatures, self._ranks.size > 1)

    def _empty_pass(
        self, teacher: str, instead: PackedBatch | None, merges: bool, seeing: bool
    ) -> None:
        """Take part in a pass of other ranks: without rows, if they have one more batch, or instead
        of a batch that this rank gave up. `merges`: that pass began with merging scores; `seeing`:
        as for `one_token`."""
        batch = one_token(self._model.device, instead, seeing=seeing)
        temperatures = torch.ones((1, 1), dtype=self._model.dtype, device=self._model.device)
        if self._penalised and self._own_model.reference is not None:
            with self._autocast():
                self._own_model.reference.scores(batch, temperatures)
        if merges and instead is not None and instead.history is not None:
            instead.history.merge(self._ranks.summed_over_slices)
        with self._autocast():
            loss, _ = self._forward.loss(
                batch,
                temperatures,
                lambda logprobs, _, __: logprobs.sum() * 0.0,
                teaching=self._teaching(
                    self._own_model, teacher, temperatures[:, 0] * 0.0, temperatures
                ),
            )
        torch.autograd.backward(loss)

    def log_ratios(self, rows: Sequence[Row], stop: threading.Event | None) -> torch.Tensor:
        """log(pi/pi_ref) of each row's response, summed over its tokens; float64 [n], on the CPU.

        Without gradients. In a gang every rank gets all rows, computes its share and has the result
        of all. Raises `Stopped`.
        """
        reference = self._own_model.reference
        assert reference is not None, "the job needs a reference"
        mine = self._ranks.share(rows)
        own = [rows[i] for i in mine]
        owners = torch.repeat_interleave(
            torch.tensor(mine, dtype=torch.int64),
            torch.tensor(response_lengths(own), dtype=torch.int64),
        )

        def gaps(batch: PackedBatch) -> torch.Tensor:
            here = batch.to(self._model.device)
            shape = (len(here.targets), 1)
            temperatures = torch.ones(shape, dtype=self._model.dtype, device=self._model.device)
            with self._autocast():
                scores, theirs = (
                    one.scores(here, temperatures).logprobs for one in (self._forward, reference)
                )
            return (scores - theirs).to("cpu", torch.float64)

        def elsewhere(batch: PackedBatch | None, seeing: bool) -> torch.Tensor:
            return gaps(one_token(self._model.device, batch, seeing=seeing))

        def compute() -> torch.Tensor:
            found = torch.zeros(len(rows), dtype=torch.float64)
            batches = self._ranks.batches(self._plan(own, gradients=False), stop)
            for batch in batches:
                smallest = functools.partial(elsewhere, batch, batches.seeing)
                one = smallest if batch is None else functools.partial(gaps, batch)
                result = batches.run(one, smallest)
                if batch is not None and result is not None:
                    found.index_add_(0, owners[batch.order], result)
            return found

        return self._ranks.summed(self.budget.fitting(compute, own))

    def logprobs(
        self, rows: Sequence[Row], stop: threading.Event | None, *, reference: bool = False
    ) -> torch.Tensor:
        """Return the log-probs of all response tokens under the current or the `reference` weights,
        [T] on the CPU.

        Without gradients. In a gang every rank gets all rows, computes its share and has the result
        of all. Raises `Stopped`.
        """
        compute = functools.partial(self._logprobs, rows, stop, reference)
        return self.budget.fitting(compute, rows)

    def _logprobs(
        self, rows: Sequence[Row], stop: threading.Event | None, reference: bool
    ) -> torch.Tensor:
        forward = self._own_model.reference if reference else self._forward
        assert forward is not None, "the job needs a reference"
        device, dtype = self._model.device, self._model.dtype
        mine = self._ranks.share(rows)
        own = [rows[i] for i in mine]
        starts = np.cumsum([0, *response_lengths(rows)])
        places = [np.arange(starts[i], starts[i + 1]) for i in mine] or [np.arange(0)]
        order = torch.from_numpy(np.concatenate(places))
        by_row = torch.tensor([row.temperature for row in own], dtype=dtype)
        sizes = torch.tensor(response_lengths(own), dtype=torch.int64)
        temperatures = torch.repeat_interleave(by_row, sizes)[:, None].to(device)

        def scores(batch: PackedBatch) -> torch.Tensor:
            here = batch.to(device)
            with self._autocast():
                found = forward.scores(here, temperatures[here.order])
            return found.logprobs.to("cpu", dtype)

        def elsewhere(batch: PackedBatch | None, seeing: bool) -> None:
            with self._autocast():
                one = torch.ones((1, 1), dtype=dtype, device=device)
                forward.scores(one_token(device, batch, seeing=seeing), one)

        found = torch.zeros(int(starts[-1]), dtype=dtype)
        batches = self._ranks.batches(self._plan(own, gradients=False), stop)
        for batch in batches:
            smallest = functools.partial(elsewhere, batch, batches.seeing)
            if batch is None:
                batches.run(smallest, smallest)
                continue
            result = batches.run(functools.partial(scores, batch), smallest)
            if result is not None:
                found[order[batch.order]] = result
        return self._ranks.summed(found) if self._ranks.size > 1 else found

    def rank_batches(
        self, rows: Sequence[Row], stop: threading.Event | None, gradients: bool
    ) -> RankBatches:
        """Return batches of rows that this rank computes, with gradients or without; None while
        others have more."""
        return self._ranks.batches(self._plan(rows, gradients=gradients), stop)

    def _reference_logprobs(
        self, model: _ThreadModel, batch: PackedBatch, own: TokenColumns
    ) -> torch.Tensor | None:
        if not self._penalised or model.reference is None:
            return own.reference
        if own.reference is not None and self._ranks.size == 1:
            return own.reference
        with self._autocast():
            found = model.reference.scores(batch, own.temperatures).logprobs
        # Another rank may have rows without these log-probs, and needs this pass.
        return found if own.reference is None else own.reference

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._policy.language_model.weight_dtype == "bfloat16":
            return torch.autocast(self._model.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()
