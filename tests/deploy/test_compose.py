"""docker-compose.yml for real: images built, the cluster up, the example trained over REST."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(
    scope="module",
    params=["docker-compose.yml", "docker-compose.yml:deploy/compose/hosts.yml"],
    ids=["one host", "three hosts"],
)
def compose(
    images: Callable[..., str], compose_program: list[str], request: pytest.FixtureRequest
) -> Iterator[Callable[..., str]]:
    """docker-compose of this project, up and healthy; down with its volumes in the end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {
        "TROUPE_PANEL_PORT": str(port),
        "COMPOSE_PROJECT_NAME": "troupe-test",
        "COMPOSE_FILE": request.param,
    }

    def compose(*arguments: str, check: bool = True, timeout: float = 900) -> str:
        return images(*compose_program, *arguments, check=check, timeout=timeout, **variables)

    compose.url = f"http://127.0.0.1:{port}"  # type: ignore[attr-defined]
    compose.models = "/models" if "hosts" in request.param else "/data/models"  # type: ignore[attr-defined]
    try:
        compose("up", "-d")
        yield compose
    finally:
        compose("down", "-v", "-t", "20", check=False)


def test_the_example_is_trained_through_the_panel(compose: Callable[..., str]) -> None:
    compose("run", "--rm", "models")
    spec = yaml.safe_load((ROOT / "examples/reasoning_team/job.yaml").read_text())
    for name, policy in spec["policies"].items():
        place: str = compose.models  # type: ignore[attr-defined]
        policy["model"]["path"] = f"{place}/reasoning_team/{name}"
    spec["pipeline"]["steps"] = 4
    spec["evaluation"]["queries"] = 16
    with httpx.Client(base_url=compose.url, timeout=30) as panel:  # type: ignore[attr-defined]
        _wait(lambda: panel.get("/healthz").status_code == 200, 180, "the panel to answer")
        _wait(lambda: _alive(panel) >= 4, 180, "two rollout and two trainer workers")
        reply = panel.post(
            "/api/jobs", content=yaml.safe_dump(spec), headers={"Content-Type": "application/yaml"}
        )
        assert reply.status_code == 201, reply.text
        url = f"/api/jobs/{reply.json()['job_id']}"
        _wait(lambda: _ended(panel, url) or panel.get(url).json()["step"] >= 1, 600, "a step")
        assert not _ended(panel, url), panel.get(url).json()["problem"]
        # All rollout containers die at once; the job goes on when they are back.
        compose("kill", "-s", "KILL", "rollout")
        compose("up", "-d", "--no-build")
        _wait(lambda: _ended(panel, url), 900, "the end")
        job = panel.get(url).json()
        logs = compose("logs", "--tail", "40", check=False)
        assert job["state"] == "succeeded", f"{job['problem']}\n{logs[-6000:]}"
        assert set(job["versions"].values()) == {4}
        assert job["before"].keys() == job["after"].keys() != set()
        checkpoints = panel.get(f"{url}/checkpoints").json()
        assert {c["policy"] for c in checkpoints} == set(spec["policies"])
        turns = panel.get(f"{url}/trajectories").json()["trajectories"]
        assert turns
        assert turns[0]["turns"] >= 1


def _alive(panel: httpx.Client) -> int:
    cluster = panel.get("/api/cluster")
    if cluster.status_code != 200:
        return 0
    return sum(worker["alive"] for worker in cluster.json()["workers"])


def _ended(panel: httpx.Client, url: str) -> bool:
    return panel.get(url).json()["state"] in ("succeeded", "failed")


def _wait(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if condition():
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(1)
