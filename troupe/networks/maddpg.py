"""`DeterministicLearner`: MADDPG, with TorchRL's DDPG loss and a critic that sees all agents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torch.nn import functional
from torchrl.modules import RunningValueNorm
from torchrl.objectives import DDPGLoss, SoftUpdate
from torchrl.objectives.utils import ValueEstimators

from troupe.job.sections.network import DeterministicSpec, NetworkSpec
from troupe.networks.acting import ActingNetwork
from troupe.networks.fragments import Fragment
from troupe.networks.learner_state import LearnerTensors, NetworkTrainer, Replay
from troupe.networks.modules import ILLEGAL, Networks
from troupe.networks.rows import check
from troupe.networks.vector import Spaces
from troupe.rpc.errors import InvalidArgument

Tensors = dict[str, torch.Tensor]


class _Actions(TensorDictModuleBase):  # type: ignore[misc]
    """Agents' actions [M, A, D] in differentiable form: discrete actions one-hot, drawn with the
    given `noise` [M, A, n] (straight-through Gumbel-softmax, Jang et al. 2017)."""

    def __init__(self, acting: ActingNetwork, temperature: float) -> None:
        super().__init__()
        # The loss passes on only the keys named here; `legal` may be missing.
        self.in_keys = ["observations", "noise", "legal"]
        self.out_keys = ["logits", "action"]
        self.acting = acting
        self._temperature = temperature

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        seen = tensordict["observations"]
        moments, agents, width = seen.shape
        who = torch.arange(agents).repeat(moments)
        out = self.acting.policy(seen.view(-1, 1, width), who).view(moments, agents, -1)
        tensordict["logits"] = out
        if self.acting.spaces.continuous:
            tensordict["action"] = out.tanh()
            return tensordict
        if "legal" in tensordict:
            out = out.masked_fill(~tensordict["legal"], ILLEGAL)
        soft = ((out + tensordict["noise"]) / self._temperature).softmax(-1)
        hard = functional.one_hot(soft.argmax(-1), out.shape[-1]).to(soft.dtype)
        tensordict["action"] = hard - soft.detach() + soft
        return tensordict


class _Critic(TensorDictModuleBase):  # type: ignore[misc]
    """Values [M, A, 1] of the joint action: agent i's critic sees the state, agent i's observation
    and all actions."""

    def __init__(self, critic: Networks) -> None:
        super().__init__()
        self.in_keys = ["observations", "state", "action"]
        self.out_keys = ["state_action_value"]
        self.critic = critic

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        seen, action = tensordict["observations"], tensordict["action"]
        moments, agents, _ = seen.shape
        shared = torch.cat([tensordict["state"], action.flatten(1)], dim=-1)
        inputs = torch.cat([seen, shared[:, None].expand(-1, agents, -1)], dim=-1)
        who = torch.arange(agents).repeat(moments)
        values = self.critic(inputs.view(moments * agents, 1, -1), who)
        tensordict["state_action_value"] = values.view(moments, agents, 1)
        return tensordict


class DeterministicLearner(NetworkTrainer):
    """A `NetworkTrainer` with a replay buffer of joint transitions.

    As in TorchRL's multi-agent tutorial, an actor's gradient is its critic's gradient at the
    current actions of all agents (Lowe et al. take the other agents' actions from the buffer).
    """

    def __init__(
        self,
        spec: NetworkSpec,
        learning: DeterministicSpec,
        spaces: Spaces,
        agents: tuple[str, ...],
    ) -> None:
        """Weights are drawn from torch's generator; `make_learner` seeds it."""
        self._learning, self._spaces, self._agents = learning, spaces, agents
        self._acting = ActingNetwork(spec, spaces, len(agents))
        own = spaces.observation + self._acting.identity
        inputs = own + spaces.state + spaces.actions * len(agents)
        critic = Networks(spec, len(agents), inputs, 1)
        self._actions = _Actions(self._acting, learning.temperature)
        self._loss = DDPGLoss(
            self._actions, _Critic(critic), delay_actor=True, delay_value=True, loss_function="l2"
        )
        self._loss.make_value_estimator(ValueEstimators.TD0, gamma=learning.gamma)
        self._follow = SoftUpdate(self._loss, tau=learning.tau)
        generator = torch.Generator()
        self._replay = Replay(learning.buffer, learning.batch, generator)
        modules: dict[str, nn.Module] = {"acting": self._acting, "critic": critic}
        self._rewards = None
        if learning.standardize_rewards:
            modules["rewards"] = self._rewards = RunningValueNorm(shape=1)
        self._tensors = LearnerTensors(
            modules,
            {
                "acting": torch.optim.Adam(self._acting.parameters(), lr=learning.actor_lr),
                "critic": torch.optim.Adam(critic.parameters(), lr=learning.critic_lr),
            },
            generator,
            {
                "acting": self._loss.target_actor_network_params,
                "critic": self._loss.target_value_network_params,
            },
            self._replay,
            {"updates": 0},
        )

    def update(self, fragments: Sequence[Fragment]) -> dict[str, float]:
        """See `NetworkTrainer.update`: store the transitions, then make `updates` gradient
        steps."""
        check(fragments, self._spaces, self._agents)
        if any("acting" in fragment.arrays for fragment in fragments):
            raise InvalidArgument(
                "learns from joint actions, but here agents take turns",
                field="network.learning.paradigm",
                value=self._learning.paradigm,
                remedy="Use dqn or ppo.",
            )
        for fragment in fragments:
            transitions = _transitions(fragment, self._spaces)
            self._replay.extend(transitions)
            if self._rewards is not None:
                self._rewards.update(transitions["rewards"].unsqueeze(-1))
        returns = np.concatenate([fragment.returns() for fragment in fragments])
        metrics = {"return": float(returns.mean()), "buffer": float(len(self._replay))}
        if len(self._replay) >= max(1, self._learning.warmup):
            made = [self._step() for _ in range(self._learning.updates)]
            metrics |= {name: float(np.mean([one[name] for one in made])) for name in made[0]}
        self._tensors.counts["updates"] += 1
        return metrics

    def _step(self) -> dict[str, float]:
        batch = self._batch(self._replay.sample())
        losses = self._loss(batch)
        penalty = self._actions(batch.select("observations", "noise"))["logits"].square().mean()
        total = losses["loss_actor"] + losses["loss_value"]
        total = total + self._learning.regularization * penalty
        metrics = {name: float(losses[name].detach()) for name in ("loss_actor", "loss_value")}
        for optimizer in self._tensors.optimizers.values():
            optimizer.zero_grad()
        total.backward()
        for name, optimizer in self._tensors.optimizers.items():
            parameters = self._tensors.modules[name].parameters()
            norm = nn.utils.clip_grad_norm_(parameters, self._learning.max_grad_norm)
            metrics[f"grad_norm/{name}"] = float(norm)
            optimizer.step()
        self._follow.step()
        return metrics

    def _batch(self, items: Tensors) -> TensorDict:
        reward = items["rewards"].unsqueeze(-1)
        if self._rewards is not None:
            reward = self._rewards.normalize(reward)
        terminated = items["terminated"].unsqueeze(-1)
        actions = items["actions"]
        if not self._spaces.continuous:
            actions = functional.one_hot(actions, self._spaces.actions).float()
        now = self._moment(items, "")
        then = self._moment(items, "next_")
        then |= {"reward": reward, "terminated": terminated, "done": terminated}
        return TensorDict({**now, "action": actions, "next": TensorDict(then, [])}, [])

    def _moment(self, items: Tensors, when: str) -> dict[str, object]:
        seen = items[f"{when}observations"]
        if self._acting.identity:
            mark = torch.eye(len(self._agents)).expand(len(seen), -1, -1)
            seen = torch.cat([seen, mark], dim=-1)
        noise = torch.empty(*seen.shape[:2], self._spaces.actions)
        noise = -noise.exponential_(generator=self._tensors.generator).log()
        found = {"observations": seen, "state": items[f"{when}state"], "noise": noise}
        if f"{when}legal" in items:
            found["legal"] = items[f"{when}legal"]
        return dict(found)


def _transitions(fragment: Fragment, spaces: Spaces) -> Tensors:
    """Return all joint transitions of a fragment's episodes [M, ...]. For an agent that has left
    the episode, rewards are zero and no value is bootstrapped."""
    own, lengths = fragment.valid(), fragment["lengths"]
    valid = own.any(axis=2)
    time = np.arange(len(own) + 1)[:, None, None]
    found = {
        "actions": fragment["actions"][valid],
        "rewards": np.where(own, fragment["rewards"], np.float32(0))[valid],
        "terminated": ((time[:-1] >= lengths - 1) & fragment["terminated"])[valid],
    }
    seen = (time <= lengths)[..., None]
    moments = {
        "observations": np.where(seen, fragment["observations"], np.float32(0)),
        "state": fragment["state"],
    }
    if not spaces.continuous:
        shape = (*moments["observations"].shape[:3], spaces.actions)
        # All items of a buffer have the same arrays, and a later episode may have masks.
        moments["legal"] = fragment.arrays.get("legal", np.ones(shape, np.bool_))
    for name, array in moments.items():
        found[name] = array[:-1][valid]
        found[f"next_{name}"] = array[1:][valid]
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in found.items()}
