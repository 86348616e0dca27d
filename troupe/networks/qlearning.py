"""`QLearner`: DQN, VDN and QMIX, with TorchRL's losses, mixers and replay buffer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn
from torchrl.modules import QMixer, QValueModule, VDNMixer
from torchrl.objectives import DQNLoss, SoftUpdate
from torchrl.objectives.multiagent import QMixerLoss
from torchrl.objectives.utils import ValueEstimators

from troupe.job.sections.network import NetworkSpec, QLearningSpec
from troupe.networks.acting import ActingNetwork
from troupe.networks.fragments import Array, Fragment
from troupe.networks.learner_state import LearnerTensors, NetworkTrainer, Replay
from troupe.networks.modules import ILLEGAL
from troupe.networks.rows import Rows, check, rows_of
from troupe.networks.vector import Spaces
from troupe.rpc.errors import InvalidArgument

Tensors = dict[str, torch.Tensor]


class _Values(TensorDictModuleBase):  # type: ignore[misc]
    """Values of all actions at `index` into `sequences`; for a team [moments, agents, n]."""

    def __init__(self, acting: ActingNetwork, team: bool, out: str | tuple[str, str]) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["sequences", "who", "index"], [out]
        self.policy = acting.policy
        self._agents, self._out = acting.agents if team else 0, out

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        values = self.policy(tensordict["sequences"], tensordict["who"], tensordict["index"])
        if "legal" in tensordict:
            values = values.masked_fill(~tensordict["legal"], ILLEGAL)
        if self._agents:
            values = values.view(-1, self._agents, values.shape[-1])
        tensordict.set(self._out, values)
        return tensordict


class QLearner(NetworkTrainer):
    """A `NetworkTrainer` with a replay buffer of whole episodes. A team's reward is the mean of its
    agents' rewards."""

    def __init__(
        self, spec: NetworkSpec, learning: QLearningSpec, spaces: Spaces, agents: tuple[str, ...]
    ) -> None:
        """Weights are drawn from torch's generator; `make_learner` seeds it. Raises
        InvalidArgument for continuous actions."""
        if spaces.continuous:
            raise InvalidArgument(
                "learns values of discrete actions, but these are continuous",
                field="network.learning.paradigm",
                value=learning.paradigm,
                remedy="Use ppo, mappo or maddpg.",
            )
        self._learning, self._spaces, self._agents = learning, spaces, agents
        self._acting = ActingNetwork(spec, spaces, len(agents))
        self._team = learning.paradigm != "dqn"
        modules: dict[str, nn.Module] = {"acting": self._acting}
        if self._team:
            modules["mixer"] = self._mixer()
            self._loss = self._mixed(modules["mixer"])
        else:
            self._loss = self._alone()
        self._loss.make_value_estimator(ValueEstimators.TD0, gamma=learning.gamma)
        self._follow = SoftUpdate(self._loss, tau=learning.tau)
        loss = self._loss
        if self._team:
            targets = {
                "acting": loss.target_local_value_network_params,
                "mixer": loss.target_mixer_network_params,
            }
        else:
            targets = {"acting": loss.target_value_network_params}
        trained = [name for name, module in modules.items() if [*module.parameters()]]
        self._trained = [p for name in trained for p in modules[name].parameters()]
        generator = torch.Generator()
        self._replay = Replay(learning.buffer, learning.batch, generator)
        self._tensors = LearnerTensors(
            modules,
            {
                name: torch.optim.Adam(modules[name].parameters(), lr=learning.lr)
                for name in trained
            },
            generator,
            targets,
            self._replay,
            {"updates": 0, "episodes": 0},
        )

    def update(self, fragments: Sequence[Fragment]) -> dict[str, float]:
        """See `NetworkTrainer.update`: store the episodes, then make `updates` gradient steps."""
        check(fragments, self._spaces, self._agents, some=not self._team)
        if self._team and any("acting" in fragment.arrays for fragment in fragments):
            raise InvalidArgument(
                "mixes values of agents that act simultaneously, but here they take turns",
                field="network.learning.paradigm",
                value=self._learning.paradigm,
                remedy="Use dqn or ppo.",
            )
        rows = rows_of(fragments, self._agents)
        counts, learning = self._tensors.counts, self._learning
        self._replay.extend(self._stored(rows))
        counts["episodes"] += len(rows.terminated)
        first, last = learning.epsilon
        done = min(1.0, counts["episodes"] / learning.epsilon_episodes)
        self._acting.epsilon.fill_(first + (last - first) * done)
        returns = np.concatenate([fragment.returns().ravel() for fragment in fragments])
        metrics = {"return": float(returns.mean()), "epsilon": float(self._acting.epsilon)}
        metrics["buffer"] = float(len(self._replay))
        if len(self._replay) >= max(1, learning.warmup):
            losses, norms = zip(*(self._step() for _ in range(learning.updates)), strict=True)
            metrics |= {"loss": float(np.mean(losses)), "grad_norm": float(np.mean(norms))}
        counts["updates"] += 1
        return metrics

    def _mixer(self) -> nn.Module:
        if self._learning.paradigm == "vdn":
            return VDNMixer(n_agents=len(self._agents), device="cpu")  # type: ignore[no-any-return]
        return QMixer(  # type: ignore[no-any-return]
            state_shape=(self._spaces.state,),
            mixing_embed_dim=self._learning.mixer_width,
            n_agents=len(self._agents),
            device="cpu",
        )

    def _alone(self) -> DQNLoss:
        network = TensorDictSequential(
            _Values(self._acting, False, "action_value"), QValueModule(action_space="categorical")
        )
        return DQNLoss(
            network,
            loss_function="l2",
            delay_value=True,
            double_dqn=self._learning.double,
            action_space="categorical",
        )

    def _mixed(self, mixer: nn.Module) -> QMixerLoss:
        values, chosen = ("agents", "action_value"), ("agents", "chosen_action_value")
        network = TensorDictSequential(
            _Values(self._acting, True, values),
            QValueModule(
                action_space="categorical",
                action_value_key=values,
                out_keys=[("agents", "action"), values, chosen],
            ),
        )
        needs = [chosen, "state"] if self._learning.paradigm == "qmix" else [chosen]
        return QMixerLoss(
            network,
            TensorDictModule(mixer, in_keys=needs, out_keys=["chosen_action_value"]),
            action_space="categorical",
        )

    def _stored(self, rows: Rows) -> Tensors:
        """Return episodes padded to the longest possible, so that all in the buffer have one
        shape."""
        steps = self._spaces.steps

        def padded(array: Array, length: int) -> torch.Tensor:
            shape = (*array.shape[:2], length, *array.shape[3:])
            found = np.zeros(shape, array.dtype)
            found[:, :, : array.shape[2]] = array
            return torch.from_numpy(found)

        found = {
            "observations": padded(rows.observations, steps + 1),
            "actions": padded(rows.actions, steps),
            "rewards": padded(rows.rewards, steps),
            "lengths": torch.from_numpy(rows.lengths),
            "terminated": torch.from_numpy(rows.terminated),
        }
        legal = rows.legal
        if legal is None:  # a later episode may have masks: all items have the same arrays
            legal = np.ones((*rows.observations.shape[:3], self._spaces.actions), np.bool_)
        found["legal"] = padded(legal, steps + 1)
        if self._team:
            found["state"] = padded(rows.state[:, :1], steps + 1)[:, 0]
        return found

    def _step(self) -> tuple[float, float]:
        """Do one gradient step, and return the loss and the gradient's norm."""
        batch = self._batch(self._replay.sample())
        if not len(batch["index"]):  # no agent had a turn in these episodes
            return 0.0, 0.0
        loss = self._loss(batch)["loss"]
        for optimizer in self._tensors.optimizers.values():
            optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self._trained, self._learning.max_grad_norm)
        for optimizer in self._tensors.optimizers.values():
            optimizer.step()
        self._follow.step()
        return float(loss.detach()), float(norm)

    def _batch(self, items: Tensors) -> TensorDict:
        """Return transitions of a batch of episodes. The next decision of an agent is at the next
        position of the same sequence."""
        episodes, agents, length, _ = items["observations"].shape
        who = torch.arange(agents).repeat(episodes)
        sequences = items["observations"].flatten(0, 1)
        if self._acting.identity:
            mark = torch.eye(agents)[who][:, None].expand(-1, length, -1)
            sequences = torch.cat([sequences, mark], dim=-1)
        lengths, ends = items["lengths"], items["terminated"]
        if self._team:
            # The team's episode is over when the episode of its last agent is.
            longest = lengths.amax(1, keepdim=True)
            ends, lengths = (ends | (lengths < longest)).all(1, keepdim=True), longest
        valid = torch.arange(length - 1) < lengths[..., None]
        last = torch.arange(length - 1) == lengths[..., None] - 1
        terminated = last & ends[..., None]
        if self._team:
            # [E, A, T] -> [M, A]: agents of a step stay together.
            where = valid[:, 0].nonzero(as_tuple=True)
            row = (where[0][:, None] * agents + torch.arange(agents)).flatten()
            time = where[1][:, None].expand(-1, agents).flatten()
            action = items["actions"].transpose(1, 2)[where]
            reward = items["rewards"].transpose(1, 2)[where].mean(dim=-1, keepdim=True)
            over, cut = terminated[:, 0][where], last[:, 0][where]
        else:
            every = valid.flatten(0, 1).nonzero(as_tuple=True)
            row, time = every
            action = items["actions"].flatten(0, 1)[every]
            reward = items["rewards"].flatten(0, 1)[every].unsqueeze(-1)
            over, cut = terminated.flatten(0, 1)[every], last.flatten(0, 1)[every]
        index, legal = row * length + time, items["legal"].flatten(0, 2)
        networks = {"sequences": sequences, "who": who}
        now: dict[str, object] = {**networks, "index": index, "legal": legal[index]}
        then: dict[str, object] = {
            **networks,
            "index": index + 1,
            "legal": legal[index + 1],
            "reward": reward,
            "terminated": over.unsqueeze(-1),
            "done": cut.unsqueeze(-1),
        }
        if self._team:
            now["state"] = items["state"][where]
            then["state"] = items["state"][where[0], where[1] + 1]
            now["agents"] = TensorDict({"action": action}, [])
        else:
            now["action"] = action
        return TensorDict({**now, "next": TensorDict(then, [])}, [])
