"""Engines of several device classes behind one policy, in a real service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from services.rollout.engines.requests import DeviceSpeed
from services.rollout.job_setup import devices_of
from tests.rollout.house import House, evaluation, make_spec, open_house
from troupe.job import JobSpec, PolicySpec
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb

OWN = DeviceSpeed("here", 100, 10)
POOLS: list[dict[str, Any]] = [
    {"device_class": "compute", "replicas": 2},
    {
        "device_class": "bandwidth",
        "prefill_tokens_per_second": 500,
        "decode_tokens_per_second": 300,
    },
]
SIMULATED = {
    "prefill_tokens_per_second": 20_000,
    "decode_seconds": 0.001,
    "decode_seconds_per_turn": 0.0,
    "response_tokens_mean": 4,
    "classes": {"compute": {"prefill_tokens_per_second": 80_000}},
}


def policy(**changes: Any) -> PolicySpec:
    return PolicySpec.model_validate(
        {"model": {"config": {"model_type": "qwen3"}, "tokenizer": "somewhere"}} | changes
    )


def test_engines_are_on_the_workers_devices_unless_the_job_says_more() -> None:
    assert devices_of(policy(engine={"replicas": 2}), OWN) == [OWN, OWN]
    assert devices_of(policy(engine={"pools": POOLS}), OWN) == [
        DeviceSpeed("compute"),
        DeviceSpeed("compute"),
        DeviceSpeed("bandwidth", 500, 300),
    ]


def test_a_simulated_engine_says_what_its_cost_model_does() -> None:
    simulated = policy(engine={"pools": POOLS, "max_running": 8}, simulated=SIMULATED)
    assert devices_of(simulated, OWN) == [
        DeviceSpeed("compute", 80_000, 8000),
        DeviceSpeed("compute", 80_000, 8000),
        DeviceSpeed("bandwidth", 500, 300),
    ]
    assert simulated.simulated is not None
    assert simulated.simulated.of_class("unheard-of") == simulated.simulated


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {
                "policies": {
                    "big": {"engine": {"kind": "sglang", "pools": POOLS, "urls": ["http://h:1"]}}
                }
            },
            "they have 3 replicas, but `urls` names 1",
        ),
        (
            {
                "policies": {
                    "big": {
                        "engine": {"pools": [{"device_class": "x", "prefill_tokens_per_second": 1}]}
                    }
                }
            },
            "give both rates or none",
        ),
        (
            {"routing": {"affinity": {"agents": {"nobody": "compute"}}}},
            "routing.affinity.agents: 'nobody' is not an agent",
        ),
        ({"routing": {"policy": "fastest"}}, "least_work"),
        (
            {"routing": {"policy": "round_robin", "affinity": {"default": "compute"}}},
            "`round_robin` does not look at device classes",
        ),
        (
            {
                "policies": {"big": {"engine": {"pools": POOLS}}},
                "routing": {"affinity": {"domains": {"game": "compote"}}},
            },
            "routing.affinity.domains.game: no engine has the class 'compote'; known: bandwidth, "
            "compute",
        ),
    ],
)
def test_contradictory_pools_and_affinities_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        JobSpec.model_validate(make_spec("one_turn", **changes))


async def served(house: House) -> dict[str, int]:
    response = await house.rollout.ListEngines(rollout_pb.ListEnginesRequest(job_id=house.job_id))
    return {e.device_class: e.generated_tokens for e in response.engines}


async def test_turns_of_a_domain_go_to_its_class_and_engines_say_what_they_are(
    tmp_path: Path,
) -> None:
    pools = [{"device_class": "compute"}, {"device_class": "bandwidth"}]
    async with open_house(tmp_path) as house:
        prepared = await house.prepare(
            "one_turn",
            policies={"big": {"engine": {"pools": pools}, "simulated": SIMULATED}},
            routing={"affinity": {"agents": {"solver": "bandwidth"}}},
        )
        rates = {
            e.device_class: (e.prefill_tokens_per_second, e.decode_tokens_per_second)
            for e in prepared.engines
        }
        assert rates == {"compute": (80_000, 16_000), "bandwidth": (20_000, 16_000)}
        ended = await house.run(evaluation(6))
        assert {e.state for e in ended.values()} == {common_pb.TRAJECTORY_STATE_COMPLETED}
        tokens = await served(house)
        assert tokens["compute"] == 0
        assert tokens["bandwidth"] > 0
