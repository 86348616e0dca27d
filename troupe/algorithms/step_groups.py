"""Advantages of single turns, from groups of turns that began with the same observation.

Symbols: an episode tau, all turns of one agent in a trajectory (a chain, see values.py); o_t the
observation of its turn t; r_t what the turn earned, with the agent's reward for the last turn;
R(tau) = sum_t r_t; R_t = sum_{k>=t} gamma^(k-t) r_k; G the sample's group, here all turns of a
query's episodes; norm(x; S) = (x - mean S) / (std S + epsilon), or x - mean S without
`scale_by_std`.

gigpo: A_t = norm(R(tau); G) + w norm(R_t; turns in G with o_t). Feng et al. 2025
    (GiGPO, "Group-in-group policy optimization for LLM agent training"), equations 3 and 6 to 8.
    The first mean is over samples as in the authors' code, or over trajectories as in equation 3
    (`baseline_weight`).
hgpo: A_t = sum_k w_k norm(R_t; turns in G with o_{t-k}, ..., o_t) / sum_k w_k, w_k
    = (k + 1)^alpha, k = 0, ..., K, over the k whose group has another member. He et al. 2026 (HGPO,
    "Hierarchy-of-groups policy optimization for long-horizon agentic tasks"), adaptive weighting.
    The authors' code counts k from 1, and also leaves out a group that gives an advantage of
    exactly zero.

The observation is a column that the workflow sets (`step_groups.observation`), or else the prompt.
A turn whose observation no other turn has is compared with nothing: its term is zero.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from troupe.algorithms.advantages import SampleBatch, group_advantages
from troupe.algorithms.values import chains


def gigpo(samples: SampleBatch) -> torch.Tensor:
    """Return the advantage `gigpo`."""
    episodes = episodes_of(samples)
    mine = [i for episode in episodes for i in episode]
    totals, to_go = _returns(samples, episodes)
    groups = [samples.groups[i] for i in mine]
    owners = [samples.trajectories[i] for i in mine] if samples.by_trajectory else None
    seen = [(samples.groups[i], samples.observations[i]) for i in mine]
    scale = samples.scale_by_std
    found = torch.zeros(len(samples.rewards), dtype=torch.float64)
    found[mine] = normalised(totals, groups, owners, scale_by_std=scale)
    found[mine] += samples.step_groups.weight * normalised(to_go, seen, scale_by_std=scale)
    return found


def hgpo(samples: SampleBatch) -> torch.Tensor:
    """Return the advantage `hgpo`."""
    episodes, spec = episodes_of(samples), samples.step_groups
    mine = [i for episode in episodes for i in episode]
    _, to_go = _returns(samples, episodes)
    total = torch.zeros(len(mine), dtype=torch.float64)
    weights = torch.zeros(len(mine), dtype=torch.float64)
    for k in range(spec.history + 1):
        keys: list[Hashable] = []
        for episode in episodes:
            seen = [samples.observations[i] for i in episode]
            for t, i in enumerate(episode):
                # Turns with fewer than k turns before them are in no group of this level.
                key = tuple(seen[t - k : t + 1]) if t >= k else i
                keys.append((t >= k, samples.groups[i], key))
        sizes: dict[Hashable, int] = {}
        for one in keys:
            sizes[one] = sizes.get(one, 0) + 1
        compared = torch.tensor([sizes[one] > 1 for one in keys], dtype=torch.float64)
        weight = (k + 1) ** spec.alpha * compared
        total += weight * normalised(to_go, keys, scale_by_std=samples.scale_by_std)
        weights += weight
    found = torch.zeros(len(samples.rewards), dtype=torch.float64)
    found[mine] = torch.where(weights > 0, total / weights.clamp(min=1e-300), 0.0)
    return found


gigpo.whole_group = True  # type: ignore[attr-defined]
hgpo.whole_group = True  # type: ignore[attr-defined]


def episodes_of(samples: SampleBatch) -> list[list[int]]:
    """Return the positions of the samples of each episode, in the order of turns."""
    return chains(
        samples.trajectories,
        samples.agents,
        samples.chains,
        samples.turns.tolist(),
        samples.lengths.tolist(),
    )


def normalised(
    values: Sequence[float],
    keys: Sequence[Hashable],
    owners: Sequence[str] | None = None,
    *,
    scale_by_std: bool,
) -> torch.Tensor:
    """Return norm(values_i; the values with equal keys), float64 [n]; exactly zero for a value
    alone in its group. `owners`: each of them counts once, by the mean of its values."""
    pools: dict[Hashable, dict[Hashable, list[float]]] = {}
    for i, (value, key) in enumerate(zip(values, keys, strict=True)):
        pools.setdefault(key, {}).setdefault(i if owners is None else owners[i], []).append(value)
    # In order of size: the result does not depend on the order of samples.
    entries = {
        key: sorted(sum(sorted(own)) / len(own) for own in pool.values())
        for key, pool in pools.items()
    }
    return group_advantages(values, [entries[key] for key in keys], scale_by_std=scale_by_std)


def _returns(
    samples: SampleBatch, episodes: Sequence[Sequence[int]]
) -> tuple[list[float], list[float]]:
    """Return R(tau) and R_t of the turns of episodes, episode after episode."""
    assert samples.earned is not None, "these have the attribute `whole_group`"
    earned, gamma = samples.earned.tolist(), samples.step_groups.gamma
    totals, returns = [], []
    for episode in episodes:
        to_go, found = 0.0, []
        for i in reversed(episode):
            to_go = earned[i] + gamma * to_go
            found.append(to_go)
        totals += [sum(earned[i] for i in episode)] * len(episode)
        returns += reversed(found)
    return totals, returns
