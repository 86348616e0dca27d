"""docker-compose.yml sets what its services read, and asks for their health where they listen."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.chassis.settings import ServiceSettings
from services.experience_store.settings import StoreSettings
from services.orchestrator.settings import OrchestratorSettings
from services.reward.settings import RewardSettings
from services.rollout.settings import RolloutSettings
from services.trainer.settings import TrainerSettings

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
IMAGE = dict(re.findall(r"(TROUPE_\w+)=([^\s$]+)", (ROOT / "deploy/docker/Dockerfile").read_text()))
SETTINGS: dict[str, type[ServiceSettings]] = {
    "experience-store": StoreSettings,
    "orchestrator": OrchestratorSettings,
    "reward": RewardSettings,
    "rollout": RolloutSettings,
    "trainer": TrainerSettings,
    "control-panel": ServiceSettings,
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
