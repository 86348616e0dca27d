"""Scores of exactly the tokens that are scored, from any Hugging Face causal LM."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from services.trainer.learning.attention import PACKED
from services.trainer.learning.cpu_threads import twin
from services.trainer.learning.lora import adapter_of
from services.trainer.learning.lora_bases import FrozenBase
from services.trainer.learning.packing import PackedBatch, PassCosts, plan
from services.trainer.learning.samples import Row
from troupe.adapters.merge import Tensors, distinct_tensors
from troupe.algorithms import selective_log_softmax
from troupe.algorithms.linear_loss import Head, LossOf, Scores, linear_loss, linear_scores
from troupe.checkpoints.format import CheckpointFormat
from troupe.checkpoints.tensors import TensorsDoNotFit, shape_difference
from troupe.rpc import FailedPrecondition


class TrainedModel:
    """A Hugging Face causal LM, what of it is trained, and what engines get of that.

    Of a model with an adapter (adapters.py) that is the adapter alone.
    """

    def __init__(self, module: Any, device: torch.device, published_type: torch.dtype) -> None:
        """Take `module` to `device`; it trains in the type of its parameters.

        `published_type`: of the floating-point tensors that engines load.
        """
        self.device = device
        self.module = module.to(device)
        self._adapter = adapter_of(module)
        self.parameters: list[torch.nn.Parameter] = (
            self._adapter.parameters if self._adapter else list(self.module.parameters())
        )
        self.dtype = self.parameters[0].dtype
        self.vocabulary = int(module.get_input_embeddings().weight.shape[0])
        self._published_type = published_type

    @property
    def num_parameters(self) -> int:
        """Distinct parameters."""
        return sum(p.numel() for p in self.module.parameters())

    @property
    def base(self) -> FrozenBase | None:
        """The frozen weights under an adapter; None where all weights are trained."""
        return self._adapter.base if self._adapter else None

    def frozen_copy(self, weights: Mapping[str, torch.Tensor]) -> Any:
        """A second module with these weights, which no gradient reaches.

        With an adapter it shares the base's tensors.
        """
        if self._adapter is not None:
            return self._adapter.frozen(weights)
        module = copy.deepcopy(self.module).requires_grad_(False)
        _copy_into(module, weights)
        return module

    @functools.cached_property
    def format(self) -> CheckpointFormat:
        """How what it consists of is named and shaped for engines, in the published type."""
        return CheckpointFormat(self.module, self._published_type)

    def published(self) -> Mapping[str, torch.Tensor]:
        """What engines load: distinct parameters and persistent buffers as a checkpoint has them,
        in the published type; or an adapter in that type (`AdapterContent`).

        A model's are made when they are read: copy or store them before the next step.
        """
        if self._adapter is not None:
            return self._adapter.content(self._published_type).to_tensors()
        return self.format.of(self.weights())

    def weights(self) -> Tensors:
        """What is trained, and persistent buffers, in full precision; not a copy."""
        if self._adapter is not None:
            return self._adapter.weights()
        return distinct_tensors(self.module)

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy what `weights` gave. Raises ValueError when the names are not the model's."""
        if self._adapter is not None:
            self._adapter.load(weights)
        else:
            _copy_into(self.module, weights)


def _copy_into(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    slots = model.state_dict()
    named = {name for name, _ in model.named_parameters()}
    # Buffers, and further names of a tied tensor, need not be there.
    expected = {n: slot.shape for n, slot in slots.items() if n in named or n in weights}
    if wrong := shape_difference({n: t.shape for n, t in weights.items()}, expected):
        raise TensorsDoNotFit(f"the weights are not the model's: {wrong}")
    model.load_state_dict(dict(weights), strict=False)


# Of log-probs in single precision.
_PROBE_TOLERANCE = 1e-3
_PROBE_ERRORS = (RuntimeError, ValueError, TypeError, KeyError, AttributeError)


@dataclass(frozen=True)
class Abilities:
    """What of a model's forward pass may be arranged otherwise; tried out, not assumed."""

    # Rows may lie side by side in one sequence (packing.py).
    packs: bool
    # Nothing follows its output layer, which is linear (linear_loss.py).
    linear_head: bool


class Forward:
    """Forward passes of one model over pieces.

    Hidden states are narrowed just before the output layer, so that neither it nor anything
    behind it sees prompt tokens or padding. All goes through the model's own forward, and what
    is differentiated comes out of it, as wrappers (FSDP, PEFT) expect.
    """

    def __init__(self, model: Any, abilities: Abilities | None = None) -> None:
        """`abilities`: those of a model of the same kind; None: they are tried out."""
        self.model = model
        self.abilities = abilities or abilities_of(model)
        if self.abilities.packs:
            model.config._attn_implementation = PACKED

    def twin(self) -> Forward:
        """Another over the same weights, for another thread."""
        return Forward(twin(self.model), self.abilities)

    def loss(
        self,
        piece: PackedBatch,
        temperatures: torch.Tensor,
        loss_of: LossOf,
        *,
        whole: bool = False,
    ) -> tuple[torch.Tensor, Scores]:
        """The sum of `loss_of` over the piece's N tokens, differentiable, and their scores.

        `temperatures`: [N, 1]. `whole`: the loss couples the tokens of a row.
        """
        if not self.abilities.linear_head:
            logits = response_logits(self.model, piece) / temperatures
            logprobs, entropy = selective_log_softmax(logits, piece.targets)
            loss = loss_of(logprobs, entropy, slice(0, len(piece.targets)))
            return loss, Scores(logprobs.detach(), entropy.detach())
        found: list[Scores] = []

        def head(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
            spans = piece.spans if whole else None
            own = Head(layer.weight, layer.bias)
            loss, scores = linear_loss(
                hidden, own, piece.targets, temperatures, loss_of, spans=spans
            )
            found.append(scores)
            return loss

        output = _through(self.model, piece, head)
        return output.reshape(()), found[0]

    @torch.no_grad()
    def scores(self, piece: PackedBatch, temperatures: torch.Tensor) -> Scores:
        """Log-probs and entropies of the piece's N tokens, without gradients."""
        if not self.abilities.linear_head:
            logits = response_logits(self.model, piece) / temperatures
            return Scores(*selective_log_softmax(logits, piece.targets))
        found: list[Scores] = []

        def head(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
            own = Head(layer.weight, layer.bias)
            found.append(linear_scores(hidden, own, piece.targets, temperatures))
            return hidden.new_zeros(())

        _through(self.model, piece, head)
        return found[0]


def response_logits(model: Any, piece: PackedBatch) -> torch.Tensor:
    """Logits [N, V] at the piece's positions."""

    def narrow(_module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, *rest = inputs
        return (_narrow(hidden, piece).unsqueeze(0), *rest)

    with _hooked(_head_of(model).register_forward_pre_hook(narrow)):
        return _call(model, piece).squeeze(0)


def _through(
    model: Any, piece: PackedBatch, instead: Callable[[Any, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """What the model returns as logits when `instead` takes the place of its output layer.

    `instead` is given the layer and the hidden states [N, d] and returns a scalar. It runs where
    the layer is about to: wrappers have its weights there, and may take them away behind it.
    """
    head, made = _head_of(model), []

    def before(layer: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, *rest = inputs
        made.append(instead(layer, _narrow(hidden, piece)))
        return (hidden[:, :0], *rest)  # the layer itself has nothing to do

    def after(_layer: Any, _inputs: Any, _output: Any) -> torch.Tensor:
        return made[0].reshape(1, 1, 1)

    with _hooked(head.register_forward_pre_hook(before), head.register_forward_hook(after)):
        return _call(model, piece)


def _narrow(hidden: torch.Tensor, piece: PackedBatch) -> torch.Tensor:
    """Hidden states [N, d] before the scored tokens."""
    return hidden.reshape(-1, hidden.shape[-1]).index_select(0, piece.positions)


def _call(model: Any, piece: PackedBatch) -> torch.Tensor:
    own = {} if piece.packing is None else {"packing": piece.packing}
    output = model(
        input_ids=piece.input_ids,
        attention_mask=None,
        position_ids=piece.position_ids,
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
    """What a token and a pair of tokens cost in `model`, in floating-point operations."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    body = sum(p.numel() for p in model.parameters()) - head.weight.numel()
    heads = getattr(config, "num_attention_heads", 1)
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    # Attention over short sequences runs at a fraction of the speed of the projections.
    return PassCosts(token=2.0 * max(body, 1), pair=3 * 4.0 * width * config.num_hidden_layers)


def abilities_of(model: Any) -> Abilities:
    """What `model` can do, from forward passes over a few short rows."""
    rows = _probe_rows(int(model.get_input_embeddings().weight.shape[0]))
    training = [module for module in model.modules() if module.training]
    for module in training:  # dropout would let nothing pass
        module.training = False
    try:
        with torch.no_grad():
            plain = _scored(model, rows, packed=False)
            packs = _may_pack(model) and _packs(model, rows, plain)
            return Abilities(packs=packs, linear_head=_has_linear_head(model, rows))
    finally:
        for module in training:
            module.training = True


def _packs(model: Any, rows: list[Row], plain: torch.Tensor) -> bool:
    """Whether packed rows, with shared prefixes or without, get the log-probs of padded ones.

    Recurrent layers and attention of another kind do not pass.
    """
    before = model.config._attn_implementation
    model.config._attn_implementation = PACKED
    try:
        found = [
            _scored(model, rows, packed=True, sharing=sharing)
            for sharing in (None, PassCosts(token=1.0, pair=0.0))
        ]
    except _PROBE_ERRORS:
        return False
    finally:
        model.config._attn_implementation = before
    # What rounding alone may come to: the base under an adapter may be in half precision.
    precision = torch.finfo(model.get_input_embeddings().weight.dtype).eps
    tolerance = max(_PROBE_TOLERANCE, 4 * precision * float(plain.abs().max()))
    return all(bool((scores - plain).abs().max() <= tolerance) for scores in found)


def _may_pack(model: Any) -> bool:
    """Whether what short rows cannot show is known: how far its layers look back."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    known = kinds <= {"full_attention", "sliding_attention"}
    return known and model.config._attn_implementation in ("sdpa", PACKED)


def _has_linear_head(model: Any, rows: list[Row]) -> bool:
    """Whether what the output layer returns are the model's logits."""
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear:
        return False
    seen: list[torch.Tensor] = []
    (piece, *_) = plan(rows, 1, packed=False)
    piece = piece.to(head.weight.device)
    with _hooked(head.register_forward_hook(lambda *call: seen.append(call[2]))):
        logits = response_logits(model, piece)
    return len(seen) == 1 and torch.equal(seen[0].squeeze(0), logits)


def _scored(model: Any, rows: list[Row], **how: Any) -> torch.Tensor:
    """Log-probs of all response tokens, row after row."""
    device = next(model.parameters()).device
    found = torch.empty(sum(row.response_length for row in rows), device=device)
    for piece in plan(rows, 1 << 20, **how):
        here = piece.to(device)
        logits = response_logits(model, here).float()
        found[here.order] = torch.log_softmax(logits, -1).gather(1, here.targets[:, None])[:, 0]
    return found


def _probe_rows(vocabulary: int) -> list[Row]:
    """Three answers to one prompt and two to others, of different lengths."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(vocabulary, size=24)
    others = [rng.integers(vocabulary, size=size) for size in (9, 3)]
    rows = []
    for index, start in enumerate([prompt, prompt, prompt, *others]):
        ids = np.concatenate([start, rng.integers(vocabulary, size=5 + 3 * index)])
        behaviour = np.zeros(len(ids) - len(start), np.float32)
        rows.append(Row(str(index), ids, len(start), behaviour, 0.0, (0.0,), 0))
    return rows
