"""`sandbox: container` on a real engine: what an image of the team's own runs, and what it cannot.

They run in tests/deploy/test_containers.py: a machine has one engine at a time.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from services.reward.call import FunctionCall
from services.reward.cgroups import CoreLease
from services.reward.sandboxes.container import ContainerSandbox
from services.reward.sandboxes.kinds import open_providers
from services.reward.sandboxes.manager import SandboxLimits, SandboxManager
from tests.reward.test_reward_sandboxes import Trajectory, function
from tests.support.waiting import PATIENCE
from troupe.v1 import reward_pb2 as reward_pb

Kind = reward_pb.InvocationError
IMAGE = "python:3.11-slim"
HOSTILE = Path(__file__).with_name("hostile_functions.py")


@pytest.fixture
def docker(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("DOCKER_HOST", "DOCKER_CONFIG", "PATH"):
        if name in engine.environment:
            monkeypatch.setenv(name, engine.environment[name])

    def docker(*arguments: str) -> str:
        done = subprocess.run(
            ["docker", *arguments], capture_output=True, text=True, timeout=PATIENCE
        )
        return done.stdout.strip()

    return docker


async def test_a_container_for_a_trajectory(docker: Any, tmp_path: Path) -> None:
    (tmp_path / "hostile_functions.py").write_text(HOSTILE.read_text())
    (tmp_path / "honest.py").write_text("def says():\n    return 'the truth'\n")
    settings = {"sandbox": "container", "image": IMAGE, "processes": 32, "disk_mib": 16}
    sandboxes = SandboxManager(SandboxLimits(), 120, open_providers())
    mine, other = Trajectory(sandboxes, tmp_path), Trajectory(sandboxes, tmp_path)
    try:
        assert (await mine.call("where", settings))["uid"] == 65534
        (name,) = docker("ps", "--format", "{{.Names}}").split()
        assert docker("inspect", "-f", "{{.State.Paused}}", name) == "true"
        assert await mine.call("writes", settings, path="here") is None
        assert await mine.call("reads", settings, path="/tmp/work/here") == "here"
        assert await other.call("lists", settings, path="/tmp/work") == []
        # A call's changes to the uploaded code are never imported.
        forged = ["/tmp/source/honest.py"]
        assert await mine.call("writes_all", settings, paths=forged) == ["done"]
        assert await mine.call("says", {**settings, "entrypoint": "honest:says"}) == "the truth"
        error = await mine.call("connects", settings, host="192.0.2.1", port=80)
        assert "OSError" in error.message
        *others, own = await mine.call(
            "writes_all", settings, paths=["/here", "/usr/here", "/etc/here", "/tmp/here"]
        )
        assert (others, own) == (["OSError"] * 3, "done")
        assert 0 < await mine.call("fork_bomb", settings, most=200) <= 32
        assert await other.call("fills_the_disk", settings, path="/tmp/big", mib=64) <= 16
        error = await other.call("never_ends", {**settings, "timeout_seconds": 1})
        assert error.kind == Kind.KIND_TIMEOUT
        assert await other.call("lists", settings, path="/tmp/work") == []
    finally:
        await sandboxes.stop()
    assert docker("ps", "-aq") == ""


async def test_a_containers_cores(docker: Any) -> None:
    what = function("where", sandbox="container", image=IMAGE, stateful=False)
    sandboxes = SandboxManager(SandboxLimits(), 120, open_providers())
    asked: list[str] = []
    grant = ContainerSandbox.grant

    async def told(self: ContainerSandbox, lease: CoreLease) -> None:
        await grant(self, lease)
        form = "{{.HostConfig.NanoCpus}} {{.HostConfig.CpusetCpus}}"
        asked.append(docker("inspect", "-f", form, self._name))

    call = FunctionCall("{}", "job")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ContainerSandbox, "grant", told)
        async with sandboxes.executor(what, call) as place:
            outcome = await place.run(what, call, CoreLease("any", (0,)))
    await sandboxes.stop()
    assert asked == ["1000000000 0"]
    assert outcome.error is not None  # the image has not got the module
    assert outcome.error.kind == Kind.KIND_NOT_IMPORTABLE


async def test_an_image_that_is_not_there(docker: Any) -> None:
    sandboxes = SandboxManager(SandboxLimits(), 120, open_providers())
    error = await Trajectory(sandboxes).call(
        "where", {"sandbox": "container", "image": "troupe-test-no-such-image:1"}
    )
    await sandboxes.stop()
    assert error.kind == Kind.KIND_WORKER_DIED
    assert "its sandbox did not start" in error.message
