"""Which sandboxes a host can make: by a trial, with a remedy where it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from troupe.doctor.findings import Verdict
from troupe.doctor.sandboxes import sandboxes


def program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


async def test_a_sandbox_that_was_made_is_good(tmp_path: Path) -> None:
    path = tmp_path / "bin"
    program(path, "bwrap", f'echo "$@" >> {tmp_path}/asked; exit 0')
    program(path, "podman", "exit 1")
    (found,) = await sandboxes(tmp_path, str(path))
    assert found.verdict is Verdict.GOOD
    assert "`container` by podman" in found.text
    # As the reward service makes them: with namespaces of its own, and a program inside.
    (asked,) = (tmp_path / "asked").read_text().splitlines()
    assert "--unshare" in asked
    assert asked.endswith("/bin/true")


async def test_a_host_without_bubblewrap_is_told_what_to_install(tmp_path: Path) -> None:
    (found,) = await sandboxes(tmp_path, str(tmp_path))
    assert found.verdict is Verdict.NOTE
    assert "Debian's package `bubblewrap`" in found.remedy


@pytest.mark.parametrize(
    ("switch", "value", "remedy"),
    [
        ("user/max_user_namespaces", "0", "user.max_user_namespaces="),
        ("kernel/unprivileged_userns_clone", "0", "unprivileged_userns_clone=1"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "unprivileged_userns=0"),
        ("kernel/unprivileged_userns_clone", "1", "seccomp=unconfined"),
    ],
)
async def test_a_trial_that_fails_names_what_forbids_it(
    switch: str, value: str, remedy: str, tmp_path: Path
) -> None:
    path = tmp_path / "bin"
    program(path, "bwrap", "echo 'bwrap: No permissions to create a new namespace' >&2; exit 1")
    program(path, "setpriv", 'while [ "$1" != --clear-groups ]; do shift; done; shift; exec "$@"')
    file = tmp_path / "proc/sys" / switch
    file.parent.mkdir(parents=True)
    file.write_text(f"{value}\n")
    (found,) = await sandboxes(tmp_path, str(path))
    assert found.verdict is Verdict.NOTE
    assert "No permissions to create a new namespace" in found.text
    assert remedy in found.remedy


async def test_root_without_the_right_tries_as_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    path = tmp_path / "bin"
    program(path, "bwrap", "exit 1")
    program(path, "setpriv", "exit 0")
    (found,) = await sandboxes(tmp_path, str(path))
    assert found.verdict is Verdict.GOOD
