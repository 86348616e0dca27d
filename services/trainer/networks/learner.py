"""One policy that is a network: collect a step's fragments, then update on all of them."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from services.trainer import fields
from services.trainer.learner import Applied
from services.trainer.named import Tensors
from services.trainer.networks.rows import FragmentRow, parse_fragments
from services.trainer.networks.sums import digest, metrics_of
from services.trainer.networks.table import Table, table_of
from services.trainer.optimizer import Moments
from services.trainer.peers import Stopped
from services.trainer.policy_model import policy_seed
from services.trainer.rows import Load
from troupe.job import JobSpec
from troupe.networks.fragments import Fragment
from troupe.networks.learning import Learner, make_learner
from troupe.v1 import experience_store_pb2 as store_pb

# How the library calls what is no optimizer, target, buffer, generator or count.
_WEIGHTS: Final = "weights."
# Metrics of every policy, by what paradigms call them.
_SAME: Final = {
    "loss/policy": ("loss_objective", "loss", "loss_actor"),
    "grad_norm": ("grad_norm", "grad_norm/acting"),
}


class NetworkModel:
    """What a checkpoint of a network needs to know of it."""

    def __init__(self, spec: JobSpec, policy: str, table: Table) -> None:
        network = spec.policies[policy].network
        assert network is not None, "the policy is a network"
        assert spec.environment is not None, "a job of networks"
        self._described = {
            "model_type": "troupe_network",
            "network": network.model_dump(mode="json"),
            "spaces": vars(table.spaces),
            "agents": list(table.agents),
            "environment": spec.environment.model_dump(mode="json"),
        }

    def state_dict(self) -> Tensors:
        """Nothing is tied."""
        return {}

    def save_pretrained(self, directory: Path, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Write a checkpoint's files: `troupe.networks` makes networks of them."""
        (directory / "config.json").write_text(json.dumps(self._described, indent=2) + "\n")
        save_file(dict(state_dict), directory / "model.safetensors")


class NetworkLearner:
    """What `Binding` and `StepRun` use of a learner, over the library's (`troupe.networks`).

    A step's fragments wait until all have come: then `apply` updates on them in the order of their
    ids, so weights are a function, bit for bit, of the state before and of the set of samples. A
    replay buffer is part of the state: what a step put into it is gone with a step that was not
    committed.
    """

    lost = False
    needs_reference = False
    base = None

    def __init__(self, spec: JobSpec, policy: str) -> None:
        """Raises InvalidArgument for an environment that cannot be made, and for a paradigm that
        cannot learn it."""
        self._job, self._name = spec, policy
        self.table = table_of(spec, policy)
        self.model = NetworkModel(spec, policy, self.table)
        self._learner: Learner | None = self._made()
        self._rows: list[FragmentRow] = []

    @property
    def num_parameters(self) -> int:
        """Of all its networks."""
        return sum(t.numel() for t in self.weights().values())

    def read(self, claimed: Iterable[store_pb.ClaimedSample], load: Load) -> list[FragmentRow]:
        """What a claim brings. Raises as `parse_fragments`."""
        return parse_fragments(claimed, self._name, self.table.agents, load)

    def set_reference(self, weights: Mapping[str, torch.Tensor]) -> None:
        """No loss of a network has one."""

    # The step.

    def accumulate(self, rows: Sequence[FragmentRow], stop: threading.Event | None = None) -> None:
        """Keep these until `apply`."""
        self._rows.extend(rows)

    def complete(self, stop: threading.Event | None = None) -> None:
        """All have come."""

    def apply(self, version: int, stop: threading.Event | None = None) -> Applied:
        """Update on the step's fragments. Raises `Stopped`, InvalidArgument for fragments of
        another environment.

        An update that gives numbers that are not finite is not applied, but `moved`.
        """
        if stop is not None and stop.is_set():
            raise Stopped
        rows = sorted(self._rows, key=lambda row: row.sample_id)
        began = time.perf_counter()
        made = self._own.update([row.fragment for row in rows])
        reason = _broken(made, self._own.published())
        metrics = metrics_of(rows, version) | _named(made)
        metrics["train/seconds"] = time.perf_counter() - began
        metrics["train/micro_batches"] = 1.0
        self.discard()
        return Applied(not reason, reason, metrics, digest(rows), moved=bool(reason))

    def discard(self) -> None:
        """Forget the step's fragments."""
        self._rows = []

    # State.

    def published(self) -> Tensors:
        """What actors play with."""
        return self._own.published()

    def weights(self) -> Tensors:
        """Of all its networks; not a copy."""
        return {
            name.removeprefix(_WEIGHTS): t
            for name, t in self._own.state().items()
            if name.startswith(_WEIGHTS)
        }

    def moments(self) -> Moments:
        """Everything else that updates depend on, a replay buffer included; not a copy."""
        state = self._own.state()
        return {name: t for name, t in state.items() if not name.startswith(_WEIGHTS)}

    def restore(self, weights: Mapping[str, torch.Tensor], moments: Moments) -> None:
        """Take over what `weights` and `moments` gave; forgets the step's fragments."""
        self.discard()
        self._own.restore({f"{_WEIGHTS}{name}": t for name, t in weights.items()} | moments)

    # Suspension: all of it, in the middle of a step too.

    def suspended(self) -> tuple[Tensors, dict[str, Any]]:
        """Tensors, not copied, and plain values (JSON) from which `adopt` goes on."""
        tensors = fields.under("state", self._own.state())
        values = []
        for i, row in enumerate(self._rows):
            arrays = {name: torch.from_numpy(a) for name, a in row.fragment.arrays.items()}
            tensors |= fields.under(f"rows/{i}", arrays)
            values.append(
                {
                    "id": row.sample_id,
                    "version": row.version,
                    "uses": row.uses,
                    "agents": list(row.fragment.agents),
                }
            )
        return tensors, {"rows": values}

    def adopt(self, tensors: Tensors, values: Mapping[str, Any]) -> None:
        """Go on from what `suspended` gave."""
        if self._learner is None:
            self._learner = self._made()
        # Small networks are trained where their environments are: beside the device.
        self._own.restore(fields.on_host(fields.below("state", tensors)))
        self._rows = []
        for i, value in enumerate(values["rows"]):
            arrays = {n: t.cpu().numpy() for n, t in fields.below(f"rows/{i}", tensors).items()}
            played = tuple(value.get("agents", self.table.agents))
            fragment = Fragment(self._name, value["version"], played, arrays)
            self._rows.append(FragmentRow(value["id"], fragment, value["uses"]))

    def leave(self) -> list[torch.Tensor]:
        """Give the memory up; only `adopt` makes a learner of this again."""
        self._learner = None
        self.discard()
        return []

    @property
    def _own(self) -> Learner:
        assert self._learner is not None, "it has left"
        return self._learner

    def _made(self) -> Learner:
        network = self._job.policies[self._name].network
        assert network is not None, "the policy is a network"
        seed = policy_seed(self._job.seed, self._name)
        table = self.table
        return make_learner(network, table.spaces, table.agents, seed)


def _named(made: Mapping[str, float]) -> dict[str, float]:
    """What a paradigm reports, its loss and norm also by the names that language models have."""
    found = {f"learning/{name}": value for name, value in made.items()}
    for name, own in _SAME.items():
        if (value := next((made[one] for one in own if one in made), None)) is not None:
            found[name] = value
    return found


def _broken(metrics: Mapping[str, float], published: Tensors) -> str:
    """Why an update cannot be kept."""
    for name, value in metrics.items():
        if not math.isfinite(value):
            return f"{name} is {value}"
    for name, tensor in published.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return f"{name} is not finite"
    return ""
