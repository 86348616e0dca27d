"""Checks of the host itself: devices and their driver, memory, limits, network, Redis.

Each check looks below `root` (for tests; "/" otherwise) and at the given environment only.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import psutil
import pynvml

from troupe.cluster.errors import RedisMissing
from troupe.cluster.redis import redis_executable, require_redis
from troupe.devices import DECLARED, GIB, VISIBLE, Device, device_use, find_devices, host_memory
from troupe.doctor.findings import Finding, good, note, problem
from troupe.rpc import InvalidArgument, TroupeError
from troupe.rpc.redis import shown

_NVIDIA: Final = "0x10de"
# PCI classes of devices that compute: display controllers and processing accelerators.
_COMPUTES: Final = ("0x03", "0x12")
# Part of a device that others hold before it is worth a word.
_HELD: Final = 0.02
# What chassis/app.py raises the limit of open files to, and below which conversations fail.
_MANY_FILES: Final = 65_536
_FEW_FILES: Final = 4_096
# Weights of the example teams need less; larger models' weights pass through it once.
_LITTLE_SHARED_MEMORY: Final = GIB
# Network interfaces that join no hosts.
_LOCAL_INTERFACES: Final = ("lo", "docker", "veth", "br-", "virbr", "cni", "flannel", "cali")


def devices(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> list[Finding]:
    """Check the driver, and the devices that processes with this environment may use."""
    if declared := environment.get(DECLARED):
        try:
            found = find_devices(environment)
        except InvalidArgument as error:
            return [problem("devices", str(error), error.remedy or "")]
        return [note("devices", f"{_listed(found)}, as {DECLARED}={declared} declares")]
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if _has_hardware(root):
            return [
                problem(
                    "driver",
                    f"the host has a device of NVIDIA, and its driver does not answer: {error}",
                    "Install NVIDIA's driver, or start the container with the devices "
                    "(`docker run --gpus all`, `nvidia` as the runtime); `nvidia-smi` must work.",
                )
            ]
        return [note("devices", "none: engines and trainers compute on the CPU")]
    try:
        version = pynvml.nvmlSystemGetDriverVersion()
        cuda = _cuda_release()
    except pynvml.NVMLError as error:
        return [problem("driver", f"does not answer: {error}", "Check `nvidia-smi`.")]
    finally:
        pynvml.nvmlShutdown()
    findings = [good("driver", f"{version}, for CUDA up to {cuda[0]}.{cuda[1]}")]
    found = find_devices(environment)
    if not found:
        visible = environment.get(VISIBLE)
        return [
            *findings,
            problem(
                "devices",
                "none is visible" + (f" with {VISIBLE}={visible!r}" if visible is not None else ""),
                f"Unset {VISIBLE}, or name the devices that Troupe may use.",
            ),
        ]
    findings.append(good("devices", _listed(found)))
    used = device_use(found)
    for device in found:
        use = used.get(device.index)
        if use is not None and use.used_bytes > _HELD * device.memory:
            findings.append(
                note(
                    "devices",
                    f"device {device.index} has {use.used_bytes / GIB:.1f} of "
                    f"{device.memory / GIB:.0f} GiB in use",
                    f"End the processes that hold it, or leave it out with {VISIBLE}.",
                )
            )
    return findings


def driver_cuda() -> tuple[int, int] | None:
    """Return the newest CUDA release that the driver runs; None without a driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return _cuda_release()
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _cuda_release() -> tuple[int, int]:
    number = int(pynvml.nvmlSystemGetCudaDriverVersion())
    return number // 1000, number % 1000 // 10


def _listed(found: Iterable[Device]) -> str:
    kinds: dict[tuple[str, int], int] = {}
    for one in found:
        kind = one.device_class, round(one.memory / GIB)
        kinds[kind] = kinds.get(kind, 0) + 1
    return ", ".join(f"{count}x {name} of {size} GiB" for (name, size), count in kinds.items())


def _has_hardware(root: Path) -> bool:
    """Return whether the PCI bus has a computing device of NVIDIA."""
    for device in (root / "sys/bus/pci/devices").glob("*"):
        try:
            vendor = (device / "vendor").read_text().strip()
            kind = (device / "class").read_text().strip()
        except OSError:
            continue
        if vendor == _NVIDIA and kind.startswith(_COMPUTES):
            return True
    return False


def memory(root: Path = Path("/")) -> list[Finding]:
    """Check the memory of the host and its shared memory."""
    total, free = host_memory(root)
    findings = [good("memory", f"{free / GIB:.0f} of {total / GIB:.0f} GiB free")]
    shared = root / "dev/shm"
    if not os.access(shared, os.W_OK):
        return [
            *findings,
            note(
                "shared memory",
                "/dev/shm is missing or read-only: weights between the processes of this host "
                "pass through a disk",
                "Mount a tmpfs there, half as large as the memory.",
            ),
        ]
    usage = shutil.disk_usage(shared)
    text = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free in /dev/shm"
    if usage.free < _LITTLE_SHARED_MEMORY:
        return [
            *findings,
            problem(
                "shared memory",
                f"{text}: the weights of a policy must fit (2 bytes per parameter)",
                "Remove files there, or enlarge it: `mount -o remount,size=50% /dev/shm`; for a "
                "container `docker run --shm-size=16g`.",
            ),
        ]
    return [*findings, good("shared memory", text)]


def limits(root: Path = Path("/")) -> list[Finding]:
    """Check the limits of open files and, where there is RDMA, of locked memory."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY or most >= _MANY_FILES:
        said = "any number" if most == resource.RLIM_INFINITY else f"{most:,}"
        findings = [good("open files", f"{said} per process")]
    else:
        make = problem if most < _FEW_FILES else note
        findings = [
            make(
                "open files",
                f"{most:,} per process; each conversation and call takes one or two",
                f"Raise the hard limit: `ulimit -Hn {_MANY_FILES}` (LimitNOFILE of a unit).",
            )
        ]
    if cards := infiniband(root):
        _, locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if locked == resource.RLIM_INFINITY:
            findings.append(good("locked memory", "any amount"))
        else:
            findings.append(
                problem(
                    "locked memory",
                    f"{locked / GIB:.2f} GiB per process; transfers by {', '.join(cards)} register "
                    "their buffers, which locks them",
                    "Set `ulimit -l unlimited` (LimitMEMLOCK of a unit, `--ulimit memlock=-1` of "
                    "a container).",
                )
            )
    return findings


def infiniband(root: Path = Path("/")) -> list[str]:
    """Return the names of the RDMA devices."""
    return sorted(one.name for one in (root / "sys/class/infiniband").glob("*"))


def network(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> list[Finding]:
    """Check which interfaces NCCL and gloo will take between hosts."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    addressed = {
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(one.family in (socket.AF_INET, socket.AF_INET6) for one in addresses)
    }
    joining = sorted(one for one in up & addressed if not one.startswith(_LOCAL_INTERFACES))
    findings = []
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if not (named := environment.get(variable)):
            continue
        # NCCL's forms: a list of prefixes, `=` for whole names, `^` for what to leave out.
        prefixes = [one for one in named.lstrip("^=").split(",") if one]
        if not named.startswith("^") and not any(
            name == one or (not named.startswith("=") and name.startswith(one))
            for name in up
            for one in prefixes
        ):
            findings.append(
                problem(
                    "network",
                    f"{variable}={named} matches no interface that is up ({', '.join(sorted(up))})",
                    f"Correct or unset {variable}.",
                )
            )
    if findings:
        return findings
    if not joining:
        return [note("network", "no interface to other hosts is up: this host works alone")]
    cards = infiniband(root)
    text = f"{', '.join(joining)} {'is' if len(joining) == 1 else 'are'} up"
    text += f"; RDMA by {', '.join(cards)}" if cards else ""
    if len(joining) > 1 and not environment.get("NCCL_SOCKET_IFNAME"):
        return [
            note(
                "network",
                f"{text}; gangs over several hosts take the first",
                "Set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME on all hosts to the fastest.",
            )
        ]
    return [good("network", text)]


async def redis(url: str) -> list[Finding]:
    """Check the Redis at `url`; "": the embedded one, which a package brings."""
    try:
        if not url:
            return [good("Redis", f"embedded, {redis_executable()}")]
        await require_redis(url)
    except RedisMissing as error:
        return [problem("Redis", str(error), "Install `troupe-rl[embedded]`, or name a Redis.")]
    except TroupeError as error:
        return [problem("Redis", error.message, error.remedy or "Start it, or correct the URL.")]
    return [good("Redis", f"answers at {shown(url)}")]
