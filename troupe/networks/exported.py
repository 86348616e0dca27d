"""`ExportedNetwork`: what `troupe export` makes of a network, as something that plays."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from troupe.networks.acting import ActingNetwork
from troupe.networks.actor import Actor, Seat
from troupe.networks.spec import NetworkSpec
from troupe.networks.vector import Spaces, VectorEnvironment, make_environment
from troupe.rpc.errors import InvalidArgument

MODEL_TYPE: Final = "troupe_network"
# A checkpoint has all networks of a learner, of which this one plays.
_ACTING: Final = "acting."
_PARTS: Final = frozenset({"acting", "critic", "mixer", "returns", "rewards"})
_POLICY: Final = "exported"


@dataclass(frozen=True)
class ExportedNetwork:
    """What it takes to play: nothing else of the job is needed."""

    network: NetworkSpec
    spaces: Spaces
    agents: tuple[str, ...]
    """Whom it was made for, in the order of the environment."""
    environment: dict[str, Any]
    """`source`, `args` and `copies` of the job."""
    weights: dict[str, torch.Tensor] = field(repr=False)
    """Names as `Actor.load` takes them."""

    @classmethod
    def read(cls, folder: str | Path) -> ExportedNetwork:
        """The network of a folder, every tensor checked against its description.

        Raises InvalidArgument for a folder that holds none, naming the file or the tensor.
        """
        directory = Path(folder)
        try:
            described = json.loads((directory / "config.json").read_text(encoding="utf-8"))
            if described.get("model_type") != MODEL_TYPE:
                raise InvalidArgument(
                    f"holds a {described.get('model_type')}, no network",
                    field="folder",
                    value=str(directory),
                    remedy="Language models are loaded with transformers.",
                )
            tensors = load_file(directory / "model.safetensors")
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
        except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
            what, why = "cannot be read", str(error)
            if isinstance(error, KeyError):
                what = "is incomplete"
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                where = ".".join(str(part) for part in ("network", *first["loc"]))
                what, why = "describes no network of this release", f"{where}: {first['msg']}"
            raise InvalidArgument(
                f"{what}: {why}",
                field="folder",
                value=str(directory),
                remedy="`troupe export` writes config.json and model.safetensors.",
            ) from error
        for name in sorted(tensors):
            if name.partition(".")[0] not in _PARTS:
                raise InvalidArgument(
                    "is none of this network's",
                    field="weights",
                    value=name,
                    remedy="`troupe export` writes config.json and model.safetensors.",
                )
        found.acting()
        return found

    def acting(self) -> ActingNetwork:
        """The network itself. Raises InvalidArgument for weights that do not fit."""
        made = ActingNetwork(self.network, self.spaces, len(self.agents))
        made.take(self.weights)
        return made

    def play(self, copies: int, **settings: Any) -> VectorEnvironment:
        """The job's environment, as so many copies; `settings` instead of the job's.

        Raises as `make_environment`.
        """
        given = {**self.environment.get("args", {}), **settings}
        return make_environment(self.environment["source"], copies, **given)

    def actor(self, environment: VectorEnvironment) -> Actor:
        """Plays all agents of `environment`. Raises InvalidArgument where there are others, whom it
        was not made for: then seat it beside their networks (`Actor`, `Seat`)."""
        made = Actor(environment, {_POLICY: Seat(self.network, environment.agents, self.agents)})
        made.load(_POLICY, self.weights, 0)
        return made
