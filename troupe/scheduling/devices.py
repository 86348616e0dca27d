"""Placement of engine replicas and trainer ranks on devices of hosts.

`plan` places requests: a request is the replicas of an engine or the ranks of a gang, and each of
its members takes a number of devices of one host. Rules:

* *All or none*: a request gets devices for all its members, or a `DeviceRefusal` that states the
  request, the available devices and their holders.
* *What runs stays*: a member that holds devices keeps them. It is placed anew only if its host or a
  device of it is gone, its request asks for another number, or another member has it without
  sharing it.
* *Nothing twice*: no device has two members, unless their requests share devices on purpose
  (`shares_with`, a job's `pipeline.colocate`). Of those, engines and trainers take turns: the
  memory of members of one kind on a device adds up, memory of two kinds does not.
* *Gangs on whole hosts first*: a gang takes free hosts that it fills, then the host where its rest
  fits best, then the hosts with most free devices. All its devices are of one class.
* *A tensor-parallel group is on one host*, on devices that are all linked to one another (NVLink)
  where there are any, else on one NUMA node, else anywhere on the host.
* *Large blocks stay free*: among equals, the choice leaves the largest aligned blocks of 1, 2, 4, 8
  neighbours (the cells of ARL-Tangram, arXiv 2603.13019, section 3; a buddy allocator).
* *Engines are spread over hosts*, so that a lost host takes few replicas of a policy.
* *Rare classes last*: a request that takes any class gets one that others name least.

Gangs go first, then engines, larger ones before smaller ones. If that refuses a request, a second
order is tried that packs instead of spreading, largest groups first; with groups of 1, 2, 4 or 8
equal devices it finds a plan wherever there is one. Hosts in the same state are examined once, so
that a plan of 3,000 devices takes milliseconds.

`split` divides the devices of a single node between engines and trainers.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter, itemgetter
from typing import Any, Final, Literal, NamedTuple

from troupe.devices import GIB, Device

Kind = Literal["engine", "trainer"]
Reason = Literal["class", "memory", "size", "held", "shared"]

_REMEDY: Final[dict[Reason, str]] = {
    "class": "Ask for a class that a host has, or add hosts with it.",
    "memory": "Spread a member over more devices (engine.tensor_parallel, trainer.gang), or use "
    "devices with more memory.",
    "size": "Ask for fewer replicas or ranks, for fewer devices per member, or add hosts.",
    "held": "Wait for their holders or cancel them, ask for fewer, or add hosts.",
    "shared": "Ask for at most as many as the request whose devices it shares.",
}


@dataclass(frozen=True, slots=True)
class DeviceHost:
    """A host that is up, and its devices; their indices are unique on it."""

    name: str
    devices: tuple[Device, ...]


@dataclass(frozen=True, slots=True)
class MemberDevices:
    """Devices of one member of a request, by their indices on `host`."""

    member: int
    """Number of the replica, or rank in the gang."""
    host: str
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """Devices wanted by an engine's replicas or a gang's ranks."""

    name: str
    kind: Kind
    members: int = 1
    """Number of replicas or ranks."""
    devices: int = 1
    """Devices of each member: its tensor-parallel size."""
    memory: int = 0
    """Bytes that a member needs on each of its devices; 0: unknown."""
    device_class: str = ""
    """Class of device that it needs; empty: any."""
    shares_with: str = ""
    """Name of a request with which it shares devices on purpose; empty: none."""

    def __post_init__(self) -> None:
        if self.members < 1 or self.devices < 1:
            raise ValueError(f"{self.name}: {self.members} members of {self.devices} devices")

    @property
    def total(self) -> int:
        """Devices of all its members."""
        return self.members * self.devices


@dataclass(frozen=True, slots=True)
class DeviceRefusal:
    """Why a request gets no devices now."""

    request: DeviceRequest
    reason: Reason
    """`class`: no device is of that class; `memory`: none of these has enough; `size`: it would not
    fit even if all were free; `held`: others hold them; `shared`: the request whose devices it
    shares has too few, or none."""
    devices: int
    """Devices that there are on all hosts."""
    suitable: int
    """Devices of the right class with enough memory."""
    free: int
    """Suitable devices that are free."""
    largest: int
    """Bytes of the largest device of the right class."""
    holders: tuple[tuple[str, int], ...]
    """Holders of suitable devices with their numbers, largest first."""
    leader: str = ""
    """The request whose devices it shares, or its own name."""

    @property
    def remedy(self) -> str:
        """A sentence that tells the user what to change."""
        return _REMEDY[self.reason]

    def __str__(self) -> str:
        asked = self.request
        size = f" with {asked.memory / GIB:.1f} GiB each" if asked.memory else ""
        there = f"there are {self.devices}; {self.suitable} suit and {self.free} of these are free"
        if self.reason == "memory":
            there += f"; the largest has {self.largest / GIB:.1f} GiB"
        if self.reason == "shared":
            there += f"; it shares the devices of {self.leader}"
        if self.holders:
            there += "; held by " + ", ".join(f"{name} ({count})" for name, count in self.holders)
        return (
            f"{asked.name} ({asked.kind}) asks for {asked.members} x {asked.devices} "
            f"{asked.device_class or 'any'} devices{size}: {there}"
        )


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The members' devices by request, and what was refused."""

    members: Mapping[str, tuple[MemberDevices, ...]]
    """By number. For a refused request: the members that run already."""
    refusals: tuple[DeviceRefusal, ...] = ()


def plan(
    hosts: Sequence[DeviceHost],
    requests: Sequence[DeviceRequest],
    held: Mapping[str, Sequence[MemberDevices]] | None = None,
) -> DevicePlan:
    """Return the devices for all members of all requests. Independent of the order of the
    arguments.

    `held`: what runs already, by request; other names there hold their devices too, and are placed
    no further. Raises ValueError for two hosts or requests of one name, two devices of one index,
    and requests that share devices with an unknown one.
    """
    ordered = sorted(hosts, key=lambda host: host.name)
    if len({host.name for host in hosts}) < len(hosts):
        raise ValueError("two hosts of one name")
    groups = _share_groups(requests)
    shapes = _shapes(ordered)
    drafts = []
    for pack in (False, True):
        drafts.append(_DeviceDraft(shapes, groups, held or {}))
        for group in sorted(groups, key=lambda one: one.by_size if pack else one.by_kind):
            drafts[-1].place(group, pack=pack)
        if not drafts[-1].refused:
            break
    return min(drafts, key=lambda draft: len(draft.refused)).plan()


@dataclass(frozen=True, slots=True)
class DeviceSplit:
    """Indices of a node's devices for engines and for trainers; `shared`: both have all of them."""

    engine: tuple[int, ...]
    trainer: tuple[int, ...]
    shared: bool = False


@dataclass(frozen=True, slots=True)
class SplitRefusal:
    """Why a node's devices cannot be divided as asked."""

    message: str
    remedy: str


def split(
    devices: Sequence[Device],
    engine: int | None = None,
    trainer: int | None = None,
    *,
    colocate: bool = False,
) -> DeviceSplit | SplitRefusal:
    """Divide a node's devices. By default engines and trainers get half each, and engines the odd
    one. They share a single device, and with `colocate` all devices.

    `engine`, `trainer`: requested numbers; a single one leaves the rest to the other. Engines get
    the block of linked devices that leaves the trainers the largest blocks.
    """
    count = len(devices)
    if colocate:
        if engine is not None or trainer is not None:
            return SplitRefusal(
                "engines and trainers that share all devices (colocate) have no numbers of their "
                "own",
                "Leave out either colocate or the numbers.",
            )
        everything = tuple(one.index for one in devices)
        return DeviceSplit(everything, everything, shared=True)
    if min(engine or 0, trainer or 0) < 0:
        return SplitRefusal(
            f"{engine} devices for engines and {trainer} for trainers", "Give 0 or more."
        )
    if engine is None and trainer is None:
        if count == 1:
            return DeviceSplit((devices[0].index,), (devices[0].index,), shared=True)
        engine = (count + 1) // 2
    if engine is None:
        engine = max(0, count - (trainer or 0))
    if trainer is None:
        trainer = max(0, count - engine)
    if engine + trainer > count:
        return SplitRefusal(
            f"{engine} devices for engines and {trainer} for trainers are more than the node's "
            f"{count}",
            "Ask for fewer.",
        )
    shape = _Shape(devices)
    ours = shape.group(shape.all, engine)
    rest = shape.all & ~ours.mask if ours else shape.all
    theirs = shape.group(rest, trainer)
    return DeviceSplit(
        shape.indices(ours.mask) if ours else (), shape.indices(theirs.mask) if theirs else ()
    )


class _Wish(NamedTuple):
    """Needs of a member: so many devices of one class (empty: any), each with so much memory."""

    devices: int
    device_class: str
    memory: int


class _Group(NamedTuple):
    """Devices that work together. `links`: 0: all linked to one another, 1: on one NUMA node, 2: on
    one host; `loss`: how much smaller the largest free blocks become; `apart`: how far they are
    from each other and from a block's start."""

    links: int
    loss: int
    apart: int
    mask: int


class _Shape:
    """The devices of a host without its name: hosts with equal ones share it.

    A set of devices is a bit mask of their positions; linked devices have neighbouring positions.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        if len({one.index for one in devices}) < len(devices):
            raise ValueError("two devices of one index")
        islands: list[list[Device]] = []
        for one in sorted(devices, key=_place_of):
            home = next((i for i in islands if all(_linked(one, other) for other in i)), None)
            if home is None:
                islands.append([one])
            else:
                home.append(one)
        self.devices = [one for island in islands for one in island]
        self._positions = {one.index: position for position, one in enumerate(self.devices)}
        self.all = (1 << len(devices)) - 1
        self._size = 1 << max(0, len(devices) - 1).bit_length()
        names = {one.index: number for number, isle in enumerate(islands) for one in isle}
        self._levels = (
            self._parts(lambda one: names[one.index]),
            self._parts(lambda one: one.numa_node),
            (self.all,),
        )
        self._groups: dict[tuple[int, int], _Group | None] = {}
        self._divided: dict[tuple[int, int], list[int]] = {}
        self._suitable: dict[_Wish, int] = {}
        self._indices: dict[int, tuple[int, ...]] = {}

    def _parts(self, key: Callable[[Device], int | None]) -> tuple[int, ...]:
        parts: dict[int | None, int] = {}
        for position, one in enumerate(self.devices):
            parts[key(one)] = parts.get(key(one), 0) | 1 << position
        return tuple(parts.values())

    def suitable(self, wish: _Wish) -> int:
        """Return the devices of the class with enough memory, or of unknown memory."""
        if (known := self._suitable.get(wish)) is None:
            known = self._suitable[wish] = sum(
                1 << position
                for position, one in enumerate(self.devices)
                if wish.device_class in ("", one.device_class) and not 0 < one.memory < wish.memory
            )
        return known

    def group(self, free: int, count: int) -> _Group | None:
        """Return the best `count` devices of `free`; None: there are not as many."""
        if not 0 < count <= free.bit_count():
            return None
        wish = free, count
        if wish not in self._groups:
            # The last level is the whole host, which has enough.
            self._groups[wish] = min(
                next(found for level in range(3) if (found := self._windows(level, free, count)))
            )
        return self._groups[wish]

    def parts(self, block: int, count: int) -> list[int]:
        """Return a set of devices in groups of `count`, the best one first."""
        if (known := self._divided.get((block, count))) is None:
            known, left = [], block
            while (group := self.group(left, count)) is not None:
                known.append(group.mask)
                left &= ~group.mask
            self._divided[block, count] = known
        return known

    def _windows(self, level: int, free: int, count: int) -> list[_Group]:
        """List each run of `count` neighbours among the free devices of each part."""
        before, found = _worth(free, 0, self._size), []
        for part in self._levels[level]:
            bits = list(_bits(part & free))
            for first in range(len(bits) - count + 1):
                mask = sum(1 << position for position in bits[first : first + count])
                loss = before - _worth(free & ~mask, 0, self._size)
                apart = bits[first + count - 1] - bits[first]
                aligned = bits[first] % (1 << (count - 1).bit_length()) == 0
                found.append(_Group(level, loss, 2 * apart + (not aligned), mask))
        return found

    def indices(self, mask: int) -> tuple[int, ...]:
        """Return the indices of the devices of a set, ascending."""
        if (known := self._indices.get(mask)) is None:
            known = tuple(sorted(self.devices[position].index for position in _bits(mask)))
            self._indices[mask] = known
        return known

    def mask(self, indices: Iterable[int]) -> int:
        """Return the set of devices of these indices; 0: one is not there."""
        positions = [self._positions.get(index) for index in indices]
        return 0 if None in positions else sum(1 << one for one in positions if one is not None)

    def class_of(self, index: int) -> str:
        """Return the class of a device."""
        return self.devices[self._positions[index]].device_class


def _place_of(one: Device) -> tuple[str, int, int]:
    numa_node = -1 if one.numa_node is None else one.numa_node
    return one.device_class, numa_node, one.index


def _linked(one: Device, other: Device) -> bool:
    return one.index in other.links or other.index in one.links


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


@lru_cache(maxsize=1 << 16)
def _worth(free: int, first: int, size: int) -> int:
    """Return the sum of the squared sizes of the largest aligned blocks that are wholly free."""
    block = ((1 << size) - 1) << first
    if free & block == block:
        return size * size
    if size == 1 or not free & block:
        return 0
    half = size // 2
    return _worth(free, first, half) + _worth(free, first + half, half)


# Properties that distinguish two devices of a host, apart from their names.
_traits_of: Final = attrgetter("index", "device_class", "memory", "links", "numa_node")


def _shapes(hosts: Iterable[DeviceHost]) -> dict[str, _Shape]:
    known: dict[tuple[Any, ...], _Shape] = {}
    shapes = {}
    for host in hosts:
        key = tuple(sorted(map(_traits_of, host.devices), key=itemgetter(0)))
        if key not in known:
            known[key] = _Shape(host.devices)
        shapes[host.name] = known[key]
    return shapes


class _FreeDevices:
    """Free devices of hosts, by the state of the host: its shape and which are free."""

    def __init__(self, shapes: Mapping[str, _Shape], free: Mapping[str, int]) -> None:
        self._shapes, self._free = shapes, dict(free)
        self._states: dict[tuple[_Shape, int], set[str]] = {}
        for host, mask in self._free.items():
            self._states.setdefault((shapes[host], mask), set()).add(host)

    def take(self, host: str, mask: int) -> None:
        """Make devices of a host no longer free."""
        shape, free = self._shapes[host], self._free[host]
        names = self._states[shape, free]
        names.remove(host)
        if not names:
            del self._states[shape, free]
        self._free[host] = free & ~mask
        self._states.setdefault((shape, free & ~mask), set()).add(host)

    def of(self, host: str) -> int:
        """Free devices of a host."""
        return self._free[host]

    def room(self, wish: _Wish) -> int:
        """Return how many members have room; every group that a host has devices for is found."""
        return sum(
            len(names) * ((free & shape.suitable(wish)).bit_count() // wish.devices)
            for (shape, free), names in self._states.items()
        )

    def spread(
        self, wish: _Wish, count: int, here: Counter[str], *, pack: bool
    ) -> list[tuple[str, int]]:
        """Take devices for up to `count` members, each on the host that has fewest of them
        (`here`); with `pack` where they leave the largest blocks."""
        # One entry for the hosts in one state: the first, with the others behind it.
        heap: list[tuple[int, int, int, str, int, Iterator[str]]] = []

        def offer(host: str, others: Iterator[str]) -> None:
            shape = self._shapes[host]
            group = shape.group(self._free[host] & shape.suitable(wish), wish.devices)
            if group is not None:
                members = 0 if pack else here[host]
                entry = group.links, members, group.loss, host, group.mask, others
                heapq.heappush(heap, entry)

        def next_of(others: Iterator[str]) -> None:
            if (host := next(others, None)) is not None:
                offer(host, others)

        for names in self._states.values():
            next_of(iter(sorted(names - here.keys())))
        for host in sorted(here.keys() & self._free.keys()):
            offer(host, iter(()))
        taken: list[tuple[str, int]] = []
        while heap and len(taken) < count:
            *_, host, mask, others = heapq.heappop(heap)
            self.take(host, mask)
            here[host] += 1
            taken.append((host, mask))
            offer(host, iter(()))
            next_of(others)
        return taken

    def gang(self, wish: _Wish, count: int) -> list[tuple[str, int]]:
        """Take devices for `count` members, on whole hosts first; for none if there are too few."""
        taken: list[tuple[str, int]] = []
        enough = self.room(wish) >= count
        while enough and len(taken) < count:
            hosts, block = self._best_for_gang(wish, count - len(taken))
            for host in hosts:
                self.take(host, block)
                parts = self._shapes[host].parts(block, wish.devices)
                taken += [(host, mask) for mask in parts]
        return taken

    def _best_for_gang(self, wish: _Wish, left: int) -> tuple[list[str], int]:
        """Return the next hosts of a gang, and its devices on each of them."""
        best: tuple[Any, ...] = ()
        alike: list[tuple[set[str], int]] = []
        most = 0
        for (shape, free), names in self._states.items():
            usable = free & shape.suitable(wish)
            room = usable.bit_count() // wish.devices
            most, fit = max(most, room), min(left, room)
            if (group := shape.group(usable, fit * wish.devices)) is not None:
                partly = int(free != shape.all)
                rank = (group.links, group.loss, partly) if fit == left else (partly, -fit, 0)
                if not best or (fit < left, rank) < best:
                    best, alike = (fit < left, rank), []
                if (fit < left, rank) == best:
                    alike.append((names, group.mask))
        if left <= most or len(alike) > 1:
            host, mask = min((min(names), mask) for names, mask in alike)
            return [host], mask
        # The choice stays until a host has room for all that are left.
        names, mask = alike[0]
        fit = mask.bit_count() // wish.devices
        return heapq.nsmallest(1 + (left - most - 1) // fit, names), mask


@dataclass(frozen=True, slots=True)
class _ShareGroup:
    """Requests for the same devices: `leader`, the largest, takes them, `guests` use them too."""

    leader: DeviceRequest
    guests: tuple[DeviceRequest, ...] = ()

    @property
    def requests(self) -> tuple[DeviceRequest, ...]:
        """All of them."""
        return self.leader, *self.guests

    @property
    def classes(self) -> frozenset[str]:
        """Classes that they name."""
        return frozenset(one.device_class for one in self.requests) - {""}

    @property
    def memory(self) -> int:
        """The most memory that one of them needs on a device."""
        return max(one.memory for one in self.requests)

    @property
    def by_size(self) -> tuple[object, ...]:
        """Orders groups: larger members, named classes and more memory first."""
        one = self.leader
        return -one.devices, not self.classes, -self.memory, -one.total, one.name

    @property
    def by_kind(self) -> tuple[object, ...]:
        """Orders groups: gangs first, the larger ones before."""
        one = self.leader
        return one.kind != "trainer", not self.classes, -one.devices, -one.total, one.name

    def friends(self, request: DeviceRequest) -> set[str]:
        """Return the names of requests whose members may be on a device of `request`: two ranks of
        a gang need two devices, two replicas of an engine do not."""
        if not self.guests:
            return set()
        names = {one.name for one in self.requests}
        return names - {request.name} if request.kind == "trainer" else names


def _share_groups(requests: Sequence[DeviceRequest]) -> list[_ShareGroup]:
    named = {one.name: one for one in requests}
    if len(named) < len(requests):
        raise ValueError("two requests of one name")
    root = {name: name for name in named}

    def find(name: str) -> str:
        while root[name] != name:
            name = root[name]
        return name

    for name in sorted(named):
        if other := named[name].shares_with:
            if other not in named:
                raise ValueError(f"{name} shares devices with {other}, which asks for none")
            root[find(name)] = find(other)
    together: dict[str, list[DeviceRequest]] = {}
    for name in named:
        together.setdefault(find(name), []).append(named[name])
    found = []
    for members in together.values():
        members.sort(key=lambda one: (-one.total, -one.devices, one.kind != "trainer", one.name))
        found.append(_ShareGroup(members[0], tuple(members[1:])))
    return found


class _DeviceDraft:
    """A plan while it is made."""

    def __init__(
        self,
        shapes: Mapping[str, _Shape],
        groups: Sequence[_ShareGroup],
        held: Mapping[str, Sequence[MemberDevices]],
    ) -> None:
        self._shapes = shapes
        self._groups = {one.name: group for group in groups for one in group.requests}
        self._requests = {one.name: one for group in groups for one in group.requests}
        self._members: dict[str, dict[int, MemberDevices]] = {name: {} for name in self._groups}
        self.refused: list[DeviceRequest] = []
        # By host: who holds devices of it, and which.
        self._holders: dict[str, dict[str, int]] = {host: {} for host in shapes}
        self._free = _FreeDevices(shapes, {host: shape.all for host, shape in shapes.items()})
        # Names that are only held come first: they cannot be placed anew.
        for name in sorted(held, key=lambda name: (name in self._groups, name)):
            for member in sorted(held[name], key=lambda one: one.member):
                if mask := self._kept(name, member):
                    self._free.take(member.host, mask)
                    self._hold(name, member, mask)
        named = Counter(name for group in groups for name in group.classes)
        classes = {one.device_class for shape in set(shapes.values()) for one in shape.devices}
        self._classes = sorted(classes, key=lambda name: (named[name], name))

    def _kept(self, name: str, member: MemberDevices) -> int:
        """Return the devices that a running member keeps; 0: it is placed anew."""
        shape = self._shapes.get(member.host)
        mask = shape.mask(member.devices) if shape is not None else 0
        if not mask or name not in self._groups:
            return mask
        request = self._requests[name]
        others = {who for who, held in self._holders[member.host].items() if held & mask}
        stays = (
            member.member < request.members
            and mask.bit_count() == request.devices
            and (not others or others <= self._groups[name].friends(request))
        )
        return mask if stays else 0

    def _hold(self, name: str, member: MemberDevices, mask: int) -> None:
        holders = self._holders[member.host]
        holders[name] = holders.get(name, 0) | mask
        if name in self._members:
            self._members[name][member.member] = member

    def place(self, group: _ShareGroup, *, pack: bool) -> None:
        """Place the requests of a group; all are refused with their leader."""
        leader = group.leader
        count = leader.members - len(self._members[leader.name])
        found = self._take(group, count, pack=pack)
        if len(found) < count:
            self.refused += group.requests
            return
        self._add(leader, found)
        for guest in group.guests:
            count = guest.members - len(self._members[guest.name])
            found = self._share(group, guest, count)
            if len(found) < count:
                self.refused.append(guest)
            else:
                self._add(guest, found)

    def _take(self, group: _ShareGroup, count: int, *, pack: bool) -> list[tuple[str, int]]:
        """Return the devices for `count` further members of the leader; none if there are too
        few."""
        leader, wishes = group.leader, self._wishes(group)
        classes = self._classes_of(leader)
        single = (one for one in wishes if classes <= {one.device_class})
        if leader.kind == "trainer":
            return next(filter(None, (self._free.gang(wish, count) for wish in single)), [])
        if sum(self._free.room(wish) for wish in wishes) < count:
            return []
        if any(guest.kind == "trainer" for guest in group.guests):
            # A gang is of one class: so are the devices that it shares, if one class has enough.
            wishes = next(([one] for one in single if self._free.room(one) >= count), wishes)
        here = Counter(one.host for one in self._members[leader.name].values())
        found: list[tuple[str, int]] = []
        for wish in wishes:
            found += self._free.spread(wish, count - len(found), here, pack=pack)
        return found

    def _classes_of(self, request: DeviceRequest) -> set[str]:
        """Return the classes of the devices of the members that have been placed."""
        members = self._members[request.name].values()
        return {self._shapes[one.host].class_of(one.devices[0]) for one in members}

    def _wishes(self, group: _ShareGroup) -> list[_Wish]:
        """Return the needs of a member of its leader, for each class of device that will do."""
        classes = [one for one in self._classes if group.classes <= {one}]
        return [_Wish(group.leader.devices, one, group.memory) for one in classes]

    def _share(self, group: _ShareGroup, guest: DeviceRequest, count: int) -> list[tuple[str, int]]:
        """Return the devices of the leader for `count` further members of a guest: those with
        fewest members of its kind, and room for one more."""
        loads: Counter[tuple[str, int]] = Counter()
        used: Counter[tuple[str, int]] = Counter()

        def add(request: DeviceRequest, host: str, mask: int) -> None:
            for bit in _bits(mask):
                loads[host, bit] += 1
                used[host, bit] += request.memory

        for one in group.requests:
            for member in self._members[one.name].values():
                if one.kind == guest.kind:
                    add(one, member.host, self._shapes[member.host].mask(member.devices))
        ours = Counter(one.host for one in self._members[guest.name].values())
        found: list[tuple[str, int]] = []
        layer = 0
        while len(found) < count:
            free: dict[str, int] = {}
            for member in self._members[group.leader.name].values():
                devices = self._shapes[member.host].devices
                mine = self._holders[member.host].get(guest.name, 0)
                barred = mine if guest.kind == "trainer" else 0
                for bit in _bits(self._shapes[member.host].mask(member.devices) & ~barred):
                    at, most = (member.host, bit), devices[bit].memory
                    room = not most or used[at] + guest.memory <= most
                    if loads[at] <= layer and room:
                        free[member.host] = free.get(member.host, 0) | 1 << bit
            pool, wish = (
                _FreeDevices(self._shapes, free),
                _Wish(guest.devices, guest.device_class, 0),
            )
            if guest.kind == "trainer":
                held = self._classes_of(guest)
                names = [
                    one
                    for one in self._classes
                    if guest.device_class in ("", one) and held <= {one}
                ]
                gangs = (pool.gang(wish._replace(device_class=one), count) for one in names)
                more = next(filter(None, gangs), [])
            else:
                more = pool.spread(wish, count - len(found), ours, pack=False)
            if not more and layer >= max(loads.values(), default=0):
                return []
            for host, mask in more:
                add(guest, host, mask)
            found += more
            layer += 1
        return found

    def _add(self, request: DeviceRequest, found: Iterable[tuple[str, int]]) -> None:
        """Assign the missing numbers to new members, host by host."""
        missing = [n for n in range(request.members) if n not in self._members[request.name]]
        for number, (host, mask) in zip(missing, found, strict=True):
            devices = self._shapes[host].indices(mask)
            self._hold(request.name, MemberDevices(number, host, devices), mask)

    def plan(self) -> DevicePlan:
        """Return the finished plan."""
        members = {
            name: tuple(numbered[number] for number in sorted(numbered))
            for name, numbered in sorted(self._members.items())
        }
        refused = sorted(self.refused, key=lambda one: one.name)
        return DevicePlan(members, tuple(self._refusal(one) for one in refused))

    def _refusal(self, request: DeviceRequest) -> DeviceRefusal:
        group, holders = self._groups[request.name], Counter[str]()
        devices = classed = suitable = free = largest = 0
        for host, shape in self._shapes.items():
            devices += len(shape.devices)
            suits = 0
            for bit, device in enumerate(shape.devices):
                if group.classes <= {device.device_class}:
                    classed += 1
                    largest = max(largest, device.memory)
                    if not 0 < device.memory < group.memory:
                        suits |= 1 << bit
            for name, held in self._holders[host].items():
                holders[name] += (held & suits).bit_count()
            suitable += suits.bit_count()
            free += (self._free.of(host) & suits).bit_count()
        empty = _FreeDevices(
            self._shapes, {host: shape.all for host, shape in self._shapes.items()}
        )
        rooms = [empty.room(wish) for wish in self._wishes(group)]
        most = max(rooms, default=0) if group.leader.kind == "trainer" else sum(rooms)
        reason: Reason = "held"
        if request is not group.leader:
            reason = "shared"
        elif not classed:
            reason = "class"
        elif not suitable:
            reason = "memory"
        elif most < request.members:
            reason = "size"
        by_count = sorted((+holders).items(), key=lambda one: (-one[1], one[0]))
        return DeviceRefusal(
            request, reason, devices, suitable, free, largest, tuple(by_count), group.leader.name
        )
