"""Networks that play an environment: their engines and episodes, and their action probabilities in
every information state of an enumerable game."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from services.rollout.engines.base import ServingEngine
from services.rollout.games import not_enumerable
from services.rollout.networks.arena import Arena, ServedVersion
from services.rollout.networks.episodes import EpisodeRunner, served_now
from services.rollout.program import JobProgram, Trajectory
from services.rollout.scoring import check_version
from services.rollout.serving.policy import ServedPolicy
from troupe.job import JobSpec, NetworkSpec
from troupe.networks.acting import ActingNetwork
from troupe.networks.environments.openspiel import histories_of
from troupe.populations.histories import Histories
from troupe.rpc.errors import DeadlineExceeded
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.workflow import Role, TurnError


@dataclass
class NetworkProgram(JobProgram):
    """An environment that networks play."""

    _: KW_ONLY
    arena: Arena
    places: int
    """Number of environments that play at once, each in its own thread."""

    @classmethod
    def open(cls, spec: JobSpec, places: int) -> NetworkProgram:
        """Open a first environment. Blocking. Raises `InvalidArgument` naming the field at
        fault."""
        return cls(spec, arena=Arena.open(spec, places), places=places)

    @property
    def most_trajectories(self) -> int:
        """One more than can play at once, since one trajectory can store its rows meanwhile."""
        return min(self.spec.limits.max_concurrent_trajectories, self.places + 1)

    def make_engine(self, engine_id: str, policy: str) -> ServingEngine:
        """Return an engine for a policy, not started."""
        return self.arena.engine(engine_id, policy)

    def cast_roles(self, cast: Mapping[str, str], field: str) -> Mapping[str, Role]:
        """Return no roles: networks have none. Raises `InvalidArgument` of kind
        "cast_does_not_fit"."""
        self.arena.check_cast(cast, field)
        return {}

    def trajectory(self, split: str) -> Callable[..., Trajectory]:
        """Return the constructor of trajectories, which play whole episodes."""
        return partial(EpisodeRunner, arena=self.arena)

    def describe_game(self, game: str) -> rollout_pb.DescribeGameResponse:
        """Return the information states of OpenSpiel's `game`."""
        return describe(self.arena, game)

    async def behave(
        self, policy: ServedPolicy, request: rollout_pb.BehaveRequest
    ) -> rollout_pb.BehaveResponse:
        """Return the action probabilities of one served version of a network."""
        return await behave(self.arena, self.spec, policy, request)

    def close(self) -> None:
        """Close the environments."""
        self.arena.close()


def describe(arena: Arena, game: str) -> rollout_pb.DescribeGameResponse:
    """Return the information states of OpenSpiel's `game`, player by player, if the job plays it.
    Walks the game tree: slow the first time.

    Raises FailedPrecondition of kind "game_not_enumerable", naming `population.game`.
    """
    tree = _tree(arena, game)
    return rollout_pb.DescribeGameResponse(
        questions=[
            rollout_pb.GameQuestion(
                player=player,
                state=name,
                moves=[rollout_pb.GameMove(name=str(action), action=action) for action in actions],
            )
            for player, ours in enumerate(tree.form.decisions)
            for name, actions in zip(ours.names, ours.actions, strict=True)
        ],
        # Networks make legal moves only.
        illegal="random_legal",
        seatings=[rollout_pb.GameSeating(agents=arena.agents)],
    )


async def behave(
    arena: Arena, spec: JobSpec, policy: ServedPolicy, request: rollout_pb.BehaveRequest
) -> rollout_pb.BehaveResponse:
    """Return the action probabilities of one served version of `policy`, within
    `limits.turn_seconds`.

    Raises the errors of `describe`, FailedPrecondition of kind "version_not_served",
    `DeadlineExceeded`.
    """
    wanted = request.version if request.HasField("version") else None
    tree = await asyncio.to_thread(_tree, arena, request.game)
    check_version(policy, wanted)
    try:
        served = await served_now(policy, spec.limits.turn_limit, wanted)
    except TurnError as error:
        raise DeadlineExceeded(
            error.message, kind="behave_deadline", field=error.field, remedy=error.remedy
        ) from error
    network, roster = spec.policies[policy.name].network, arena.roster(policy.name)
    assert network is not None, "all policies of the job are networks"
    rows = await asyncio.to_thread(_rows, arena, network, roster, served, tree)
    return rollout_pb.BehaveResponse(
        behaviours=[rollout_pb.GameBehaviour(probabilities=row) for row in rows],
        version=served.version,
        checksum=served.checksum,
    )


@torch.inference_mode()
def _rows(
    arena: Arena, spec: NetworkSpec, roster: tuple[str, ...], served: ServedVersion, tree: Histories
) -> list[list[float]]:
    """Return probabilities of the legal actions of every information state, player by player."""
    network = ActingNetwork(spec, arena.spaces, len(roster))
    network.take(served.tensors)
    found: list[list[float]] = []
    for player, agent in enumerate(arena.agents):
        table: Any = tree.uniform(player)
        if agent in roster:
            # One batch: each state is a copy.
            network.begin(len(table), [roster.index(agent)])
            seen = torch.from_numpy(tree.tensors[player])[:, None]
            legal = torch.from_numpy(tree.legal[player])[:, None]
            table = network.probabilities(seen, legal)[:, 0].numpy()
        actions = tree.form.decisions[player].actions
        found += [row[list(own)].tolist() for row, own in zip(table, actions, strict=True)]
    return found


def _tree(arena: Arena, game: str) -> Histories:
    played = arena.tree
    remedy = "Remove the field: matches fill the table"
    if not isinstance(played, Histories) or len(arena.agents) != played.form.players:
        raise not_enumerable(
            "the environment is not `openspiel` with all players as agents (`seats: null`)",
            game,
            remedy,
        )
    try:
        tree = histories_of(game)
    except Exception as error:  # of OpenSpiel
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise not_enumerable(reason, game, remedy) from error
    if not _same(tree, played):
        raise not_enumerable(
            "the environment plays another game", game, "Name the game of environment.args.game"
        )
    return tree


def _same(one: Histories, other: Histories) -> bool:
    names = [[ours.names for ours in tree.form.decisions] for tree in (one, other)]
    return one is other or (
        names[0] == names[1]
        and np.array_equal(one.form.leaves, other.form.leaves)
        and np.array_equal(one.form.returns, other.form.returns)
    )
