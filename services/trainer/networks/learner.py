"""Learner of a policy that is a small network: collects a step's fragments, then updates once."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import save_file

from services.trainer.learning.interface import Applied, PolicyLearner
from services.trainer.learning.model import policy_seed
from services.trainer.learning.optimizer import Moments
from services.trainer.learning.ranks import Stopped
from services.trainer.learning.samples import Load, column_of, malformed
from services.trainer.state import suspension
from services.trainer.state.training_state import KeptState, Snapshot
from troupe.checkpoints.adapters import Tensors
from troupe.contracts import metric_names
from troupe.experience import samples_digest
from troupe.job import JobSpec
from troupe.networks.fragments import SEATS, SHAPES, Array, Fragment
from troupe.networks.jobs import (
    agents_of,
    close_environment,
    environment_guard,
    environment_of,
    make_learner,
)
from troupe.networks.learner_state import NetworkTrainer
from troupe.networks.vector import Spaces
from troupe.rpc import InvalidArgument
from troupe.user_code import call_within
from troupe.v1 import experience_store_pb2 as store_pb

# Time limit for making an environment; other policies wait for the compute thread meanwhile.
_MAKE_SECONDS: Final = 120.0
# Prefix of network weights in the state of `NetworkTrainer`.
_WEIGHTS: Final = "weights."
# Metric names common to all policies, and the paradigms' names for the same metrics.
_SAME: Final = {
    metric_names.POLICY_LOSS: ("loss_objective", "loss", "loss_actor"),
    metric_names.GRAD_NORM: ("grad_norm", "grad_norm/acting"),
}


@dataclass(frozen=True)
class FragmentRow:
    """One sample (trajectory fragment) of a policy that is a small network."""

    sample_id: str
    fragment: Fragment
    # Number of earlier steps that have trained it.
    uses: int = 0

    @property
    def version(self) -> int:
        """The policy version that chose the actions."""
        return self.fragment.version

    @property
    def size(self) -> int:
        """The number of environment steps."""
        return self.fragment.steps


def parse_fragments(
    claimed: Iterable[store_pb.ClaimedSample], policy: str, agents: tuple[str, ...], load: Load
) -> list[FragmentRow]:
    """Parse a claim into rows, sorted by sample id; `agents`: the agents that the policy may play.

    Raises ChecksumError, FailedPrecondition of kind "malformed_sample", and the errors of `load`.
    """
    rows = [_parse(item.sample, policy, agents, load) for item in claimed]
    return sorted(rows, key=lambda row: row.sample_id)


def _parse(
    sample: store_pb.Sample, policy: str, agents: tuple[str, ...], load: Load
) -> FragmentRow:
    found = {name: column_of(sample, name, load) for name in SHAPES}
    # Copied, since arrays of a message or in shared memory must not be written to.
    arrays = {name: np.array(array) for name, array in found.items() if array is not None}
    version = sample.versions[0].version if sample.versions else 0
    try:
        played = _played(column_of(sample, SEATS, load), agents)
        fragment = Fragment(policy, version, played, arrays)
    except InvalidArgument as error:
        text = f"{error.field or 'fragment'} {error.message}"
        remedy = (
            "Run rollout workers and trainers of one release; if they are, report a bug with the "
            "sample id."
        )
        raise malformed(sample.sample_id, text, remedy) from error
    return FragmentRow(sample.sample_id, fragment, sample.uses)


def _played(seats: Array | None, agents: tuple[str, ...]) -> tuple[str, ...]:
    """Return the agents that the policy played; `seats`: their indices, absent for all of them."""
    if seats is None:
        return agents
    chosen = seats.tolist()
    if sorted(set(chosen)) != chosen or not all(0 <= seat < len(agents) for seat in chosen):
        raise InvalidArgument(f"are {chosen}, of {len(agents)} agents", field="seats")
    return tuple(agents[seat] for seat in chosen)


def metrics_of(rows: Sequence[FragmentRow], version: int) -> dict[str, float]:
    """Return the step's sample metrics, under the names of the language-model learner where they
    agree.

    `version`: the version that the step starts from.
    """
    if not rows:
        return {"samples": 0.0}
    returns = np.concatenate([row.fragment.returns().ravel() for row in rows])
    versions = np.array([row.version for row in rows])
    return {
        "samples": float(len(rows)),
        "episodes": float(sum(row.fragment.episodes for row in rows)),
        "environment_steps": float(sum(row.fragment.steps for row in rows)),
        metric_names.REWARD_MEAN: float(returns.mean()),
        metric_names.REWARD_STD: float(returns.std()),
        metric_names.STALENESS_MEAN: float(version - versions.mean()),
        metric_names.STALENESS_MAX: float(version - versions.min()),
        "reused_fraction": sum(row.uses > 0 for row in rows) / len(rows),
    }


@dataclass(frozen=True)
class PolicyTable:
    """The spaces of a policy's environment and the agents that it plays."""

    spaces: Spaces
    agents: tuple[str, ...]
    """The agents that it may play, in the order of the environment."""


def table_of(spec: JobSpec, policy: str) -> PolicyTable:
    """Make the job's environment, read its spaces and agents, and close it. Blocking.

    Raises InvalidArgument naming the field of the job at fault.
    """
    with environment_guard(spec):
        return call_within(_inspected, spec, policy, seconds=_MAKE_SECONDS)


def _inspected(spec: JobSpec, policy: str) -> PolicyTable:
    environment = environment_of(spec, copies=1)
    try:
        return PolicyTable(environment.spaces, agents_of(spec, environment.agents, policy))
    finally:
        close_environment(environment)


class NetworkModel:
    """The description of a network that its checkpoints carry."""

    def __init__(self, spec: JobSpec, policy: str, table: PolicyTable) -> None:
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
        """Empty: no tensors are tied."""
        return {}

    def save_pretrained(self, directory: Path, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Write the files of a checkpoint, which `troupe.networks` can load."""
        (directory / "config.json").write_text(json.dumps(self._described, indent=2) + "\n")
        save_file(dict(state_dict), directory / "model.safetensors")


class NetworkLearner(PolicyLearner[FragmentRow]):
    """A learner over a `NetworkTrainer` of `troupe.networks`.

    `apply` updates on all fragments of a step in the order of their ids, so weights are a function,
    bit for bit, of the state before and of the set of samples. A replay buffer is part of the
    state: the entries of a step that is not committed are undone.
    """

    def __init__(self, spec: JobSpec, policy: str) -> None:
        """Make the networks for the policy's environment.

        Raises InvalidArgument for an environment that cannot be made or learned.
        """
        self._job, self._name = spec, policy
        self.table = table_of(spec, policy)
        self._model = NetworkModel(spec, policy, self.table)
        self._learner: NetworkTrainer | None = self._made()
        self._rows: list[FragmentRow] = []

    @property
    def num_parameters(self) -> int:
        """Number of parameters of all its networks."""
        return sum(t.numel() for t in self.weights().values())

    @property
    def model(self) -> NetworkModel:
        """The description of the networks that checkpoints carry."""
        return self._model

    @property
    def needs_reference(self) -> bool:
        """False: losses of networks have no KL term."""
        return False

    def read(self, claimed: Iterable[store_pb.ClaimedSample], load: Load) -> list[FragmentRow]:
        """Parse the samples of a claim. Raises the errors of `parse_fragments`."""
        return parse_fragments(claimed, self._name, self.table.agents, load)

    # The step.

    def accumulate(self, rows: Sequence[FragmentRow], stop: threading.Event | None = None) -> None:
        """Keep the fragments until `apply`."""
        self._rows.extend(rows)

    def complete(self, stop: threading.Event | None = None) -> None:
        """Do nothing: `apply` updates on all fragments."""

    def apply(
        self,
        version: int,
        stop: threading.Event | None = None,
        rates: Mapping[str, float] | None = None,
    ) -> Applied:
        """Update on the step's fragments.

        An update with a result that is not finite is reported as not applied, but `moved`. Raises
        `Stopped`, InvalidArgument for fragments of another environment.
        """
        if stop is not None and stop.is_set():
            raise Stopped
        rows = sorted(self._rows, key=lambda row: row.sample_id)
        began = time.perf_counter()
        made = self._own.update([row.fragment for row in rows])
        reason = _broken(made, self._own.published())
        metrics = metrics_of(rows, version) | _named(made)
        metrics[metric_names.TRAIN_SECONDS] = time.perf_counter() - began
        metrics[metric_names.MICRO_BATCHES] = 1.0
        self.discard()
        digest = samples_digest(row.sample_id for row in rows)
        return Applied(not reason, reason, metrics, digest, moved=bool(reason))

    def discard(self) -> None:
        """Forget the step's fragments."""
        self._rows = []

    # State.

    def published(self) -> Tensors:
        """Return the tensors that actors load."""
        return self._own.published()

    def weights(self) -> Tensors:
        """Return the weights of all its networks; not copies."""
        return {
            name.removeprefix(_WEIGHTS): t
            for name, t in self._own.state().items()
            if name.startswith(_WEIGHTS)
        }

    def moments(self) -> Moments:
        """Return all other training state, including a replay buffer; not copies."""
        state = self._own.state()
        return {name: t for name, t in state.items() if not name.startswith(_WEIGHTS)}

    def snapshot(self) -> Snapshot:
        """See `PolicyLearner`; the moments include a replay buffer."""
        return Snapshot(self.weights(), self.moments())

    def load(self, state: KeptState) -> None:
        """See `PolicyLearner`."""
        self.restore(state.weights, state.moments)

    def load_reference(self, state: KeptState) -> None:
        """Do nothing: networks need no reference."""

    def restore(self, weights: Mapping[str, torch.Tensor], moments: Moments) -> None:
        """Inverse of `weights` and `moments`; forgets the step's fragments."""
        self.discard()
        self._own.restore({f"{_WEIGHTS}{name}": t for name, t in weights.items()} | moments)

    # Suspension, possible in the middle of a step.

    def suspended(self) -> tuple[Tensors, dict[str, Any]]:
        """Return the whole state as tensors, not copied, and plain values (JSON), for `adopt`."""
        tensors = suspension.under("state", self._own.state())
        values = []
        for i, row in enumerate(self._rows):
            arrays = {name: torch.from_numpy(a) for name, a in row.fragment.arrays.items()}
            tensors |= suspension.under(f"rows/{i}", arrays)
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
        """Continue from a state that `suspended` gave."""
        if self._learner is None:
            self._learner = self._made()
        # Small networks are trained on the CPU.
        self._own.restore(suspension.on_host(suspension.below("state", tensors)))
        self._rows = []
        for i, value in enumerate(values["rows"]):
            arrays = {n: t.cpu().numpy() for n, t in suspension.below(f"rows/{i}", tensors).items()}
            played = tuple(value["agents"])
            fragment = Fragment(self._name, value["version"], played, arrays)
            self._rows.append(FragmentRow(value["id"], fragment, value["uses"]))

    def release(self) -> list[torch.Tensor]:
        """Free the networks' memory; only `adopt` may be called then."""
        self._learner = None
        self.discard()
        return []

    @property
    def _own(self) -> NetworkTrainer:
        assert self._learner is not None, "its memory was released"
        return self._learner

    def _made(self) -> NetworkTrainer:
        network = self._job.policies[self._name].network
        assert network is not None, "the policy is a network"
        seed = policy_seed(self._job.seed, self._name)
        table = self.table
        return make_learner(network, table.spaces, table.agents, seed)


def _named(made: Mapping[str, float]) -> dict[str, float]:
    """Return a paradigm's metrics, its loss and norm also under the names for language models."""
    found = {f"learning/{name}": value for name, value in made.items()}
    for name, own in _SAME.items():
        if (value := next((made[one] for one in own if one in made), None)) is not None:
            found[name] = value
    return found


def _broken(metrics: Mapping[str, float], published: Tensors) -> str:
    """Return the reason why an update cannot be kept; empty if it can."""
    for name, value in metrics.items():
        if not math.isfinite(value):
            return f"{name} is {value}"
    for name, tensor in published.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return f"{name} is not finite"
    return ""
