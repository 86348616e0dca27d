"""`Rows`: fragments as learners use them, one row of decisions per episode and agent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from troupe.networks.fragments import SHAPES, Array, Fragment
from troupe.networks.vector import Spaces
from troupe.rpc.errors import InvalidArgument


@dataclass(frozen=True)
class Rows:
    """E episodes of A agents with at most K decisions. Where agents take turns, steps in which an
    agent did not act are not its decisions: their rewards count towards its previous decision."""

    observations: Array
    """[E, A, K + 1, O]; after the last decision the agent's final observation."""
    state: Array
    """[E, A, K + 1, S]"""
    legal: Array | None
    """[E, A, K + 1, n]"""
    actions: Array
    """[E, A, K], or [E, A, K, D]."""
    log_probs: Array
    """[E, A, K]"""
    rewards: Array
    """[E, A, K]"""
    lengths: Array
    """[E, A]: decisions."""
    terminated: Array
    """[E, A]"""

    def decided(self) -> Any:
        """[E, A, K]: decisions, as opposed to padding."""
        return np.arange(self.rewards.shape[2]) < self.lengths[..., None]

    def last(self) -> Any:
        """[E, A, K]: each agent's last decision."""
        return np.arange(self.rewards.shape[2]) == self.lengths[..., None] - 1


def check(
    fragments: Sequence[Fragment], spaces: Spaces, agents: tuple[str, ...], *, some: bool = False
) -> None:
    """Raise InvalidArgument for fragments of other agents or spaces. `some`: fragments may have
    only some of the agents."""
    if not fragments:
        raise InvalidArgument("an update needs at least one", field="fragments")
    sizes = {"O": spaces.observation, "S": spaces.state, "n": spaces.actions}
    for fragment in fragments:
        present = tuple(one for one in agents if not some or one in fragment.agents)
        if fragment.agents != present or not present:
            raise InvalidArgument(
                f"are of {', '.join(fragment.agents)}, but the policy plays {', '.join(agents)}",
                field="fragments",
            )
        for name in ("observations", "state", "legal"):
            letter = SHAPES[name].split()[-1]
            if name in fragment.arrays and fragment[name].shape[-1] != sizes[letter]:
                raise InvalidArgument(
                    f"{letter} is {fragment[name].shape[-1]}, but the environment's is "
                    f"{sizes[letter]}",
                    field=f"fragments.{name}",
                )
        drawn = fragment["actions"]
        if (drawn.ndim == 4) != spaces.continuous or (
            spaces.continuous and drawn.shape[-1] != spaces.actions
        ):
            raise InvalidArgument(
                f"have shape {list(drawn.shape)}, which does not fit these spaces",
                field="fragments.actions",
            )
        if len(drawn) > spaces.steps:
            raise InvalidArgument(
                f"has {len(drawn)} steps, but episodes have at most {spaces.steps}",
                field="fragments.actions",
            )
        if (
            not spaces.continuous
            and not ((drawn >= 0) & (drawn < spaces.actions) | ~fragment.valid()).all()
        ):
            raise InvalidArgument(
                f"has actions beyond 0 to {spaces.actions - 1}", field="fragments.actions"
            )
        for name in ("rewards", "log_probs"):
            if not np.isfinite(fragment[name][fragment.valid()]).all():
                raise InvalidArgument("has values that are not finite", field=f"fragments.{name}")


def rows_of(fragments: Sequence[Fragment], roster: tuple[str, ...] = ()) -> Rows:
    """Return all episodes of fragments that passed `check`, in order. `roster`: the agents of the
    rows; one that did not play has no decisions."""
    fragments = [_with_absent(one, roster) for one in fragments]
    steps = max(len(fragment["rewards"]) for fragment in fragments)
    masked = any("legal" in fragment.arrays for fragment in fragments)
    agents = len(fragments[0].agents)
    found = Rows(
        observations=_joined(fragments, "observations", steps + 1).transpose(1, 2, 0, 3),
        state=np.repeat(
            _joined(fragments, "state", steps + 1).transpose(1, 0, 2)[:, None], agents, axis=1
        ),
        legal=_joined(fragments, "legal", steps + 1).transpose(1, 2, 0, 3) if masked else None,
        actions=np.moveaxis(_joined(fragments, "actions", steps), 0, 2),
        log_probs=_joined(fragments, "log_probs", steps).transpose(1, 2, 0),
        rewards=_joined(fragments, "rewards", steps).transpose(1, 2, 0),
        lengths=np.concatenate([fragment["lengths"] for fragment in fragments]),
        terminated=np.concatenate([fragment["terminated"] for fragment in fragments]),
    )
    if not any("acting" in fragment.arrays for fragment in fragments):
        return found
    acting = _joined(fragments, "acting", steps).transpose(1, 2, 0) & found.decided()
    return _own_turns(found, acting)


def _with_absent(fragment: Fragment, roster: tuple[str, ...]) -> Fragment:
    """Return the fragment with all agents of `roster`; the episodes of those that did not play have
    no steps."""
    if not roster or fragment.agents == roster:
        return fragment
    at = [roster.index(agent) for agent in fragment.agents]
    arrays = {}
    for name, array in fragment.arrays.items():
        letters = SHAPES[name].split()
        if "A" not in letters:
            arrays[name] = array
            continue
        axis = letters.index("A")
        shape = (*array.shape[:axis], len(roster), *array.shape[axis + 1 :])
        whole = np.full(shape, name == "legal", array.dtype)
        np.moveaxis(whole, axis, 0)[at] = np.moveaxis(array, axis, 0)
        arrays[name] = whole
    return Fragment(fragment.policy, fragment.version, roster, arrays)


def _own_turns(rows: Rows, acting: Array) -> Rows:
    """Return rows of only those steps in which the row's agent acted (`acting` [E, A, T])."""
    decisions = acting.sum(axis=-1).astype(np.int32)
    most = max(1, int(decisions.max(initial=0)))
    # Steps of the agent's decisions, then the end of its episode.
    times = np.argsort(~acting, axis=-1, kind="stable")[..., :most]
    times = np.concatenate([times, np.zeros_like(times[..., :1])], axis=-1)
    behind = np.arange(most + 1) >= decisions[..., None]
    times = np.where(behind, rows.lengths[..., None], times)
    gained = np.where(rows.decided(), rows.rewards, 0).cumsum(axis=-1, dtype=np.float64)
    gained = np.concatenate([np.zeros_like(gained[..., :1]), gained], axis=-1)
    until = np.take_along_axis(gained, times, axis=-1)
    own = times[..., :most].clip(max=rows.rewards.shape[-1] - 1)

    def at(array: Array, where: Array) -> Array:
        wide = where.reshape(*where.shape, *[1] * (array.ndim - where.ndim))
        return np.take_along_axis(array, wide, axis=2)

    return Rows(
        observations=at(rows.observations, times),
        state=at(rows.state, times),
        legal=None if rows.legal is None else at(rows.legal, times),
        actions=at(rows.actions, own),
        log_probs=at(rows.log_probs, own),
        rewards=np.diff(until, axis=-1).astype(np.float32),
        lengths=decisions,
        terminated=rows.terminated,
    )


def _joined(fragments: Sequence[Fragment], name: str, steps: int) -> Array:
    """Return the array of all episodes [steps, E, ...], padded with zeros; an array that a fragment
    lacks is all ones.

    Values beyond an episode's end become zeros: a NaN there would reach the gradient of a recurrent
    network, whatever it is multiplied by."""
    parts = []
    for fragment in fragments:
        array = fragment.arrays.get(name)
        if array is None:
            like = next(other[name] for other in fragments if name in other.arrays)
            shape = (steps, fragment.episodes, *like.shape[2:])
            array = np.ones(shape, like.dtype)
        elif array.dtype.kind == "f":
            letters, lengths = SHAPES[name].split(), fragment["lengths"]
            ends = lengths if "A" in letters else lengths.max(axis=1)
            # Observations have one more step than decisions.
            ends = ends + (letters[0] == "T+1")
            inside = np.arange(len(array)).reshape(-1, *[1] * ends.ndim) < ends
            if not inside.all():
                wide = inside.reshape(*inside.shape, *[1] * (array.ndim - inside.ndim))
                array = np.where(wide, array, np.zeros((), array.dtype))
        if len(array) < steps:
            padding = np.zeros((steps - len(array), *array.shape[1:]), array.dtype)
            array = np.concatenate([array, padding])
        parts.append(array)
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
