"""The test double against what a real server answered (`exchanges.py`, `recorded/`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.engines.exchanges import RECORDED, play
from tests.rollout.engines.models import CONFIG
from tests.rollout.engines.real_server import RealServer
from tests.support.fake_sglang import FakeSglang, serve

# What the client reads: the double has to have it wherever the real server has it.
READ = {
    "completion_tokens",
    "context_length",
    "cached_tokens",
    "dp_size",
    "enable_deterministic_inference",
    "enable_memory_saver",
    "enable_priority_scheduling",
    "end",
    "error",
    "error_message",
    "finish_reason",
    "input_token_logprobs",
    "loads",
    "message",
    "meta_info",
    "model_type",
    "num_running_reqs",
    "num_waiting_reqs",
    "num_waiting_uncached_tokens",
    "output_ids",
    "output_token_logprobs",
    "served_model_name",
    "start",
    "success",
    "token_usage",
    "tp_size",
    "type",
    "version",
    "weight_version",
    "weight_versions",
}
# Paths of the document: a path that the double lacks would look like an older release.
READ |= {"paths", "components", "schemas", "PauseGenerationReqInput", "properties", "mode"}


def differences(double: Any, real: Any, at: str = "") -> Iterator[str]:
    """Where the double's answer has keys or types that the real one has not, or lacks what is
    read."""
    if _kind(double) != _kind(real):
        yield f"{at}: {_kind(double)}, really {_kind(real)}"
    elif isinstance(real, dict):
        for key in double.keys() - real.keys():
            yield f"{at}.{key}: not there, really"
        for key in real.keys() - double.keys():
            if key in READ or key.startswith("/"):
                yield f"{at}.{key}: missing"
        for key in double.keys() & real.keys():
            if key not in READ and None in (double[key], real[key]):
                continue  # some figures are null until there are any
            yield from differences(double[key], real[key], f"{at}.{key}")
    elif isinstance(real, list):
        if bool(double) != bool(real):
            yield f"{at}: {len(double)} elements, really {len(real)}"
        elif real and isinstance(real[0], list) and len(double[0]) != len(real[0]):
            yield f"{at}: rows of {len(double[0])}, really {len(real[0])}"
        for mine, theirs in zip(double[:2], real[:2], strict=False):
            yield from differences(mine, theirs, f"{at}[]")


def _kind(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(type(value).__name__)
    return "number" if isinstance(value, int | float) else type(value).__name__


def compare(answers: dict[str, Any], recorded: dict[str, Any]) -> list[str]:
    """All differences, by exchange."""
    assert answers.keys() == recorded.keys()
    found = []
    for name, real in recorded.items():
        mine = answers[name]
        if mine["status"] != real["status"]:
            found.append(f"{name}: status {mine['status']}, really {real['status']}")
        found += [f"{name}{one}" for one in differences(mine["body"], real["body"])]
    return found


@pytest.fixture
def recorded() -> dict[str, Any]:
    answers: dict[str, Any] = json.loads(RECORDED.read_text())
    return answers


async def test_the_double_answers_as_the_real_server_did(
    recorded: dict[str, Any], tmp_path: Path
) -> None:
    async with serve(FakeSglang(CONFIG)) as url:
        answers = await play(url, tmp_path)
    assert compare(answers, recorded) == []
    for name in ("aborted", "kept", "busy", "to the length", "to a stop token", "no token"):
        kinds = [
            one[name]["body"]["meta_info"]["finish_reason"]["type"] for one in (answers, recorded)
        ]
        assert kinds[0] == kinds[1], name
    for name in ("unknown token's bias", "too long"):
        assert answers[name]["body"] == recorded[name]["body"]


def test_a_double_that_strays_is_noticed(recorded: dict[str, Any]) -> None:
    strayed = json.loads(json.dumps(recorded))
    strayed["flush of a busy one"]["status"] = 200
    strayed["to the length"]["body"]["meta_info"].pop("weight_versions")
    strayed["load"]["body"]["loads"][0]["num_running_reqs"] = "0"
    strayed["begin"]["body"]["extra"] = 1
    assert sorted(compare(strayed, recorded)) == [
        "begin.extra: not there, really",
        "flush of a busy one: status 200, really 400",
        "load.loads[].num_running_reqs: str, really number",
        "to the length.meta_info.weight_versions: missing",
    ]


@pytest.mark.slow
async def test_the_recording_is_what_a_real_server_answers(
    real_sglang: RealServer, recorded: dict[str, Any], tmp_path: Path
) -> None:
    answers = await play(real_sglang.url, tmp_path)
    if answers["server"]["body"]["version"] != recorded["server"]["body"]["version"]:
        pytest.skip("another release than the recorded one")
    assert compare(answers, recorded) == []
    assert compare(recorded, answers) == []
