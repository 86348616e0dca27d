"""Layers of a sandbox in addition to namespaces: system calls, and files by landlock."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path

import pytest

from services.reward.executor import WorkerProcess
from services.reward.sandboxes import landlock, seccomp
from services.reward.sandboxes.local import LocalProvider
from services.reward.sandboxes.profile import SandboxProfile
from tests.support.needs import BUBBLEWRAP
from tests.support.waiting import PATIENCE

libseccomp = pytest.mark.skipif(seccomp.filter_path() is None, reason="libseccomp is not installed")

# Number on x86-64 and on aarch64, and arguments with which it would succeed without the filter.
CALLS = {
    "ptrace": (101, 117, (0, 0, 0, 0)),
    "keyctl": (250, 219, (0, -3, 0)),
    "bpf": (321, 280, (0, 0, 0)),
    "perf_event_open": (298, 241, (0, 0, -1, -1, 0)),
    "userfaultfd": (323, 282, (1,)),
    "mount": (165, 40, (0, 0, 0, 0, 0)),
    "unshare": (272, 97, (0x10000000,)),
    "setns": (308, 268, (-1, 0)),
    "kexec_load": (246, 104, (0, 0, 0, 0)),
    "io_uring_setup": (425, 425, (1, 0)),
    "clone of a user namespace": (56, 220, (0x10000000 | 17, 0, 0, 0, 0)),
    "clone of a network": (56, 220, (0x40000000 | 17, 0, 0, 0, 0)),
    "socket of AF_VSOCK": (41, 198, (40, 1, 0)),
    "socket of AF_ALG": (41, 198, (38, 5, 0)),
    "socket of AF_PACKET": (41, 198, (17, 3, 0)),
    "ioctl TIOCSTI": (16, 29, (0, 0x5412, 0)),
}
PROGRAM = """
import ctypes, json, os, sys
calls, program = json.loads(sys.argv[1]), ctypes.CDLL(None, use_errno=True)
found = {}
for name, (number, arguments) in calls.items():
    done = program.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    if done == 0 and name.startswith("clone"):
        os._exit(0)  # the child that must not be
    found[name] = ctypes.get_errno() if done < 0 else "done"
print(json.dumps(found))
"""


def inside(program: str, *arguments: str) -> str:
    """Return the output of a Python program in a sandbox like a worker's."""
    command, environment = SandboxProfile("bubblewrap", 64, 16).wrap(["-c", program, *arguments])
    command = command[: len(command) - 4]  # the limits are for programs of ours
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@BUBBLEWRAP
@libseccomp
@pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="other numbers")
def test_system_calls_that_break_sandboxes_are_denied() -> None:
    place = 0 if os.uname().machine == "x86_64" else 1
    calls = {name: (numbers[place], numbers[2]) for name, numbers in CALLS.items()}
    found = json.loads(inside(PROGRAM, json.dumps(calls)))
    assert found == dict.fromkeys(CALLS, errno.EPERM)


@pytest.mark.slow
@BUBBLEWRAP
@libseccomp
def test_system_calls_that_programs_need_are_allowed() -> None:
    said = inside(
        "import asyncio, multiprocessing, socket, subprocess, sys, threading\n"
        "import numpy, pytest\n"
        "thread = threading.Thread(target=print, args=('thread',)); thread.start(); thread.join()\n"
        "print(int((numpy.ones((8, 8)) @ numpy.ones((8, 8))).sum()), flush=True)\n"
        "async def echo():\n"
        "    server = await asyncio.start_server(lambda r, w: w.close(), '127.0.0.1', 0)\n"
        "    await asyncio.open_connection(*server.sockets[0].getsockname())\n"
        "asyncio.run(echo())\n"
        "with open('/tmp/test_it.py', 'w') as file: file.write('def test_it(): assert 1')\n"
        "sys.exit(subprocess.call([sys.executable, '-m', 'pytest', '-q', '-p',\n"
        "         'no:cacheprovider', '/tmp/test_it.py']))\n"
    )
    assert said.startswith("thread\n512\n")
    assert "1 passed" in said


@pytest.mark.skipif(landlock.version() == 0, reason="the kernel has no landlock")
async def test_a_process_reaches_the_files_that_it_declares(tmp_path: Path) -> None:
    for name in ("read", "write", "neither"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("here")
    profile = SandboxProfile(reads=(str(tmp_path / "read"),), writes=(str(tmp_path / "write"),))
    process = await WorkerProcess.start(await LocalProvider().launch("test", profile))
    try:

        async def call(name: str, path: Path) -> str:
            entrypoint = f"hostile_functions:{name}"
            for request in (
                {"call": "prepare", "entrypoint": entrypoint},
                {
                    "call": "invoke",
                    "entrypoint": entrypoint,
                    "arguments_json": json.dumps({"path": str(path)}),
                    "memory_mib": 0,
                },
            ):
                process.send(request)
                answer = await process.answer()
                text = answer.kind if answer.kind == "ok" else answer.text.partition(":")[0]
            return text

        found = {
            (what, name): await call(what, tmp_path / name / "file")
            for what in ("reads", "writes")
            for name in ("read", "write", "neither")
        }
    finally:
        await process.sandbox.stop()
    assert found == {
        ("reads", "read"): "ok",
        ("reads", "write"): "ok",
        ("reads", "neither"): "PermissionError",
        ("writes", "read"): "PermissionError",
        ("writes", "write"): "ok",
        ("writes", "neither"): "PermissionError",
    }


@BUBBLEWRAP
def test_the_layers_in_force_are_told() -> None:
    bare = LocalProvider.layers(SandboxProfile("bubblewrap", memory_mib=128), None)
    assert {"namespaces", "read-only root", "rlimits", "rlimit:as"} <= set(bare)
    assert ("seccomp" in bare) == (seccomp.filter_path() is not None)
    assert LocalProvider.layers(SandboxProfile(reads=("/data",)), None) == ["landlock"]
    assert LocalProvider.layers(SandboxProfile(), None) == []


@pytest.mark.skipif(landlock.version() == 0, reason="the kernel has no landlock")
async def test_uploaded_source_may_have_modules_of_the_services_names(tmp_path: Path) -> None:
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "__init__.py").write_text("def scores():\n    return 0.5\n")
    profile = SandboxProfile(reads=(str(tmp_path),), source=str(tmp_path))
    process = await WorkerProcess.start(await LocalProvider().launch("test", profile))
    try:
        for request in (
            {"call": "prepare", "entrypoint": "services:scores"},
            {
                "call": "invoke",
                "entrypoint": "services:scores",
                "arguments_json": "",
                "memory_mib": 0,
            },
        ):
            process.send(request)
            answer = await process.answer()
    finally:
        await process.sandbox.stop()
    assert (answer.kind, answer.text) == ("ok", "0.5")
