"""Fragments as samples of the experience store bring them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from services.trainer.rows import Load, column_of, malformed
from troupe.networks.fragments import SEATS, SHAPES, Array, Fragment
from troupe.rpc import InvalidArgument
from troupe.v1 import experience_store_pb2 as store_pb


@dataclass(frozen=True)
class FragmentRow:
    """One sample of a policy that is a network."""

    sample_id: str
    fragment: Fragment
    # Steps that have trained it before.
    uses: int = 0

    @property
    def version(self) -> int:
        """That drew its actions."""
        return self.fragment.version

    @property
    def size(self) -> int:
        """Steps of the environment."""
        return self.fragment.steps


def parse_fragments(
    claimed: Iterable[store_pb.ClaimedSample], policy: str, agents: tuple[str, ...], load: Load
) -> list[FragmentRow]:
    """The rows of a claim in the order of their ids; `agents`: whom the policy may play.

    Raises ChecksumError, FailedPrecondition of kind "malformed_sample", or what `load` raises.
    """
    rows = [_parse(item.sample, policy, agents, load) for item in claimed]
    return sorted(rows, key=lambda row: row.sample_id)


def _parse(
    sample: store_pb.Sample, policy: str, agents: tuple[str, ...], load: Load
) -> FragmentRow:
    found = {name: column_of(sample, name, load) for name in SHAPES}
    # Copies: what a message or another process owns is not to be written into.
    arrays = {name: np.array(array) for name, array in found.items() if array is not None}
    version = sample.versions[0].version if sample.versions else 0
    try:
        played = _played(column_of(sample, SEATS, load), agents)
        fragment = Fragment(policy, version, played, arrays)
    except InvalidArgument as error:
        text = f"{error.field or 'fragment'} {error.message}"
        remedy = "Rollout and trainer must be of one release; report it with the sample id."
        raise malformed(sample.sample_id, text, remedy) from error
    return FragmentRow(sample.sample_id, fragment, sample.uses)


def _played(seats: Array | None, agents: tuple[str, ...]) -> tuple[str, ...]:
    """Whom the policy played; `seats`: their numbers, absent where it was everybody."""
    if seats is None:
        return agents
    chosen = seats.tolist()
    if sorted(set(chosen)) != chosen or not all(0 <= seat < len(agents) for seat in chosen):
        raise InvalidArgument(f"are {chosen}, of {len(agents)} agents", field="seats")
    return tuple(agents[seat] for seat in chosen)
