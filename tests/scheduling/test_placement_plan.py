"""Which devices each engine replica and trainer rank gets: rules of `plan` and `split`."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.devices import GIB, Device
from troupe.scheduling.devices import (
    DeviceHost,
    DevicePlan,
    DeviceRequest,
    DeviceSplit,
    MemberDevices,
    SplitRefusal,
    plan,
    split,
)


def _host(
    name: str, count: int = 8, island: int = 8, device_class: str = "H100", gib: int = 80
) -> DeviceHost:
    """A host whose devices are linked in islands of `island` neighbours, on two NUMA nodes."""
    return DeviceHost(
        name,
        tuple(
            Device(
                index,
                device_class,
                gib * GIB,
                tuple(n for n in range(count) if n // island == index // island and n != index),
                2 * index // count,
                f"GPU-{name}-{index}",
            )
            for index in range(count)
        ),
    )


def _engine(name: str, members: int = 1, devices: int = 1, **more: object) -> DeviceRequest:
    return DeviceRequest(name, "engine", members, devices, **more)  # type: ignore[arg-type]


def _gang(name: str, members: int = 1, **more: object) -> DeviceRequest:
    return DeviceRequest(name, "trainer", members, **more)  # type: ignore[arg-type]


def _at(found: DevicePlan, name: str) -> list[tuple[str, tuple[int, ...]]]:
    return [(one.host, one.devices) for one in found.members[name]]


def _hosts_of(found: DevicePlan, name: str) -> Counter[str]:
    return Counter(one.host for one in found.members[name])


_KINDS_OF_HOSTS = st.tuples(
    st.integers(1, 8),
    st.sampled_from((1, 2, 4, 8)),
    st.sampled_from(("H100", "L4")),
    st.sampled_from((24, 80)),
)
_HOSTS = st.lists(_KINDS_OF_HOSTS, min_size=1, max_size=5).map(
    lambda several: [_host(f"h{n}", *one) for n, one in enumerate(several)]
)


@st.composite
def _requests(draw: st.DrawFn, prefix: str = "r") -> list[DeviceRequest]:
    found: list[DeviceRequest] = []
    for number in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(("engine", "trainer")))
        found.append(
            DeviceRequest(
                f"{prefix}{number}",
                kind,  # type: ignore[arg-type]
                draw(st.integers(1, 10)),
                draw(st.sampled_from((1, 2, 3, 4, 8))) if kind == "engine" else 1,
                draw(st.sampled_from((0, 10, 30))) * GIB,
                draw(st.sampled_from(("", "", "H100", "L4", "B200"))),
                draw(st.sampled_from(["", "", *(one.name for one in found)])),
            )
        )
    return found


def _check(
    hosts: Sequence[DeviceHost], requests: Sequence[DeviceRequest], found: DevicePlan
) -> None:
    """Check the properties of every plan on a free cluster."""
    devices = {(h.name, d.index): d for h in hosts for d in h.devices}
    named = {one.name: one for one in requests}
    refused = {one.request.name for one in found.refusals}
    root = {name: name for name in named}
    for _ in named:
        for one in requests:
            if one.shares_with:
                low = min(root[one.name], root[one.shares_with])
                root[one.name] = root[one.shares_with] = low
    users: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
    for name, members in found.members.items():
        one = named[name]
        assert [m.member for m in members] == ([] if name in refused else [*range(one.members)])
        classes = set()
        for member in members:
            assert len(set(member.devices)) == one.devices
            for index in member.devices:
                device = devices[member.host, index]
                assert one.device_class in ("", device.device_class)
                assert device.memory >= one.memory
                classes.add(device.device_class)
                users[member.host, index].append(name)
        assert one.kind == "engine" or len(classes) <= 1
    for place, names in users.items():
        if len(names) > 1:
            assert len({root[name] for name in names}) == 1
            sharing = [other for other in named if root[other] == root[names[0]]]
            assert len(sharing) > 1
        for kind in ("engine", "trainer"):
            alike = [named[name] for name in names if named[name].kind == kind]
            assert sum(one.memory for one in alike) <= devices[place].memory
        ranks = [name for name in names if named[name].kind == "trainer"]
        assert len(set(ranks)) == len(ranks)


def test_a_gang_that_shares_devices_of_engines_is_of_one_class() -> None:
    hosts = [_host("h0", 2, device_class="L4"), _host("h1", 4)]
    # Three engines of two devices need both classes: five ranks of one class find no room there.
    both = plan(hosts, [_gang("gang", 5), _engine("engine", 3, 2, shares_with="gang")])
    assert [one.request.name for one in both.refusals] == ["gang"]
    assert _hosts_of(both, "engine") == {"h0": 1, "h1": 2}
    # Where one class has room for the engines, they are placed so that the gang finds its own.
    hosts = [_host("h0", 2, device_class="L4"), _host("h1", 2, device_class="L4"), _host("h2", 4)]
    found = plan(hosts, [_gang("gang", 4), _engine("engine", 2, 2, shares_with="gang")])
    assert not found.refusals
    shapes = {one.name: {d.device_class for d in one.devices} for one in hosts}
    assert len({*map(tuple, (shapes[host] for host in _hosts_of(found, "gang")))}) == 1


@settings(max_examples=150, deadline=None)
@given(_HOSTS, _requests(), st.randoms(use_true_random=False))
def test_no_device_has_two_members_and_the_order_of_arguments_does_not_matter(
    hosts: list[DeviceHost], requests: list[DeviceRequest], random: object
) -> None:
    found = plan(hosts, requests)
    _check(hosts, requests, found)
    assert plan(hosts[::-1], requests[::-1]) == found
    held = {name: members for name, members in found.members.items() if members}
    assert plan(hosts, requests, held).members == found.members


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(_KINDS_OF_HOSTS, st.integers(1, 6)), min_size=1, max_size=3),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    _requests(),
)
def test_a_gang_that_takes_many_hosts_at_once_takes_those_it_would_one_by_one(
    kinds: list[tuple[tuple[int, int, str, int], int]],
    gangs: list[int],
    requests: list[DeviceRequest],
) -> None:
    hosts = [_host(f"h{n}-{m}", *one) for n, (one, count) in enumerate(kinds) for m in range(count)]
    requests = [*requests, *(_gang(f"g{n}", ranks) for n, ranks in enumerate(gangs))]
    found = plan(hosts, requests)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heapq, "nsmallest", lambda _, names: [min(names)])
        assert plan(hosts, requests) == found


@settings(max_examples=100, deadline=None)
@given(_HOSTS, _requests("a"), _requests("b"))
def test_an_update_moves_nothing_that_runs(
    hosts: list[DeviceHost], first: list[DeviceRequest], second: list[DeviceRequest]
) -> None:
    before = plan(hosts, first)
    after = plan(hosts, [*first, *second], before.members)
    placed = {name: members for name, members in before.members.items() if members}
    assert placed.items() <= after.members.items()
    outside = plan(hosts, second, before.members)
    taken = {(m.host, i) for ms in before.members.values() for m in ms for i in m.devices}
    fresh = {(m.host, i) for ms in outside.members.values() for m in ms for i in m.devices}
    assert not taken & fresh


@settings(max_examples=100, deadline=None)
@given(_HOSTS, _requests())
def test_a_refusal_names_the_devices_and_their_holders(
    hosts: list[DeviceHost], requests: list[DeviceRequest]
) -> None:
    found = plan(hosts, requests)
    for one in found.refusals:
        assert one.devices == sum(len(host.devices) for host in hosts)
        holders = dict(one.holders)
        assert holders.keys() <= found.members.keys()
        assert all(found.members[name] for name in holders)
        text = str(one)
        assert f"{one.request.name} ({one.request.kind})" in text
        assert all(f"{name} ({count})" in text for name, count in holders.items())
        assert one.remedy
        if one.reason == "held":
            assert holders
        if one.reason in ("class", "memory"):
            assert one.suitable == one.free == 0


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.lists(st.sampled_from((1, 2, 4, 8)), max_size=12), st.data())
def test_groups_of_one_two_four_or_eight_find_their_devices_wherever_there_are_enough(
    hosts: int, sizes: list[int], data: st.DataObject
) -> None:
    requests, left = [], 8 * hosts
    for number, size in enumerate(sizes):
        if size <= left:
            members = data.draw(st.integers(1, left // size))
            if data.draw(st.booleans()):
                requests.append(_engine(f"e{number}", members, size))
            else:
                requests.append(_gang(f"t{number}", members * size))
            left -= members * size
    assert plan([_host(f"h{n}") for n in range(hosts)], requests).refusals == ()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.lists(st.integers(0, 8), min_size=4, max_size=8))
def test_gangs_take_whole_hosts_first(ranks: int, busy: list[int]) -> None:
    hosts = [_host(f"h{n}") for n in range(len(busy))]
    held = {
        f"x{n}": [MemberDevices(0, f"h{n}", tuple(range(count)))]
        for n, count in enumerate(busy)
        if count
    }
    found = plan(hosts, [_gang("gang", ranks)], held)
    if sum(8 - count for count in busy) < ranks:
        assert [one.reason for one in found.refusals] == (
            ["size" if 8 * len(busy) < ranks else "held"]
        )
        return
    used = _hosts_of(found, "gang")
    whole = {f"h{n}" for n, count in enumerate(busy) if not count}
    filled = [name for name in used if used[name] == 8]
    assert len(filled) == min(len(whole), ranks // 8)
    # What is left of it is on one host where one has room for it.
    rest = ranks - 8 * len(filled)
    room = [8 - count for n, count in enumerate(busy) if f"h{n}" not in filled]
    assert len(used) - len(filled) == (rest > 0) or max(room, default=0) < rest


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from((2, 4)), st.sets(st.integers(0, 15), max_size=14), st.sampled_from((2, 3, 4))
)
def test_a_tensor_parallel_group_is_linked_where_linked_devices_are_free(
    island: int, busy: set[int], size: int
) -> None:
    hosts = [_host("h0", island=island), _host("h1", island=island)]
    held = {"x": [MemberDevices(n, f"h{n // 8}", (n % 8,)) for n in sorted(busy)]}
    found = plan(hosts, [_engine("engine", 1, size)], held)
    free = [[n % 8 for n in range(8 * h, 8 * h + 8) if n not in busy] for h in (0, 1)]
    if max(map(len, free)) < size:
        assert [one.reason for one in found.refusals] == ["held"]
        return
    ((host, devices),) = _at(found, "engine")
    islands = {index // island for index in devices}
    nodes = {index // 4 for index in devices}
    counts = [Counter(index // island for index in one) for one in free]
    if max(max(c.values(), default=0) for c in counts) >= size:
        assert len(islands) == 1
    elif max(max(Counter(i // 4 for i in one).values(), default=0) for one in free) >= size:
        assert len(nodes) == 1
    assert set(devices) <= set(free[int(host[1])])


def test_the_largest_aligned_blocks_stay_free() -> None:
    held = {"x": [MemberDevices(0, "h0", (0,))], "y": [MemberDevices(0, "h1", (0, 1))]}
    found = plan([_host("h0"), _host("h1"), _host("h2")], [_engine("e", 1, 2)], held)
    # A pair next to devices in use, not a corner of four or eight.
    assert _at(found, "e") == [("h0", (2, 3))]
    found = plan([_host("h0")], [_engine("e", 1, 1)], {"x": [MemberDevices(0, "h0", (0,))]})
    assert _at(found, "e") == [("h0", (1,))]


def test_engines_are_spread_over_hosts_and_packed_where_they_must_be() -> None:
    hosts = [_host(f"h{n}") for n in range(4)]
    found = plan(hosts, [_engine("e", 8, 1)])
    assert set(_hosts_of(found, "e").values()) == {2}
    # A group of eight needs a host that spreading would have broken.
    found = plan(hosts[:2], [_engine("a", 8, 1), _engine("b", 1, 8)])
    assert not found.refusals
    assert len(_hosts_of(found, "a")) == 1


def test_any_class_leaves_the_class_that_others_name() -> None:
    hosts = [_host("big", 2), _host("small", 2, device_class="L4", gib=24)]
    found = plan(hosts, [_engine("a", 2), _engine("b", 2, device_class="H100")])
    assert not found.refusals
    assert set(_hosts_of(found, "a")) == {"small"}
    # A gang is of one class: as fast as its slowest rank.
    (refusal,) = plan(hosts, [_gang("gang", 3)]).refusals
    assert refusal.reason == "size"


def test_colocated_engines_and_trainers_take_turns_on_the_same_devices() -> None:
    requests = [
        _gang("trainer", 1, memory=60 * GIB),
        _engine("solver", 1, memory=30 * GIB, shares_with="trainer"),
        _engine("checker", 1, memory=30 * GIB, shares_with="trainer"),
    ]
    found = plan([_host("h0", 1)], requests)
    assert not found.refusals
    assert {tuple(_at(found, one.name)) for one in requests} == {(("h0", (0,)),)}
    # Both engines are awake at once: their memory adds up.
    large = _engine("checker", 1, memory=60 * GIB, shares_with="trainer")
    (refusal,) = plan([_host("h0", 1)], [*requests[:2], large]).refusals
    assert refusal.reason == "shared"
    assert refusal.request.name == "solver"
    assert "shares the devices of trainer" in str(refusal)
    # Devices of a larger gang are shared out before any is used twice.
    several = [_gang("t", 4), *(_engine(f"e{n}", 2, shares_with="t") for n in range(2))]
    found = plan([_host("h0", 4)], several)
    assert len({place for n in range(2) for place in _at(found, f"e{n}")}) == 4


def test_running_members_move_only_if_their_device_is_gone() -> None:
    hosts = [_host("h0", 4), _host("h1", 4)]
    running = {"gang": [MemberDevices(n, "h0", (n,)) for n in range(4)]}
    found = plan([hosts[1], DeviceHost("h0", hosts[0].devices[:3])], [_gang("gang", 4)], running)
    assert _at(found, "gang")[:3] == [("h0", (n,)) for n in range(3)]
    assert found.members["gang"][3].host == "h1"
    # A lost host: its ranks only.
    both = {"gang": [MemberDevices(0, "h0", (0,)), MemberDevices(1, "h1", (2,))]}
    found = plan([hosts[1]], [_gang("gang", 2)], both)
    assert _at(found, "gang")[1] == ("h1", (2,))
    assert _at(found, "gang")[0][0] == "h1"
    # Another tensor-parallel size is another process.
    old = {"e": [MemberDevices(0, "h0", (0,))]}
    assert _at(plan(hosts[:1], [_engine("e", 1, 2)], old), "e") == [("h0", (0, 1))]
    # No longer shared: one of them moves.
    twice: Mapping[str, list[MemberDevices]] = {
        name: [MemberDevices(0, "h0", (0,))] for name in ("e", "t")
    }
    found = plan(hosts[:1], [_engine("e"), _gang("t")], twice)
    assert _at(found, "e") == [("h0", (0,))] != _at(found, "t")


def test_refusals_say_why() -> None:
    hosts = [_host("h0", 2)]
    held = {"judge": [MemberDevices(0, "h0", (0,))]}
    cases = {
        "class": _engine("a", device_class="B200"),
        "memory": _engine("a", memory=100 * GIB),
        "size": _gang("a", 3),
        "held": _gang("a", 2),
    }
    for reason, request in cases.items():
        (refusal,) = plan(hosts, [request], held).refusals
        assert refusal.reason == reason
    assert "asks for 2 x 1 any devices: there are 2; 2 suit and 1 of these are free" in str(refusal)
    assert "held by judge (1)" in str(refusal)
    (refusal,) = plan([], [_engine("a")]).refusals
    assert (refusal.reason, refusal.devices) == ("class", 0)
    clash = [_gang("t", device_class="L4"), _engine("e", device_class="H100", shares_with="t")]
    assert len(plan(hosts, clash).refusals) == 2


def test_contradictory_arguments_are_errors() -> None:
    with pytest.raises(ValueError, match="two hosts"):
        plan([_host("h0"), _host("h0")], [])
    with pytest.raises(ValueError, match="two requests"):
        plan([], [_engine("a"), _gang("a")])
    with pytest.raises(ValueError, match="b, which asks for none"):
        plan([], [_engine("a", shares_with="b")])
    with pytest.raises(ValueError, match="two devices"):
        plan([DeviceHost("h0", (Device(0, "H100", 1), Device(0, "H100", 2)))], [])
    with pytest.raises(ValueError, match="0 members"):
        _engine("a", 0)


def test_three_thousand_devices_of_many_requests() -> None:
    hosts = [_host(f"h{n:03}") for n in range(375)]
    requests = [
        *(_gang(f"t{n}", 8 + 4 * (n % 4)) for n in range(100)),
        *(_engine(f"e{n}", 4, 1 + n % 2) for n in range(200)),
        *(_engine(f"c{n}", 4, 2, shares_with=f"t{n}") for n in range(30)),
    ]
    found = plan(hosts, requests)
    assert not found.refusals
    _check(hosts, requests, found)


def test_a_node_divides_its_devices() -> None:
    devices = _host("h0").devices
    assert split(devices) == DeviceSplit((0, 1, 2, 3), (4, 5, 6, 7))
    assert split(devices[:3]) == DeviceSplit((0, 1), (2,))
    assert split(devices, 3) == DeviceSplit((0, 1, 2), (3, 4, 5, 6, 7))
    assert split(devices, trainer=1) == DeviceSplit((0, 1, 2, 3, 4, 5, 6), (7,))
    assert split(devices, 2, 2) == DeviceSplit((0, 1), (2, 3))
    assert split(devices, 8, 0) == DeviceSplit(tuple(range(8)), ())
    assert split(devices[:1]) == DeviceSplit((0,), (0,), shared=True)
    assert split(devices[:1], 1) == DeviceSplit((0,), ())
    assert isinstance(split(devices, 6, 3), SplitRefusal)
    assert isinstance(split(devices, -1), SplitRefusal)
    assert isinstance(split((), 1), SplitRefusal)
    assert split(()) == DeviceSplit((), ())
    # Pairs stay whole.
    halves = split(_host("h0", 6, island=2).devices)
    assert isinstance(halves, DeviceSplit)
    assert len(halves.engine) == len(halves.trainer) == 3
