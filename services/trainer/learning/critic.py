"""The critic of one policy: values of what its agents saw, the advantages that they give, its fit.

A network of its own beside the policy's: a copy of the first weights whose output layer is a
single number. So the policy's gradient, its norm and its moments are what they are without it, and
what engines load cannot contain it. Its weights and moments are training state.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from services.trainer.learning.attention import PACKED
from services.trainer.learning.forward import response_logits
from services.trainer.learning.optimizer import (
    Gradients,
    export_moments,
    import_moments,
    learning_rate,
    make_optimizer,
)
from services.trainer.learning.packing import PackedBatch
from services.trainer.learning.samples import Row, response_lengths
from services.trainer.state import suspension
from services.trainer.state.suspension import PooledParameters
from troupe.algorithms import ValueStatistics, gae, value_loss
from troupe.checkpoints.tensors import TensorsDoNotFit, shape_difference
from troupe.job.algorithm import CriticSpec
from troupe.rpc import FailedPrecondition

# Before the names of its tensors, among those of the optimizer.
_PREFIX = "critic/"
_WEIGHT = "weight"
# Cuts rows into forward passes, on the device.
Pieces = Callable[[Sequence[Row], threading.Event | None], Iterator[PackedBatch]]


@dataclass(frozen=True)
class Estimate:
    """What the critic made of rows before the step changed it; T response tokens, row after row."""

    # With their advantages by token.
    rows: list[Row]
    # [T] V(s_t), and the R_t that it is fitted to; on the device.
    values: torch.Tensor
    returns: torch.Tensor
    # float64 [n]: mean of |A_t| over the tokens of each row.
    sizes: torch.Tensor


class Critic:
    """V(s_t) of one policy's samples under weights that are fitted to their returns."""

    def __init__(self, policy: Any, spec: CriticSpec, pieces: Pieces, *, bfloat16: bool) -> None:
        """A critic whose trunk is a copy of the model `policy`'s, whose head is zero.

        What of the model is frozen stays shared with it: with an adapter the critic is one too.
        `pieces` lays rows out as suits the model; `bfloat16`: matrices are multiplied in it.
        """
        module = _copy_of(policy)
        self._head = _ValueHead(module.get_output_embeddings().weight)
        module.set_output_embeddings(self._head)
        # What bounds logits (Gemma) would bound values.
        config = module.config.get_text_config()
        if getattr(config, "final_logit_softcapping", None) is not None:
            config.final_logit_softcapping = None
        # What is behind a model's last position cannot be read (GPT-2) or was never learned.
        self._positions = int(getattr(config, "max_position_embeddings", 0) or 0)
        self._module = module
        self._spec, self._pieces, self._bfloat16 = spec, pieces, bfloat16
        self._trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._gradients = Gradients(list(self._trained.values()))
        self._optimizer = make_optimizer(module, spec.optimizer)
        self._lodger = PooledParameters(self._trained, list(self._trained.values()))
        self._statistics = ValueStatistics()
        self._tokens = 0

    @property
    def gradients(self) -> Gradients:
        """What accumulates between two steps."""
        return self._gradients

    def estimate(self, rows: Sequence[Row], stop: threading.Event | None) -> Estimate:
        """Values, advantages and returns of rows that are whole chains. Raises `Stopped`."""
        views = [self._view(row) for row in rows]
        values = self._head.weight.new_empty(sum(response_lengths(rows)))
        with torch.no_grad():
            for piece in self._pieces(views, stop):
                values[piece.order] = self._values(piece)
        advantages = chained_advantages(
            rows, values, gamma=self._spec.gamma, gae_lambda=self._spec.gae_lambda
        )
        parts = torch.split(advantages, response_lengths(rows))
        credited = [
            replace(row, advantages=part.numpy()) for row, part in zip(rows, parts, strict=True)
        ]
        returns = values + advantages.to(values.device, values.dtype)
        sizes = [float(part.abs().mean()) if len(part) else 0.0 for part in parts]
        return Estimate(credited, values, returns, torch.tensor(sizes, dtype=torch.float64))

    def backward(self, estimate: Estimate, stop: threading.Event | None) -> str:
        """Add the gradient of the summed value loss; why not, if it is not finite.

        Raises `Stopped` between pieces.
        """
        clip = self._spec.value_clip
        for piece in self._pieces([self._view(row) for row in estimate.rows], stop):
            returns, old = estimate.returns[piece.order], estimate.values[piece.order]
            values = self._values(piece)
            loss = value_loss(values, returns, old, clip).sum()
            if not torch.isfinite(loss):
                return f"the value loss of a micro-batch is {loss.item()}"
            torch.autograd.backward(loss)
            self._statistics.add(values, returns, old, clip)
            self._tokens += len(values)
        return ""

    def finish(self) -> float:
        """The mean gradient of what was added, clipped; returns its norm before the clip."""
        return self._gradients.finish(max(self._tokens, 1), self._spec.optimizer.max_grad_norm)

    def step(self, version: int, steps: int) -> None:
        """One update with what `finish` left, at the rate of `version` of `steps`."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._spec.optimizer, version, steps)
        self._optimizer.step()

    def clear(self) -> None:
        """Forget the gradient of one update."""
        self._gradients.discard()
        self._tokens = 0

    def discard(self) -> None:
        """Forget the step that accumulates."""
        self.clear()
        self._statistics = ValueStatistics()

    def metrics(self) -> dict[str, float]:
        """Of the step that accumulates."""
        return self._statistics.metrics() if self._statistics.tokens else {}

    def state(self) -> dict[str, torch.Tensor]:
        """Weights by `critic/weight/{parameter}` and moments by `critic/{slot}/{parameter}`.

        Not a copy.
        """
        state = {f"{_PREFIX}{_WEIGHT}/{n}": p.detach() for n, p in self._trained.items()}
        moments = export_moments(self._module, self._optimizer)
        return state | {f"{_PREFIX}{name}": tensor for name, tensor in moments.items()}

    def restore(
        self, state: Mapping[str, torch.Tensor], *, copy: bool = True
    ) -> dict[str, torch.Tensor]:
        """Take over what `state` gave; returns the tensors that are not of it.

        Without `copy` the critic goes on in these very tensors, which are on its device. Raises
        TensorsDoNotFit, a ValueError, when a weight is missing, not its own or of another shape.
        """
        self.discard()
        mine = {n.removeprefix(_PREFIX): t for n, t in state.items() if n.startswith(_PREFIX)}
        weights = suspension.below(_WEIGHT, mine)
        if missing := sorted(self._trained.keys() - weights.keys()):
            raise TensorsDoNotFit(f"the state has no weights of the critic: missing {missing[:3]}")
        found, own = ({n: t.shape for n, t in one.items()} for one in (weights, self._trained))
        if wrong := shape_difference(found, own):
            raise TensorsDoNotFit(f"the state's weights are not the critic's: {wrong}")
        if copy:
            with torch.no_grad():
                for name, parameter in self._trained.items():
                    parameter.copy_(weights[name])
        else:
            self._lodger.enter(weights)
        moments = {n: t for n, t in mine.items() if not n.startswith(f"{_WEIGHT}/")}
        import_moments(self._module, self._optimizer, moments, copy=copy)
        return {n: t for n, t in state.items() if not n.startswith(_PREFIX)}

    # Suspension, in the middle of a step too.

    def of_step(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """What accumulates within a step: tensors, not copied, and plain values."""
        gradients, bounds = self._gradients.state()
        statistics, told = suspension.take_apart(self._statistics)
        tensors = suspension.under("gradients", gradients) | suspension.under(
            "statistics", statistics
        )
        return tensors, {"bounds": bounds, "statistics": told, "tokens": self._tokens}

    def resume_step(self, tensors: dict[str, torch.Tensor], values: Mapping[str, Any]) -> None:
        """Inverse of `of_step`."""
        self._gradients.restore(suspension.below("gradients", tensors), values["bounds"])
        statistics = suspension.below("statistics", tensors)
        suspension.put_together(self._statistics, statistics, values["statistics"])
        self._tokens = values["tokens"]

    def leave(self) -> list[torch.Tensor]:
        """Give the device's memory up; only `restore` without `copy` makes a critic of it again."""
        left = [*export_moments(self._module, self._optimizer).values(), *self._lodger.leave()]
        self._optimizer.state.clear()
        self.discard()
        self._gradients.restore({}, [])
        return left

    def _view(self, row: Row) -> Row:
        """The row as the critic sees it: behind what the team saw, where it observes that."""
        if self._spec.observes == "agent":
            return row
        if row.context is None:
            raise FailedPrecondition(
                "it has no column critic_context, which a critic that observes the team reads",
                kind="malformed_sample",
                field="sample_id",
                value=row.sample_id,
                remedy="Update the rollout workers, or set algorithm.critic.observes to `agent`.",
            )
        room = self._spec.context_tokens
        if self._positions:
            room = min(room, max(0, self._positions - len(row.ids)))
        context = row.context[max(0, len(row.context) - room) :]
        ids = np.concatenate([context, row.ids])
        return replace(row, ids=ids, prompt_length=row.prompt_length + len(context))

    def _values(self, piece: PackedBatch) -> torch.Tensor:
        """V(s_t) of the piece's N tokens, [N]."""
        if piece.packing is not None:
            # Or its rows would be taken for one.
            self._module.config._attn_implementation = PACKED
        precision: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self._bfloat16:
            precision = torch.autocast(piece.input_ids.device.type, dtype=torch.bfloat16)
        with precision:
            return response_logits(self._module, piece)[:, 0]


class _ValueHead(torch.nn.Linear):
    """One number per hidden state, in single precision at least."""

    def __init__(self, replaced: torch.Tensor) -> None:
        """In the place of an output layer whose weight is `replaced` [V, d]; all zero."""
        dtype = torch.promote_types(replaced.dtype, torch.float32)
        super().__init__(replaced.shape[1], 1, device=replaced.device, dtype=dtype)
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., d] to [..., 1]"""
        with torch.autocast(hidden.device.type, enabled=False):
            return super().forward(hidden.to(self.weight.dtype))


def _copy_of(model: Any) -> Any:
    """The model with weights of its own where they are trained; frozen ones are shared."""
    memo: dict[int, Any] = {id(p): p for p in model.parameters() if not p.requires_grad}
    # What names the policy's adapter does not name the critic's.
    memo[id(getattr(model, "troupe_adapter", None))] = None
    return copy.deepcopy(model, memo)


def _earned(row: Row, *, last: bool) -> float:
    """The reward at a turn's last token, `last` of its chain (`troupe.workflow.samples`)."""
    if row.earned is not None:
        return row.earned + (row.final or 0.0 if last else 0.0)
    # Nothing but `reward` is known: of the turn, or else of its agent.
    return row.reward if row.own_reward or last else 0.0


def chained_advantages(
    rows: Sequence[Row], values: torch.Tensor, *, gamma: float, gae_lambda: float
) -> torch.Tensor:
    """A_t of the rows' response tokens, row after row: float64 [T] on the CPU.

    `values` [T]. Turns of a chain (values.py) follow one another by `Row.turn`; one that has not
    come is as if it had not been.
    """
    starts = np.cumsum([0, *response_lengths(rows)])
    chains: dict[tuple[str, str, str], list[int]] = {}
    for i in sorted(range(len(rows)), key=lambda i: rows[i].turn):
        if rows[i].response_length:
            row = rows[i]
            chains.setdefault((row.trajectory, row.agent, row.chain), []).append(i)
    rewards = torch.zeros(len(values), dtype=torch.float64)
    for chain in chains.values():
        for i in chain:
            rewards[starts[i + 1] - 1] = _earned(rows[i], last=i == chain[-1])
    ordered = [np.arange(starts[i], starts[i + 1]) for chain in chains.values() for i in chain]
    if not ordered:
        return torch.zeros(0, dtype=torch.float64)
    order = torch.from_numpy(np.concatenate(ordered))
    lengths = [sum(rows[i].response_length for i in chain) for chain in chains.values()]
    found = torch.empty(len(values), dtype=torch.float64)
    found[order] = gae(
        rewards[order], values.cpu()[order], lengths, gamma=gamma, gae_lambda=gae_lambda
    )
    return found
