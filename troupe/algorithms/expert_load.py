"""Load of the experts of a mixture: how evenly tokens are routed, and the loss that balances it.

Both count each response token once, so they do not depend on how rows are cut into passes, packed,
or divided over the ranks of a gang. Prompts, which carry no loss, do not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


class ExpertLoad:
    """Listener (`troupe.mixtures.RoutingListener`) that measures one pass over N scored tokens.

    `counts`: float64 [layers, experts], tokens by expert. `balance`: the sum over rows of their
    weight times their mean imbalance over layers, differentiable; `weight`: the sum of these
    weights. `replayed`: the number of `tokens` that were sent to the same experts as in the engine.
    """

    def __init__(
        self,
        layers: int,
        experts: int,
        positions: torch.Tensor,
        spans: Sequence[int],
        weights: torch.Tensor | None = None,
        routes: torch.Tensor | None = None,
    ) -> None:
        """Create the listener. `positions`: int64 [N], positions of the scored tokens among the
        tokens that routers see, row after row; `spans`: scored tokens of each row. `weights` [N]:
        the tokens' weights in the loss, for `balance`; None: not requested. `routes`: replayed
        routes, [T, layers, k], negative where none are replayed."""
        self._positions = positions
        self._lengths = torch.tensor(spans, device=positions.device)
        self._weights: torch.Tensor | None = None
        if weights is not None:
            self._weights = _sums(weights[:, None], self._lengths)[:, 0]
        self.tokens = len(positions)
        self.weight: torch.Tensor | float = 0.0 if weights is None else weights.double().sum()
        self.replayed: torch.Tensor | float = 0.0
        if routes is not None:
            given = routes.amax((1, 2)).index_select(0, positions) >= 0
            self.replayed = given.sum(dtype=torch.float64)
        self.counts = torch.zeros((layers, experts), dtype=torch.float64, device=positions.device)
        self._imbalances: list[torch.Tensor] = []

    def chose(
        self, layer: int, logits: torch.Tensor, indices: torch.Tensor, *, again: bool
    ) -> None:
        """Add the selection of a layer; `again`: compute it without adding."""
        chosen = indices.index_select(0, self._positions)
        if not again:
            flat = chosen.reshape(-1)
            ones = torch.ones(len(flat), dtype=torch.float64, device=flat.device)
            self.counts[layer].scatter_add_(0, flat, ones)
        if self._weights is not None:
            scored = logits.index_select(0, self._positions)
            imbalance = imbalances(scored, chosen, self._lengths).mul(self._weights).sum()
            if not again:
                self._imbalances.append(imbalance)

    @property
    def balance(self) -> torch.Tensor | None:
        """The weighted sum over rows; None if it was not requested, or if no layer has experts."""
        if not self._imbalances:
            return None
        return torch.stack(self._imbalances).mean()


def imbalances(logits: torch.Tensor, chosen: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the imbalance of each of R rows, (E / k) sum_e f_e P_e, [R]; 1 where all experts are
    equal.

    f_e: the fraction of the row's tokens that chose expert e; P_e: the mean of its probability, the
    softmax of the router's logits. That is the auxiliary loss of Switch Transformers (Fedus et al.
    2021, equation 4) for k experts per token, over one sequence (DeepSeek-V3, section 2.1.2).
    `logits` [N, E] and `chosen` int64 [N, k] of the rows' tokens, row after row; `lengths` int64
    [R]. Its gradient is P's.
    """
    experts, k = logits.shape[-1], chosen.shape[-1]
    exact = logits if logits.dtype == torch.float64 else logits.float()
    probabilities = torch.softmax(exact, -1)
    hit = torch.zeros_like(probabilities).scatter_(1, chosen, 1.0)
    fractions, means = _sums(hit, lengths), _sums(probabilities, lengths)
    return (fractions * means).sum(-1) * (experts / k) / lengths.to(exact.dtype).square()


def load_metrics(counts: torch.Tensor) -> dict[str, float]:
    """Return metrics of tokens by expert, [layers, experts]; layers without tokens have no experts.

    `router/load_max`: load of the busiest expert over the mean, in the worst layer;
    `router/load_entropy`: entropy of the load in units of its maximum, mean over layers;
    `router/idle_fraction`: fraction of experts that got no token.
    """
    loads = counts[counts.sum(-1) > 0]
    if not len(loads):
        return {}
    shares = loads / loads.sum(-1, keepdim=True)
    experts = loads.shape[-1]
    entropies = torch.special.entr(shares).sum(-1) / math.log(max(experts, 2))
    return {
        "router/load_max": float(shares.max()) * experts,
        "router/load_entropy": float(entropies.mean()),
        "router/idle_fraction": float((loads == 0).double().mean()),
    }


def _sums(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the sums [R, E] over the rows' parts of `values` [N, E]."""
    return torch.segment_reduce(values, "sum", lengths=lengths, axis=0)
