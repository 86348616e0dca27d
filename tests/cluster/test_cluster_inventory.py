"""Which process of a node gets which devices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.cluster.inventory import NodeShares, assign, by_device
from troupe.cluster.settings import ClusterSettings
from troupe.devices import parse_devices
from troupe.rpc import InvalidArgument

numbers = st.none() | st.integers(0, 10)


@given(
    count=st.integers(0, 16),
    engine=numbers,
    trainer=numbers,
    per=st.integers(1, 8),
    reward=st.integers(0, 4),
    rollouts=st.none() | st.integers(1, 4),
    trainers=st.none() | st.integers(1, 8),
)
def test_no_device_is_assigned_twice_and_each_request_is_met_or_refused(
    count: int,
    engine: int | None,
    trainer: int | None,
    per: int,
    reward: int,
    rollouts: int | None,
    trainers: int | None,
) -> None:
    devices = parse_devices(f"{count}xH100-80GB") if count else ()
    shares = NodeShares(engine, trainer, per, reward, rollouts, trainers)
    try:
        given_ = assign(devices, shares)
    except InvalidArgument as error:
        assert error.field, error.remedy  # noqa: PT017 - most examples are no error
        return
    assert len(given_.rollouts) == (rollouts or 1)
    assert len(given_.trainers) >= 1
    if not count:
        return
    assert len(given_.reward) == reward
    groups = [*given_.rollouts, *given_.trainers, given_.reward]
    flat = [one.index for group in groups for one in group]
    if given_.shared:
        assert count - reward == 1
    else:
        assert len(flat) == len(set(flat))
    assert set(flat) <= set(range(count))
    if engine is not None and not given_.shared:
        share = engine // (rollouts or 1)
        assert [len(group) for group in given_.rollouts] == [share] * (rollouts or 1)
    if trainers is not None:
        assert len(given_.trainers) == trainers


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        (NodeShares(), (["0,1,2,3"], ["4", "5", "6", "7"])),
        (NodeShares(devices_per_trainer=4), (["0,1,2,3"], ["4,5,6,7"])),
        (NodeShares(trainers=2), (["0,1,2,3"], ["4,5", "6,7"])),
        (NodeShares(engine_devices=6), (["0,1,2,3,4,5"], ["6", "7"])),
        (NodeShares(trainer_devices=0), (["0,1,2,3,4,5,6,7"], [""])),
        (NodeShares(trainer_devices=0, may_lack=True), (["0,1,2,3,4,5,6,7"], [])),
        (NodeShares(engine_devices=0, may_lack=True), ([], list("01234567"))),
        (NodeShares(rollouts=2, trainers=1), (["0,1", "2,3"], ["4,5,6,7"])),
    ],
)
def test_eight_devices_are_divided_by_the_rule(
    shares: NodeShares, expected: tuple[list[str], list[str]]
) -> None:
    found = assign(parse_devices("8xH100-80GB"), shares)
    for groups, indices in zip((found.rollouts, found.trainers), expected, strict=True):
        assert [",".join(str(one.index) for one in group) for group in groups] == indices


def test_one_device_is_shared_and_said_to_be() -> None:
    found = assign(parse_devices("24GB"), NodeShares())
    assert found.shared
    assert found.rollouts == found.trainers
    names = {name: found.of(name) for name in ("rollout-0", "trainer-0", "reward", "orchestrator")}
    assert by_device(names) == {0: "rollout-0, trainer-0"}


@pytest.mark.parametrize(
    ("declared", "options", "field"),
    [
        ("", {"engine_devices": 1}, "engine_devices"),
        ("4x80GB", {"engine_devices": 3, "trainer_devices": 2}, "engine_devices"),
        ("4x80GB", {"trainer_devices": 5}, "trainer_devices"),
        ("4x80GB", {"trainers": 3}, "trainers"),
        ("8x80GB", {"trainers": 2, "devices_per_trainer": 4}, "devices_per_trainer"),
        ("2x80GB", {"environment": {"TROUPE_REWARD_GPUS": "3"}}, "TROUPE_REWARD_GPUS"),
        ("2y80GB", {}, "TROUPE_DEVICES"),
    ],
)
def test_more_than_there_is_is_refused(
    declared: str, options: dict[str, object], field: str
) -> None:
    settings = ClusterSettings(devices=declared, **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument) as refused:
        settings.shares(settings.inventory())
    assert refused.value.field == field
    assert refused.value.remedy


def test_slurms_selection_of_devices_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of Slurm that was given two of a host's devices divides these two."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    settings = ClusterSettings(devices="8x80GB")
    found = settings.shares(settings.inventory())
    assert [one.index for one in found.of("rollout-0")] == [2]
    assert [one.index for one in found.of("trainer-0")] == [3]


def test_colocated_engines_and_trainers_have_all_devices() -> None:
    devices = parse_devices("4xH100-80GB")
    shared = assign(devices, NodeShares(devices_per_trainer=2, colocate=True, reward_devices=0))
    assert shared.shared
    assert [[one.index for one in group] for group in shared.rollouts] == [[0, 1, 2, 3]]
    assert [[one.index for one in group] for group in shared.trainers] == [[0, 1], [2, 3]]
    with pytest.raises(InvalidArgument, match="no numbers of their own") as refused:
        assign(devices, NodeShares(engine_devices=2, colocate=True))
    assert refused.value.field == "engine_devices"
