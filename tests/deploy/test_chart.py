"""The chart of the reward service: what it renders fits together, and fits the service."""

from __future__ import annotations

import json
import re
import subprocess
import sys
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


# In a process of its own: the library is Go's, with a runtime that stays in the process.
_RENDER = """
import json, sys
from helm_python import Chart, lint
values = json.loads(sys.argv[2])
report = lint(sys.argv[1], values, strict=True)
found = [m for m in report["messages"] if m["severity"] in (2, 3, "WARNING", "ERROR")]
assert not found and not report["errors"], report
print(json.dumps(Chart.load(sys.argv[1]).render(values, name="r")))
"""


def render(**changes: Any) -> dict[tuple[str, str], dict[str, Any]]:
    """The chart's objects by kind and name, as Helm renders release "r".

    `changes`: values that differ from the chart's own; `a__b` is the value `a.b`.
    """
    values: dict[str, Any] = {}
    for key, value in changes.items():
        first, _, second = key.partition("__")
        if second:
            values.setdefault(first, {})[second] = value
        else:
            values[first] = value
    command = [sys.executable, "-c", _RENDER, str(CHART), json.dumps(values)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    files: dict[str, str] = json.loads(run.stdout)
    objects = [o for text in files.values() for o in yaml.safe_load_all(text) if o]
    return {(o["kind"], o["metadata"]["name"]): o for o in objects}


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
