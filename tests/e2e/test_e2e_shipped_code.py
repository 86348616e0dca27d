"""Jobs that ship their code to hosts that do not have it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from tests.e2e.test_e2e_nodes import TOKEN, _logs, node, supervisor
from tests.support.ports import free_port
from tests.support.tiny_team import job
from troupe.client import AsyncClient
from troupe.rpc import ClientSettings, FailedPrecondition, InvalidArgument

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FLOW = """
from flown_team import VERSION
from flown_team.tasks import LETTERS


class Tasks:
    def __init__(self, split):
        self.letters = LETTERS[:6] if split == "train" else LETTERS[6:]

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"question": self.letters[index % len(self.letters)] + "?"}


async def play(query, agents, tools):
    from flown_team.late import version_of  # when it runs
    draft = await agents["solver"].chat(query["question"])
    critique = await agents["checker"].chat(query["question"] + draft.text)
    score = await tools.call("score", text=draft.text)
    query.log(version=VERSION, late=version_of(), rewarded=score["version"])
    return {"solver": score["share"], "checker": 0.0, "team": score["share"]}


def share(text):
    return {"share": text.count("a") / max(1, len(text)), "version": VERSION}
"""


def project(folder: Path, version: int) -> Path:
    """A project with a package of this version, and files that must not be sent."""
    files = {
        "flown_team/__init__.py": f"VERSION = {version}\n",
        "flown_team/flow.py": FLOW,
        "flown_team/tasks.py": 'LETTERS = "abcdefgh"\n',
        "flown_team/late.py": f"def version_of():\n    return {version}\n",
        "flown_team/data/large.bin": "x" * 100,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def shipping(models: Path, folder: Path, **changes: Any) -> str:
    return job(
        models,
        **{
            "workflow": "flown_team.flow:play",
            "tasks.source": "flown_team.flow:Tasks",
            "tools.score.entrypoint": "flown_team.flow:share",
            "code": {"root": str(folder), "include": ["flown_team"], "exclude": ["*/data"]},
            "pipeline.steps": 2,
            "evaluation.queries": 0,
            **changes,
        },
    )


async def test_a_node_without_the_package_trains_two_versions_of_it(
    tmp_path: Path, models: Path
) -> None:
    port = free_port()
    empty = tmp_path / "empty"
    empty.mkdir()
    head = ["head", "--port", str(port), "--no-panel", "--advertise", "127.0.0.1"]
    settings = ClientSettings(token=SecretStr(TOKEN))
    with (
        supervisor(tmp_path / "head", *head, cwd=empty),
        supervisor(tmp_path / "n1", *node(port, "n1"), cwd=empty) as there,
    ):
        async with AsyncClient(f"127.0.0.1:{port}", settings=settings) as client:
            async with asyncio.timeout(240):
                while True:
                    try:
                        workers = (await client.cluster()).workers
                    except Exception:
                        workers = ()
                    if len([one for one in workers if one.alive]) >= 2:
                        break
                    assert there.poll() is None, _logs(tmp_path)
                    await asyncio.sleep(0.5)
            # Without sending it is missing; and a submission over REST names files that no host
            # has.
            bare = await client.submit(shipping(models, tmp_path, code=None))
            failed = await bare.wait(timeout=200)
            assert failed.problem is not None
            assert failed.problem.field == "workflow", failed
            assert "code.include" in (failed.problem.remedy or "")
            with pytest.raises(InvalidArgument, match="no such file"):
                await client.submit(shipping(models, tmp_path))

            handles = [
                await client.submit(shipping(models, project(tmp_path / str(version), version)))
                for version in (1, 2)
            ]
            for version, handle in enumerate(handles, start=1):
                record = await handle.wait(timeout=400)
                assert record.state == "succeeded", (record, _logs(tmp_path))
                for row in await handle.metrics():
                    names = {f"trajectory/{name}" for name in ("version", "late", "rewarded")}
                    found = {k: v for k, v in row.values.items() if k in names}
                    assert found == dict.fromkeys(names, float(version)), row
                assert not (await handle.audit()).violations
                settings_of = {one.field: (one.value, one.source) for one in record.resolved}
                assert settings_of["policies.solver.engine.max_context"] == ("128", "given")
                assert settings_of["policies.solver.engine.max_running"] == ("64", "CPU")
                assert settings_of["policies.checker.trainer.forward_tokens"] == ("1024", "CPU")
                assert settings_of["policies.checker.model.dtype"][0] == "float32"
                assert settings_of["limits.turn_seconds"] == ("200", "given")
            with pytest.raises(FailedPrecondition):
                await handles[0].resume(shipping(models, tmp_path / "2", seed=5))
