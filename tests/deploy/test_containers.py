"""Real containers: the chart, docker-compose, and sandboxes of functions.

They are in one file, and so run one after another: a machine has one container engine at a time.
docker-compose: images built, the cluster up, the example trained over REST. The chart: every
container that Helm renders is started as a kubelet would start it.

There is no API server: the test takes the rendered pods itself, gives each container its image,
command, environment, secrets, volumes, user, capabilities and address, and services' names in
DNS. What it leaves out are resources (devices are not there), policies of the network, and probes
that are no commands.
"""

from __future__ import annotations

import base64
import os
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml
from rendered_chart import NAMESPACE, Objects, PodTemplate, Refused, Values, expanded, pods, render

from tests.reward.containers import (  # noqa: F401 - tests of sandboxes that need an engine, too
    docker,
    test_a_container_for_a_trajectory,
    test_a_containers_cores,
    test_an_image_that_is_not_there,
)
from tests.support.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
SUBNET: Final = "10.213.7"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

VALUES: Final[Values] = {
    "tls": {"enabled": True},
    "storage": {"data": {"shared": True}, "modelsClaim": "models"},
    "pool": {"transferSize": "64Mi", "sharedMemory": "256Mi"},
    "reward": {"workers": 1, "hosts": {"replicas": 1, "workers": 1, "sharedMemory": "64Mi"}},
    "rollout": {"pools": {"default": {"replicas": 1}}},
    # One trainer, and a gang of two pods with a rank each; it computes on CPUs here. The trainer
    # leads no gang of its own, as it would with a rank per core.
    "trainer": {
        "pools": {
            "default": {"replicas": 1, "environment": {"TROUPE_GANG_RANKS": "1"}},
            "big": {"replicas": 1, "nodes": 2, "gpus": 1},
        }
    },
}
# Contents of `models`: the example's architectures with random weights.
MAKE_MODELS: Final = """
from troupe.demo.models import make_model
from troupe.demo.models import make_tokenizer
tokenizer = make_tokenizer()
for name in ("solver", "checker"):
    make_model(name, tokenizer, 0).save_pretrained(f"/models/{name}")
    tokenizer.save_pretrained(f"/models/{name}")
"""

Docker = Callable[..., str]


class Kubelet:
    """Pods of a release as containers on one network."""

    def __init__(self, run: Docker, objects: Objects, directory: Path) -> None:
        self._docker, self._objects, self._directory = run, objects, directory
        self._mark = f"troupe-{secrets.token_hex(3)}"
        self._volumes: set[str] = set()
        self._probes: dict[str, list[str]] = {}
        self.token = base64.b64decode(objects["Secret", "t-token"]["data"]["token"]).decode()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.panel_port: int = free.getsockname()[1]

    def start(self) -> None:
        """Start a network, and every pod of every workload."""
        self._docker("docker", "network", "create", "--subnet", f"{SUBNET}.0/24", self._mark)
        names: list[tuple[PodTemplate, str]] = []
        for pod in pods(self._objects):
            name = f"{pod.workload}-0" if not pod.index else f"{pod.workload}-0-{pod.index}"
            names.append((pod, name))
        for number, (pod, name) in enumerate(names):
            self._run(pod, name, f"{SUBNET}.{number + 10}")

    def fill_models(self) -> None:
        """Make the models in the claim that the values name."""
        self._docker(
            *("docker", "run", "--rm", "-v", f"{self._volume('models')}:/models"),
            *("troupe-trainer", "python", "-c", MAKE_MODELS),
        )

    def unready(self) -> list[str]:
        """Names of the pods whose readiness command fails, or that have ended."""
        found = []
        for name, command in self._probes.items():
            ask = ("docker", "exec", self._container(name), *command)
            done = self._docker(
                "sh", "-c", '"$@" >/dev/null 2>&1 && echo ready', "-", *ask, check=False
            )
            if "ready" not in done:
                found.append(name)
        return found

    def kill(self, name: str) -> None:
        """SIGKILL a pod's container and start it again: the pod keeps address and volumes."""
        self._docker("docker", "kill", "--signal", "KILL", self._container(name))
        self._docker("docker", "start", self._container(name))

    def end(self, name: str) -> int:
        """Stop a pod's container within its grace; returns its exit status."""
        container = self._container(name)
        self._docker("docker", "stop", container)
        return int(self._docker("docker", "inspect", "-f", "{{.State.ExitCode}}", container))

    def logs(self, lines: int = 15) -> str:
        """The last lines of every pod."""
        return "\n".join(
            f"--- {name}\n{self._docker('docker', 'logs', '--tail', str(lines), one, check=False)}"
            for name in self._probes
            for one in [self._container(name)]
        )

    def close(self) -> None:
        """Remove all containers, volumes and the network."""
        for name in self._probes:
            self._docker("docker", "rm", "-f", self._container(name), check=False)
        self._docker("docker", "network", "rm", self._mark, check=False)
        for volume in self._volumes:
            self._docker("docker", "volume", "rm", volume, check=False)

    def _run(self, pod: PodTemplate, name: str, address: str) -> None:
        container, context = pod.container, pod.spec["securityContext"]
        own = container["securityContext"]
        group: dict[str, str] = {}
        if pod.size > 1:
            group = {
                "LWS_LEADER_ADDRESS": f"{pod.workload}-0.{pod.workload}.{NAMESPACE}",
                "LWS_GROUP_SIZE": str(pod.size),
                "LWS_WORKER_INDEX": str(pod.index),
            }
        variables = group | pod.variables(self._objects, status_podIP=address, **group)
        file = self._directory / f"{name}.env"
        file.write_text("".join(f"{key}={value}\n" for key, value in variables.items()))
        options = [
            *("--name", self._container(name), "--hostname", name, "--env-file", str(file)),
            *("--network", self._mark, "--ip", address),
            *("--user", f"{context['runAsUser']}:{context['runAsGroup']}"),
            *("--group-add", str(context["fsGroup"])),
            *("--stop-timeout", str(pod.spec["terminationGracePeriodSeconds"])),
        ]
        for alias in [
            *self._services(pod),
            *([f"{name}.{pod.workload}.{NAMESPACE}"] if group else []),
        ]:
            options += ["--network-alias", alias]
        for capability in own["capabilities"]["drop"]:
            options += ["--cap-drop", capability]
        if not own["allowPrivilegeEscalation"]:
            options += ["--security-opt", "no-new-privileges:true"]
        if own["readOnlyRootFilesystem"]:
            options.append("--read-only")
        options += self._mounts(pod, name)
        if pod.workload == "t-control-panel":
            (port,) = container["ports"]
            options += ["-p", f"127.0.0.1:{self.panel_port}:{port['containerPort']}"]
        command = [expanded(part, variables) for part in container.get("command", [])]
        arguments = [expanded(part, variables) for part in container.get("args", [])]
        if command:
            options += ["--entrypoint", command[0]]
        probe = container.get("readinessProbe", {}).get("exec", {}).get("command", ["true"])
        self._probes[name] = probe
        self._docker(
            *("docker", "run", "-d", *options, container["image"], *command[1:], *arguments)
        )

    def _services(self, pod: PodTemplate) -> list[str]:
        """Names of the Services that select a pod."""
        return [
            name
            for (kind, name), one in self._objects.items()
            if kind == "Service" and one["spec"]["selector"].items() <= pod.labels.items()
        ]

    def _mounts(self, pod: PodTemplate, name: str) -> list[str]:
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        for claim in self._claims(pod.workload):
            volumes[claim] = {"persistentVolumeClaim": {"claimName": f"{claim}-{name}"}}
        options: list[str] = []
        for mount in pod.container["volumeMounts"]:
            volume, path = volumes[mount["name"]], mount["mountPath"]
            ending = ":ro" if mount.get("readOnly") else ""
            if secret := volume.get("secret"):
                source = self._secret(secret, pod.spec["securityContext"]["fsGroup"], name)
                options += ["-v", f"{source}:{path}{ending}"]
            elif claim := volume.get("persistentVolumeClaim"):
                options += ["-v", f"{self._volume(claim['claimName'])}:{path}{ending}"]
            elif path == "/dev/shm":
                options += ["--shm-size", _bytes(volume["emptyDir"]["sizeLimit"])]
            else:
                empty, own = volume["emptyDir"], f"{name}-{mount['name']}"
                memory = empty.get("medium") == "Memory"
                limit = _bytes(empty.get("sizeLimit", "1Gi")) if memory else None
                options += ["-v", f"{self._volume(own, limit)}:{path}"]
        return options

    def _claims(self, workload: str) -> list[str]:
        one = self._objects.get(("StatefulSet", workload), {"spec": {}})
        return [c["metadata"]["name"] for c in one["spec"].get("volumeClaimTemplates", [])]

    def _secret(self, volume: dict[str, Any], group: int, name: str) -> Path:
        data = self._objects["Secret", volume["secretName"]]["data"]
        directory = self._directory / f"{name}-{volume['secretName']}"
        directory.mkdir()
        items = volume.get("items") or [{"key": key, "path": key} for key in data]
        for item in items:
            file = directory / item["path"]
            file.write_bytes(base64.b64decode(data[item["key"]]))
            os.chown(file, 0, group)
            file.chmod(volume["defaultMode"])
        return directory

    def _volume(self, name: str, memory: str | None = None) -> str:
        """A volume that any user may write to: on disk, or of so many bytes of memory.

        A kubelet keeps the latter as long as its pod, an engine as long as a container runs.
        """
        volume = f"{self._mark}-{name}"
        if volume not in self._volumes and memory is not None:
            options = ("type=tmpfs", "device=tmpfs", f"o=size={memory},mode=1777")
            flags = [part for option in options for part in ("--opt", option)]
            self._docker("docker", "volume", "create", *flags, volume)
        self._volumes.add(volume)
        return volume

    def _container(self, name: str) -> str:
        return f"{self._mark}-{name}"


def _bytes(quantity: str) -> str:
    units = {"Mi": 2**20, "Gi": 2**30}
    return str(int(quantity[:-2]) * units[quantity[-2:]])


@pytest.fixture
def release(images: Docker, tmp_path: Path) -> Iterator[Kubelet]:
    """A release that runs, with models."""
    tmp_path.chmod(0o755)
    (objects,) = render(VALUES)
    assert not isinstance(objects, Refused), objects
    certificate = objects["Secret", "t-tls"]["data"]["ca.crt"]
    (tmp_path / "ca.crt").write_bytes(base64.b64decode(certificate))
    kubelet = Kubelet(images, objects, tmp_path)
    try:
        kubelet.fill_models()
        kubelet.start()
        yield kubelet
    finally:
        kubelet.close()


def test_a_release_trains_through_the_panel_although_pods_die(
    release: Kubelet, tmp_path: Path
) -> None:
    spec = yaml.safe_load((ROOT / "troupe/demo/job.yaml").read_text())
    for name, policy in spec["policies"].items():
        policy["model"]["path"] = f"/models/{name}"
        policy["engine"] = {"kind": "embedded", "max_running": 16, "max_context": 128}
    # The solver learns on two pods.
    spec["policies"]["solver"]["trainer"] = {"gang": 2}
    spec["pipeline"] |= {"steps": 2, "queries_per_step": 4, "group_size": 4}
    spec["pipeline"]["micro_batch_samples"] = 8
    spec["evaluation"] = {"queries": 4}
    spec["checkpoint"] = {"every": 1, "keep": 2}
    try:
        _wait(lambda: not release.unready(), 900, lambda: f"ready pods: {release.unready()}")
        with httpx.Client(
            base_url=f"https://127.0.0.1:{release.panel_port}",
            headers={"Authorization": f"Bearer {release.token}"},
            verify=ssl.create_default_context(cafile=str(tmp_path / "ca.crt")),
            timeout=PATIENCE,
        ) as panel:
            assert panel.get("/api/cluster", headers={"Authorization": ""}).status_code == 401
            _wait(lambda: _alive(panel) == 3, 300, lambda: "a rollout, a trainer, a gang's lead")
            reply = panel.post(
                "/api/jobs",
                content=yaml.safe_dump(spec),
                headers={"Content-Type": "application/yaml"},
            )
            assert reply.status_code == 201, reply.text
            url = f"/api/jobs/{reply.json()['job_id']}"
            _wait(lambda: _ended(panel, url) or panel.get(url).json()["step"] >= 1, 900, "a step")
            assert not _ended(panel, url), panel.get(url).json()["problem"]
            # A pod of the gang that does not lead, and the pod that plays.
            release.kill("t-trainer-big-0-1")
            release.kill("t-rollout-default-0")
            _wait(lambda: _ended(panel, url), 1200, "the end")
            job = panel.get(url).json()
            assert job["state"] == "succeeded", job["problem"]
            assert set(job["versions"].values()) == {2}
            audit = panel.get(f"{url}/audit", timeout=300).json()
            assert audit["violations"] == []
            checkpoints = panel.get(f"{url}/checkpoints").json()
            assert {c["policy"] for c in checkpoints} == set(spec["policies"])
        # Within the time that Kubernetes gives them, and in order.
        for name in ("t-trainer-big-0", "t-trainer-big-0-1", "t-rollout-default-0", "t-reward-0"):
            assert release.end(name) == 0, name
    except BaseException:
        print(release.logs())
        raise


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
    spec = yaml.safe_load((ROOT / "troupe/demo/job.yaml").read_text())
    for name, policy in spec["policies"].items():
        place: str = compose.models  # type: ignore[attr-defined]
        policy["model"]["path"] = f"{place}/reasoning_team/{name}"
    spec["pipeline"]["steps"] = 4
    spec["evaluation"]["queries"] = 16
    with httpx.Client(base_url=compose.url, timeout=PATIENCE) as panel:  # type: ignore[attr-defined]
        _wait(lambda: panel.get("/healthz").status_code == 200, 180, "the panel to answer")
        _wait(lambda: _alive(panel) >= 4, 180, "two rollout and two trainer workers")
        reply = panel.post(
            "/api/jobs", content=yaml.safe_dump(spec), headers={"Content-Type": "application/yaml"}
        )
        assert reply.status_code == 201, reply.text
        url = f"/api/jobs/{reply.json()['job_id']}"
        _wait(lambda: _ended(panel, url) or panel.get(url).json()["step"] >= 1, 600, "a step")
        assert not _ended(panel, url), panel.get(url).json()["problem"]
        # All rollout containers die at once; the job continues when they are back.
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


def _wait(condition: Callable[[], bool], seconds: float, what: str | Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if condition():
                return
        except httpx.TransportError:
            pass
        if time.monotonic() > deadline:
            pytest.fail(f"waited {seconds:g} s for {what if isinstance(what, str) else what()}")
        time.sleep(1)
