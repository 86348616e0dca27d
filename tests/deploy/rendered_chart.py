"""The chart, rendered by Helm: objects, pods and containers of a release."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.waiting import PATIENCE

CHART = Path(__file__).resolve().parents[2] / "deploy/helm/troupe"
RELEASE, NAMESPACE = "t", "agents"

Values = dict[str, Any]
# Objects by kind and name.
Objects = dict[tuple[str, str], dict[str, Any]]

# In a separate process: the library is Go's, with a runtime that stays in the process.
_RENDER = """
import json, sys
from helm_python import Chart, HelmError, lint
path, release, namespace = sys.argv[1:]
answers = []
for values in json.load(sys.stdin):
    try:
        files = Chart.load(path).render(values, name=release, namespace=namespace)
    except HelmError as error:
        answers.append({"refused": str(error)})
        continue
    report = lint(path, values, strict=True)
    found = [m for m in report["messages"] if m["severity"] in (2, 3, "WARNING", "ERROR")]
    assert not found and not report["errors"], report
    answers.append({"files": files})
print(json.dumps(answers))
"""


class Refused(Exception):
    """Helm does not render the chart with these values."""


def render(*cases: Values) -> list[Objects | Refused]:
    """The chart with each of `cases` as values over its own, linted; refusals are returned."""
    command = [sys.executable, "-c", _RENDER, str(CHART), RELEASE, NAMESPACE]
    run = subprocess.run(
        command,
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert run.returncode == 0, run.stderr
    found: list[Objects | Refused] = []
    for answer in json.loads(run.stdout):
        if "refused" in answer:
            found.append(Refused(answer["refused"]))
            continue
        texts = [text for name, text in answer["files"].items() if name.endswith(".yaml")]
        objects = [one for text in texts for one in yaml.safe_load_all(text) if one]
        by_name: Objects = {(one["kind"], one["metadata"]["name"]): one for one in objects}
        assert len(by_name) == len(objects), "two objects have one name"
        found.append(by_name)
    return found


@dataclass(frozen=True)
class PodTemplate:
    """The pods of one workload."""

    workload: str
    template: dict[str, Any]
    # Place in a group of LeaderWorkerSet, and the group's size; (0, 1) elsewhere.
    index: int = 0
    size: int = 1

    @property
    def labels(self) -> Mapping[str, str]:
        labels: dict[str, str] = self.template["metadata"]["labels"]
        return labels

    @property
    def spec(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.template["spec"]
        return spec

    @property
    def container(self) -> dict[str, Any]:
        (container,) = self.spec["containers"]
        return dict(container)

    def variables(self, objects: Objects, **known: str) -> dict[str, str]:
        """The container's environment, as a kubelet makes it: secrets and `$(NAME)` resolved.

        `known`: variables that are there before, and what fields of the pod hold, by path.
        """
        made: dict[str, str] = {}
        for one in self.container["env"]:
            assert one["name"] not in made, f"{one['name']} stands twice"
            source = one.get("valueFrom", {})
            if secret := source.get("secretKeyRef"):
                data = objects["Secret", secret["name"]]["data"]
                value = base64.b64decode(data[secret["key"]]).decode()
            elif field := source.get("fieldRef"):
                value = known[field["fieldPath"].replace(".", "_")]
            else:
                value = expanded(one["value"], made | known)
            made[one["name"]] = value
        return made


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """`text` with `$(NAME)` replaced, as Kubernetes does in commands, arguments and values."""
    for name, value in variables.items():
        text = text.replace(f"$({name})", value)
    return text


def pods(objects: Objects) -> Iterator[PodTemplate]:
    """Return one template per kind of pod, with separate ones for leaders and workers."""
    for (kind, name), one in objects.items():
        if kind in ("Deployment", "StatefulSet"):
            yield PodTemplate(name, one["spec"]["template"])
        elif kind == "LeaderWorkerSet":
            group = one["spec"]["leaderWorkerTemplate"]
            yield PodTemplate(name, group["leaderTemplate"], 0, group["size"])
            yield PodTemplate(name, group["workerTemplate"], 1, group["size"])
