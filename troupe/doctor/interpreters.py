"""Checks of Python environments: torch of this one, and the inference servers of others.

An inference server has an environment of its own, since it pins other packages. What an environment
has is read from its metadata, by a short program that its interpreter runs; only torch is imported,
where devices are to be seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from troupe.doctor.findings import Finding, good, note, problem

# A cold disk and a large environment: importing torch alone may take tens of seconds.
_SECONDS: Final = 180.0
_PACKAGES: Final = ("torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "vllm", "transformers")
OWN_PATHS: Final = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP")
"""Variables of a process that change which packages an interpreter finds: other environments do not
inherit them."""
# Prints what `Environment` holds as its last line: imports may print, too.
_LOOK: Final = """
import importlib.metadata as metadata, json, sys
names, look = json.loads(sys.argv[1]), sys.argv[2] == "1"
found = {"python": sys.version.split()[0], "packages": {}, "cuda": None, "devices": 0, "error": ""}
for name in names:
    try:
        found["packages"][name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
if look and "torch" in found["packages"]:
    try:
        import torch
        found["cuda"] = torch.version.cuda
        if torch.version.cuda:
            torch.cuda.init()
            found["devices"] = torch.cuda.device_count()
            found["arches"] = torch.cuda.get_arch_list()
            found["capability"] = torch.cuda.get_device_capability(0)
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
print()
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Environment:
    """The packages of one Python environment, and what its torch says of devices."""

    interpreter: str
    python: str
    packages: Mapping[str, str]
    """Versions by name, of the packages that matter here."""
    cuda: str | None = None
    """CUDA release that torch was built for; None: for the CPU, or not looked at."""
    devices: int = 0
    error: str = ""
    """Torch's answer to the question for devices."""
    arches: tuple[str, ...] = ()
    capability: tuple[int, int] | None = None

    @property
    def nccl(self) -> str | None:
        """Version of NCCL's package, with which torch's CUDA build is linked."""
        names = (name for name in self.packages if name.startswith("nvidia-nccl-"))
        return next((self.packages[name] for name in names), None)

    def release(self, package: str) -> tuple[int, ...]:
        """Return the numbers of a package's version, without what follows ("0.5.15.post1"); empty
        if it is not there."""
        numbers = re.match(r"[0-9]+(\.[0-9]+)*", self.packages.get(package, ""))
        return tuple(map(int, numbers[0].split("."))) if numbers else ()


def _packages() -> list[str]:
    """Return the packages that matter: those of `_PACKAGES`, and the inference servers."""
    # The data model of jobs is slow to import, and most starts of workers check no environment.
    from troupe.job.engines import KINDS

    return [*_PACKAGES, *(kind.package for kind in KINDS.values() if kind.is_server)]


@functools.cache
def running_environment() -> Environment:
    """Return what the environment of this process has, from its metadata."""
    found = {}
    for name in _packages():
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return Environment(sys.executable, platform.python_version(), found)


class NoEnvironment(Exception):
    """There is no interpreter where one is named, or it does not run."""


async def read_environment(interpreter: str, *, with_devices: bool = False) -> Environment:
    """Return what the environment of an interpreter has.

    `with_devices`: import its torch and let it initialise CUDA. Raises `NoEnvironment`.
    """
    path = _program(interpreter)
    arguments = ("-c", _LOOK, json.dumps(_packages()), str(int(with_devices)))
    try:
        process = await asyncio.create_subprocess_exec(
            path,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            # As servers are launched: this process's search path is not theirs.
            env={name: one for name, one in os.environ.items() if name not in OWN_PATHS},
        )
    except OSError as error:
        raise NoEnvironment(f"{path} does not start: {error}") from error
    try:
        out, err = await asyncio.wait_for(process.communicate(), _SECONDS)
    except TimeoutError:
        raise NoEnvironment(f"{path} does not answer within {_SECONDS:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        said: dict[str, Any] = json.loads(out.decode(errors="replace").strip().splitlines()[-1])
    except (ValueError, IndexError):
        lines = [one for text in (out, err) for one in text.decode(errors="replace").splitlines()]
        last = next((one for one in reversed(lines) if one.strip()), "it prints nothing")
        raise NoEnvironment(f"{path} fails: {last.strip()}") from None
    capability = said.get("capability")
    return Environment(
        path,
        said["python"],
        said["packages"],
        said["cuda"],
        said["devices"],
        said["error"],
        tuple(said.get("arches", ())),
        None if capability is None else (capability[0], capability[1]),
    )


def _program(interpreter: str) -> str:
    path = str(Path(interpreter).expanduser())
    if shutil.which(path) is None:
        raise NoEnvironment(f"there is no interpreter at {path}")
    return path


def torch_of(own: Environment, devices: int, driver_cuda: tuple[int, int] | None) -> Finding:
    """Check the torch of the trainer's environment against the host's devices."""
    version = own.packages.get("torch")
    if version is None:
        return problem("torch", "not installed", "Install `troupe-rl[cpu]` or `troupe-rl[gpu]`.")
    if not devices:
        return good("torch", f"{version}, used on the CPU")
    wanted = version.partition("+")[0]
    if own.cuda is None and not own.error:
        return problem(
            "torch",
            f"{version} is a build for the CPU, and there are {devices} devices",
            f'Install the CUDA build: `pip install --force-reinstall "torch=={wanted}"` without an '
            "index of CPU builds.",
        )
    if driver_cuda is not None and own.cuda and int(own.cuda.partition(".")[0]) > driver_cuda[0]:
        release = ".".join(map(str, driver_cuda))
        return problem(
            "torch",
            f"{version} needs CUDA {own.cuda}, and the driver runs up to {release}",
            "Update NVIDIA's driver.",
        )
    if own.error or not own.devices:
        return problem(
            "torch",
            f"{version} cannot use the devices: {own.error or 'it sees none'}",
            "Check that `nvidia-smi` lists them, and that the driver was not updated without a "
            "restart.",
        )
    if own.capability is not None and own.arches:
        major = own.capability[0]
        if not any(one.rpartition("_")[2].rstrip("af")[:-1] == str(major) for one in own.arches):
            return problem(
                "torch",
                f"{version} has no kernels for devices of compute capability "
                f"{major}.{own.capability[1]} ({', '.join(own.arches)})",
                "Use a device that this build supports.",
            )
    return good("torch", f"{version}, CUDA {own.cuda}, NCCL {own.nccl or 'unknown'}")


def server_of(kind: str, found: Environment, own: Environment, devices: int) -> list[Finding]:
    """Check the environment of an inference server (`kind`: sglang, vllm) against the trainer's."""
    from troupe.job.engines import KINDS

    version = found.packages.get(KINDS[kind].package)
    if version is None:
        return [
            problem(
                kind,
                f"{found.interpreter} has no {kind}",
                f"Name the interpreter of the environment that has it, or install it: "
                f"{KINDS[kind].install} (docs/gpus.md).",
            )
        ]
    torch, nccl = found.packages.get("torch", "none"), found.nccl
    text = f"{version} in {found.interpreter}: torch {torch}, NCCL {nccl or 'none'}"
    if not devices:
        return [good(kind, text)]
    findings = [good(kind, text)]
    if KINDS[kind].joins_groups and own.nccl != nccl:
        findings = [
            problem(
                kind,
                f"{text}; the trainer has NCCL {own.nccl or 'none'}, and NCCL forms no group of "
                "different releases: weights cannot be broadcast",
                f"Install the release of {kind} that docs/gpus.md names.",
            )
        ]
    if not KINDS[kind].needs_nvcc:
        return findings
    if (compiler := nvcc()) is None:
        findings.append(
            problem(
                "nvcc",
                f"not found; {kind} compiles kernels when it starts",
                "Install the CUDA toolkit (Debian and Ubuntu: cuda-toolkit of NVIDIA's "
                "repository), or set CUDA_HOME to one.",
            )
        )
    else:
        findings.append(good("nvcc", compiler))
    return findings


def nvcc(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the path of CUDA's compiler where servers look for it: CUDA_HOME, PATH,
    /usr/local/cuda."""
    homes = [environment[name] for name in ("CUDA_HOME", "CUDA_PATH") if environment.get(name)]
    for home in homes:
        if os.access(found := Path(home, "bin", "nvcc"), os.X_OK):
            return str(found)
    if found_on_path := shutil.which("nvcc", path=environment.get("PATH")):
        return found_on_path
    usual = Path("/usr/local/cuda/bin/nvcc")
    return str(usual) if os.access(usual, os.X_OK) else None


async def servers(named: Mapping[str, str], own: Environment, devices: int) -> list[Finding]:
    """Check the environments of inference servers; `named`: interpreter by kind of server."""
    findings: list[Finding] = []
    for kind, interpreter in named.items():
        try:
            found = await read_environment(interpreter)
        except NoEnvironment as error:
            findings.append(problem(kind, str(error), "Correct the path (docs/gpus.md)."))
        else:
            findings += server_of(kind, found, own, devices)
    if not named:
        from troupe.job.engines import KINDS, server_kinds

        variables = " or ".join(kind.python_variable for kind in KINDS.values() if kind.is_server)
        findings.append(
            note(
                "servers",
                "no environment named: only the embedded engine can be launched",
                f"Install {server_kinds()} in an environment of its own and set {variables} "
                "(docs/gpus.md).",
            )
        )
    return findings


async def own_environment(*, with_devices: bool) -> Environment:
    """Return the environment of the running interpreter, looked at like any other."""
    return await read_environment(sys.executable, with_devices=with_devices)
