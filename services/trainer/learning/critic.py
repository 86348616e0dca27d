"""The critic of one policy: its value function, GAE advantages, and value loss, of tokens or turns.

The critic is a separate network: a copy of the policy's first weights with a scalar output layer.
So the policy's gradient, gradient norm and optimizer state are the same as without a critic, and
published weights do not contain it. The critic's weights and moments are training state.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from services.trainer.learning.forward import response_logits
from services.trainer.learning.optimizer import (
    Gradients,
    export_moments,
    import_moments,
    make_optimizer,
)
from services.trainer.learning.ranks import RankBatches, RankGroup
from services.trainer.learning.samples import (
    Row,
    TrainingBatch,
    by_token,
    chains_of,
    earned_in,
    response_lengths,
)
from services.trainer.learning.sequences.attention import PACKED
from services.trainer.learning.sequences.packing import PackedBatch, one_token
from services.trainer.state import suspension
from services.trainer.state.parameter_memory import PooledParameters
from troupe.algorithms.values import ValueStatistics, gae, value_loss
from troupe.checkpoints.tensors import TensorsDoNotFit, shape_difference
from troupe.job.sections.algorithm import CriticSpec
from troupe.job.sections.policy import Offload
from troupe.rpc import FailedPrecondition

# Prefix of the critic's tensors in the optimizer state, and the name of its weights below it.
_PREFIX = "critic/"
_WEIGHT = "weight"
# Function that packs this rank's rows into forward passes, with gradients or without.
Pack = Callable[[Sequence[Row], threading.Event | None, bool], RankBatches]


def critic_module(policy: Any) -> Any:
    """Return a copy of the trunk of the model `policy`, with a new output layer of zeros.

    Frozen weights stay shared: the critic of a policy with an adapter is an adapter, too.
    """
    memo: dict[int, Any] = {id(p): p for p in policy.parameters() if not p.requires_grad}
    # The `Adapter` of the policy refers to the policy's own parameters.
    memo[id(getattr(policy, "troupe_adapter", None))] = None
    weight = policy.get_output_embeddings().weight
    return with_value_head(copy.deepcopy(policy, memo), weight.device)


def with_value_head(module: Any, device: torch.device) -> Any:
    """Return a language model (which may be on the meta device) with a value function in place of
    its output layer, which is on `device`."""
    module.set_output_embeddings(ValueHead(module.get_output_embeddings().weight, device))
    # Disabled, as a soft cap on logits (Gemma) would bound the values.
    config = module.config.get_text_config()
    if getattr(config, "final_logit_softcapping", None) is not None:
        config.final_logit_softcapping = None
    return module


class Critic:
    """The value function V(s_t) of one policy, and its optimizer."""

    def __init__(
        self,
        module: Any,
        spec: CriticSpec,
        pack: Pack,
        offload: Offload,
        device: torch.device,
        bfloat16: bool,
        ranks: RankGroup,
    ) -> None:
        """`module`: with a value head (`critic_module`), or this rank's shards of it.

        `bfloat16`: compute under autocast to bfloat16. `ranks`: those that hold the other parts.
        `offload`: unless "none", with moments in host memory; the weights stay on the device.
        """
        # Longest input: later positions cannot be embedded (GPT-2) or were never trained.
        config = module.config.get_text_config()
        self._positions = int(getattr(config, "max_position_embeddings", 0) or 0)
        self._module = module
        self._spec, self._pack, self._bfloat16 = spec, pack, bfloat16
        self._device, self._ranks = device, ranks
        self._trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.parameters = list(self._trained.values())
        self.gradients = Gradients(self.parameters, ranks)
        self._optimizer = make_optimizer(module, spec.optimizer, offload)
        # Of a gang, FSDP owns the memory of the parameters.
        own = self._trained if ranks.size == 1 else {}
        self._pooled = PooledParameters(own)
        self._statistics = ValueStatistics()
        self._tokens = 0

    def estimate(self, rows: Sequence[Row], stop: threading.Event | None) -> TrainingBatch:
        """Compute values, advantages and returns of whole chains with the current weights.

        The returned batch's rows have their advantages by token, unless values are of turns. In a
        gang every rank gets all rows, computes its share and has the values of all. Raises
        `Stopped`.
        """
        given, rows = rows, self._states(rows)
        views, order = self._share(rows)
        dtype = self._module.get_output_embeddings().weight.dtype
        values = torch.zeros(sum(response_lengths(rows)), dtype=dtype, device=self._device)
        batches = self._pack(views, stop, False)
        with torch.no_grad():
            for batch in batches:
                smallest = functools.partial(self._keep_elsewhere, batch, batches.seeing)
                if batch is None:
                    batches.run(smallest, smallest)
                    continue
                here = batch.to(self._device)
                found = batches.run(functools.partial(self._values, here), smallest)
                if found is not None:
                    values[order[here.order]] = found
        if self._ranks.size > 1:
            values = self._ranks.summed(values.cpu()).to(self._device)
        advantages = chained_advantages(
            rows,
            values,
            gamma=self._spec.gamma,
            gae_lambda=self._spec.gae_lambda,
            team=self._spec.episodes == "team",
        )
        returns = values + advantages.to(values.device, values.dtype)
        if self._spec.values == "token":
            return replace(by_token(given, advantages), values=values, returns=returns)
        # A turn has one value, or none without a response.
        parts = torch.split(advantages, response_lengths(rows))
        of_turns = torch.stack([part.sum() for part in parts])
        return TrainingBatch(given, of_turns, values, returns)

    def backward(self, batch: TrainingBatch, stop: threading.Event | None) -> str:
        """Add the gradient of the summed value loss of a batch that `estimate` returned.

        Returns why the gradient cannot be used, or an empty text. Raises `Stopped` between passes.
        """
        assert batch.values is not None, "the batch is an estimate of a critic"
        assert batch.returns is not None, "the batch is an estimate of a critic"
        clip = self._spec.value_clip
        rows = self._states(batch.rows)
        views, order = self._share(rows)
        batches = self._pack(views, stop, True)
        found = []
        for packed in batches:
            if batches.keeping:
                elsewhere = functools.partial(self._keep_elsewhere, packed, batches.seeing)
                keep = elsewhere if packed is None else functools.partial(self._keep, packed)
                batches.run(keep, elsewhere)
                continue
            smallest = functools.partial(self._smallest_pass, packed, batches.seeing)
            if packed is None:
                batches.run(smallest, smallest)
                continue
            here = packed.to(self._device)
            place = order[here.order]
            given = batch.returns[place], batch.values[place]
            one = functools.partial(self._pass, here, *given)
            if (result := batches.run(one, smallest)) is not None:
                batches.problem, values = result
                found.append((values, *given))
        # Not before: passes that run out of memory are repeated, all of them (pass_budget.py).
        for values, returns, old in found:
            self._statistics.add(values, returns, old, clip)
        # All ranks divide by the tokens of all.
        self._tokens += sum(response_lengths(rows))
        return batches.problem

    def _pass(
        self, batch: PackedBatch, returns: torch.Tensor, old: torch.Tensor
    ) -> tuple[str, torch.Tensor]:
        """Add the gradient of one pass: why it cannot be used, and the values [N]."""
        values = self._values(batch)
        loss = value_loss(values, returns, old, self._spec.value_clip).sum()
        problem = ""
        if not torch.isfinite(loss):
            problem = f"the value loss of a micro-batch is {loss.item()}"
        # Also for a loss that is discarded: other ranks need this pass.
        torch.autograd.backward(loss)
        return problem, values.detach()

    def _smallest_pass(self, instead: PackedBatch | None, seeing: bool) -> None:
        """Take part in a pass of other ranks; `instead`: the batch that this one gave up; `seeing`:
        as for `one_token`."""
        one = one_token(self._device, instead, seeing=seeing)
        torch.autograd.backward(self._values(one).sum() * 0.0)

    def _states(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Return `rows` with a response token for each state that has a value: with `values: turn`
        only the first one, before which the prompt is the state."""
        if self._spec.values == "token":
            return rows
        return [row if row.response_length < 2 else _first_token(row) for row in rows]

    def _share(self, rows: Sequence[Row]) -> tuple[list[Row], torch.Tensor]:
        """Return the input rows that this rank computes, and the positions of their response tokens
        among all rows' response tokens: int64 [N], on the device."""
        views = [self._view(row) for row in rows]
        mine = self._ranks.share(views)
        starts = np.cumsum([0, *response_lengths(rows)])
        places = [np.arange(starts[i], starts[i + 1]) for i in mine] or [np.arange(0)]
        order = torch.from_numpy(np.concatenate(places)).to(self._device)
        return [views[i] for i in mine], order

    def finish(self) -> float:
        """Turn the summed gradient into a mean over tokens, clip it, and return its norm before
        clipping."""
        return self.gradients.finish(max(self._tokens, 1), self._spec.optimizer.max_grad_norm)

    def step(self, rate: float) -> None:
        """Update the weights after `finish`, at this learning rate."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()

    def clear(self) -> None:
        """Discard the gradient of the current update."""
        self.gradients.discard()
        self._tokens = 0

    def discard(self) -> None:
        """Discard the gradient and the statistics of the current step."""
        self.clear()
        self._statistics = ValueStatistics()

    def metrics(self) -> dict[str, float]:
        """Return the value statistics of the current step, of all ranks."""
        found = self._ranks.merged(self._statistics)
        return found.metrics() if found.tokens else {}

    def leave_statistics(self, *, here: bool) -> None:
        """Let one rank of a gang hold the statistics of all ranks; `here`: this rank does."""
        merged = self._ranks.merged(self._statistics)
        self._statistics = merged if here else ValueStatistics()

    def without_statistics(
        self, tensors: dict[str, torch.Tensor], values: Mapping[str, Any]
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return a suspended state (`Learner.suspended`) with zeros for the statistics of the
        critic, which another rank continues."""
        begin = f"{_PREFIX}statistics/"
        fresh, counts = suspension.split_fields(ValueStatistics())
        found = {name: t for name, t in tensors.items() if not name.startswith(begin)}
        found |= {f"{begin}{name}": t for name, t in fresh.items()}
        return found, {**values, "critic": {**values["critic"], "statistics": counts}}

    def sharded(self) -> dict[str, torch.Tensor]:
        """Return the parameters by their names in `state`, and in gradients of `step_state`."""
        named = {n: p.detach() for n, p in self._trained.items()}
        numbered = {str(i): p for i, p in enumerate(named.values())}
        return suspension.under(f"{_PREFIX}{_WEIGHT}", named) | suspension.under(
            f"{_PREFIX}gradients", numbered
        )

    def state(self) -> dict[str, torch.Tensor]:
        """Return weights by `critic/weight/{parameter}`, moments by `critic/{kind}/{parameter}`."""
        state = {f"{_PREFIX}{_WEIGHT}/{n}": p.detach() for n, p in self._trained.items()}
        moments = export_moments(self._module, self._optimizer)
        return state | {f"{_PREFIX}{name}": tensor for name, tensor in moments.items()}

    def restore(
        self, state: Mapping[str, torch.Tensor], *, copy: bool = True
    ) -> dict[str, torch.Tensor]:
        """Restore the critic's tensors in `state`, and return the other tensors of `state`.

        Without `copy` the critic uses the given tensors themselves, which must be on its device.
        Raises TensorsDoNotFit, a ValueError, if a weight is missing, superfluous or misshaped.
        """
        self.discard()
        mine = {n.removeprefix(_PREFIX): t for n, t in state.items() if n.startswith(_PREFIX)}
        weights = suspension.below(_WEIGHT, mine)
        if missing := sorted(self._trained.keys() - weights.keys()):
            raise TensorsDoNotFit(f"the state has no weights of the critic: missing {missing[:3]}")
        found, own = ({n: t.shape for n, t in one.items()} for one in (weights, self._trained))
        if wrong := shape_difference(found, own):
            raise TensorsDoNotFit(f"the state's weights are not the critic's: {wrong}")
        if copy or self._ranks.size > 1:
            with torch.no_grad():
                for name, parameter in self._trained.items():
                    parameter.copy_(weights[name])
        else:
            self._pooled.attach(weights)
        moments = {n: t for n, t in mine.items() if not n.startswith(f"{_WEIGHT}/")}
        import_moments(self._module, self._optimizer, moments, copy=copy)
        return {n: t for n, t in state.items() if not n.startswith(_PREFIX)}

    # Suspension, possible in the middle of a step.

    def step_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return the current step's gradients and statistics as tensors, not copied, and plain
        values."""
        gradients, bounds = self.gradients.state()
        statistics, counts = suspension.split_fields(self._statistics)
        tensors = suspension.under("gradients", gradients)
        tensors |= suspension.under("statistics", statistics)
        return tensors, {"bounds": bounds, "statistics": counts, "tokens": self._tokens}

    def restore_step(self, tensors: dict[str, torch.Tensor], values: Mapping[str, Any]) -> None:
        """Restore the values of `step_state`."""
        self.gradients.restore(suspension.below("gradients", tensors), values["bounds"])
        statistics = suspension.below("statistics", tensors)
        suspension.join_fields(self._statistics, statistics, values["statistics"])
        self._tokens = values["tokens"]

    def release(self) -> list[torch.Tensor]:
        """Release and return the device memory; only `restore` without `copy` may follow."""
        left = [*export_moments(self._module, self._optimizer).values(), *self._pooled.release()]
        self._optimizer.state.clear()
        self.discard()
        self.gradients.restore({}, [])
        return left

    @torch.no_grad()
    def _keep(self, batch: PackedBatch) -> None:
        """Run a piece for its keys and values."""
        self._values(batch.to(self._device))

    def _keep_elsewhere(self, instead: PackedBatch | None, seeing: bool) -> None:
        """Like `_smallest_pass`, without gradients."""
        self._keep(one_token(self._device, instead, seeing=seeing))

    def _view(self, row: Row) -> Row:
        """Return the critic's input row: the team's context, if observed, is put before the
        prompt."""
        if row.routes is not None:
            row = replace(row, routes=None)  # the policy's: the critic's router chooses by itself
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
        return replace(
            row,
            ids=np.concatenate([context, row.ids]),
            prompt_length=row.prompt_length + len(context),
            payloads=tuple(placed.moved(len(context)) for placed in row.payloads),
        )

    def _values(self, batch: PackedBatch) -> torch.Tensor:
        """Return V(s_t) of the batch's N tokens, [N]."""
        if batch.packing is not None:
            # Plain attention would treat the rows of a packed batch as one sequence.
            self._module.config._attn_implementation = PACKED
        precision: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self._bfloat16:
            precision = torch.autocast(batch.input_ids.device.type, dtype=torch.bfloat16)
        with precision:
            return response_logits(self._module, batch)[:, 0]


class ValueHead(torch.nn.Linear):
    """The critic's output layer: one number per hidden state, in float32 or better."""

    def __init__(self, replaced: torch.Tensor, device: torch.device) -> None:
        """Make a layer of zeros for the inputs of an output layer with weight `replaced` [V, d]."""
        dtype = torch.promote_types(replaced.dtype, torch.float32)
        super().__init__(replaced.shape[1], 1, device=device, dtype=dtype)
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return values [..., 1] of hidden states [..., d]."""
        with torch.autocast(hidden.device.type, enabled=False):
            return super().forward(hidden.to(self.weight.dtype))


def _first_token(row: Row) -> Row:
    """Return `row` with the first token of its response, which earns what the turn earned."""
    size = row.prompt_length + 1
    return replace(
        row,
        ids=row.ids[:size],
        behaviour=row.behaviour[:1],
        reference=None,
        teacher=None,
        old=None,
        advantages=None,
        penalty=None if row.penalty is None else row.penalty.sum(keepdims=True),
    )


def chained_advantages(
    rows: Sequence[Row],
    values: torch.Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    team: bool = False,
) -> torch.Tensor:
    """Return the GAE advantages of the rows' T response tokens, row after row: float64 [T] on the
    CPU.

    `values`: V(s_t), [T]. The turns of a chain (`troupe/algorithms/values.py`) are ordered by
    `Row.turn`; a turn that is missing is left out of the chain. `team`: as in `chains_of`.
    """
    starts = np.cumsum([0, *response_lengths(rows)])
    chains = chains_of(rows, team=team)
    rewards = torch.zeros(len(values), dtype=torch.float64)
    for chain in chains:
        for i, earned in zip(chain, earned_in(rows, chain), strict=True):
            rewards[starts[i + 1] - 1] = earned
            if (penalty := rows[i].penalty) is not None:
                rewards[starts[i] : starts[i + 1]] -= torch.from_numpy(penalty)
    ordered = [np.arange(starts[i], starts[i + 1]) for chain in chains for i in chain]
    if not ordered:
        return torch.zeros(0, dtype=torch.float64)
    order = torch.from_numpy(np.concatenate(ordered))
    lengths = [sum(rows[i].response_length for i in chain) for chain in chains]
    found = torch.empty(len(values), dtype=torch.float64)
    found[order] = gae(
        rewards[order], values.cpu()[order], lengths, gamma=gamma, gae_lambda=gae_lambda
    )
    return found
