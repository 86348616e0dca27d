"""The loss of response tokens: its inputs by token, and what a pass reports of them.

`TokenColumns` are the inputs, `TokenLoss` the job's loss as a function of the scores of a pass,
`KeptTokens` what a step computes of a few rows for people to look at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from services.trainer.learning.samples import Row, TrainingBatch, response_lengths
from troupe.algorithms.expert_load import ExpertLoad
from troupe.algorithms.linear_loss import LossOf, Scores
from troupe.algorithms.losses import Normalize, grpo_loss_sum, token_weights
from troupe.algorithms.registry import AlgorithmFunctions, FunctionFault
from troupe.job import AlgorithmSpec, JobSpec
from troupe.scheduling.admission import keeps_tokens
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

# Log-ratios that are kept for people to look at are cut there.
_MOST_GAP: Final = 50.0


@dataclass(frozen=True)
class TokenColumns:
    """Inputs of the loss for T response tokens, row after row; all on one device."""

    # [T] log-probs under the engine that sampled them (mu).
    behaviour: torch.Tensor
    # [T] advantage of each token; without a critic, its row's.
    advantages: torch.Tensor
    # [T] weight w_t in the loss sum.
    weights: torch.Tensor
    # [T, 1] sampling temperature.
    temperatures: torch.Tensor
    # int64 [T] index of its row.
    sequences: torch.Tensor
    # [T] log-probs under the first version, if the samples bring them.
    reference: torch.Tensor | None = None
    # [T] recomputed log-probs under the weights that the step began with (pi_old), if any.
    old: torch.Tensor | None = None
    # bool [T] whether the token was given, not generated; None: none was.
    demonstrated: torch.Tensor | None = None

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
        """Return the columns of `rows` in `dtype`.

        `advantages`: float64 [n], for rows that do not carry advantages by token.
        """
        lengths, paired = response_lengths(rows), any(row.preference for row in rows)
        sizes = torch.tensor(lengths)
        temperatures = torch.tensor([row.temperature for row in rows], dtype=torch.float64)
        columns = {
            "behaviour": torch.from_numpy(np.concatenate([row.behaviour for row in rows])),
            "advantages": torch.repeat_interleave(advantages, sizes),
            # A pair's loss is a mean over pairs, whatever other losses are means of.
            "weights": token_weights(lengths, "token" if paired else normalize),
            "temperatures": torch.repeat_interleave(temperatures, sizes)[:, None],
        }
        for name in ("advantages", "reference", "old"):
            found = [values for row in rows if (values := getattr(row, name)) is not None]
            if len(found) == len(rows):
                columns[name] = torch.from_numpy(np.concatenate(found))
        given = torch.tensor([row.demonstration for row in rows])
        return cls(
            demonstrated=torch.repeat_interleave(given, sizes).to(device) if given.any() else None,
            sequences=torch.repeat_interleave(torch.arange(len(rows)), sizes).to(device),
            **{name: column.to(device, dtype) for name, column in columns.items()},
        )

    def at(self, order: torch.Tensor | slice) -> TokenColumns:
        """Return the columns of N tokens: those that `order` (int64 [N], or a slice) selects."""
        own = {name: t[order] for name, t in vars(self).items() if t is not None}
        return TokenColumns(**own)


class TokenLoss:
    """The loss of one job as a function of the log-probs and entropies of tokens."""

    def __init__(self, algorithm: AlgorithmSpec, functions: AlgorithmFunctions) -> None:
        self._algorithm = algorithm
        # Whether a token's loss may depend on the other tokens of its sample.
        self.couples_tokens = functions.couples_tokens
        # The first fault of a user's loss or correction since this was last None.
        self.fault: FunctionFault | None = None
        self._how: dict[str, Any] = {
            "clip_low": algorithm.clip_low,
            "clip_high": algorithm.clip_high,
            "dual_clip": algorithm.dual_clip,
            "loss": functions.loss,
            "correction": functions.correction,
            "correction_cap": algorithm.correction_cap,
        }

    def statistics(
        self,
        own: TokenColumns,
        loss: torch.Tensor,
        scores: Scores,
        load: ExpertLoad | None,
    ) -> dict[str, Any]:
        """Return arguments for `TokenStatistics` of the tokens of `own`, and of a mixture's
        experts."""
        old = scores.logprobs if own.old is None else own.old
        return {
            "loss_sum": loss.detach(),
            "logprobs": scores.logprobs,
            "behaviour_logprobs": own.behaviour,
            "advantages": own.advantages,
            "entropy": scores.entropy,
            "sequences": own.sequences,
            "demonstrated": own.demonstrated,
            "old_logprobs": old if self._algorithm.old_logprobs == "recomputed" else None,
            "reference_logprobs": own.reference,
            "teacher_divergence": scores.divergence,
            "load": load,
            **self._how,
        }

    def of(self, own: TokenColumns) -> LossOf:
        """Return the summed loss of a part of the tokens of `own`, given their scores."""
        algorithm, how = self._algorithm, self._how
        recomputed = algorithm.old_logprobs == "recomputed"

        def loss_of(logprobs: torch.Tensor, entropy: torch.Tensor, part: slice) -> torch.Tensor:
            some = own.at(part)
            # Before the first update, old log-probs are the present ones.
            old = logprobs.detach() if some.old is None else some.old
            try:
                return grpo_loss_sum(
                    logprobs,
                    some.behaviour,
                    some.advantages,
                    some.weights,
                    sequences=some.sequences,
                    demonstrated=some.demonstrated,
                    old_logprobs=old if recomputed else None,
                    reference_logprobs=some.reference,
                    kl_coefficient=algorithm.kl_loss,
                    entropy=entropy,
                    entropy_coefficient=algorithm.entropy_coefficient,
                    **how,
                )
            except FunctionFault as fault:
                # The pass continues, since other ranks take part in it; its gradient is discarded.
                self.fault = self.fault or fault
                return logprobs.sum() * 0.0

        return loss_of


class KeptTokens:
    """Values of the tokens of a few rows that a step keeps for people to look at: advantages, and
    ratios of the probability under the trained weights to the engine's.

    The rows belong to the trajectories that `keeps_tokens` names. They are not part of the training
    state: a suspended step keeps what was computed since then, a rank of a gang keeps nothing.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._every = spec.pipeline.queries_per_step
        self._turns: dict[tuple[str, int], orchestrator_pb.TrainedTurn] = {}

    def measured(self, batch: TrainingBatch) -> None:
        """Keep the advantages of rows, also of those that no gradient is computed for."""
        for row, advantage in zip(batch.rows, batch.advantages.tolist(), strict=True):
            played = not row.demonstration and not row.preference
            if played and keeps_tokens(row.trajectory, self._every):
                given = np.full(row.response_length, advantage)
                self._turns[row.trajectory, row.turn] = orchestrator_pb.TrainedTurn(
                    trajectory_id=row.trajectory,
                    turn=row.turn,
                    advantages=given if row.advantages is None else row.advantages,
                )

    def scored(self, rows: Sequence[Row], order: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Keep the ratios of rows whose log-probs a pass computed: `logprobs` [N] of the response
        tokens `order` (int64 [N]) of `rows`, row after row. A later pass replaces them."""
        start = 0
        for row in rows:
            kept = self._turns.get((row.trajectory, row.turn))
            end = start + row.response_length
            if kept is not None and row.response_length:
                here = (order >= start) & (order < end)
                if bool(here.any()):
                    # A pass may have only some of the tokens; the others keep their ratios.
                    ratios = np.array(kept.ratios or np.ones(row.response_length))
                    found = logprobs.detach()[here.to(logprobs.device)].double().cpu().numpy()
                    places = order[here].cpu().numpy() - start
                    gap = np.nan_to_num(found - row.behaviour[places], nan=0.0)
                    ratios[places] = np.exp(np.clip(gap, -_MOST_GAP, _MOST_GAP))
                    kept.ratios[:] = ratios
            start = end

    def take(self) -> list[orchestrator_pb.TrainedTurn]:
        """Return all that was kept, which is forgotten."""
        found, self._turns = list(self._turns.values()), {}
        return found
