"""Routers of mixtures of experts: which experts tokens are sent to, recorded and replayed.

A router of transformers selects its experts by one `torch.topk` over all of them. `Routers` lets
this selection be recorded (engines return it, the trainer counts it) and replaced by another one:
router replay (R3, Ma et al. 2025, https://arxiv.org/abs/2510.11370), where the trainer computes
with the experts that the engine computed with. Gate values still come from the model's own scores,
so that gradients reach the router.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K: Final = ("num_experts_per_tok", "moe_k", "moe_topk")
_ROUTERS: Final = "_troupe_routers"
_ROUTER: Final = "_troupe_router"
_TOPK: Final = (torch.topk, torch.Tensor.topk)

Indices = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class RoutingShape:
    """The routing of a model: its layers, each of which chooses `top_k` of `experts`."""

    layers: int
    top_k: int
    experts: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of stored expert indices: one byte each up to 256 experts, else two."""
        return np.dtype(np.uint8 if self.experts <= 256 else np.int16)

    def compact(self, indices: Indices) -> Indices:
        """Return expert indices in the smallest type."""
        return np.ascontiguousarray(indices, self.dtype)

    def problem(self, routes: Indices, tokens: int) -> str:
        """Return why `routes` cannot belong to a sample of `tokens` tokens; empty if they can."""
        wanted = (tokens - 1, self.layers, self.top_k)
        if routes.shape != wanted:
            return f"its routed experts have shape {list(routes.shape)}, not {list(wanted)}"
        if routes.size and not 0 <= int(routes.min()) <= int(routes.max()) < self.experts:
            return f"it was routed to expert {int(routes.max())} of {self.experts}"
        return ""


def is_mixture(config: Any) -> bool:
    """Return whether a transformers configuration describes a mixture of experts."""
    return _number((config.get_text_config(),), _EXPERTS) > 0


def shape_in(config: Any) -> RoutingShape | None:
    """Return the routing of a model with this configuration; None for dense models."""
    text = config.get_text_config()
    experts = _number((text,), _EXPERTS)
    if not experts:
        return None
    return RoutingShape(int(text.num_hidden_layers), _number((text,), _TOP_K) or 1, experts)


class RoutingListener(Protocol):
    """A receiver of the selections of one forward pass over T tokens."""

    def chose(
        self, layer: int, logits: torch.Tensor, indices: torch.Tensor, *, again: bool
    ) -> None:
        """Receive the `indices` int64 [T, k] that a layer's router chose by `logits` [T, experts].

        `again`: the layer is recomputed for its backward pass (activation checkpointing). The
        listener must repeat the operations of the first time, without effect.
        """
        ...


@dataclass(frozen=True)
class RecordedRoutes:
    """A listener that keeps all selections of a pass."""

    shape: RoutingShape
    by_layer: dict[int, torch.Tensor]

    def chose(
        self, layer: int, logits: torch.Tensor, indices: torch.Tensor, *, again: bool
    ) -> None:
        """Keep the selection of a layer."""
        self.by_layer[layer] = indices

    def compact(self) -> Indices:
        """Return the experts of all tokens, [T, layers, k], as in samples (`ROUTES_COLUMN`)."""
        some = next(iter(self.by_layer.values()))
        routes = torch.zeros((len(some), self.shape.layers, self.shape.top_k), dtype=torch.int16)
        for layer, indices in self.by_layer.items():
            routes[:, layer] = indices.to("cpu", torch.int16)
        return self.shape.compact(routes.numpy())


class Routers:
    """The routers of one model. A deep copy of the model has routers of its own."""

    def __init__(self, shape: RoutingShape, mixed: tuple[int, ...]) -> None:
        self.shape = shape
        self.mixed = mixed
        """Take the numbers of the layers that have experts."""
        self._listener: RoutingListener | None = None
        # [T, layers, k]; negative: the router's own choice.
        self._routes: torch.Tensor | None = None
        self._passing = False

    @classmethod
    def of(cls, model: Any) -> Routers | None:
        """Return the routers of a transformers model; None if it is dense or its routers do not
        select by top-k."""
        if _ROUTERS in model.__dict__:
            known: Routers | None = model.__dict__[_ROUTERS]
            return known
        found = _routers_in(model)
        if not found:
            model.__dict__[_ROUTERS] = None  # asked with every claim of samples
            return None
        (top_k, experts), *others = {(one.top_k, one.experts) for _, one in found}
        if others or not _selects(found[0][0]):
            return None
        layers = int(model.config.get_text_config().num_hidden_layers)
        shape = RoutingShape(layers, top_k, experts)
        own = cls(shape, tuple(sorted(one.layer for _, one in found)))
        for module, router in found:
            router.routers = own
            module.__dict__[_ROUTER] = router
            module.forward = types.MethodType(_routed, module)
        model.__dict__[_ROUTERS] = own
        return own

    @classmethod
    def shape_of(cls, model: Any) -> RoutingShape | None:
        """Return the routing of a model; None if it has no routers that can be recorded."""
        found = cls.of(model)
        return None if found is None else found.shape

    @contextlib.contextmanager
    def passing(
        self, listener: RoutingListener | None, routes: torch.Tensor | None = None
    ) -> Iterator[None]:
        """Report the selections of one forward pass over T tokens to `listener`.

        `routes` [T, layers, k]: experts to use instead, where they are not negative. Both stay in
        force for the backward pass.
        """
        self._listener, self._routes, self._passing = listener, routes, True
        try:
            yield
        finally:
            self._passing = False

    @property
    def _active(self) -> bool:
        # Calls of the model between its passes are not recorded.
        mine = self._passing or torch._C._current_graph_task_id() != -1
        return mine and (self._listener is not None or self._routes is not None)

    def _given(self, layer: int) -> torch.Tensor | None:
        """Return the experts to use in a layer, int64 [T, k]."""
        return None if self._routes is None else self._routes[:, layer].long()

    def _chose(self, layer: int, logits: torch.Tensor, indices: torch.Tensor) -> None:
        if self._listener is not None:
            self._listener.chose(layer, logits, indices, again=not self._passing)


@dataclass
class _Router:
    """One router. `logits_at`: place of its logits in its output; `routers`: the model's
    routers."""

    layer: int
    top_k: int
    experts: int
    logits_at: int
    routers: Routers | None = None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _routed(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Replacement of `forward` of a router."""
    router: _Router = module.__dict__[_ROUTER]
    routers, own = router.routers, type(module).forward
    if routers is None or not routers._active:
        return own(module, *args, **kwargs)
    with _Selection(router, routers._given(router.layer)) as selection:
        output = own(module, *args, **kwargs)
    if selection.indices is not None:
        logits = output if isinstance(output, torch.Tensor) else output[router.logits_at]
        flat = logits.reshape(-1, router.experts), selection.indices.reshape(-1, router.top_k)
        routers._chose(router.layer, *flat)
    return output


class _Selection(TorchFunctionMode):
    """A mode that records a router's `topk` selection, and replaces it by `given`."""

    def __init__(self, router: _Router, given: torch.Tensor | None) -> None:
        super().__init__()
        self._router, self._given = router, given
        self.indices: torch.Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func not in _TOPK:
            return found
        scores = args[0] if args else kwargs["input"]
        # Other calls select groups of experts, or score them.
        if (scores.shape[-1], found.indices.shape[-1]) != (
            self._router.experts,
            self._router.top_k,
        ):
            return found
        self.indices = found.indices
        if self._given is None:
            return found
        given = self._given.view(found.indices.shape)
        self.indices = torch.where(given >= 0, given, found.indices)
        return torch.return_types.topk((scores.gather(-1, self.indices), self.indices))


def _routers_in(model: Any) -> list[tuple[Any, _Router]]:
    """Return the modules that transformers takes router logits from, with their descriptions."""
    from transformers import PreTrainedModel
    from transformers.utils.output_capturing import OutputRecorder

    kinds: dict[type, int] = {}
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            recorders = (part._can_record_outputs or {}).get("router_logits", [])
            for one in recorders if isinstance(recorders, list) else [recorders]:
                if isinstance(one, OutputRecorder) and one.target_class is not None:
                    kinds[one.target_class] = one.index
    if not kinds:
        return []
    config = model.config.get_text_config()
    found = []
    for name, part in model.named_modules():
        at = kinds.get(type(part))
        layer = next((int(piece) for piece in name.split(".") if piece.isdigit()), None)
        if at is None or layer is None:
            continue
        top_k = _number((part, config), ("top_k", *_TOP_K))
        experts = _number((part, config), _EXPERTS)
        if top_k and experts:
            found.append((part, _Router(layer, top_k, experts, at)))
    return found


def mixed_blocks(model: Any) -> list[Any]:
    """Return the modules that hold a router and its experts, one per layer; none if a router is
    unknown or does not share a module with its experts."""
    routers = {id(module) for module, _ in _routers_in(model)}
    found = []
    for part in model.modules():
        inner = dict(part.named_children())
        if any(id(child) in routers for child in inner.values()) and "self_attn" not in inner:
            found.append(part)
    return found if len(found) == len(routers) else []


def _number(owners: Sequence[Any], names: Sequence[str]) -> int:
    """Return the first positive integer among the attributes `names`; 0 if there is none."""
    values = (getattr(owner, name, None) for owner in owners for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v), 0)


def _selects(module: Any) -> bool:
    """Return whether a router of this class calls `topk`; PhiMoE's masks maxima instead."""
    try:
        return "topk(" in inspect.getsource(type(module).forward)
    except (OSError, TypeError):  # its source is not available
        return False
