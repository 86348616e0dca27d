"""The chart: Helm's output is valid, consistent, and fits the services."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import re
from pathlib import Path
from typing import Any, Final

import jsonschema
import kubernetes_validate
import pytest
import yaml
from rendered_chart import CHART, NAMESPACE, Objects, PodTemplate, Refused, Values, pods, render

from services.chassis.settings import ServiceSettings
from services.chassis.telemetry import Telemetry
from services.control_panel.access import PanelSettings
from services.experience_store.server import StoreSettings
from services.orchestrator.server import make_service as make_orchestrator
from services.orchestrator.settings import OrchestratorSettings
from services.reward.runtime import Runtime
from services.reward.settings import RewardSettings
from services.rollout.settings import RolloutSettings
from services.trainer.gang.__main__ import FollowerSettings
from services.trainer.settings import TrainerSettings
from troupe.disks import memory_root

SCHEMAS = Path(__file__).parent / "schemas"
KUBERNETES: Final = kubernetes_validate.latest_version()
GANG: Final[Values] = {"replicas": 2, "nodes": 4, "gpus": 8, "sharedMemory": "64Gi"}
SHARED: Final[Values] = {"data": {"shared": True}}
JUDGE: Final[Values] = {
    "image": "lmsysorg/sglang:v0.5.21",
    "model": "/models/judge",
    "replicas": 2,
    "nodes": 2,
    "gpus": 8,
    "args": ["--mem-fraction-static", "0.8"],
}

CASES: Final[dict[str, Values]] = {
    "own": {},
    "external redis": {"redis": {"enabled": False, "external": {"url": "rediss://redis:6380/0"}}},
    "secrets": {
        "auth": {"existingSecret": "given"},
        "tls": {"enabled": True, "existingSecret": "certificate"},
        "redis": {"enabled": False, "external": {"existingSecret": "elsewhere"}},
        "hub": {"enabled": True, "existingSecret": "hub"},
        "image": {"pullSecrets": ["registry"]},
    },
    "everything": {
        "environment": {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"},
        "tls": {"enabled": True},
        "storage": {"data": {"shared": True}, "modelsClaim": "models"},
        "hub": {"enabled": True},
        "panel": {"ingress": {"enabled": True, "host": "troupe.example.com", "tlsSecret": "web"}},
        "reward": {
            "quotas": {"api": {"rate": 2.5, "concurrency": 3}},
            "hosts": {
                "replicas": 1,
                "gpus": 2,
                "models": {"judge": {"entrypoint": "m:make", "gpus": 2}},
                "sharedMemory": "40Gi",
            },
        },
        "rollout": {
            "pools": {"default": None, "fast": {"replicas": 3, "gpus": 4, "deviceClass": "h100"}}
        },
        "trainer": {"pools": {"default": None, "big": GANG, "small": {"replicas": 1, "gpus": 1}}},
        "sglang": {"pools": {"judge": JUDGE}},
        "kueue": {"queue": "team", "priorityClass": "low", "topology": "rack"},
        "networkPolicy": {
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
            "panelFrom": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
            "egress": [{"to": [{"ipBlock": {"cidr": "203.0.113.7/32"}}]}],
        },
        "autoscaling": {
            "matchers": 'namespace="agents"',
            "rewardHosts": {"kind": "keda", "min": 0},
            "trainers": {"kind": "keda", "pool": "big"},
        },
        "monitoring": {"enabled": True, "labels": {"release": "prometheus"}},
    },
    "hpa": {"autoscaling": {"rewardHosts": {"kind": "hpa"}}},
    "scaled pods": {
        "storage": SHARED,
        "autoscaling": {"trainers": {"kind": "keda"}},
    },
}

# Contradictory values, and the field that the refusal names.
REFUSED: Final[list[tuple[Values, str]]] = [
    ({"redis": {"external": {"url": "redis://elsewhere:6379/0"}}}, "redis"),
    ({"redis": {"enabled": False}}, "redis"),
    (
        {"redis": {"enabled": False, "external": {"url": "redis://r", "existingSecret": "s"}}},
        "redis",
    ),
    ({"redis": {"enabled": False, "external": {"url": "http://r"}}}, "redis/external/url"),
    ({"trainer": {"pools": {"big": {"replicas": 1, "nodes": 2}}}, "storage": SHARED}, "big"),
    ({"trainer": {"pools": {"big": GANG | {"gpus": 0}}}, "storage": SHARED}, "big/gpus"),
    ({"trainer": {"pools": {"big": GANG | {"ranks": 9}}}, "storage": SHARED}, "pools.big.ranks"),
    ({"trainer": {"pools": {"big": GANG}}}, "storage/data/shared"),
    ({"trainer": {"pools": {"big": GANG | {"nodes": 65}}}, "storage": SHARED}, "big/nodes"),
    ({"trainer": {"pools": {"default": {"replicas": -1}}}}, "default/replicas"),
    ({"trainer": {"pools": {"big": {"gpus": 1}}}}, "replicas"),
    ({"rollout": {"pools": {"default": {"replicas": 1, "nodes": 2}}}}, "nodes"),
    ({"rollout": {"pools": {"Upper": {"replicas": 1}}}}, "Upper"),
    ({"rollout": {"pools": {"default": {"replicas": 1, "transferSize": "-2Gi"}}}}, "transferSize"),
    (
        {"pool": {"resources": {"limits": {"nvidia.com/gpu": 1}}}},
        "pool/resources/limits",
    ),
    ({"sglang": {"pools": {"judge": JUDGE | {"nodes": 1}}}}, "judge/nodes"),
    ({"rolout": {}}, "rolout"),
    ({"drainSeconds": -1}, "drainSeconds"),
    ({"tls": {"existingSecret": "certificate"}}, "tls/existingSecret"),
    ({"hub": {"existingSecret": "hub"}}, "hub/existingSecret"),
    ({"panel": {"ingress": {"enabled": True}}}, "panel/ingress/host"),
    ({"reward": {"workers": 0}}, "not"),
    ({"reward": {"hosts": {"models": {"judge": {"entrypoint": "m:f"}}}}}, "hosts/gpus"),
    ({"kueue": {"topology": "rack"}}, "kueue/topology"),
    ({"autoscaling": {"trainers": {"kind": "keda"}}}, "storage/data/shared"),
    ({"autoscaling": {"rewardHosts": {"kind": "hpa", "min": 0}}}, "rewardHosts/min"),
    (
        {"storage": SHARED, "autoscaling": {"trainers": {"kind": "keda", "pool": "none"}}},
        "autoscaling.trainers.pool",
    ),
    (
        {"storage": SHARED, "autoscaling": {"trainers": {"kind": "keda", "min": 9}}},
        "autoscaling.trainers.min",
    ),
    (
        {"autoscaling": {"rewardHosts": {"kind": "keda", "min": 17}}},
        "autoscaling.rewardHosts.min",
    ),
]

SETTINGS: Final[dict[str, type[ServiceSettings]]] = {
    "services.control_panel": PanelSettings,
    "services.experience_store": StoreSettings,
    "services.orchestrator": OrchestratorSettings,
    "services.reward": RewardSettings,
    "services.reward.hosts": RewardSettings,
    "services.rollout": RolloutSettings,
    "services.trainer": TrainerSettings,
    "services.trainer.gang": FollowerSettings,
}


@pytest.fixture(scope="module")
def rendered() -> dict[str, Objects]:
    """The rendered output of every case."""
    found = render(*CASES.values())
    refused = {name: str(one) for name, one in zip(CASES, found, strict=True) if is_refused(one)}
    assert not refused
    return {n: one for n, one in zip(CASES, found, strict=True) if not isinstance(one, Refused)}


def is_refused(one: Objects | Refused) -> bool:
    return isinstance(one, Refused)


def test_everything_is_valid(rendered: dict[str, Objects]) -> None:
    kinds = {path.stem: json.loads(path.read_text()) for path in sorted(SCHEMAS.glob("*.json"))}
    seen: dict[str, set[str]] = {}
    for objects in rendered.values():
        for (kind, _), one in objects.items():
            if (text := json.dumps(one)) in seen.setdefault(kind, set()):
                continue
            seen[kind].add(text)
            if (schema := kinds.get(kind.lower())) is None:
                kubernetes_validate.validate(one, KUBERNETES, strict=True)
                continue
            jsonschema.Draft202012Validator(schema).validate(one)
            for pod in pods({(kind, "it"): one}):
                as_template = {"apiVersion": "v1", "kind": "PodTemplate", "template": pod.template}
                kubernetes_validate.validate(as_template, KUBERNETES, strict=True)
    assert seen.keys() >= {
        *("StatefulSet", "Deployment", "LeaderWorkerSet", "Service", "Secret", "Ingress"),
        *("PersistentVolumeClaim", "PodDisruptionBudget", "NetworkPolicy"),
        *("ScaledObject", "HorizontalPodAutoscaler", "PodMonitor"),
    }


def test_a_misspelt_field_would_be_found(rendered: dict[str, Objects]) -> None:
    wrong = copy.deepcopy(rendered["own"]["Deployment", "t-reward"])
    wrong["spec"]["template"]["spec"]["terminationGracePeriod"] = 5
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


def test_contradictions_are_refused_by_name() -> None:
    answers = render(*(values for values, _ in REFUSED))
    for (values, field), answer in zip(REFUSED, answers, strict=True):
        assert isinstance(answer, Refused), values
        assert field in str(answer), (values, str(answer))


def test_the_schema_knows_every_value() -> None:
    """A value without a schema would be refused, one without a default would be undocumented."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def compare(known: dict[str, Any], given: dict[str, Any], where: str) -> None:
        properties = known["properties"].keys() - {"global"}
        assert properties == given.keys(), where
        for key, value in given.items():
            inner = known["properties"][key]
            if isinstance(value, dict) and "properties" in inner:
                compare(inner, value, f"{where}.{key}")

    compare(schema, values, "values")


def module_of(pod: PodTemplate) -> str:
    command: list[str] = pod.container["command"]
    assert command[:2] == ["python", "-m"]
    return command[2]


def test_services_understand_their_variables(
    rendered: dict[str, Objects], monkeypatch: pytest.MonkeyPatch
) -> None:
    every = {field for one in SETTINGS.values() for field in one.model_fields}
    objects = rendered["everything"]
    for pod in pods(objects):
        if pod.container["name"] in ("redis", "sglang"):
            continue
        variables = pod.variables(objects, status_podIP="10.0.0.9")
        own = {n.removeprefix("TROUPE_").lower() for n in variables if n.startswith("TROUPE_")}
        assert own <= every, own - every
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            # As in the image and in LeaderWorkerSet.
            patch.setenv("TROUPE_HOST", "0.0.0.0")
            if "TROUPE_PORT" not in variables:
                patch.setenv("TROUPE_PORT", "50051")
            if pod.size > 1:
                patch.setenv("LWS_LEADER_ADDRESS", f"{pod.workload}-0.{pod.workload}.{NAMESPACE}")
                patch.setenv("LWS_GROUP_SIZE", str(pod.size))
                patch.setenv("LWS_WORKER_INDEX", str(pod.index))
            settings = SETTINGS[module_of(pod)]()
        assert settings.token is not None
        assert settings.tls_name == "cluster.troupe"
        for address in (settings.orchestrator_address, settings.reward_address):
            host, _, port = address.partition(":")
            (ports,) = objects["Service", host]["spec"]["ports"]
            assert str(ports["port"]) == port
        # A service drains twice, ends its ranks, and is killed after this time.
        grace = pod.spec["terminationGracePeriodSeconds"]
        assert grace >= 2 * settings.drain_seconds + 16 + 5
        if isinstance(settings, FollowerSettings):
            assert (settings.gang_node, settings.gang_nodes) == (pod.index, 4)
            assert settings.gang_endpoint == "t-trainer-big-0.t-trainer-big.agents:29500"
            assert settings.gang_ranks == 8
        elif isinstance(settings, TrainerSettings):
            assert (settings.gang_nodes, settings.gang_ranks) == (1, 1)
        if isinstance(settings, RolloutSettings):
            assert settings.device_class == "h100"
        if module_of(pod) == "services.reward.hosts":
            assert settings.reward_models["judge"].gpus == 2  # type: ignore[attr-defined]
        elif isinstance(settings, RewardSettings):
            assert settings.reward_quotas["api"].rate == 2.5
        if isinstance(settings, PanelSettings):
            assert "troupe.example.com" in settings.host_names


def test_selectors_select_their_own_pods_only(rendered: dict[str, Objects]) -> None:
    for objects in rendered.values():
        every = list(pods(objects))
        for (kind, name), one in objects.items():
            if kind == "Service":
                selector = one["spec"]["selector"]
            elif kind in ("Deployment", "StatefulSet", "PodDisruptionBudget"):
                selector = one["spec"]["selector"]["matchLabels"]
            else:
                continue
            found = {p.workload for p in every if selector.items() <= p.labels.items()}
            assert found == {name}, (kind, name)
        budgets = {name for kind, name in objects if kind == "PodDisruptionBudget"}
        assert budgets == {pod.workload for pod in every}


def test_every_pod_is_an_unprivileged_user_without_capabilities(
    rendered: dict[str, Objects],
) -> None:
    for objects in rendered.values():
        for pod in pods(objects):
            assert pod.spec["automountServiceAccountToken"] is False
            context = pod.spec["securityContext"]
            assert context["runAsNonRoot"] is True
            assert context["runAsUser"] > 0
            assert context["seccompProfile"]["type"] == "RuntimeDefault"
            own = pod.container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["readOnlyRootFilesystem"] is True
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert "privileged" not in own
            assert "hostNetwork" not in pod.spec
            assert "hostPath" not in json.dumps(pod.spec["volumes"])


def test_devices_and_shared_memory_of_pools(rendered: dict[str, Objects]) -> None:
    objects = rendered["everything"]
    for pod in pods(objects):
        if pod.workload in ("t-trainer-big", "t-rollout-fast", "t-trainer-small", "t-reward-host"):
            gpus = {"t-rollout-fast": "4", "t-trainer-small": "1", "t-reward-host": "2"}
            wanted = gpus.get(pod.workload, "8")
            assert pod.container["resources"]["limits"] == {"nvidia.com/gpu": wanted}
            volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
            mounts = {m["mountPath"]: m["name"] for m in pod.container["volumeMounts"]}
            memory = volumes[mounts[str(memory_root())]]["emptyDir"]
            sizes = {"t-trainer-big": "64Gi", "t-reward-host": "40Gi"}
            assert memory == {"medium": "Memory", "sizeLimit": sizes.get(pod.workload, "1Gi")}
        assert {m["name"] for m in pod.container["volumeMounts"]} <= {
            volume["name"] for volume in pod.spec["volumes"]
        } | {"data"}


def test_gangs_are_admitted_as_a_whole(rendered: dict[str, Objects]) -> None:
    objects = rendered["everything"]
    gang = objects["LeaderWorkerSet", "t-trainer-big"]
    workers = [n for k, n in objects if k in ("Deployment", "LeaderWorkerSet") and "trainer" in n]
    assert set(workers) == {"t-trainer-big", "t-trainer-small"}
    for kind, name in objects:
        if name in ("t-trainer-big", "t-trainer-small", "t-rollout-fast", "t-sglang-judge"):
            if kind not in ("Deployment", "LeaderWorkerSet"):
                continue
            labels = objects[kind, name]["metadata"]["labels"]
            assert labels["kueue.x-k8s.io/queue-name"] == "team"
            assert labels["kueue.x-k8s.io/priority-class"] == "low"
    group = gang["spec"]["leaderWorkerTemplate"]
    assert (group["size"], group["restartPolicy"]) == (4, "None")
    leader, worker = group["leaderTemplate"]["metadata"], group["workerTemplate"]["metadata"]
    assert leader["annotations"] == worker["annotations"]
    assert leader["annotations"]["kueue.x-k8s.io/podset-required-topology"] == "rack"
    # A follower serves nothing and gets no requests.
    assert "readinessProbe" in group["leaderTemplate"]["spec"]["containers"][0]
    assert "readinessProbe" not in group["workerTemplate"]["spec"]["containers"][0]
    assert "kueue" not in json.dumps(list(rendered["own"].values()))


def test_sglang_over_several_hosts(rendered: dict[str, Objects]) -> None:
    leader, worker = (p for p in pods(rendered["everything"]) if p.workload == "t-sglang-judge")
    assert leader.container["command"] == worker.container["command"]
    line = " ".join(leader.container["command"])
    assert "--tp 16" in line
    assert "--dist-init-addr $(LWS_LEADER_ADDRESS):20000 --nnodes $(LWS_GROUP_SIZE)" in line
    assert line.endswith("--mem-fraction-static 0.8")
    # A server whose ranks are not all there is of no use.
    group = rendered["everything"]["LeaderWorkerSet", "t-sglang-judge"]["spec"]
    assert group["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"


def test_only_the_panel_is_reached_from_outside(rendered: dict[str, Objects]) -> None:
    for objects in rendered.values():
        policies = [one["spec"] for (kind, _), one in objects.items() if kind == "NetworkPolicy"]
        base = objects["NetworkPolicy", "t"]["spec"]
        assert base["policyTypes"] == ["Ingress", "Egress"]
        ours = {"app.kubernetes.io/name": "troupe", "app.kubernetes.io/instance": "t"}
        assert base["podSelector"]["matchLabels"] == ours
        for pod in pods(objects):
            assert ours.items() <= pod.labels.items()
        assert base["ingress"][0] == {"from": [{"podSelector": {"matchLabels": ours}}]}
        for rule in base["ingress"][1:]:
            assert rule["ports"] == [{"port": 9090, "protocol": "TCP"}]
        opened = [p for p in policies if p is not base and "Ingress" in p["policyTypes"]]
        (panel,) = opened
        component = panel["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        assert component == "control-panel"
        types = {
            one["spec"].get("type", "ClusterIP")
            for (k, _), one in objects.items()
            if k == "Service"
        }
        assert types == {"ClusterIP"}
        for kind, name in objects:
            assert kind != "Ingress" or name == "t-control-panel"
    names = {name for kind, name in rendered["own"] if kind == "NetworkPolicy"}
    assert names == {"t", "t-control-panel"}
    names = {name for kind, name in rendered["everything"] if kind == "NetworkPolicy"}
    assert names == {"t", "t-control-panel", "t-hub", "t-outside"}


def test_every_pod_that_may_reach_the_hub_has_its_token(rendered: dict[str, Objects]) -> None:
    objects = rendered["secrets"]
    [policy] = objects["NetworkPolicy", "t-hub"]["spec"]["podSelector"]["matchExpressions"]
    with_token = {
        pods["template"]["metadata"]["labels"]["app.kubernetes.io/component"]
        for pods in (one.get("spec", {}) for one in objects.values())
        if "template" in pods and "HF_TOKEN" in json.dumps(pods)
    }
    absent = {"reward-host", "sglang"}  # not in this case
    assert with_token == set(policy["values"]) - absent
    assert "reward" in with_token  # it runs reward models where there are no reward hosts


def test_secrets_are_made_or_given(rendered: dict[str, Objects]) -> None:
    own = rendered["own"]
    token = base64.b64decode(own["Secret", "t-token"]["data"]["token"]).decode()
    assert len(token) == 48
    again = render({})[0]
    assert not isinstance(again, Refused)
    assert again["Secret", "t-token"]["data"] != own["Secret", "t-token"]["data"]
    given = rendered["secrets"]
    assert not [name for kind, name in given if kind == "Secret"]
    for pod in pods(given):
        text = json.dumps(pod.template)
        assert '{"name": "given", "key": "token"}' in text
        assert '"secretName": "certificate"' in text
        assert pod.spec["imagePullSecrets"] == [{"name": "registry"}]
    certificate = rendered["everything"]["Secret", "t-tls"]["data"]
    assert base64.b64decode(certificate["tls.crt"]).startswith(b"-----BEGIN CERTIFICATE")
    # Nothing secret on a command line.
    for pod in pods(own):
        line = json.dumps([pod.container.get("command"), pod.container.get("args")])
        assert token not in line
        assert "requirepass" not in line


def test_state_outlives_pods(rendered: dict[str, Objects]) -> None:
    own, shared = rendered["own"], rendered["everything"]
    assert own["PersistentVolumeClaim", "t-data"]["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert shared["PersistentVolumeClaim", "t-data"]["spec"]["accessModes"] == ["ReadWriteMany"]
    for objects in (own, shared):
        for pod in pods(objects):
            volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
            kind = pod.labels["app.kubernetes.io/component"]
            if kind == "orchestrator" or (kind in ("trainer", "rollout") and objects is shared):
                assert volumes["data"]["persistentVolumeClaim"]["claimName"] == "t-data"
            elif kind in ("trainer", "rollout"):
                assert "emptyDir" in volumes["data"]
            if kind == "trainer":
                variables = pod.variables(objects, status_podIP="10.0.0.9")
                copies = variables.get("TROUPE_TRAINER_STATE_REPLICAS")
                assert copies == ("1" if objects is own else None)
    (claim,) = own["StatefulSet", "t-redis"]["spec"]["volumeClaimTemplates"]
    assert claim["metadata"]["name"] == "data"


def exported() -> set[str]:
    """Names of the metrics that orchestrator and reward service have."""
    telemetry = Telemetry()

    async def make() -> None:  # both begin in an event loop
        Runtime([], telemetry)
        make_orchestrator(OrchestratorSettings(), telemetry)

    asyncio.run(make())
    return {metric.name for metric in telemetry.registry.collect()}


def test_autoscalers_read_metrics_that_there_are(rendered: dict[str, Objects]) -> None:
    names = exported()
    hpa = rendered["hpa"]["HorizontalPodAutoscaler", "t-reward-host"]["spec"]
    (metric,) = hpa["metrics"]
    assert metric["external"]["metric"]["name"] in names
    for case, name, target in (
        ("everything", "t-reward-host", ("Deployment", "t-reward-host")),
        ("everything", "t-trainer-big", ("LeaderWorkerSet", "t-trainer-big")),
        ("scaled pods", "t-trainer-default", ("Deployment", "t-trainer-default")),
    ):
        objects = rendered[case]
        spec = objects["ScaledObject", name]["spec"]
        reference = spec["scaleTargetRef"]
        assert (reference.get("kind", "Deployment"), reference["name"]) == target
        # The chart's own number must not overrule an autoscaler.
        assert "replicas" not in objects[target]["spec"]
        assert spec["minReplicaCount"] == 0
        (trigger,) = spec["triggers"]
        query = trigger["metadata"]["query"]
        assert re.findall(r"troupe_\w+", query)[0] in names
        assert ('{namespace="agents"}' in query) == (case == "everything")
        if name == "t-trainer-big":
            # The pool "small" has one of the trainers that are wanted.
            assert query.endswith("- 1, 0)")
    assert "replicas" not in rendered["hpa"]["Deployment", "t-reward-host"]["spec"]
    assert "replicas" in rendered["everything"]["Deployment", "t-trainer-small"]["spec"]
