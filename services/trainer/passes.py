"""Forward and backward passes over rows: gradients of a summed loss, and its statistics."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import Any

import torch

from services.trainer.batching import Piece, plan
from services.trainer.columns import TokenColumns
from services.trainer.forward import costs_of, response_logits, supports_sharing
from services.trainer.peers import Peers
from services.trainer.rows import Row
from services.trainer.trained_model import TrainedModel
from troupe.algorithms import TokenStatistics, grpo_loss_sum, selective_log_softmax
from troupe.job import JobSpec

# Tokens of a forward pass: on a CPU what stays in its caches, on a GPU what fills it.
_FORWARD_TOKENS = {"cpu": 1024, "cuda": 16384}
# Logits of one forward pass, in bytes of float32.
_LOGITS_BYTES = 256 << 20


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
        peers: Peers | None = None,
    ) -> None:
        self._model = model
        self._peers = peers or Peers()
        self._job = spec
        self._policy = spec.policies[policy]
        self._reference: Any = None
        self._budget = forward_tokens or _FORWARD_TOKENS.get(model.device.type, 4096)
        self._limit = max(1, _LOGITS_BYTES // (4 * model.vocabulary))
        self._sharing = None
        if share_prefixes and self._policy.trainable and supports_sharing(model.module):
            self._sharing = costs_of(model.module)

    def set_reference(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Keep a frozen copy of the model with these weights for the divergence."""
        self._reference = self._model.frozen_copy(weights)

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
        algorithm, device = self._job.algorithm, self._model.device
        columns = None
        if rows:
            columns = TokenColumns.of(
                rows, advantages, algorithm.normalize, device=device, dtype=self._model.dtype
            )
        how: dict[str, Any] = {
            "clip_low": algorithm.clip_low,
            "clip_high": algorithm.clip_high,
            "loss": algorithm.loss,
            "correction": self._job.correction,
            "correction_cap": algorithm.correction_cap,
        }
        pieces = plan(rows, self._budget, sharing=self._sharing, limit=self._limit)
        turns = self._peers.turns(pieces, stop)
        for piece in turns:
            if piece is None or columns is None:
                self._take_part()
                continue
            here = piece.to(device)
            own = columns.at(here.order)
            with self._autocast():
                logits = response_logits(self._model.module, here) / own.temperatures
            logprobs, entropy = selective_log_softmax(logits, here.targets)
            how["sequences"] = own.sequences
            how["reference_logprobs"] = self._reference_logprobs(here, own)
            loss = grpo_loss_sum(
                logprobs,
                own.behaviour,
                own.advantages,
                own.weights,
                kl_coefficient=algorithm.kl_coefficient,
                entropy=entropy,
                entropy_coefficient=algorithm.entropy_coefficient,
                **how,
            )
            if not torch.isfinite(loss):
                turns.problem = f"the loss of a micro-batch is {loss.item()}"
            # The gradients of a broken step are thrown away, but other ranks wait for this pass.
            torch.autograd.backward(loss)
            statistics.add(loss, logprobs, own.behaviour, own.advantages, entropy, **how)
        return turns.problem

    def _take_part(self) -> None:
        """A pass of which nothing is kept, for ranks that have one piece more than this one."""
        ids = torch.zeros((1, 1), dtype=torch.int64, device=self._model.device)
        nothing = torch.zeros(1, dtype=torch.int64, device=self._model.device)
        piece = Piece(input_ids=ids, positions=nothing, targets=nothing, order=nothing)
        with self._autocast():
            logits = response_logits(self._model.module, piece)
        if self._reference is not None:
            with torch.no_grad(), self._autocast():
                response_logits(self._reference, piece)
        torch.autograd.backward(logits.sum() * 0.0)

    def _reference_logprobs(self, piece: Piece, own: TokenColumns) -> torch.Tensor | None:
        if self._reference is None or (own.reference is not None and self._peers.size == 1):
            return own.reference
        with torch.no_grad(), self._autocast():
            logits = response_logits(self._reference, piece) / own.temperatures
            found = selective_log_softmax(logits, piece.targets)[0]
        # Another rank's rows may bring none, and wait for this pass.
        return found if own.reference is None else own.reference

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._policy.model.dtype == "bfloat16":
            return torch.autocast(self._model.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()
