"""`troupe workflow try --policy`: models play a workflow, by the embedded engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.client.conftest import Run, Stage
from tests.support.tiny_team import make_model

WORKFLOW = """
async def solve(query, agents, tools):
    draft = await agents["solver"].chat(query["question"], temperature=0, max_new_tokens=5)
    final = await agents["checker"].chat(draft.text or "?", temperature=0, max_new_tokens=4)
    return {"solver": float(len(draft.text)), "checker": float(len(final.text))}
"""
JOB: dict[str, Any] = {
    "name": "played",
    "workflow": "modelled:solve",
    "tasks": {"source": "tests.support.tiny_team:Tasks"},
    "agents": {"solver": {"policy": "big"}, "checker": {"policy": "small"}},
    "policies": {
        "big": {"model": {"path": "/nowhere/big"}, "engine": {"max_context": 64}},
        "small": {"model": {"path": "/nowhere/small"}},
    },
    "pipeline": {"steps": 3, "queries_per_step": 4},
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a workflow and its job."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "modelled", raising=False)
    monkeypatch.delenv("TROUPE_DATA_DIR", raising=False)
    Path("modelled.py").write_text(WORKFLOW)
    Path("job.yaml").write_text(yaml.safe_dump(JOB))
    return tmp_path


def greedy(folder: Path, question: str, tokens: int) -> str:
    """Return the text that transformers generates for a question."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    made = model.generate(**asked, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(made[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)


def played(run: Run, *arguments: str) -> list[str]:
    """The replies of the first trajectory."""
    status, out, err = run("workflow", "try", *arguments, "--group-size", "1", "--json")
    assert status == 0, out + err
    (one,) = json.loads(out)["trajectories"]
    return [turn["response"] for turn in one["turns"]]


def test_a_model_in_a_directory_plays_all_agents(run: Run, here: Path) -> None:
    model = make_model(here / "model", seed=3)
    said = greedy(model, "a?", 5)
    expected = [said, greedy(model, said or "?", 4)]
    assert played(run, "job.yaml", "--policy", "./model", "--queries", "1") == expected
    query = '{"question": "a?"}'
    assert played(run, "modelled.py", "--policy", "model", "--query", query) == expected


def test_the_checkpoints_of_a_job_play_its_policies(run: Run, here: Path) -> None:
    kept = here / "runs/mine/checkpoints"
    for policy, seed in (("big", 1), ("small", 2)):
        for version in (1, 2):
            make_model(kept / policy / f"v{version}", seed=10 * seed + version)
    for policy, version in (("mine", 2), ("mine@1", 1)):
        said = greedy(kept / f"big/v{version}", "a?", 5)
        expected = [said, greedy(kept / f"small/v{version}", said or "?", 4)]
        assert played(run, "job.yaml", "--policy", policy, "--queries", "1") == expected
    status, _, err = run("workflow", "try", "job.yaml", "--policy", "mine@7")
    assert status == 2
    assert "there is no checkpoint of small@7; there are: big@1, big@2, small@1, small@2" in err


def test_an_adapter_plays_on_its_base(run: Run, here: Path) -> None:
    base = make_model(here / "base", seed=4)
    torch.manual_seed(0)
    config = LoraConfig(r=2, lora_alpha=64, target_modules=["q_proj"], init_lora_weights=False)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    adapted.save_pretrained(here / "adapter")
    AutoTokenizer.from_pretrained(base).save_pretrained(here / "adapter")
    merged = adapted.merge_and_unload()
    merged.save_pretrained(here / "merged")
    AutoTokenizer.from_pretrained(base).save_pretrained(here / "merged")
    said = greedy(here / "merged", "a?", 5)
    assert played(run, "job.yaml", "--policy", "adapter", "--queries", "1")[0] == said
    # Its files are as they were.
    assert (here / "adapter/adapter_config.json").is_file()


def test_a_policy_that_is_neither_a_model_nor_a_job_is_refused(run: Run, here: Path) -> None:
    (here / "empty").mkdir()
    for given in ("./empty", "./nowhere", "mine@x"):
        status, _, err = run("workflow", "try", "job.yaml", "--policy", given)
        assert status == 2
        assert f"error: --policy = {given}: is neither a directory with a model nor a job" in err
    script = ("--policy", "./empty", "--script", "replies.yaml")
    status, _, err = run("workflow", "try", "job.yaml", *script)
    assert status == 2
    assert "error: --script = replies.yaml" in err


def test_a_job_of_another_cluster_is_exported_to_play(run: Run, here: Path, cluster: Stage) -> None:
    model = make_model(here / "model", seed=5)
    files = [one for one in model.iterdir() if one.is_file()]
    cluster.fake.files = {one.name: one.read_bytes() for one in files}
    said = greedy(model, "a?", 5)
    expected = [said, greedy(model, said or "?", 4)]
    query = ("--query", '{"question": "a?"}')
    assert played(run, "modelled.py", "--policy", "mine@3", *query) == expected
    (asked,) = cluster.fake.requests("ExportCheckpoint")
    assert (asked.job_id, asked.policy, asked.version) == ("mine", "solver", 3)
