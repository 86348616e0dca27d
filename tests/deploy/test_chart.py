"""The chart of the reward service: what it renders fits together, and fits the service."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.chassis.telemetry import Telemetry
from services.reward.hosts.agent import RewardHost
from services.reward.runtime import Runtime
from services.reward.settings import RewardSettings
from troupe.scratch import memory_root

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/troupe-reward"
_ACTION = re.compile(r"\{\{-?\s*(.*?)\s*-?\}\}")


def render(**changes: Any) -> dict[tuple[str, str], dict[str, Any]]:
    """The chart's objects by kind and name, as release "r"; `changes` are of `a__b` in values."""
    if shutil.which("helm"):
        settings = [
            f"--set-json={k.replace('__', '.')}={json.dumps(v)}" for k, v in changes.items()
        ]
        command = ["helm", "template", "r", str(CHART), *settings]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    else:
        values = yaml.safe_load((CHART / "values.yaml").read_text())
        for key, value in changes.items():
            first, _, second = key.partition("__")
            if second:
                values[first][second] = value
            else:
                values[first] = value
        files = sorted((CHART / "templates").glob("*.yaml"))
        text = "\n---\n".join(_filled(file.read_text(), values) for file in files)
    objects = [o for o in yaml.safe_load_all(text) if o]
    return {(o["kind"], o["metadata"]["name"]): o for o in objects}


def _filled(text: str, values: dict[str, Any]) -> str:
    """The few of Helm's actions that the chart uses, where there is no Helm; others fail."""

    def value(words: list[str]) -> Any:
        if words[0] == "add":
            return sum(int(value([word])) for word in words[1:])
        if words[0] == "eq":
            return value([words[1]]) == value([words[2]])
        (word,) = words
        if word.startswith(".Values."):
            found: Any = values
            for part in word.removeprefix(".Values.").split("."):
                found = found[part]
            return found
        return {".Release.Name": "r"}[word] if word.startswith(".") else json.loads(word)

    def shown(action: str) -> str:
        first, *filters = action.split(" | ")
        found = value(first.split())
        for name in filters:
            assert name in ("quote", "toJson")
            found = json.dumps(str(found) if name == "quote" else found)
        return str(found)

    lines, hidden = [], [False]
    for line in text.splitlines():
        action = _ACTION.fullmatch(line.strip())
        if action and action[1].startswith("if "):
            hidden.append(hidden[-1] or not value(action[1].split()[1:]))
        elif action and action[1] == "end":
            hidden.pop()
        elif not hidden[-1]:
            lines.append(_ACTION.sub(lambda found: shown(found[1]), line))
    assert hidden == [False]
    return "\n".join(lines)


def environment(deployment: dict[str, Any]) -> dict[str, str]:
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return {e["name"]: e["value"] for e in container["env"] if "value" in e}


def test_hosts_find_the_service_and_both_understand_their_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    objects = render(
        redisUrl="redis://redis:6379/0",
        tokenSecret="troupe",
        hosts__gpus=2,
        hosts__models={"judge": {"entrypoint": "m:make", "gpus": 2}},
        service__quotas={"api": {"rate": 2.5, "concurrency": 3}},
    )
    service, hosts = objects["Deployment", "r"], objects["Deployment", "r-hosts"]
    for deployment in (service, hosts):
        spec = deployment["spec"]
        labels = spec["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"].items() <= labels.items()
    selected = objects["Service", "r"]["spec"]["selector"]
    assert selected.items() <= service["spec"]["template"]["metadata"]["labels"].items()
    assert not selected.items() <= hosts["spec"]["template"]["metadata"]["labels"].items()
    (port,) = objects["Service", "r"]["spec"]["ports"]
    assert environment(hosts)["TROUPE_REWARD_ADDRESS"] == f"r:{port['port']}"

    fields = {f"TROUPE_{name.upper()}" for name in RewardSettings.model_fields}
    for deployment in (service, hosts):
        assert environment(deployment).keys() <= fields
        with monkeypatch.context() as patch:
            for name, value in environment(deployment).items():
                patch.setenv(name, value)
            settings = RewardSettings()
        if deployment is service:
            assert settings.reward_quotas["api"].rate == 2.5
        else:
            assert settings.reward_models["judge"].gpus == 2
            seconds = hosts["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
            assert seconds >= settings.drain_seconds + 20


def test_sleeping_models_have_room_in_host_memory() -> None:
    pod = render(hosts__sharedMemory="40Gi")["Deployment", "r-hosts"]["spec"]["template"]["spec"]
    (container,), (volume,) = pod["containers"], pod["volumes"]
    (mount,) = container["volumeMounts"]
    assert mount == {"name": volume["name"], "mountPath": str(memory_root())}
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "40Gi"}


@pytest.mark.parametrize("kind", ["hpa", "keda", "none"])
def test_hosts_scale_on_what_waits(kind: str) -> None:
    objects = render(autoscaling__kind=kind)
    scalers = {"hpa": "HorizontalPodAutoscaler", "keda": "ScaledObject"}
    scaling = {k for k, _ in objects} & set(scalers.values())
    assert scaling == ({scalers[kind]} if kind in scalers else set())
    hosts = objects["Deployment", "r-hosts"]
    # Who scales it must not be overruled by the chart's own number.
    assert ("replicas" in hosts["spec"]) == (kind == "none")
    if kind == "none":
        return
    spec = objects[scalers[kind], "r-hosts"]["spec"]
    assert spec["scaleTargetRef"]["name"] == hosts["metadata"]["name"]
    telemetry = Telemetry()
    Runtime([], telemetry)
    exported = {metric.name for metric in telemetry.registry.collect()}
    if kind == "hpa":
        (metric,) = spec["metrics"]
        assert metric["external"]["metric"]["name"] in exported
        assert int(metric["external"]["target"]["averageValue"]) == 16
    else:
        (trigger,) = spec["triggers"]
        assert re.fullmatch(r"sum\((\w+)\)", trigger["metadata"]["query"])[1] in exported  # type: ignore[index]


def test_compose_has_hosts_for_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    overlay = yaml.safe_load((ROOT / "deploy/compose/reward-hosts.yml").read_text())["services"]
    assert overlay["reward-host"]["command"] == ["python", "-m", "services.reward.hosts"]
    for name in ("reward", "reward-host"):
        for variable, value in overlay[name]["environment"].items():
            monkeypatch.setenv(variable, re.sub(r"\$\{\w+:-(\w*)\}", r"\1", value))
        settings = RewardSettings()
    assert settings.reward_workers == 4
    assert RewardHost.name


def test_every_pod_is_an_unprivileged_user_without_capabilities() -> None:
    deployments = [one for (kind, _), one in render().items() if kind == "Deployment"]
    pods = [one["spec"]["template"]["spec"] for one in deployments]
    assert len(pods) == 2
    for pod in pods:
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 65534
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["seccompProfile"]["type"] in ("RuntimeDefault", "Unconfined")
            assert "privileged" not in context
