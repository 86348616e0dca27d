"""Requests to a vLLM server, and the reading of its documents, reports and answers.

The answers were recorded from a real 0.32.0 on a CPU; test_vllm_server.py runs one.
"""

from __future__ import annotations

import base64
import io
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.rollout.engines.errors import BrokenReply, Refused
from services.rollout.engines.servers.interface import (
    AdapterNeeds,
    Launch,
    ServerDescription,
    Unfit,
)
from services.rollout.engines.turns import EngineTurn
from services.rollout.engines.vllm.replies import (
    PICKLES,
    VllmFeatures,
    description_of,
    load_of,
    prompt_logprobs,
    reply_of,
    routes_of,
)
from services.rollout.engines.vllm.server import TRANSFER, VllmServer, sampling_of
from tests.rollout.engines.models import policy_spec
from troupe.mixtures import RoutingShape
from troupe.workflow.backend import Sampling
from troupe.workflow.token_ids import TokenIds

PATHS = (
    "/inference/v1/generate",
    "/collective_rpc",
    "/pause",
    "/update_weight_version",
    "/weight_info",
    "/v1/load_lora_adapter",
    "/weight_checker",
    "/sleep",
    "/wake_up",
    "/release_kv_cache_memory",
)
METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="solver"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="solver"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="solver"} 0.25
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{engine="0",model_name="solver"} 704.0
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{engine="0",model_name="solver"} 176.0
"""


def document(*without: str) -> dict[str, Any]:
    return {"paths": {path: {} for path in PATHS if path not in without}}


def config(**changes: Any) -> dict[str, Any]:
    """`/server_info`, its parts that are read; `changes` by name of a field."""
    parts: dict[str, dict[str, Any]] = {
        "model_config": {
            "max_model_len": 200,
            "logprobs_mode": "processed_logprobs",
            "enable_sleep_mode": False,
        },
        "parallel_config": {
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
        },
        "lora_config": {"max_lora_rank": 8, "target_modules": None, "max_loras": 4},
        "device_config": {"device": "cpu"},
        "aux_output_config": {"enable_return_routed_experts": False},
    }
    for part in parts.values():
        part.update({name: value for name, value in changes.items() if name in part})
    return parts


def described(environment: dict[str, Any] | None = None, **changes: Any) -> ServerDescription:
    return description_of(VllmFeatures.of(document()), config(**changes), environment or {})


def answer(**changes: Any) -> dict[str, Any]:
    """The answer to a generation of two tokens."""
    rows = [{"token_id": 28, "logprob": -4.5, "rank": 73}, {"token_id": 0, "logprob": -1.25}]
    choice = {
        "finish_reason": "length",
        "token_ids": [28, 0],
        "routed_experts": None,
        "weight_versions": [
            {"version": "7", "start": 0, "end": 1},
            {"version": "8", "start": 1, "end": 2},
        ],
        "logprobs": {"content": rows},
        **changes,
    }
    details = {"cached_tokens": 128, "created_cache_tokens": None}
    return {"usage": {"prompt_tokens": 180, "prompt_tokens_details": details}, "choices": [choice]}


def turn(**sampling: Any) -> EngineTurn:
    asked = Sampling(**{"max_new_tokens": 10, **sampling})
    return EngineTurn(
        "r",
        TokenIds.of([1, 2, 3]),
        asked,
        max_new_tokens=10,
        stop_ids=frozenset({5, 4}),
        seed=11,
    )


def test_a_server_is_described_by_its_document_and_its_settings() -> None:
    found = described({"VLLM_BATCH_INVARIANT": True})
    assert found.ways == {"directory"}
    assert (found.ranks, found.context, found.device) == (2, 200, "cpu")
    assert found.names_versions
    assert found.keeps_cache
    assert found.takes_adapters
    assert found.adapters is not None
    assert (found.adapters.rank, list(found.adapters.modules)) == (8, [])
    assert (found.deterministic, found.frees_memory, found.routed_experts) == (True, False, False)
    assert described(enable_sleep_mode=True).frees_memory
    assert described(enable_return_routed_experts=True).routed_experts
    without = {**config(), "lora_config": None}
    assert description_of(VllmFeatures.of(document()), without, {}).adapters is None
    older = VllmFeatures.of(document("/update_weight_version", "/sleep", "/v1/load_lora_adapter"))
    found = description_of(older, config(enable_sleep_mode=True), {})
    assert (found.names_versions, found.frees_memory, found.takes_adapters) == (False,) * 3


@pytest.mark.parametrize(
    ("absent", "remedy"),
    [
        ("/inference/v1/generate", "--enable-scale-out"),
        ("/collective_rpc", "VLLM_SERVER_DEV_MODE"),
        ("/pause", "VLLM_SERVER_DEV_MODE"),
    ],
)
def test_a_server_without_a_path_that_all_depends_on_is_unfit(absent: str, remedy: str) -> None:
    with pytest.raises(Unfit, match=absent) as info:
        VllmFeatures.of(document(absent))
    assert remedy in info.value.remedy


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"data_parallel_size": 2}, "--data-parallel-size 1"),
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
    ],
)
def test_a_server_with_settings_that_training_cannot_use_is_unfit(
    changes: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(Unfit) as info:
        described(**changes)
    assert remedy in info.value.remedy


def test_settings_that_cannot_be_read_are_a_broken_reply() -> None:
    with pytest.raises(BrokenReply, match="model_config"):
        description_of(VllmFeatures.of(document()), {}, {})


def test_the_load_is_read_from_the_metrics() -> None:
    load = load_of(METRICS)
    assert (load.running, load.waiting, load.kv_usage, load.cache_hit_rate) == (3, 2, 0.25, 0.25)
    assert load_of("").running == 0


def test_an_answer_has_tokens_logprobs_versions_and_what_was_cached() -> None:
    reply = reply_of(answer())
    assert (reply.token_ids, reply.logprobs, reply.cached_tokens) == ([28, 0], [-4.5, -1.25], 128)
    assert reply.versions(7, steady=False) == [7, 8]
    assert not reply.aborted
    assert reply_of(answer(finish_reason="abort")).aborted
    nothing = reply_of(answer(finish_reason="abort", token_ids=[], logprobs=None))
    assert (nothing.token_ids, nothing.logprobs) == ([], [])
    rows = [{"token_id": 28, "logprob": None}]
    (broken,) = reply_of(answer(token_ids=[28], logprobs={"content": rows})).logprobs
    assert math.isnan(broken)


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [28]},
        {"token_ids": [28, 1]},
        {"logprobs": None},
        {"logprobs": {"content": [{}]}},
        {"weight_versions": [{"version": "7"}]},
    ],
)
def test_an_answer_that_contradicts_itself_is_broken(changes: dict[str, Any]) -> None:
    with pytest.raises(BrokenReply):
        reply_of(answer(**changes))
    with pytest.raises(BrokenReply):
        reply_of({"choices": []})


def test_the_logprobs_of_a_prompt_are_those_of_its_own_tokens() -> None:
    rows = [
        None,
        {"6": {"logprob": -4.5, "rank": 90}},
        {"3": {"logprob": -0.1, "rank": 1}, "7": {"logprob": -2.0, "rank": 62}},
    ]
    assert prompt_logprobs({"prompt_logprobs": rows}, [5, 6, 7]) == [-4.5, -2.0]
    for wrong in (None, rows[:2], [None, {}, {}]):
        with pytest.raises(BrokenReply):
            prompt_logprobs({"prompt_logprobs": wrong}, [5, 6, 7])


def test_the_experts_of_tokens_are_read_from_an_npy_file() -> None:
    shape = RoutingShape(layers=2, top_k=2, experts=4)
    routes = np.zeros((4, shape.layers, shape.top_k), np.uint8)
    routes[:, :, 1] = 1
    file = io.BytesIO()
    np.save(file, routes)
    text = base64.b64encode(file.getvalue()).decode()
    reply = answer(routed_experts=text)
    found = routes_of(reply_of(reply), reply, shape, 5).routes
    assert found is not None
    assert shape.problem(found, 5) == ""
    for wrong in (None, "bm90IG5weQ=="):
        broken = answer(routed_experts=wrong)
        with pytest.raises(BrokenReply):
            routes_of(reply_of(broken), broken, shape, 5)


def test_a_turn_is_asked_for_with_all_that_has_a_default() -> None:
    asked = sampling_of(turn(seed=11, temperature=0.5))
    assert asked == {
        "max_tokens": 10,
        "temperature": 0.5,
        "logprobs": 0,
        "stop_token_ids": [4, 5],
        "ignore_eos": True,
        "detokenize": False,
        "seed": 11,
    }
    assert "seed" not in sampling_of(turn())
    # The rest of a turn is not drawn by the numbers that its beginning was drawn by.
    going_on = turn(seed=11)
    going_on.extend([7, 8], [-1.0, -1.0], [0, 0])
    rest = sampling_of(going_on)
    assert rest["seed"] != 11
    assert 0 <= rest["seed"] < 1 << 63
    assert rest["max_tokens"] == 8


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 5}])
def test_a_truncated_distribution_is_refused_since_its_logprobs_are_others(
    cut: dict[str, Any],
) -> None:
    with pytest.raises(Refused, match="top_p and top_k") as info:
        sampling_of(turn(**cut))
    assert info.value.status == 400


def test_a_truncation_is_asked_for_where_its_log_probs_are_expected() -> None:
    asked = sampling_of(turn(top_p=0.9, logprobs="processed"))
    assert (asked["top_p"], asked["top_k"]) == (0.9, 0)
    assert sampling_of(turn(top_k=5, logprobs="processed"))["top_k"] == 5
    assert "top_p" not in sampling_of(turn(logprobs="processed"))


def test_a_launched_server_is_started_for_what_its_policy_needs() -> None:
    spec = policy_spec(
        kind="vllm", python="/v/python", tensor_parallel=2, launch=["--seed", "{replica}"]
    )
    command = VllmServer.command(Launch(spec, "/m", 1234, 256, name="n", replica=3))
    assert command[:5] == ["/v/python", "-m", "vllm.entrypoints.cli.main", "serve", "/m"]
    assert command[-2:] == ["--seed", "3"]
    joined = " ".join(command)
    for wanted in (
        "--load-format dummy",
        "--logprobs-mode processed_logprobs",
        "--enable-scale-out",
        "--tensor-parallel-size 2",
        "--max-model-len 256",
        "--served-model-name n",
    ):
        assert wanted in joined
    assert "lora" not in joined
    needs = AdapterNeeds(20, ["q_proj"], policies=2)
    adapters = Launch(spec, "/m", 1234, 256, adapters=needs, deterministic=True, memory=True)
    joined = " ".join(VllmServer.command(adapters))
    # vLLM knows some ranks only.
    assert "--enable-lora --max-lora-rank 32 --lora-target-modules q_proj" in joined
    # Three live versions of each policy, and the base.
    assert "--max-loras 7 --max-cpu-loras 14" in joined
    assert "--enable-sleep-mode" in joined
    variables = VllmServer.variables(adapters)
    assert variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert variables["VLLM_BATCH_INVARIANT"] == "1"
    assert variables["VLLM_SERVER_DEV_MODE"] == "1"
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in VllmServer.variables(
        Launch(spec, "/m", 1, 256)
    )


def test_a_server_takes_weights_from_a_trainers_devices_as_it_was_started() -> None:
    phases = ("init_weight_transfer_engine", "start_weight_update", "update_weights")
    paths = [*PATHS, *(f"/{phase}" for phase in phases), "/finish_weight_update"]
    features = VllmFeatures.of({"paths": {path: {} for path in paths}})
    pickles = {"VLLM_ALLOW_INSECURE_SERIALIZATION": True}
    for backend, environment, ranks, device, ways in (
        ("nccl", {}, 2, "cuda", {"directory", "broadcast"}),
        ("ipc", pickles, 1, "cuda", {"directory", "ipc"}),
        ("ipc", {}, 1, "cuda", {"directory"}),
        ("ipc", pickles, 2, "cuda", {"directory"}),
        ("sharded_rdt", pickles, 1, "cuda", {"directory"}),
        ("nccl", pickles, 1, "cpu", {"directory"}),
        (None, pickles, 1, "cuda", {"directory"}),
    ):
        transfer = None if backend is None else {"backend": backend}
        asked = config(tensor_parallel_size=ranks, device=device)
        asked["weight_transfer_config"] = transfer  # type: ignore[assignment]
        assert description_of(features, asked, environment).ways == ways, (backend, ranks, device)
        older = VllmFeatures.of(document())
        assert description_of(older, asked, environment).ways == {"directory"}


@pytest.mark.parametrize(
    ("update", "colocate", "ranks", "backend"),
    [
        ("auto", False, 4, "nccl"),
        ("auto", True, 1, "ipc"),
        ("auto", True, 2, None),  # NCCL joins no two ranks on one GPU, handles reach one rank
        ("ipc", False, 1, "ipc"),
        ("broadcast", True, 2, "nccl"),
        ("disk", False, 1, None),
    ],
)
def test_a_server_on_gpus_is_started_for_the_way_that_reaches_it(
    update: str, colocate: bool, ranks: int, backend: str | None
) -> None:
    spec = policy_spec(kind="vllm", update=update, tensor_parallel=ranks)
    launch = Launch(spec.model_copy(update={"colocate": colocate}), "m", 1, 64, gpu=True)
    command = VllmServer.command(launch)
    if backend is None:
        assert TRANSFER not in command
    else:
        given = command[command.index(TRANSFER) + 1]
        assert json.loads(given) == {"backend": backend}
    assert (PICKLES in VllmServer.variables(launch)) == (backend == "ipc")
    for other in (replace(launch, gpu=False), replace(launch, adapters=AdapterNeeds(8, ["q"], 2))):
        assert TRANSFER not in VllmServer.command(other)
