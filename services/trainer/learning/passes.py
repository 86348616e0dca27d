"""Forward and backward passes over rows: gradients of a summed loss, and its statistics."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from services.trainer.learning.attention import PACKED, packed_attention
from services.trainer.learning.cpu_kernels import layers_of, use_kernels
from services.trainer.learning.cpu_threads import CpuThreads, dealt, pays
from services.trainer.learning.forward import Forward, TrainedModel, costs_of
from services.trainer.learning.packing import PackedBatch, plan
from services.trainer.learning.ranks import RankGroup, RankPieces, Stopped
from services.trainer.learning.samples import Row, response_lengths
from troupe.algorithms import TokenStatistics, grpo_loss_sum, token_weights
from troupe.algorithms.losses import Normalize
from troupe.job import JobSpec, TrainerSpec
from troupe.rpc import FailedPrecondition


@dataclass(frozen=True)
class TokenColumns:
    """The T response tokens of a micro-batch, row after row; all on one device."""

    # [T] log-probs under the engine that drew them.
    behaviour: torch.Tensor
    # [T] advantage of each; without a critic that of the sample that it is of.
    advantages: torch.Tensor
    # [T] weight in the loss, before the division by N.
    weights: torch.Tensor
    # [T, 1] what the logits were divided by in the draw.
    temperatures: torch.Tensor
    # int64 [T] which row each is of.
    sequences: torch.Tensor
    # [T] log-probs under the first version, where the samples bring them.
    reference: torch.Tensor | None = None
    # [T] log-probs under the weights that the step began with, where they were recomputed.
    old: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        rows: Sequence[Row],
        advantages: torch.Tensor,
        normalize: Normalize,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> TokenColumns:
        """The columns of `rows`, computed in `dtype`.

        `advantages`: float64 [n], of rows that have none for each token.
        """
        lengths = response_lengths(rows)
        sizes = torch.tensor(lengths)
        heat = torch.tensor([row.temperature for row in rows], dtype=torch.float64)
        known = [row.reference for row in rows if row.reference is not None]
        columns = {
            "behaviour": torch.from_numpy(np.concatenate([row.behaviour for row in rows])),
            "advantages": torch.repeat_interleave(advantages, sizes),
            "weights": token_weights(lengths, normalize),
            "temperatures": torch.repeat_interleave(heat, sizes)[:, None],
        }
        if len(known) == len(rows):
            columns["reference"] = torch.from_numpy(np.concatenate(known))
        credits = [row.advantages for row in rows if row.advantages is not None]
        if len(credits) == len(rows):
            columns["advantages"] = torch.from_numpy(np.concatenate(credits))
        old = [row.old for row in rows if row.old is not None]
        if len(old) == len(rows):
            columns["old"] = torch.from_numpy(np.concatenate(old))
        return cls(
            sequences=torch.repeat_interleave(torch.arange(len(rows)), sizes).to(device),
            **{name: column.to(device, dtype) for name, column in columns.items()},
        )

    def with_reference(self, reference: torch.Tensor | None) -> TokenColumns:
        """The same with these log-probs [T] under the first version."""
        return replace(self, reference=reference)

    def at(self, order: torch.Tensor | slice) -> TokenColumns:
        """Those of the tokens that `order` (int64 [N], or a slice) names."""
        reference = None if self.reference is None else self.reference[order]
        old = None if self.old is None else self.old[order]
        return TokenColumns(
            self.behaviour[order],
            self.advantages[order],
            self.weights[order],
            self.temperatures[order],
            self.sequences[order],
            reference,
            old,
        )


_ARRANGED = "_troupe_arranged"


def arrange(policy: str, model: Any, spec: TrainerSpec) -> None:
    """Have the layers of `model` compute as `spec` says; once for a model.

    Raises FailedPrecondition of kind "model_unsupported" or "no_compiler", naming the field.
    """
    if getattr(model, _ARRANGED, False):
        return
    field = f"policies.{policy}.trainer"
    choose_kernels(model, spec)
    if spec.compile == "on":
        _check_compiler(next(model.parameters()).device, f"{field}.compile")
        # Attention has kernels of its own; what rows it is given would be compiled in.
        eager = torch.compiler.disable(packed_attention)  # type: ignore[no-untyped-call]
        AttentionInterface.register(PACKED, eager)
        for layer in _layers(model, f"{field}.compile"):
            layer.forward = _Fused(layer.forward)
    if spec.activation_checkpointing:
        for layer in _layers(model, f"{field}.activation_checkpointing"):
            _compute_again(layer)
    setattr(model, _ARRANGED, True)


def choose_kernels(model: Any, spec: TrainerSpec) -> None:
    """What of an arranged model concerns one that is never differentiated too: both shall round
    alike."""
    if spec.kernels == "auto" and spec.compile != "on":  # a compiler fuses by itself
        use_kernels(model)


class _Fused:
    """A compiled `forward`; that of a copy of its layer is compiled for the copy.

    `Module.compile` would compile nothing where `forward` is computed again: it gives up at the
    first frame of torch's own.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        # Packed pieces are of all sizes: no kernel for each.
        self._compiled = torch.compile(forward, dynamic=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Fused:
        return _Fused(copy.deepcopy(self._forward, memo))


def _compute_again(layer: torch.nn.Module) -> None:
    # Ours instead of transformers' own switch, which works in training mode only, with dropout.
    # Around `forward`, so that hooks of wrappers (FSDP) stay outside.
    inner = layer.forward
    layer.forward = functools.partial(checkpoint, inner, use_reentrant=False)


def _layers(model: Any, field: str) -> list[torch.nn.Module]:
    found = layers_of(model)
    if not found:
        raise FailedPrecondition(
            f"{type(model).__name__} does not say what its layers are",
            kind="model_unsupported",
            field=field,
            remedy="Leave it at its default, or use an architecture whose layers transformers can "
            "checkpoint.",
        )
    return found


def _check_compiler(device: torch.device, field: str) -> None:
    problem = ""
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            problem = str(error).strip() or "there is no C++ compiler"
    else:
        from torch.utils._triton import has_triton

        problem = "" if has_triton() else "triton is not installed"
    if problem:
        raise FailedPrecondition(
            f"torch.compile cannot work on this worker: {problem}",
            kind="no_compiler",
            field=field,
            value="on",
            remedy="Use `auto` or `off`, or install a C++ compiler (CPU) or triton (GPU) there.",
        )


# Tokens of a forward pass: on a CPU what stays in its caches, on a GPU what fills it.
_FORWARD_TOKENS = {"cpu": 1024, "cuda": 16384}
# Losses and corrections that couple the tokens of a sample.
_BY_SEQUENCE = {"gspo", "sequence_masked"}
# Logits of one forward pass, in bytes of float32, where they are made all at once.
_LOGITS_BYTES = 256 << 20


@dataclass(frozen=True)
class _Seat:
    """What one thread computes with."""

    forward: Forward
    # Of the first version, where the loss contains a divergence from it.
    reference: Forward | None
    # The policy's parameters, and those of a twin that stand for them: same values, own gradients.
    pairs: tuple[tuple[torch.nn.Parameter, torch.nn.Parameter], ...] = ()

    def twin(self) -> _Seat:
        """Another over the same weights."""
        forward = self.forward.twin()
        named = zip(self.forward.model.parameters(), forward.model.parameters(), strict=True)
        return _Seat(forward, self.reference and self.reference.twin(), tuple(named))

    def take(self) -> None:
        """Begin: the policy may have left its memory for another since."""
        for parameter, own in self.pairs:
            own.data, own.grad = parameter.data, None

    def give(self) -> None:
        """Add the gradients to the policy's."""
        for parameter, own in self.pairs:
            if own.grad is not None:
                before, own.grad = own.grad, None
                parameter.grad = before if parameter.grad is None else parameter.grad.add_(before)

    def leave(self) -> None:
        """End, whatever happened: the memory is the policy's to give up."""
        for _, own in self.pairs:
            own.data, own.grad = own.data.new_empty(0), None


@dataclass
class _Share:
    """What one member of a crew has to tell of its rows, piece after piece."""

    told: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""


class Passes:
    """How rows go through the model of one policy, in pieces that fit its device."""

    def __init__(
        self,
        model: TrainedModel,
        spec: JobSpec,
        policy: str,
        *,
        forward_tokens: int = 0,
        share_prefixes: bool = True,
        peers: RankGroup | None = None,
    ) -> None:
        self._model = model
        self._peers = peers or RankGroup()
        self._job = spec
        self._policy = spec.policies[policy]
        arrange(policy, model.module, self._policy.trainer)
        self._reference: Forward | None = None
        wanted = self._policy.trainer.forward_tokens or forward_tokens
        self._budget = wanted or _FORWARD_TOKENS.get(model.device.type, 4096)
        self._shares = share_prefixes

    @functools.cached_property
    def _forward(self) -> Forward:
        # Not before it is needed: a frozen policy and a stand-in never are.
        return Forward(self._model.module)

    @functools.cached_property
    def _seat(self) -> _Seat:
        return _Seat(self._forward, self._reference)

    @functools.cached_property
    def _crew(self) -> CpuThreads | None:
        """Who computes rows side by side; None where one pass follows the other."""
        # Sums that depend on nothing else than their rows are laid out by group (units.py).
        alone = self._peers.size == 1 and not self._job.pipeline.deterministic
        compiled = self._policy.trainer.compile == "on"  # kernels of a module are its own
        lora = self._policy.lora
        # All threads draw from one generator: in no order, and not the same again when activations
        # are computed again.
        draws = lora is not None and lora.dropout > 0
        threads = torch.get_num_threads()
        fits = alone and not compiled and not draws
        return CpuThreads(threads) if fits and pays(self._model.parameters, threads) else None

    @functools.cached_property
    def _seats(self) -> list[_Seat]:
        """One for each of the crew."""
        assert self._crew is not None
        return [self._seat, *(self._seat.twin() for _ in range(self._crew.size - 1))]

    @functools.cached_property
    def _layout(self) -> dict[str, Any]:
        """How pieces are planned."""
        abilities = self._forward.abilities
        layout: dict[str, Any] = {"packed": abilities.packs}
        if self._shares and abilities.packs:
            layout["sharing"] = costs_of(self._model.module)
        if not abilities.linear_head:
            layout["limit"] = max(1, _LOGITS_BYTES // (4 * self._model.vocabulary))
        return layout

    def set_reference(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Keep a frozen copy of the model with these weights for the divergence."""
        frozen = self._model.frozen_copy(weights)
        choose_kernels(frozen, self._policy.trainer)
        self._reference = Forward(frozen, self._forward.abilities)
        for made in ("_seat", "_seats"):
            self.__dict__.pop(made, None)

    def backward(
        self,
        rows: list[Row],
        advantages: torch.Tensor,
        statistics: TokenStatistics,
        stop: threading.Event | None,
    ) -> str:
        """Add the gradient of these rows' summed loss; why not, if it is not finite.

        `advantages`: float64 [n]. Raises `Stopped` between pieces. In a gang every rank is given
        all rows and computes its share of them.
        """
        mine = self._peers.share(rows)
        rows, advantages = [rows[i] for i in mine], advantages[mine]
        if rows and self._crew is not None:
            return self._side_by_side(self._crew, rows, advantages, statistics, stop)
        columns = self._columns(rows, advantages) if rows else None
        turns = self._peers.turns(plan(rows, self._budget, **self._layout), stop)
        for piece in turns:
            if piece is None or columns is None:
                self._take_part()
                continue
            loss, told = self._loss(self._seat, piece, columns)
            turns.problem = _not_finite(loss)
            # The gradients of a broken step are thrown away, but other ranks wait for this pass.
            torch.autograd.backward(loss)
            statistics.add(**told)
        return turns.problem

    def _side_by_side(
        self,
        crew: CpuThreads,
        rows: list[Row],
        advantages: torch.Tensor,
        statistics: TokenStatistics,
        stop: threading.Event | None,
    ) -> str:
        """As `backward`: every member computes rows of its own. The order of sums is fixed."""
        calls = [
            functools.partial(self._share, seat, [rows[i] for i in hand], advantages[hand], stop)
            for seat, hand in zip(self._seats, dealt(rows, crew.size), strict=False)
        ]
        try:
            shares = crew.run(calls)
            for seat, share in zip(self._seats, shares, strict=False):
                seat.give()
                for told in share.told:
                    statistics.add(**told)
        finally:
            for seat in self._seats:
                seat.leave()
        return next((share.problem for share in shares if share.problem), "")

    def _share(
        self, seat: _Seat, rows: list[Row], advantages: torch.Tensor, stop: threading.Event | None
    ) -> _Share:
        """What one member computes."""
        share = _Share()
        columns = self._columns(rows, advantages)
        seat.take()
        for piece in RankPieces(plan(rows, self._budget, **self._layout), stop):
            assert piece is not None  # a learner alone
            loss, told = self._loss(seat, piece, columns)
            share.told.append(told)
            share.problem = _not_finite(loss)
            if share.problem:
                break
            torch.autograd.backward(loss)
        return share

    def _columns(self, rows: list[Row], advantages: torch.Tensor) -> TokenColumns:
        device, dtype = self._model.device, self._model.dtype
        return TokenColumns.of(
            rows, advantages, self._job.algorithm.normalize, device=device, dtype=dtype
        )

    def _loss(
        self, seat: _Seat, piece: PackedBatch, columns: TokenColumns
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """The summed loss of a piece, differentiable, and what `TokenStatistics` hears of it."""
        algorithm = self._job.algorithm
        how: dict[str, Any] = {
            "clip_low": algorithm.clip_low,
            "clip_high": algorithm.clip_high,
            "loss": algorithm.loss,
            "correction": self._job.correction,
            "correction_cap": algorithm.correction_cap,
        }
        recomputed = algorithm.old_logprobs == "recomputed"
        whole = not _BY_SEQUENCE.isdisjoint((algorithm.loss, self._job.correction))
        here = piece.to(self._model.device)
        own = columns.at(here.order)
        own = own.with_reference(self._reference_logprobs(seat, here, own))

        def loss_of(logprobs: torch.Tensor, entropy: torch.Tensor, part: slice) -> torch.Tensor:
            some = own.at(part)
            # Before the first update they are what was just computed.
            old = logprobs.detach() if some.old is None else some.old
            return grpo_loss_sum(
                logprobs,
                some.behaviour,
                some.advantages,
                some.weights,
                sequences=some.sequences,
                old_logprobs=old if recomputed else None,
                reference_logprobs=some.reference,
                kl_coefficient=algorithm.kl_coefficient,
                entropy=entropy,
                entropy_coefficient=algorithm.entropy_coefficient,
                **how,
            )

        with self._autocast():
            loss, scores = seat.forward.loss(here, own.temperatures, loss_of, whole=whole)
        old = scores.logprobs if own.old is None else own.old
        return loss, {
            "loss_sum": loss.detach(),
            "logprobs": scores.logprobs,
            "behaviour_logprobs": own.behaviour,
            "advantages": own.advantages,
            "entropy": scores.entropy,
            "sequences": own.sequences,
            "old_logprobs": old if recomputed else None,
            "reference_logprobs": own.reference,
            **how,
        }

    def _take_part(self) -> None:
        """A pass of which nothing is kept, for ranks that have one piece more than this one."""
        ids = torch.zeros((1, 1), dtype=torch.int64, device=self._model.device)
        nothing = torch.zeros(1, dtype=torch.int64, device=self._model.device)
        piece = PackedBatch(ids, nothing, nothing, nothing, spans=(1,))
        heat = torch.ones((1, 1), dtype=self._model.dtype, device=self._model.device)
        if self._seat.reference is not None:
            with self._autocast():
                self._seat.reference.scores(piece, heat)
        with self._autocast():
            loss, _ = self._forward.loss(piece, heat, lambda logprobs, _, __: logprobs.sum() * 0.0)
        torch.autograd.backward(loss)

    def logprobs(self, rows: Sequence[Row], stop: threading.Event | None) -> torch.Tensor:
        """Of every response token under the present weights, [T]. Raises `Stopped`."""
        device, dtype = self._model.device, self._model.dtype
        heat = torch.tensor([row.temperature for row in rows], dtype=dtype)
        sizes = torch.tensor([row.response_length for row in rows])
        temperatures = torch.repeat_interleave(heat, sizes)[:, None].to(device)
        found = torch.empty(len(temperatures), dtype=dtype, device=device)
        for here in self.pieces(rows, stop):
            with self._autocast():
                scores = self._forward.scores(here, temperatures[here.order])
            found[here.order] = scores.logprobs.to(dtype)
        return found

    def pieces(self, rows: Sequence[Row], stop: threading.Event | None) -> Iterator[PackedBatch]:
        """Forward passes that score every response token once. Raises `Stopped` between them."""
        for piece in plan(rows, self._budget, **self._layout):
            if stop is not None and stop.is_set():
                raise Stopped
            yield piece.to(self._model.device)

    def _reference_logprobs(
        self, seat: _Seat, piece: PackedBatch, own: TokenColumns
    ) -> torch.Tensor | None:
        if seat.reference is None or (own.reference is not None and self._peers.size == 1):
            return own.reference
        with self._autocast():
            found = seat.reference.scores(piece, own.temperatures).logprobs
        # Another rank's rows may bring none, and wait for this pass.
        return found if own.reference is None else own.reference

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._policy.language_model.dtype == "bfloat16":
            return torch.autocast(self._model.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()


def _not_finite(loss: torch.Tensor) -> str:
    return "" if torch.isfinite(loss) else f"the loss of a micro-batch is {loss.item()}"
