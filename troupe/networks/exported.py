"""`ExportedNetwork`: loads and plays a network that `troupe export` has written."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from pydantic import ValidationError

from troupe.checkpoints.reading import SINGLE, StoredTensors
from troupe.job.sections.network import NetworkSpec
from troupe.networks.acting import ActingNetwork
from troupe.networks.actor import Actor, Seat
from troupe.networks.vector import Spaces, VectorEnvironment, make_environment
from troupe.rpc.errors import InvalidArgument

MODEL_TYPE: Final = "troupe_network"
# Prefix of the acting network in a checkpoint, which has all networks of a learner.
_ACTING: Final = "acting."
_PARTS: Final = frozenset({"acting", "critic", "mixer", "returns", "rewards"})
_POLICY: Final = "exported"


@dataclass(frozen=True)
class ExportedNetwork:
    """An exported policy with its spaces and environment; plays without the job."""

    network: NetworkSpec
    spaces: Spaces
    agents: tuple[str, ...]
    """The agents that it was made for, in the environment's order."""
    environment: dict[str, Any]
    """`source`, `args` and `copies` of the job."""
    weights: dict[str, torch.Tensor] = field(repr=False)
    """By the names that `Actor.load` takes."""

    @classmethod
    def read(cls, folder: str | Path) -> ExportedNetwork:
        """Read a folder, with every tensor checked against its description.

        Raises InvalidArgument naming the file or tensor at fault.
        """
        directory = Path(folder)
        try:
            described = json.loads((directory / "config.json").read_text(encoding="utf-8"))
            if described.get("model_type") != MODEL_TYPE:
                raise InvalidArgument(
                    f"holds a {described.get('model_type')}, not a network",
                    field="folder",
                    value=str(directory),
                    remedy="Language models are loaded with transformers.",
                )
            tensors = dict(StoredTensors([directory / SINGLE]))
            own = {
                name.removeprefix(_ACTING): tensor
                for name, tensor in tensors.items()
                if name.startswith(_ACTING)
            }
            found = cls(
                NetworkSpec.model_validate(described["network"]),
                Spaces(**described["spaces"]),
                tuple(described["agents"]),
                dict(described["environment"]),
                own,
            )
        except (OSError, KeyError, TypeError, ValueError) as error:
            problem, reason = "cannot be read", str(error)
            if isinstance(error, KeyError):
                problem = "is incomplete"
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                where = ".".join(str(part) for part in ("network", *first["loc"]))
                problem = "does not describe a network of this release"
                reason = f"{where}: {first['msg']}"
            raise InvalidArgument(
                f"{problem}: {reason}",
                field="folder",
                value=str(directory),
                remedy="`troupe export` writes config.json and model.safetensors.",
            ) from error
        for name in sorted(tensors):
            if name.partition(".")[0] not in _PARTS:
                raise InvalidArgument(
                    "is not a tensor of this network",
                    field="weights",
                    value=name,
                    remedy="`troupe export` writes config.json and model.safetensors.",
                )
        found.acting()
        return found

    def acting(self) -> ActingNetwork:
        """Return the network with its weights. Raises InvalidArgument for weights that do not
        fit."""
        made = ActingNetwork(self.network, self.spaces, len(self.agents))
        made.take(self.weights)
        return made

    def play(self, copies: int, **settings: Any) -> VectorEnvironment:
        """Return the job's environment in `copies` copies; `settings` override the job's.

        Raises the errors of `make_environment`.
        """
        given = {**self.environment.get("args", {}), **settings}
        return make_environment(self.environment["source"], copies, **given)

    def actor(self, environment: VectorEnvironment) -> Actor:
        """Return an actor that plays all agents of `environment`. Raises InvalidArgument for agents
        that the network was not made for; build an `Actor` with several `Seat`s for those."""
        made = Actor(environment, {_POLICY: Seat(self.network, environment.agents, self.agents)})
        made.load(_POLICY, self.weights, 0)
        return made
