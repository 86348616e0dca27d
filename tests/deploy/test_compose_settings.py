"""docker-compose.yml sets the variables that its services read, and checks their health where they
listen."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.chassis.settings import ServiceSettings
from services.control_panel.access import PanelSettings
from services.experience_store.server import StoreSettings
from services.orchestrator.settings import OrchestratorSettings
from services.reward.settings import RewardSettings
from services.rollout.settings import RolloutSettings
from services.trainer.settings import TrainerSettings

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DOCKERFILE = (ROOT / "deploy/docker/Dockerfile").read_text()
IMAGE = dict(re.findall(r"(TROUPE_\w+)=([^\s$]+)", DOCKERFILE))
SETTINGS: dict[str, type[ServiceSettings]] = {
    "experience-store": StoreSettings,
    "orchestrator": OrchestratorSettings,
    "reward": RewardSettings,
    "rollout": RolloutSettings,
    "trainer": TrainerSettings,
    "control-panel": PanelSettings,
}
EVERY = {name for one in SETTINGS.values() for name in one.model_fields}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_service_is_told_what_it_reads_and_asked_where_it_listens(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = COMPOSE["services"][name]
    for variable, value in {**IMAGE, **service["environment"]}.items():
        if variable != "TROUPE_SERVICE":  # which module is run
            assert variable.removeprefix("TROUPE_").lower() in EVERY, variable
        default = value.partition(":-")[2].rstrip("}") if value.startswith("${") else value
        monkeypatch.setenv(variable, default)
    port = SETTINGS[name]().port
    asked = " ".join(service["healthcheck"]["test"])
    assert f"127.0.0.1:{port}" in asked
    for mount in service.get("volumes", []):
        assert mount.partition(":")[0] in COMPOSE["volumes"]
    for other, how in service.get("depends_on", {}).items():
        assert how == {"condition": "service_healthy"}
        assert "healthcheck" in COMPOSE["services"][other]


COMPOSE_FILES = [
    ROOT / "docker-compose.yml",
    ROOT / "docker-compose.gpu.yml",
    *sorted((ROOT / "deploy/compose").glob("*.yml")),
]


@pytest.mark.parametrize("file", COMPOSE_FILES, ids=lambda file: file.name)
def test_every_container_is_an_unprivileged_user_without_capabilities(file: Path) -> None:
    services = yaml.safe_load(file.read_text())["services"]
    for name, service in services.items():
        one = {**COMPOSE["services"].get(name, {}), **service}
        user = int(str(one["user"]).partition(":")[0])
        assert user > 0, name
        assert one["cap_drop"] == ["ALL"], name
        assert "cap_add" not in one
        assert not one.get("privileged")
        assert one["security_opt"] == ["no-new-privileges:true"], name
        if one["image"].startswith("troupe-"):
            assert user == int(re.findall(r"^USER (\d+)", DOCKERFILE, re.M)[-1])


def test_the_image_ends_as_an_unprivileged_user() -> None:
    lines = [line for line in DOCKERFILE.splitlines() if re.match(r"(USER|RUN|COPY|CMD) ", line)]
    assert lines[-2:][0] == "USER 65534:65534"
    assert lines[-1].startswith("CMD ")


def test_compose_has_hosts_for_the_reward_service(monkeypatch: pytest.MonkeyPatch) -> None:
    overlay = yaml.safe_load((ROOT / "deploy/compose/reward-hosts.yml").read_text())["services"]
    assert overlay["reward-host"]["command"] == ["python", "-m", "services.reward.hosts"]
    for name in ("reward", "reward-host"):
        for variable, value in overlay[name]["environment"].items():
            monkeypatch.setenv(variable, re.sub(r"\$\{\w+:-(\w*)\}", r"\1", value))
        settings = RewardSettings()
    assert settings.reward_workers == 4
