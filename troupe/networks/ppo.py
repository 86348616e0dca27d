"""`PPOLearner`: independent PPO and MAPPO, with TorchRL's losses and advantages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModuleBase,
)
from torch import nn
from torch.distributions import Categorical
from torchrl.modules import IndependentNormal, PopArtValueNorm
from torchrl.objectives.multiagent import IPPOLoss, MAPPOLoss
from torchrl.objectives.value.functional import vec_generalized_advantage_estimate

from troupe.algorithms.objectives import MAX_LOG_RATIO
from troupe.job.sections.network import NetworkSpec, PPOSpec
from troupe.networks.acting import ActingNetwork
from troupe.networks.fragments import Fragment
from troupe.networks.learner_state import LearnerTensors, NetworkTrainer
from troupe.networks.modules import ILLEGAL, Networks, initialize
from troupe.networks.rows import Rows, check, rows_of
from troupe.networks.vector import Spaces

Tensors = dict[str, torch.Tensor]

# Decay of the running statistics of returns: they follow a policy within a few hundred gradient
# steps.
_RETURNS_MEMORY = 0.99


class _Distribution(TensorDictModuleBase):  # type: ignore[misc]
    """Parameters of the action distributions, by `sequences`, `who` and `index`."""

    def __init__(self, acting: ActingNetwork) -> None:
        super().__init__()
        self.in_keys = ["sequences", "who", "index"]
        self.out_keys = ["loc", "scale"] if acting.spaces.continuous else ["logits"]
        self.acting = acting

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        out = self.acting.policy(tensordict["sequences"], tensordict["who"], tensordict["index"])
        if self.acting.spaces.continuous:
            tensordict["loc"], tensordict["scale"] = out, self.acting.log_std.exp().expand_as(out)
        elif "legal" in tensordict:
            tensordict["logits"] = out.masked_fill(~tensordict["legal"], ILLEGAL)
        else:
            tensordict["logits"] = out
        return tensordict


class _PredictedReturns(TensorDictModuleBase):  # type: ignore[misc]
    """The critic's returns, denormalized."""

    def __init__(self, critic: Networks, norm: PopArtValueNorm | None) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["seen", "who", "index"], ["state_value"]
        self.critic = critic
        # In a list, so that it is not registered as a submodule: the loss owns and updates it.
        self._norm = [norm]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        values = self.critic(tensordict["seen"], tensordict["who"], tensordict["index"])
        norm = self._norm[0]
        tensordict["state_value"] = values if norm is None else norm.denormalize(values)
        return tensordict


class _BoundedRatio:
    """Mixin of a PPO loss that bounds log pi/mu by `MAX_LOG_RATIO`. Where a ratio overflows and is
    clipped, TorchRL's gradient is zero times infinity: one very unlikely action would make all
    weights NaN."""

    def _log_weight(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        log_weight, *others = super()._log_weight(*args, **kwargs)  # type: ignore[misc]
        # The gradient is kept, as in the losses of language models (`bounded_exp`).
        beyond = MAX_LOG_RATIO + (log_weight - log_weight.detach())
        return torch.where(log_weight > MAX_LOG_RATIO, beyond, log_weight), *others


class _IndependentLoss(_BoundedRatio, IPPOLoss):  # type: ignore[misc]
    """The IPPO loss with bounded ratios."""


class _TeamLoss(_BoundedRatio, MAPPOLoss):  # type: ignore[misc]
    """The MAPPO loss with bounded ratios."""


class PPOLearner(NetworkTrainer):
    """A `NetworkTrainer` with clipped policy gradients on the fragments of one update."""

    def __init__(
        self, spec: NetworkSpec, learning: PPOSpec, spaces: Spaces, agents: tuple[str, ...]
    ) -> None:
        """Weights are drawn from torch's generator; `make_learner` seeds it."""
        self._spec, self._learning, self._spaces, self._agents = spec, learning, spaces, agents
        self._acting = ActingNetwork(spec, spaces, len(agents))
        self._team = learning.paradigm == "mappo"
        own = spaces.observation + self._acting.identity
        self._critic = Networks(spec, len(agents), own + spaces.state * self._team, 1)
        initialize(self._acting.policy, 0.01)
        initialize(self._critic, 1.0)
        norm = PopArtValueNorm(shape=1, beta=_RETURNS_MEMORY) if learning.normalize_values else None
        self._values = _PredictedReturns(self._critic, norm)
        continuous = spaces.continuous
        policy = ProbabilisticTensorDictSequential(
            _Distribution(self._acting),
            ProbabilisticTensorDictModule(
                in_keys=["loc", "scale"] if continuous else ["logits"],
                out_keys=["action"],
                distribution_class=IndependentNormal if continuous else Categorical,
                distribution_kwargs={} if continuous else {"validate_args": False},
                return_log_prob=True,
            ),
        )
        self._loss = (_TeamLoss if self._team else _IndependentLoss)(
            policy,
            self._values,
            value_norm=norm,
            clip_epsilon=learning.clip,
            entropy_coeff=learning.entropy_coefficient,
            entropy_bonus=learning.entropy_coefficient > 0,
            critic_coeff=learning.value_coefficient,
            loss_critic_type="smooth_l1",
            normalize_advantage=False,
        )
        self._loss.set_keys(sample_log_prob="log_prob")
        modules: dict[str, nn.Module] = {"acting": self._acting, "critic": self._critic}
        self._trained = list(modules.items())
        if norm is not None:
            modules["returns"] = norm
        self._tensors = LearnerTensors(
            modules,
            {
                name: torch.optim.Adam(module.parameters(), lr=learning.lr, eps=1e-5)
                for name, module in self._trained
            },
            torch.Generator(),
            counts={"updates": 0},
        )

    def update(self, fragments: Sequence[Fragment]) -> dict[str, float]:
        """See `NetworkTrainer.update`; every epoch goes over all decisions of all fragments."""
        check(fragments, self._spaces, self._agents, some=True)
        rows = rows_of(fragments, self._agents)
        data = self._data(rows)
        sums: dict[str, float] = {}
        made = 0
        for _ in range(self._learning.epochs):
            for part in self._minibatches(data):
                for name, value in self._step(part).items():
                    sums[name] = sums.get(name, 0.0) + value
                made += 1
        self._tensors.counts["updates"] += 1
        metrics = {name: total / max(made, 1) for name, total in sums.items()}
        returns = np.concatenate([fragment.returns().ravel() for fragment in fragments])
        metrics["return"] = float(returns.mean())
        metrics["decisions"] = float(rows.lengths.sum())
        return metrics

    def _data(self, rows: Rows) -> Tensors:
        """Return the units of minibatches [U, L, ...]: episodes with a GRU, else single decisions;
        `valid` [U, L] masks padding."""
        episodes, agents, _, _ = rows.observations.shape
        who = torch.arange(agents).repeat(episodes)
        sequences = _merged(rows.observations)
        if self._acting.identity:
            mark = torch.eye(agents)[who][:, None].expand(-1, sequences.shape[1], -1)
            sequences = torch.cat([sequences, mark], dim=-1)
        seen = torch.cat([sequences, _merged(rows.state)], dim=-1) if self._team else sequences
        with torch.no_grad():
            found = self._values(TensorDict({"seen": seen, "who": who, "index": None}))
        values = found["state_value"].view(*seen.shape[:2], 1)
        valid = _merged(rows.decided())
        done = _merged(rows.last()) | ~valid
        terminated = done & _merged(rows.terminated)[:, None]
        # Values beyond an episode's end are undefined; `done` keeps them out.
        advantage, target = vec_generalized_advantage_estimate(
            self._learning.gamma,
            self._learning.gae_lambda,
            values[:, :-1],
            values[:, 1:],
            torch.where(valid, _merged(rows.rewards), 0.0).unsqueeze(-1),
            done.unsqueeze(-1),
            terminated.unsqueeze(-1),
        )
        counted = advantage[valid]
        advantage = (advantage - counted.mean()) / (counted.std(correction=0) + 1e-6)
        data = {
            "sequences": sequences[:, :-1],
            "seen": seen[:, :-1],
            "action": _merged(rows.actions),
            "log_prob": _merged(rows.log_probs),
            "advantage": advantage,
            "value_target": target,
            "valid": valid,
        }
        if rows.legal is not None:
            data["legal"] = _merged(rows.legal)[:, :-1]
        if self._spec.kind == "rnn":
            return data | {"who": who}
        flat = {name: tensor[valid].unsqueeze(1) for name, tensor in data.items()}
        return flat | {"who": who[:, None].expand_as(valid)[valid]}

    def _minibatches(self, data: Tensors) -> Iterator[TensorDict]:
        units, parts = len(data["who"]), self._learning.minibatches
        order = torch.randperm(units, generator=self._tensors.generator) if parts > 1 else None
        for chosen in [None] if order is None else order.tensor_split(parts):
            part = data if chosen is None else {name: value[chosen] for name, value in data.items()}
            valid = part["valid"]
            index = valid.flatten().nonzero(as_tuple=True)[0]
            if not len(index):
                continue
            # `sequences`, `seen` and `who` stay whole; the networks select by `index`.
            whole = {name: part[name] for name in ("sequences", "seen", "who")}
            counted = {
                name: value[valid]
                for name, value in part.items()
                if name not in ("sequences", "seen", "who", "valid")
            }
            yield TensorDict({**whole, **counted, "index": index}, [])

    def _step(self, part: TensorDict) -> dict[str, float]:
        losses = self._loss(part)
        total = sum(value for name, value in losses.items() if name.startswith("loss_"))
        for optimizer in self._tensors.optimizers.values():
            optimizer.zero_grad()
        total.backward()  # type: ignore[union-attr]
        metrics = {}
        for name, module in self._trained:
            norm = torch.nn.utils.clip_grad_norm_(module.parameters(), self._learning.max_grad_norm)
            metrics[f"grad_norm/{name}"] = float(norm)
            self._tensors.optimizers[name].step()
        for name in ("loss_objective", "loss_critic", "entropy", "clip_fraction", "kl_approx"):
            if name in losses:
                metrics[name] = float(losses[name].detach())
        return metrics


def _merged(array: Any) -> torch.Tensor:
    """Return an array [E, A, ...] as a tensor [E * A, ...]."""
    return torch.from_numpy(np.ascontiguousarray(array)).flatten(0, 1)
