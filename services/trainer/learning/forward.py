"""Forward passes of any Hugging Face causal LM that score response tokens only.

`TrainedModel` is a model with its trained weights and their published form; `Forward` computes the
loss and log-probs of packed batches; `capabilities_of` tests which optimizations a model supports.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from services.trainer.learning.cpu_threads import twin
from services.trainer.learning.frozen_base import AdaptedBase
from services.trainer.learning.kernels.half import HalfWeights
from services.trainer.learning.lora import adapter_of
from services.trainer.learning.samples import Row
from services.trainer.learning.sequences.attention import PACKED
from services.trainer.learning.sequences.packing import PackedBatch, PassCosts, plan
from troupe.algorithms.expert_load import ExpertLoad
from troupe.algorithms.linear_loss import (
    Head,
    LossOf,
    Scores,
    Teacher,
    linear_loss,
    linear_scores,
)
from troupe.algorithms.logprobs import selective_log_softmax
from troupe.checkpoints.adapters import Tensors, adapted, distinct_tensors
from troupe.checkpoints.format import CheckpointFormat, is_transformers
from troupe.checkpoints.proof import Proof, Proven, Prover
from troupe.checkpoints.tensors import TensorsDoNotFit, shape_difference
from troupe.mixtures import Routers, RoutingShape
from troupe.rpc import FailedPrecondition

# Tolerance for equal log-probs in single precision.
_PROBE_TOLERANCE = 1e-3
# In half precision, rounding is not small compared with the effect of wrong attention in a model
# whose log-probs are all similar: on average, packing may change them by a quarter of the change
# from reading other rows.
_PROBE_SHARE = 0.25
# Tokens of a probe's piece (packing.py), and of its row for which attention has another kernel on a
# CPU than for short ones.
_PROBE_CUT = 48
_PROBE_LONG = 170
_PROBE_ERRORS = (RuntimeError, ValueError, TypeError, KeyError, AttributeError)


class TrainedModel:
    """A Hugging Face causal LM with its trained weights: all of them, or an adapter (lora.py)."""

    def __init__(self, module: Any, device: torch.device, published_type: torch.dtype) -> None:
        """Move `module` to `device`; it trains in the type of its parameters.

        `published_type`: the dtype of floating-point tensors that engines load.
        """
        self.device = device
        self.module = module.to(device)
        self._adapter = adapter_of(module)
        # The trained parameters by the names of `weights`.
        self.named: dict[str, torch.nn.Parameter] = (
            self._adapter.named if self._adapter else dict(self.module.named_parameters())
        )
        self.parameters = list(self.named.values())
        self.dtype = self.parameters[0].dtype
        self.vocabulary = int(module.get_input_embeddings().weight.shape[0])
        self.payload_kinds = payload_kinds_of(module)
        # Distinct parameters, frozen ones included.
        self.num_parameters: int = sum(p.numel() for p in self.module.parameters())
        # The frozen weights under an adapter; None where all weights are trained.
        self.base: AdaptedBase | None = self._adapter.base if self._adapter else None
        self._published_type = published_type

    def frozen_copy(self, weights: Mapping[str, torch.Tensor]) -> Any:
        """Return a second module with these weights, without gradients; it shares an adapter's
        base."""
        if self._adapter is not None:
            return self._adapter.frozen(weights)
        module = copy.deepcopy(self.module).requires_grad_(False)
        _copy_into(module, weights)
        return module

    @functools.cached_property
    def routers(self) -> Routers | None:
        """The routers of a mixture of experts; None for dense models."""
        return Routers.of(self.module)

    @functools.cached_property
    def format(self) -> CheckpointFormat:
        """Names and shapes of the model's tensors in a checkpoint, in the published type."""
        return CheckpointFormat(self.module, self._published_type)

    def proof(self, passage: Sequence[int], what: Proven) -> Proof | None:
        """Return the proof of the published weights, or of the base under an adapter, computed on
        the device; see `PolicyLearner.proof`."""
        if not is_transformers(self.module):
            return None
        if self._adapter is None:
            tensors = self.format.rounded(self.weights(), self._whole)
            return self._prover.prove(tensors, passage)
        base = self._adapter.base.rounded()
        if what == "base":
            return self._prover.prove(base, passage, what=what)
        content = self._adapter.content(self._published_type)
        whole = {name: self._whole(tensor) for name, tensor in content.tensors.items()}
        content = replace(content, tensors=whole)
        served = adapted(base, content, exact=False)
        return self._prover.prove(adapted(base, content), passage, served=served)

    def proof_of(
        self, published: Mapping[str, torch.Tensor], passage: Sequence[int]
    ) -> Proof | None:
        """Return the proof of published tensors of the whole model, computed on the device."""
        if not is_transformers(self.module):
            return None
        return self._prover.prove(self._prover.reference.arranged(published), passage)

    @functools.cached_property
    def _prover(self) -> Prover:
        return Prover(self.module.config, self.device)

    @staticmethod
    def _whole(tensor: torch.Tensor) -> torch.Tensor:
        """Return the full tensor of one of the model's."""
        return tensor

    def published(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors that engines load, in the published type: parameters and persistent
        buffers in checkpoint format, or an adapter (`AdapterContent`).

        A model's tensors are converted when they are read: copy them before the next step.
        """
        if self._adapter is not None:
            return self._adapter.content(self._published_type).to_tensors()
        return self.format.of(self.weights())

    def weights(self) -> Tensors:
        """Trained weights and persistent buffers in full precision; not copies."""
        if self._adapter is not None:
            return self._adapter.weights()
        return distinct_tensors(self.module)

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy `weights` into the model. Raises ValueError when they are another model's."""
        if self._adapter is not None:
            self._adapter.load(weights)
        else:
            _copy_into(self.module, weights)


def _copy_into(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    own = model.state_dict()
    named = {name for name, _ in model.named_parameters()}
    # Buffers, and further names of a tied tensor, may be missing.
    expected = {n: tensor.shape for n, tensor in own.items() if n in named or n in weights}
    if wrong := shape_difference({n: t.shape for n, t in weights.items()}, expected):
        raise TensorsDoNotFit(f"the weights are not the model's: {wrong}")
    model.load_state_dict(dict(weights), strict=False)


@dataclass(frozen=True)
class Capabilities:
    """The capabilities of a model's forward pass, as tested by `capabilities_of`."""

    # Whether rows may be packed into one sequence (packing.py).
    packs: bool
    # Whether a linear output layer makes its logits (linear_loss.py).
    linear_head: bool
    # Why rows may not be packed; empty if they may.
    unpacked: str = field(default="", compare=False)


class Forward:
    """The computation of losses and scores of packed batches with one model.

    Hidden states are narrowed to scored tokens just before the output layer, so that it never sees
    prompt tokens or padding. All passes go through the model's own forward, and the loss is its
    output, as wrappers (FSDP, PEFT) expect.
    """

    def __init__(
        self,
        model: Any,
        capabilities: Capabilities | None = None,
        *,
        routers: Routers | None = None,
        half: bool = False,
        copies: HalfWeights | None = None,
    ) -> None:
        """Wrap `model`. `capabilities`: of a model of the same kind; default: test them, in
        bfloat16 if passes are made under autocast to it (`half`). `routers`: routers of a mixture,
        which replay the routes of a batch. `copies`: of the model's weights, if it has any.
        """
        self.model = model
        self.routers = routers
        self._copies = copies
        self.capabilities = capabilities or capabilities_of(model, half=half)
        if self.capabilities.packs:
            model.config._attn_implementation = PACKED

    def twin(self) -> Forward:
        """Return a `Forward` over the same weights, for another thread."""
        model = twin(self.model)
        return Forward(model, self.capabilities, routers=self.routers and Routers.of(model))

    def loss(
        self,
        batch: PackedBatch,
        temperatures: torch.Tensor,
        loss_of: LossOf,
        *,
        whole: bool = False,
        teaching: Teaching | None = None,
        load: ExpertLoad | None = None,
    ) -> tuple[torch.Tensor, Scores]:
        """Return the sum of `loss_of` over the batch's N tokens, differentiable, and their scores.

        `temperatures`: [N, 1]. `whole`: `loss_of` needs all tokens of a row at once. `teaching`:
        adds the weighed divergence from a teacher to the loss. `load`: measures the experts of a
        mixture; its `balance` is added to the loss.
        """
        if not self.capabilities.linear_head or (teaching and not teaching.linear_head):
            with self._routing(batch, load):
                logits = response_logits(self.model, batch) / temperatures
            logprobs, entropy = selective_log_softmax(logits, batch.targets)
            loss = _balanced(loss_of(logprobs, entropy, slice(0, len(batch.targets))), load)
            divergence = None if teaching is None else teaching.divergence(batch, logits)
            if divergence is not None and teaching is not None:
                loss = loss + (teaching.weights * divergence).sum()
                divergence = divergence.detach()
            return loss, Scores(logprobs.detach(), entropy.detach(), divergence)
        found: list[Scores] = []
        teacher = None if teaching is None else teaching.teacher(batch)

        def head(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
            spans = batch.spans if whole else None
            own = self._head(layer)
            loss, scores = linear_loss(
                hidden, own, batch.targets, temperatures, loss_of, spans=spans, teacher=teacher
            )
            found.append(scores)
            return _balanced(loss, load)

        with self._routing(batch, load):
            output = _with_head(self.model, batch, head)
        return output.reshape(()), found[0]

    @torch.no_grad()
    def scores(self, batch: PackedBatch, temperatures: torch.Tensor) -> Scores:
        """Return the log-probs and entropies of the batch's N tokens, without gradients."""
        if not self.capabilities.linear_head:
            with self._routing(batch):
                logits = response_logits(self.model, batch) / temperatures
            return Scores(*selective_log_softmax(logits, batch.targets))
        found: list[Scores] = []

        def head(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
            own = self._head(layer)
            found.append(linear_scores(hidden, own, batch.targets, temperatures))
            return hidden.new_zeros(())

        with self._routing(batch):
            _with_head(self.model, batch, head)
        return found[0]

    @torch.no_grad()
    def keep(self, batch: PackedBatch) -> None:
        """Run a piece only for the keys and values that it leaves in its history."""
        with self._routing(batch):
            if self.capabilities.linear_head:
                _with_head(self.model, batch, lambda _, hidden: hidden.new_zeros(()))
            else:
                response_logits(self.model, batch)

    def _head(self, layer: Any) -> Head:
        half = None if self._copies is None else self._copies.of(layer.weight)
        return Head(layer.weight, layer.bias, half)

    def _routing(
        self, batch: PackedBatch, load: ExpertLoad | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Return a pass over `batch` with the routes that its rows bring, measured by `load`."""
        if self.routers is None:
            return contextlib.nullcontext()
        return self.routers.passing(load, batch.routes)


def payload_kinds_of(model: Any) -> Collection[str]:
    """Return the kinds of payloads that the model's forward pass takes as `payloads`."""
    kinds: Collection[str] = getattr(model, "payload_kinds", ())
    return kinds


def _balanced(loss: torch.Tensor, load: ExpertLoad | None) -> torch.Tensor:
    """Return the loss with the weighed imbalance of experts; all layers have been computed."""
    balance = None if load is None else load.balance
    return loss if balance is None else loss + balance


@dataclass(frozen=True)
class Teaching:
    """A frozen teacher's part in a pass: sum_t w_t KL(student_t || teacher_t)."""

    forward: Forward
    # [N], [N, 1]
    weights: torch.Tensor
    temperatures: torch.Tensor
    # Whether its weights are in memory during its own passes only (FSDP).
    sharded: bool = False

    @property
    def linear_head(self) -> bool:
        """Whether a linear output layer makes its logits."""
        return self.forward.capabilities.linear_head

    @torch.no_grad()
    def teacher(self, batch: PackedBatch) -> Teacher:
        """Return hidden states and output layer of the model, for `linear_loss`."""
        found: list[Teacher] = []

        def head(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
            weight, bias = layer.weight.detach(), layer.bias
            if self.sharded:
                weight, bias = weight.clone(), None if bias is None else bias.detach().clone()
            found.append(Teacher(hidden, Head(weight, bias), self.weights))
            return hidden.new_zeros(())

        _with_head(self.forward.model, batch, head)
        return found[0]

    def divergence(self, batch: PackedBatch, logits: torch.Tensor) -> torch.Tensor:
        """Return KL(student || teacher) [N], differentiable in the student's `logits` [N, V] over
        its temperatures."""
        with torch.no_grad():
            theirs = response_logits(self.forward.model, batch) / self.temperatures
            others = torch.log_softmax(theirs[:, : logits.shape[1]].to(logits.dtype), -1)
        logp = torch.log_softmax(logits, -1)
        return (logp.exp() * (logp - others)).sum(-1)


def response_logits(model: Any, batch: PackedBatch) -> torch.Tensor:
    """Return logits [N, V] of the batch's scored tokens."""

    def narrow(_module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, *rest = inputs
        return (_narrow(hidden, batch).unsqueeze(0), *rest)

    with _hooked(_head_of(model).register_forward_pre_hook(narrow)):
        return _call(model, batch).squeeze(0)


def _with_head(
    model: Any, batch: PackedBatch, compute: Callable[[Any, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return the model's output with `compute` in place of its output layer.

    `compute` is given the layer and the hidden states [N, d], and returns a scalar. It runs in a
    hook before the layer: there wrappers (FSDP) have gathered the layer's weights.
    """
    head, made = _head_of(model), []

    def before(layer: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, *rest = inputs
        made.append(compute(layer, _narrow(hidden, batch)))
        return (hidden[:, :0], *rest)  # no tokens, so that the layer itself computes nothing

    def after(_layer: Any, _inputs: Any, _output: Any) -> torch.Tensor:
        return made[0].reshape(1, 1, 1)

    with _hooked(head.register_forward_pre_hook(before), head.register_forward_hook(after)):
        return _call(model, batch)


def _narrow(hidden: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Return the hidden states [N, d] from which the scored tokens are predicted."""
    return hidden.reshape(-1, hidden.shape[-1]).index_select(0, batch.positions)


def _call(model: Any, batch: PackedBatch) -> torch.Tensor:
    own: dict[str, Any] = {} if batch.packing is None else {"packing": batch.packing}
    if batch.payloads is not None:
        own["payloads"] = batch.payloads
    output = model(
        input_ids=batch.input_ids,
        attention_mask=None,
        position_ids=batch.position_ids,
        use_cache=False,
        **own,
    )
    logits: torch.Tensor = output.logits
    return logits


@contextlib.contextmanager
def _hooked(*handles: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _head_of(model: Any) -> Any:
    head = model.get_output_embeddings()
    if head is None:
        raise FailedPrecondition(
            f"{type(model).__name__} has no output embeddings",
            kind="model_unsupported",
            remedy="Use a causal language model.",
        )
    return head


def costs_of(model: Any) -> PassCosts:
    """Return the cost model of `model`: FLOPs per token and per pair of tokens."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    body = sum(p.numel() for p in model.parameters()) - head.weight.numel()
    heads = getattr(config, "num_attention_heads", 1)
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    # Weighted up: attention over short sequences runs at a fraction of the projections' speed.
    return PassCosts(token=2.0 * max(body, 1), pair=3 * 4.0 * width * config.num_hidden_layers)


def capabilities_of(model: Any, *, half: bool = False) -> Capabilities:
    """Test the capabilities of `model` by forward passes over a few rows, as passes will be made:
    on its device, with the kernels used there, under autocast to bfloat16 if `half`."""
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    # Routers without replay would choose differently wherever a pass rounds differently.
    routing = Routers.shape_of(model)
    rows = _probe_rows(vocabulary, positions or _PROBE_LONG, routing)
    training = [module for module in model.modules() if module.training]
    for module in training:  # evaluation mode, since passes with dropout never agree
        module.training = False
    device = next(model.parameters()).device
    try:
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=half):
            unpacked = _may_pack(model) or _unpacked(model, rows, half)
            linear = _has_linear_head(model, rows[:-1])
            return Capabilities(not unpacked, linear, unpacked)
    finally:
        for module in training:
            module.training = True


def _unpacked(model: Any, rows: list[Row], half: bool) -> str:
    """Return why rows may not be packed: they do not get the log-probs of padded ones, as with
    recurrent layers or other kinds of attention; empty if they do, with shared prefixes or without,
    whole or in pieces."""
    plain = _scored(model, rows, packed=False)
    before = model.config._attn_implementation
    model.config._attn_implementation = PACKED
    short = rows[:-1]  # together with a long row, short rows use the kernel for long rows
    shared = PassCosts(token=1.0, pair=0.0)
    try:
        found = [
            _scored(model, some, packed=True, **how)
            for some in (short, rows)
            for how in (
                {},
                {"sharing": shared},
                {"sharing": shared, "cut": _PROBE_CUT, "gradients": False},
            )
        ]
        leaking = _scored(model, rows, packed=True, leaks=True) if half else plain
    except _PROBE_ERRORS as error:
        return f"its attention does not take packed rows ({type(error).__name__}: {error})"
    finally:
        model.config._attn_implementation = before
    # Tolerance by dtype: the base under an adapter may be in half precision.
    kinds = [model.get_input_embeddings().weight.dtype, *([torch.bfloat16] if half else [])]
    precision = max(torch.finfo(kind).eps for kind in kinds)
    tolerance = max(_PROBE_TOLERANCE, 4 * precision * float(plain.abs().max()))
    wrong = float((leaking - plain).abs().mean())
    for scores in found:
        gaps = (scores - plain[: len(scores)]).abs()
        largest, mean = float(gaps.max()), float(gaps.mean())
        if not largest <= tolerance:  # also if it is not a number
            return f"packed log-probs differ from padded ones by {largest:.2g} (> {tolerance:.2g})"
        if half and not mean <= max(_PROBE_TOLERANCE, _PROBE_SHARE * wrong):
            return (
                f"packed log-probs differ from padded ones by {mean:.2g} on average, and by "
                f"{wrong:.2g} where rows attend to each other"
            )
    return ""


def _may_pack(model: Any) -> str:
    """Return why no rows may be packed, judged by the layers' kinds of attention, since short probe
    rows cannot reveal windows; empty if there is no known reason."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if unknown := sorted(kinds - {"full_attention", "sliding_attention"}):
        return f"it has layers of the kind {unknown[0]}"
    own = model.config._attn_implementation
    return "" if own in ("sdpa", PACKED) else f"its attention is `{own}`, not `sdpa`"


def _has_linear_head(model: Any, rows: list[Row]) -> bool:
    """Return whether the output layer is linear and its output is the model's logits."""
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear:
        return False
    seen: list[torch.Tensor] = []
    (batch, *_) = plan(rows, 1, packed=False)
    batch = batch.to(head.weight.device)
    with _hooked(head.register_forward_hook(lambda *call: seen.append(call[2]))):
        logits = response_logits(model, batch)
    return len(seen) == 1 and torch.equal(seen[0].squeeze(0), logits)


def _scored(model: Any, rows: list[Row], *, leaks: bool = False, **how: Any) -> torch.Tensor:
    """Return the log-probs of all response tokens, row after row. `leaks`: where packed rows are
    read as one sequence."""
    device = next(model.parameters()).device
    found = torch.empty(sum(row.response_length for row in rows), device=device)
    for batch in plan(rows, 1 << 20, **how):
        here = batch.to(device)
        here = replace(here, packing=None) if leaks else here
        routers = None if here.routes is None else Routers.of(model)
        passing = (
            contextlib.nullcontext() if routers is None else routers.passing(None, here.routes)
        )
        with passing:
            logits = response_logits(model, here).float()
        found[here.order] = torch.log_softmax(logits, -1).gather(1, here.targets[:, None])[:, 0]
    return found


def _probe_rows(vocabulary: int, positions: int, routing: RoutingShape | None = None) -> list[Row]:
    """Return rows for testing: three answers to one prompt and some to others, of different
    lengths; the last row is long, as far as the model has `positions`. `routing`: of a mixture of
    experts, whose rows contain the experts of their tokens."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(vocabulary, size=24)
    last = 20  # tokens of the last answer
    long = max(1, min(_PROBE_LONG, positions) - last)
    others = [rng.integers(vocabulary, size=size) for size in (9, 3, long)]
    rows = []
    for index, start in enumerate([prompt, prompt, prompt, *others]):
        ids = np.concatenate([start, rng.integers(vocabulary, size=5 + 3 * index)])
        behaviour = np.zeros(len(ids) - len(start), np.float32)
        routes = None if routing is None else _probe_routes(ids[:-1], routing)
        rows.append(Row(str(index), ids, len(start), behaviour, 0.0, (0.0,), 0, routes=routes))
    return rows


def _probe_routes(ids: np.ndarray[Any, np.dtype[Any]], routing: RoutingShape) -> Any:
    """Return experts [T, layers, k] that depend only on the tokens so far, so that a common prefix
    has the same experts."""
    first = np.cumsum(ids)[:, None, None] + np.arange(routing.layers)[None, :, None]
    return routing.compact((first + np.arange(routing.top_k)) % routing.experts)
