"""Keys, values and scores shared by the pieces of a sequence that is longer than a pass.

A piece's tokens attend to the keys and values that earlier pieces left in a `History`. Gradients
are exact: pieces that others read are first run without gradients, and differentiated after their
readers, whose gradients with respect to the keys and values are added to their own. So only one
piece's activations are in memory, no token is differentiated twice, and an inner piece costs one
additional forward pass. A loss that couples the tokens of a row, which may be in several pieces, is
first differentiated with respect to the scores of all of them; for each piece, it is then linear in
the piece's scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

# Function from log-probs and entropies [n], and their slice of all tokens, to their summed loss.
ScoreLoss = Callable[[torch.Tensor, torch.Tensor, slice], torch.Tensor]


@dataclass
class KeptStates:
    """Keys and values of one attention layer for the t tokens of a piece, and their gradients."""

    # [1, G, t, D], [1, G, t, E]
    key: torch.Tensor
    value: torch.Tensor
    # The same shapes, in float32 or better; None: no reader has been differentiated yet.
    by_key: torch.Tensor | None = None
    by_value: torch.Tensor | None = None

    def add(self, index: torch.Tensor | None, by_key: torch.Tensor, by_value: torch.Tensor) -> None:
        """Add the gradients of the tokens `index` (int64 [n]; None: all)."""
        self.by_key = _added(self.by_key, self.key, index, by_key)
        self.by_value = _added(self.by_value, self.value, index, by_value)


def _added(
    total: torch.Tensor | None, like: torch.Tensor, index: torch.Tensor | None, by: torch.Tensor
) -> torch.Tensor:
    if total is None:
        kind = torch.promote_types(like.dtype, torch.float32)
        total = torch.zeros(like.shape, dtype=kind, device=like.device)
    by = by.to(total.dtype)
    return total.add_(by) if index is None else total.index_add_(2, index, by)


class History:
    """State shared by the pieces of one sequence: keys and values, and the scores of its N tokens
    if a loss couples them."""

    def __init__(self, order: torch.Tensor) -> None:
        """`order`: int64 [N], index of each scored token of the sequence among the scored tokens of
        all rows, row after row."""
        self.order = order
        self._pieces: dict[int, dict[torch.nn.Module, KeptStates]] = {}
        # [N]: log-probs, entropies and, with a reference model, its log-probs, from the passes that
        # keep them; zero for tokens without such a pass yet.
        self._scores: tuple[torch.Tensor, torch.Tensor] | None = None
        self.reference: torch.Tensor | None = None
        # [N]: gradients of the loss with respect to log-probs and entropies.
        self.slopes: tuple[torch.Tensor, torch.Tensor] | None = None

    def keep(
        self, piece: int, layer: torch.nn.Module, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Keep the keys and values that an attention layer computed for a piece's tokens."""
        self._pieces.setdefault(piece, {})[layer] = KeptStates(key.detach(), value.detach())

    def of(self, piece: int, layer: torch.nn.Module) -> KeptStates | None:
        """Return the kept states of a piece in an attention layer; None without any."""
        return self._pieces.get(piece, {}).get(layer)

    def forget(self, piece: int) -> None:
        """Drop a piece's keys and values."""
        self._pieces.pop(piece, None)

    def score(
        self,
        within: torch.Tensor,
        logprobs: torch.Tensor,
        entropy: torch.Tensor,
        reference: torch.Tensor | None,
    ) -> None:
        """Record the scores of the tokens `within` (int64 [n], of N), and a reference model's."""
        if self._scores is None:
            n = len(self.order)
            self._scores = logprobs.new_zeros(n), entropy.new_zeros(n)
            self.reference = None if reference is None else reference.new_zeros(n)
        self._scores[0][within], self._scores[1][within] = logprobs, entropy
        if self.reference is not None and reference is not None:
            self.reference[within] = reference

    def scores(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probs and entropies [N] of all tokens."""
        assert self._scores is not None, "all pieces keep before one is differentiated"
        return self._scores

    def merge(self, summed: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Sum the scores of ranks that have each scored a part; `summed` sums arrays [N] over
        ranks."""
        logprobs, entropy = self.scores()
        self._scores = summed(logprobs), summed(entropy)
        self.reference = None if self.reference is None else summed(self.reference)

    def differentiate(self, loss_of: ScoreLoss) -> torch.Tensor:
        """Return the loss of all tokens, and keep its gradient with respect to their scores for
        `linear`."""
        with torch.enable_grad():
            inputs = [one.detach().requires_grad_() for one in self.scores()]
            loss = loss_of(inputs[0], inputs[1], slice(0, len(self.order)))
            found = torch.autograd.grad(loss, inputs, allow_unused=True)
        by_logprob, by_entropy = (
            torch.zeros_like(one) if slope is None else slope
            for one, slope in zip(inputs, found, strict=True)
        )
        self.slopes = by_logprob, by_entropy
        return loss.detach()

    def linear(self, within: torch.Tensor) -> ScoreLoss:
        """Return a function of the scores of the tokens `within` that has the gradient of the whole
        loss."""
        assert self.slopes is not None, "the loss was differentiated"
        by_logprob, by_entropy = (one[within] for one in self.slopes)

        def loss_of(logprobs: torch.Tensor, entropy: torch.Tensor, part: slice) -> torch.Tensor:
            return (logprobs * by_logprob[part]).sum() + (entropy * by_entropy[part]).sum()

        return loss_of


@dataclass(frozen=True)
class Past:
    """A piece's place in the sequence that it was cut from."""

    history: History
    # Its number; then, for each piece that its tokens attend to, the piece's number and the indices
    # of the attended tokens among its keys (int64 [n]; None: all). The pass's keys are its own,
    # then these.
    piece: int
    earlier: tuple[tuple[int, torch.Tensor | None], ...]
    # Whether the pass keeps its keys and values.
    keeps: bool


@dataclass(frozen=True)
class PiecePass:
    """A pass over one piece."""

    piece: int
    keeps: bool
    # Pieces whose keys and values no later pass reads.
    done: tuple[int, ...]


def schedule_pieces(
    readers: Mapping[int, set[int]], *, gradients: bool, coupled: bool
) -> list[PiecePass]:
    """Return the order of passes over pieces. `readers`: by piece, the later pieces that attend to
    it.

    A piece is differentiated after all of its readers, which come as early as this allows, so that
    few pieces' keys and values are in memory: only the path to the current piece.
    """
    if not gradients:
        last = {p: max(own, default=p) for p, own in readers.items()}
        return [
            PiecePass(p, bool(readers[p]), tuple(q for q in readers if last[q] == p))
            for p in readers
        ]
    if coupled:
        kept = [PiecePass(p, True, ()) for p in readers]
        return kept + [PiecePass(p, False, (p,)) for p in reversed(list(readers))]
    steps: list[PiecePass] = []
    waiting: list[int] = []
    learnt: set[int] = set()
    for p, own in readers.items():
        if own:
            steps.append(PiecePass(p, True, ()))
            waiting.append(p)
        else:
            steps.append(PiecePass(p, False, (p,)))
            learnt.add(p)
        for q in reversed(waiting):
            if readers[q] <= learnt:
                steps.append(PiecePass(q, False, (q,)))
                learnt.add(q)
        waiting = [q for q in waiting if q not in learnt]
    return steps
