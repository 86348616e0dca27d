"""The devices of a host: found through NVML, or declared in `TROUPE_DEVICES`.

`8xH100-80GB` is eight devices of class H100 with 80 GB each. Class and count may be left out
(`80GB`, `2x24GB`), and kinds are joined by `+` (`4xH100-80GB+2xL4-24GB`).

The variables of `visible` give devices to a process: CUDA_VISIBLE_DEVICES, and TROUPE_DEVICES,
which describes the same devices, so that the process knows them without a driver. Tests and dry
runs declare devices on machines that have none.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

import psutil
import pynvml

from troupe.rpc import InvalidArgument

GIB: Final = 1 << 30
DECLARED: Final = "TROUPE_DEVICES"
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
# Version of the messages in which nodes report their devices. A head refuses other versions.
NODE_PROTOCOL: Final = 1

# Class of a device that is declared without one.
_ANY_CLASS: Final = "gpu"
_KIND: Final = re.compile(
    r"(?:(?P<count>\d{1,6})x)?(?:(?P<name>[A-Za-z][\w.-]*?)-)?(?P<size>\d{1,6}(?:\.\d{1,3})?)"
    r"(?P<unit>GB|GiB|MB|MiB)",
    re.ASCII | re.IGNORECASE,
)
_MOST_DEVICES: Final = 1 << 16
# Limit, use, and the kind of pages not in use, of control groups of versions 2 and 1.
_MEMORY_FILES: Final = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
# Declared devices of one kind count as linked with each other if one host can hold them.
_MOST_LINKED: Final = 16


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a host."""

    index: int
    """Its number on the host, in the order of the PCI bus."""
    device_class: str
    """Class, such as "H100"."""
    memory: int
    """Bytes."""
    links: tuple[int, ...] = ()
    """Indices of the devices that NVLink joins it to."""
    numa_node: int | None = None
    uuid: str = ""
    """The driver's name for it, "GPU-..."; empty for a declared device."""


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """The use of a device as its driver reports it."""

    used_bytes: int
    utilization: float
    """Fraction of the most recent time in which it computed."""


def parse_devices(text: str, field: str = "devices") -> tuple[Device, ...]:
    """Return the devices that `text` describes, numbered from 0 in the order of the text.

    GB and MB are powers of two, as vendors and drivers use them for a device's memory. A JSON list
    is read in the format that `visible` writes. Raises InvalidArgument, which names `field`.
    """
    if text.lstrip().startswith("["):
        return _from_json(text, field)
    found: list[Device] = []
    for part in text.split("+"):
        kind = _KIND.fullmatch(part.strip())
        if kind is None:
            raise InvalidArgument(
                f"{part.strip()!r} is not COUNTxCLASS-MEMORY",
                field=field,
                value=text,
                remedy="Write for example 8xH100-80GB, 2x24GB or 4xH100-80GB+2xL4-24GB.",
            )
        count = 1 if kind["count"] is None else int(kind["count"])
        memory = int(float(kind["size"]) * (GIB if kind["unit"][0] in "Gg" else GIB >> 10))
        if not count or not memory or len(found) + count > _MOST_DEVICES:
            raise InvalidArgument(
                f"{part.strip()!r} has {count} devices of {memory} bytes",
                field=field,
                value=text,
                remedy=f"Give 1 to {_MOST_DEVICES} devices in all, each with memory.",
            )
        name = kind["name"] or _ANY_CLASS
        numbers = range(len(found), len(found) + count)
        found += [
            Device(
                number,
                name,
                memory,
                tuple(other for other in numbers if other != number)
                if count <= _MOST_LINKED
                else (),
            )
            for number in numbers
        ]
    return tuple(found)


def _from_json(text: str, field: str) -> tuple[Device, ...]:
    try:
        devices = tuple(
            Device(**{**one, "links": tuple(one.get("links", ()))}) for one in json.loads(text)
        )
        if len({one.index for one in devices}) != len(devices):
            raise ValueError("two devices have one index")
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidArgument(
            f"is not a list of devices: {error}",
            field=field,
            value=text[:200],
            remedy="Write COUNTxCLASS-MEMORY, such as 8xH100-80GB.",
        ) from error
    return devices


def find_devices(environment: Mapping[str, str] = os.environ) -> tuple[Device, ...]:
    """Return the devices that a process with this environment may use; none without a driver.

    TROUPE_DEVICES takes the place of what NVML reports. CUDA_VISIBLE_DEVICES, as Slurm and
    Kubernetes set it, selects from either. Raises `InvalidArgument`.
    """
    declared = environment.get(DECLARED, "")
    devices = parse_devices(declared, DECLARED) if declared.strip() else _installed()
    selection = environment.get(VISIBLE)
    return devices if selection is None else _selected(devices, selection)


def visible(devices: Sequence[Device]) -> dict[str, str]:
    """Return environment variables with which a process sees only these devices."""
    return {
        VISIBLE: ",".join(str(one.index) for one in devices),
        # By default CUDA numbers the fastest device first; NVML and this module use the bus order.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        DECLARED: json.dumps([asdict(one) for one in devices]) if devices else "",
    }


def _selected(devices: tuple[Device, ...], selection: str) -> tuple[Device, ...]:
    """Return the devices that CUDA_VISIBLE_DEVICES selects, in its order; like CUDA, stop at the
    first unknown name."""
    by_index = {str(one.index): one for one in devices}
    found: list[Device] = []
    for part in selection.split(","):
        name = part.strip()
        if name.isdecimal():
            one = by_index.get(str(int(name)))
        else:
            # A prefix of the UUID suffices if it is unique.
            fitting = [d for d in devices if name and d.uuid.startswith(name)]
            one = fitting[0] if len(fitting) == 1 else None
        if one is None or one in found:
            break
        found.append(one)
    return tuple(found)


def pin(pid: int, devices: Iterable[Device]) -> None:
    """Pin a process that has just started to the cores of its devices' NUMA nodes, as far as this
    process may use them; do nothing if the nodes are unknown."""
    cores: set[int] = set()
    for node in {one.numa_node for one in devices}:
        if node is None:
            return
        try:
            cores |= _cores_of(node)
        except OSError:
            return
    near = cores & os.sched_getaffinity(0)
    if near:
        with contextlib.suppress(OSError):  # it has ended already
            os.sched_setaffinity(pid, near)


def _cores_of(node: int) -> set[int]:
    """Return the cores of a NUMA node, from the kernel's list ("0-3,8")."""
    cores: set[int] = set()
    text = Path(f"/sys/devices/system/node/node{node}/cpulist").read_text().strip()
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


class _Driver:
    """This process's connection to NVML. It stays open, since a node asks every few seconds, and is
    reopened after a fault, such as a device that fell off the bus."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = False

    @contextlib.contextmanager
    def asked(self) -> Iterator[bool]:
        """Return a context in which NVML can be queried; yields whether a driver is present."""
        with self._lock:
            if not self._open:
                with contextlib.suppress(pynvml.NVMLError):
                    pynvml.nvmlInit()
                    self._open = True
            yield self._open

    def close(self) -> None:
        """Close NVML within `asked`."""
        self._open = False
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


_driver = _Driver()


def _installed() -> tuple[Device, ...]:
    with _driver.asked() as there:
        if not there:
            return ()
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
        return tuple(_described(index, handles) for index in range(len(handles)))


def _described(index: int, handles: Sequence[Any]) -> Device:
    handle = handles[index]
    memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    return Device(
        index,
        class_of(str(pynvml.nvmlDeviceGetName(handle))),
        memory,
        tuple(
            number
            for number, other in enumerate(handles)
            if number != index and _linked(handle, other)
        ),
        _numa_node(handle),
        str(pynvml.nvmlDeviceGetUUID(handle)),
    )


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """Return the total and the free bytes that this process may use: the host's memory, or less
    under control groups (a container's limit). `root`: where /proc and /sys are."""
    total, free = psutil.virtual_memory()[:2]
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
            limit_name, use_name, idle_name = _MEMORY_FILES[bool(controllers)]
            # Check every level: a parent's limit holds too. A container may see its own as the top.
            here = PurePosixPath(path.lstrip("/"))
            for group in (top / level for level in (here, *here.parents)):
                with contextlib.suppress(OSError, LookupError, ValueError):  # or "max": no limit
                    limit = int((group / limit_name).read_text())
                    kinds = (group / "memory.stat").read_text().split()
                    idle = int(kinds[kinds.index(idle_name) + 1])
                    free = min(free, max(0, limit - int((group / use_name).read_text()) + idle))
                    total = min(total, limit)
    return total, free


def class_of(name: str) -> str:
    """Return the class of a device by its name at the driver ("NVIDIA H100 80GB HBM3" ->
    "H100")."""
    parts = re.split(r"[ -]", re.sub(r"^(NVIDIA|Tesla|GeForce| )*", "", name))
    form = re.compile(r"[0-9]+GB|HBM[0-9]e?|PCIe|SXM[0-9]?")
    return "-".join(part for part in parts if part and not form.fullmatch(part)) or _ANY_CLASS


def _linked(one: Any, other: Any) -> bool:
    try:
        status = pynvml.nvmlDeviceGetP2PStatus(one, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except pynvml.NVMLError:  # the driver does not know
        return False
    return bool(status == pynvml.NVML_P2P_STATUS_OK)


def _numa_node(handle: Any) -> int | None:
    try:
        bus = str(pynvml.nvmlDeviceGetPciInfo(handle).busId).lower()
        # NVML writes the domain with eight digits, the kernel with four.
        text = Path(f"/sys/bus/pci/devices/{bus[-12:]}/numa_node").read_text()
    except (pynvml.NVMLError, OSError):
        return None
    node = int(text)
    return None if node < 0 else node


def device_use(devices: Iterable[Device]) -> dict[int, DeviceUse]:
    """Return the use of each device, by index; devices without a driver are left out."""
    found: dict[int, DeviceUse] = {}
    faulty = False
    with _driver.asked() as there:
        for one in devices if there else ():
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(one.index)
                used = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
                busy = float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
                found[one.index] = DeviceUse(used, busy)
            except pynvml.NVMLError:
                faulty = True
        if faulty:
            _driver.close()
    return found
