"""Copies of training state on other hosts' disks: known versions after the loss of a host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.trainer.state.training_state import Snapshot, TrainingState
from services.trainer.versions import RemoteStates
from troupe.v1 import trainer_pb2 as trainer_pb

WEIGHTS = {"w": torch.ones(2)}


class Hosts(dict[str, "Trainer"]):
    """The trainers that are up, and the contents of their hosts' transfer layer."""

    def __init__(self) -> None:
        self.lying: dict[str, Mapping[str, torch.Tensor]] = {}
        self.offered: list[str] = []
        # Calls and their deadlines.
        self.asked: list[tuple[str, float]] = []


class Host:
    """`HostTransfer`, as far as a trainer uses it."""

    def __init__(self, name: str, hosts: Hosts) -> None:
        self.holders, self._hosts = [name], hosts

    def directory(self, key: str) -> Any:
        return SimpleNamespace(trainers=list(self._hosts))

    def keys(self, prefix: str) -> list[str]:
        return [key for key in self._hosts.lying if key.startswith(prefix)]

    def set(self, key: str, files: Mapping[str, torch.Tensor]) -> Any:
        self._hosts.lying[key] = files
        self._hosts.offered.append(key.rpartition("/")[2].partition("-")[0])
        return SimpleNamespace(checksum="", num_bytes=1)

    def get(self, key: str, expected_checksum: str) -> tuple[Mapping[str, torch.Tensor], None]:
        return self._hosts.lying[key], None

    def hint(self, key: str, holders: Any) -> None:
        pass

    def delete(self, key: str) -> None:
        self._hosts.lying.pop(key, None)

    def drop(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.delete(key)


class Trainer(RemoteStates):
    """A trainer on a separate host, reached without a network."""

    def __init__(self, name: str, hosts: Hosts, root: Path) -> None:
        settings: Any = SimpleNamespace(
            address=name,
            data_dir=root / name,
            trainer_keep_states=2,
            trainer_state_replicas=1,
            trainer_sync_files=False,
            trainer_state_wait_seconds=0.0,
            shares_states=True,
        )
        host: Any = Host(name, hosts)
        super().__init__(host, settings)
        self._hosts, self.states = hosts, self.store("job", "player")
        hosts[name] = self

    def KeepState(
        self, request: trainer_pb.KeepStateRequest, timeout: float
    ) -> trainer_pb.KeepStateResponse:
        self._hosts.asked.append(("KeepState", timeout))
        return self.keep(request.job_id, request.policy, request.version, request.offer)

    def OfferState(
        self, request: trainer_pb.OfferStateRequest, timeout: float
    ) -> trainer_pb.OfferStateResponse:
        self._hosts.asked.append(("OfferState", timeout))
        return self.offer(request.job_id, request.policy, request.version, request.checksum)

    @contextmanager
    def _trainer(self, address: str) -> Iterator[Any]:
        yield self._hosts[address]

    def save(self, version: int, *, first: bool) -> None:
        self.states.save(TrainingState(version, f"{version:032x}", Snapshot(WEIGHTS)))
        self.states.prune(version, 2, first=first)


@pytest.mark.parametrize("first", [True, False])
def test_a_host_that_joins_later_gets_the_first_version(tmp_path: Path, first: bool) -> None:
    """Else a policy could not begin again once those are lost that were there when it was made."""
    hosts = Hosts()
    maker, copy = (Trainer(name, hosts, tmp_path) for name in ("maker", "copy"))
    for version in range(4):
        maker.save(version, first=first)
    assert copy.states.versions() == [0, 2, 3]
    del hosts["copy"]
    late = Trainer("late", hosts, tmp_path)
    maker.save(4, first=first)
    assert late.states.versions() == ([0, 4] if first else [4]), "no more than is needed"
    assert torch.equal(late.states.load(4).weights["w"], WEIGHTS["w"])
    maker.save(5, first=first)
    # One copy is enough; the offered state is deleted.
    assert hosts.offered == ["v0", "v1", "v2", "v3", "v4", *["v0"] * first, "v5"]
    assert not hosts.lying


def test_other_trainers_have_time_for_the_state_of_a_large_policy(tmp_path: Path) -> None:
    """Weights and two moments of 32 billion parameters, read from or written to a disk."""
    hosts = Hosts()
    Trainer("copy", hosts, tmp_path)
    Trainer("maker", hosts, tmp_path).save(0, first=True)
    late = Trainer("late", hosts, tmp_path)
    assert torch.equal(late.states.load(0, f"{0:032x}").weights["w"], WEIGHTS["w"])
    assert [what for what, _ in hosts.asked] == ["KeepState", "OfferState"]
    assert all(seconds >= 32e9 * 12 / 100e6 for _, seconds in hosts.asked)
