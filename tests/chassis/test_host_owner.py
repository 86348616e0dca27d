"""Services of one host run one owner process between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from services.chassis.transfer import HostOwnership
from troupe.rpc import Unavailable


@dataclass
class Owners:
    """Stands for the processes: which ports were asked for, and who still runs."""

    asked: list[int] = field(default_factory=list)
    running: list[str] = field(default_factory=list)
    taken: set[int] = field(default_factory=set)
    broken: bool = False

    def start(self, port: int) -> Owner:
        self.asked.append(port)
        if self.broken or port in self.taken:
            raise Unavailable("taken", kind="port_taken")
        bound = port or 7000 + len(self.asked)
        return Owner(self, f"host:{bound}", f"127.0.0.1:{bound}")


@dataclass
class Owner:
    owners: Owners
    address: str
    local: str

    def __post_init__(self) -> None:
        self.owners.running.append(self.address)

    def close(self) -> None:
        self.owners.running.remove(self.address)


def test_another_service_takes_the_owner_over_at_the_same_port(tmp_path: Path) -> None:
    owners = Owners()
    first, second = (HostOwnership(tmp_path, "c", 0, owners.start) for _ in range(2))
    assert first.place() is None
    first.look()
    second.look()
    assert first._process is not None
    assert second._process is None
    place = second.place()
    assert place == first.place()
    assert place is not None
    assert (place.address, second.near()) == ("host:7001", "127.0.0.1:7001")
    first.close()
    assert owners.running == []
    second.look()
    assert second._process is not None
    assert second.place() == place, "what others remember is still true"
    assert owners.asked == [0, 7001]
    second.close()
    second.close()
    second.look()
    assert owners.running == []


def test_an_owner_takes_another_port_if_its_port_is_taken(tmp_path: Path) -> None:
    owners = Owners()
    first = HostOwnership(tmp_path, "c", 0, owners.start)
    first.look()
    first.close()
    owners.taken.add(7001)
    second = HostOwnership(tmp_path, "c", 0, owners.start)
    second.look()
    assert owners.asked == [0, 7001, 0]
    assert owners.running == ["host:7003"]
    second.close()


def test_a_port_that_is_set_is_the_only_one(tmp_path: Path) -> None:
    owners = Owners(taken={9000})
    owner = HostOwnership(tmp_path, "c", 9000, owners.start)
    with pytest.raises(Unavailable):
        owner.look()
    owners.taken.clear()
    owner.look()
    assert owner._process is not None, "one that could not start is tried again"
    owner.close()


def test_clusters_that_share_a_directory_have_owners_of_their_own(tmp_path: Path) -> None:
    owners = Owners()
    for mark in ("one", "other"):
        HostOwnership(tmp_path, mark, 0, owners.start).look()
    assert len(owners.running) == 2


def test_containers_that_share_memory_meet_at_a_socket_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for root, near in (
        (tmp_path / "d", f"unix:{tmp_path}/d/.socket-c"),
        # Names of sockets are short.
        (tmp_path / ("d" * 100), "host:7001"),
    ):
        root.mkdir(exist_ok=True)
        owner = HostOwnership(root, "c", 0, Owners().start)
        assert owner.near() is None
        owner.look()
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr("services.chassis.transfer.host_id", lambda: "another container")
            assert owner.near() == near
        owner.close()


def test_no_certificate_has_to_name_the_loopback(tmp_path: Path) -> None:
    for root, near in (
        (tmp_path / "d", f"unix:{tmp_path}/d/.socket-c"),
        (tmp_path / ("d" * 100), "127.0.0.1:7001"),
    ):
        root.mkdir()
        owner = HostOwnership(root, "c", 0, Owners().start, certified=True)
        owner.look()
        assert owner.near() == near
        owner.close()
