"""Checks of what runs code that a model wrote: bubblewrap with namespaces, and engines of
containers.

A trial tells more than settings: kernels, distributions and engines of containers each have ways of
their own to forbid namespaces. The reward service makes its sandboxes likewise
(`services/reward/sandboxes/profile.py`).
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from troupe.doctor.findings import Finding, good, note

_SECONDS: Final = 30.0
_NOBODY: Final = "65534"
_SUBJECT: Final = "sandboxes"
# Settings of the kernel and of distributions that forbid namespaces to users: file below /proc/sys,
# forbidding value, remedy.
_SWITCHES: Final = (
    ("user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=10000"),
    ("kernel/unprivileged_userns_clone", "0", "sysctl kernel.unprivileged_userns_clone=1"),
    (
        "kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
    ),
)


async def sandboxes(root: Path = Path("/"), path: str | None = None) -> list[Finding]:
    """Check which kinds of sandboxes the reward service can use here; `path`: where programs are
    looked for (default: PATH)."""
    engine = next((one for one in ("docker", "podman") if shutil.which(one, path=path)), None)
    container = f"; `container` by {engine}" if engine else ""
    bubblewrap = shutil.which("bwrap", path=path)
    if bubblewrap is None:
        return [
            note(
                _SUBJECT,
                f"bubblewrap is not installed: rewards and tools that run a model's code fail"
                f"{container}",
                "Install it (Debian's package `bubblewrap`) where the reward service runs.",
            )
        ]
    said = ""
    for command in _trials(bubblewrap, shutil.which("setpriv", path=path)):
        said = await _run(command)
        if not said:
            return [good(_SUBJECT, f"`bubblewrap` by {bubblewrap}{container}")]
    return [
        note(
            _SUBJECT,
            f"bubblewrap makes no sandbox here ({said}): rewards and tools that run a model's code "
            f"fail{container}",
            _remedy(root),
        )
    ]


def _trials(bubblewrap: str, setpriv: str | None) -> list[tuple[str, ...]]:
    """Return commands that make a sandbox; one that succeeds is enough."""
    place = ("--ro-bind", "/", "/", "--proc", "/proc", "/bin/true")
    own = (bubblewrap, "--unshare-user", "--unshare-all", *place)
    if os.geteuid() != 0:
        return [own]
    spaces = ("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts")
    trials: list[tuple[str, ...]] = [(bubblewrap, *spaces, *place)]
    if setpriv is not None:  # in a container: as another user, without privileges
        user = (setpriv, "--reuid", _NOBODY, "--regid", _NOBODY, "--clear-groups")
        trials.append((*user, *own))
    return trials


async def _run(command: Sequence[str]) -> str:
    """Run a trial; return what it said, empty for success."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, err = await asyncio.wait_for(process.communicate(), _SECONDS)
    except TimeoutError:
        return f"no answer within {_SECONDS:.0f} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == 0:
        return ""
    lines = err.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit status {process.returncode}"


def _remedy(root: Path) -> str:
    for name, forbids, command in _SWITCHES:
        try:
            value = (root / "proc/sys" / name).read_text().strip()
        except OSError:
            continue
        if value == forbids:
            return f"Allow users namespaces: `{command}`."
    return (
        "Start the container with `--security-opt seccomp=unconfined` (and `systempaths="
        "unconfined`), or run the reward service outside of one (docs/rewards.md)."
    )
