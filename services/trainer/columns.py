"""What the loss needs of each response token, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from services.trainer.rows import Row, response_lengths
from troupe.algorithms import token_weights
from troupe.algorithms.losses import Normalize


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
