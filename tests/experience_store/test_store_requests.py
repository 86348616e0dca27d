"""Requests that the service refuses, with the field at fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message

from tests.support.experience import make_sample
from tests.support.experience_client import Client
from troupe import tensors
from troupe.rpc import InvalidArgument, new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb


def span(version: int) -> common_pb.VersionSpan:
    return common_pb.VersionSpan(version=version, start=0, end=4)


def floats(*values: float) -> common_pb.Tensor:
    return tensors.to_proto(np.array(values, np.float32))


def sample(**fields: Any) -> list[store_pb.Sample]:
    """Return a sample of q0-t0 that differs from a valid one in `fields`."""
    row = make_sample("q0", 0, "q0-t0")
    for name, value in fields.items():
        if isinstance(value, Message):
            getattr(row, name).CopyFrom(value)  # type: ignore[arg-type]
        elif isinstance(value, dict):
            for key, column in value.items():
                row.columns[key].CopyFrom(column)
        elif isinstance(value, list):
            del getattr(row, name)[:]
            getattr(row, name).extend(value)
        else:
            setattr(row, name, value)
    return [row]


def append(**fields: Any) -> Callable[[Client], object]:
    return lambda client: client.append_request("q0", "q0-t0", **fields)


def opened(**fields: Any) -> Callable[[Client], object]:
    return lambda client: client.open_request(step=5, **fields)


def claim(**fields: Any) -> Callable[[Client], object]:
    return lambda client: client.claim_request(**fields)


def commit(**fields: Any) -> Callable[[Client], object]:
    return lambda client: client.commit_request("c1", **fields)


def created(**fields: Any) -> Callable[[Client], object]:
    values: dict[str, Any] = {"request_id": "r", "job_id": "job", "policies": ["solver"]}
    return lambda client: store_pb.CreateTablesRequest(**(values | fields))


def filled(**fields: Any) -> Callable[[Client], object]:
    return lambda client: store_pb.FillColumnsRequest(
        **(
            {
                "request_id": new_id(),
                "job_id": client.job,
                "policy": "solver",
                "sample_id": "q0_0_q0-t0",
            }
            | fields
        )
    )


def amended(**fields: Any) -> Callable[[Client], object]:
    return lambda client: store_pb.AmendStepRequest(
        **({"request_id": new_id(), "job_id": client.job} | fields)
    )


def gone(**fields: Any) -> Callable[[Client], object]:
    values: dict[str, Any] = {"claimant": "t", "claim_id": "c1", "sample_ids": ["s"]}
    return lambda client: store_pb.DropGoneRequest(
        **({"request_id": new_id(), "job_id": client.job, "policy": "solver"} | values | fields)
    )


def first(**fields: Any) -> Callable[[Client], object]:
    values: dict[str, Any] = {"weights": common_pb.WeightsRef(policy="solver")}
    return lambda client: store_pb.OpenVersionRequest(
        **({"request_id": new_id(), "job_id": client.job} | values | fields)
    )


def restarted(**fields: Any) -> Callable[[Client], object]:
    values: dict[str, Any] = {"weights": common_pb.WeightsRef(policy="solver", version=1)}
    return lambda client: store_pb.RestartVersionRequest(
        **({"request_id": new_id(), "job_id": client.job} | values | fields)
    )


def listed(**fields: Any) -> Callable[[Client], object]:
    return lambda client: store_pb.ListPolicyVersionsRequest(
        **({"job_id": client.job, "policy": "solver"} | fields)
    )


def torn() -> store_pb.Column:
    """Return a tensor with fewer bytes than its shape needs."""
    tensor = floats(1, 2, 3)
    tensor.shape[0] = 4
    return store_pb.Column(tensor=tensor)


DOUBLES = store_pb.Column(tensor=tensors.to_proto(np.zeros(4)))
HUGE = store_pb.Column(json="x" * (17 * 2**20))
JSON = store_pb.Column(json="1")

BAD = [
    ("CreateTables", created(request_id=""), "request_id"),
    ("CreateTables", created(job_id="a/b"), "job_id"),
    ("CreateTables", created(job_id="{job}"), "job_id"),
    ("CreateTables", created(policies=[]), "policies"),
    ("CreateTables", created(policies=["a\nb"]), "policies"),
    ("CreateTables", created(policies=["a", "a"]), "policies"),
    ("CreateTables", created(required_columns=["no spaces"]), "required_columns"),
    ("CreateTables", created(max_uses=-1), "max_uses"),
    ("OpenStep", opened(query_ids=[]), "query_ids"),
    ("OpenStep", opened(query_ids=["q", "q"]), "query_ids"),
    ("OpenStep", opened(query_ids=["q", "q"], held_open=True), "query_ids"),
    ("OpenStep", opened(query_ids=["q\t0"]), "query_ids"),
    ("OpenStep", opened(query_ids=["q" * 300]), "query_ids"),
    ("OpenStep", opened(group_size=0), "group_size"),
    ("OpenStep", opened(versions={}), "versions[solver]"),
    ("OpenStep", opened(versions={"solver": 0, "frozen": 0}), "versions[frozen]"),
    ("OpenStep", opened(versions={"solver": -1}), "versions[solver]"),
    ("OpenStep", lambda client: client.open_request(step=-1), "step"),
    ("OpenStep", opened(cursor=-1), "cursor"),
    ("AmendStep", amended(request_id=""), "request_id"),
    ("AmendStep", amended(step=-1), "step"),
    ("AmendStep", amended(add_query_ids=["q\t0"]), "add_query_ids"),
    ("AmendStep", amended(add_query_ids=["q", "q"]), "add_query_ids"),
    ("AmendStep", amended(drop_query_ids=["q0"]), "drop_reason"),
    (
        "AmendStep",
        amended(add_query_ids=["q"], drop_query_ids=["q"], drop_reason="r"),
        "drop_query_ids",
    ),
    ("AmendStep", amended(carry_query_ids=["q0"]), "carry_to"),
    ("AmendStep", amended(step=3, carry_query_ids=["q0"], carry_to=3), "carry_to"),
    ("AmendStep", amended(cursor=-1), "cursor"),
    ("AppendTrajectory", append(samples=sample(versions=[span(-1)])), "samples[0].versions"),
    ("AppendTrajectory", append(state=common_pb.TRAJECTORY_STATE_RUNNING), "state"),
    ("AppendTrajectory", append(state=99), "state"),
    ("AppendTrajectory", append(state=common_pb.TRAJECTORY_STATE_FAILED), "samples"),
    ("AppendTrajectory", append(state=common_pb.TRAJECTORY_STATE_FAILED, samples=[]), "reason"),
    ("AppendTrajectory", append(trajectory_id=""), "trajectory_id"),
    ("AppendTrajectory", append(samples=sample(policy="frozen")), "samples[0].policy"),
    ("AppendTrajectory", append(samples=sample(query_id="q1")), "samples[0].query_id"),
    ("AppendTrajectory", append(samples=sample(sample_id="mine")), "samples[0].sample_id"),
    ("AppendTrajectory", append(samples=sample(group_id="")), "samples[0].group_id"),
    ("AppendTrajectory", append(samples=sample() + sample()), "samples[1].sample_id"),
    ("AppendTrajectory", append(samples=sample(reward=float("nan"))), "samples[0].reward"),
    ("AppendTrajectory", append(samples=sample(reward=float("inf"))), "samples[0].reward"),
    ("AppendTrajectory", append(samples=sample(prompt_ids=floats(1))), "samples[0].prompt_ids"),
    ("AppendTrajectory", append(samples=sample(logprobs=floats(0))), "samples[0].logprobs"),
    (
        "AppendTrajectory",
        append(
            samples=sample(
                prompt_ids=common_pb.Tensor(dtype=common_pb.DTYPE_INT32, shape=[3], data=b"12")
            )
        ),
        "samples[0].prompt_ids",
    ),
    (
        "AppendTrajectory",
        append(samples=sample(columns={"reward": JSON})),
        "samples[0].columns[reward]",
    ),
    (
        "AppendTrajectory",
        append(samples=sample(columns={"empty": store_pb.Column()})),
        "samples[0].columns[empty]",
    ),
    (
        "AppendTrajectory",
        append(samples=sample(columns={"big": HUGE})),
        "samples[0].columns[big]",
    ),
    (
        "AppendTrajectory",
        append(samples=sample(columns={"torn": torn()})),
        "samples[0].columns[torn].tensor",
    ),
    (
        "AppendTrajectory",
        append(samples=sample(columns={"reference_logprobs": DOUBLES})),
        "samples[0].columns[reference_logprobs].tensor",
    ),
    (
        "FillColumns",
        filled(columns={"reference_logprobs": JSON}),
        "columns[reference_logprobs].tensor",
    ),
    *(
        ("FillColumns", filled(columns={"a": store_pb.Column(json=text)}), "columns[a].json")
        for text in ("{", "NaN", "1e400", "[" * 100_000, "[" + "{}," * 100_000 + "{}]")
    ),
    ("FillColumns", filled(columns={"a": store_pb.Column(ref="")}), "columns[a].ref"),
    ("FillColumns", filled(columns={"a": torn()}), "columns[a].tensor"),
    (
        "FillColumns",
        filled(columns={"a": store_pb.Column(tensor=common_pb.Tensor(dtype=99))}),  # type: ignore[arg-type]
        "columns[a].tensor",
    ),
    ("FillColumns", filled(), "drop_reason"),
    (
        "FillColumns",
        filled(reward=1.0, more=[store_pb.SampleColumns(sample_id="q0_1_q0-t0")]),
        "more[0].drop_reason",
    ),
    ("FillColumns", filled(reward=1.0, drop_reason="both"), "drop_reason"),
    ("FillColumns", filled(reward=float("nan")), "reward"),
    ("FillColumns", filled(columns={"a,b": JSON}), "columns[a,b]"),
    ("ClaimMicroBatch", claim(max_samples=0), "max_samples"),
    ("ClaimMicroBatch", claim(max_samples=65_537), "max_samples"),
    ("ClaimMicroBatch", claim(oldest_version=-1), "oldest_version"),
    ("ClaimMicroBatch", claim(max_tokens=-1), "max_tokens"),
    ("ClaimMicroBatch", claim(lease_seconds=0), "lease_seconds"),
    ("ClaimMicroBatch", claim(lease_seconds=float("nan")), "lease_seconds"),
    ("ClaimMicroBatch", claim(wait_seconds=float("nan")), "wait_seconds"),
    ("ClaimMicroBatch", claim(claimant=""), "claimant"),
    ("DropGone", gone(claimant=""), "claimant"),
    ("DropGone", gone(claim_id=""), "claim_id"),
    ("DropGone", gone(sample_ids=[]), "sample_ids"),
    ("DropGone", gone(sample_ids=["a\nb"]), "sample_ids"),
    ("DropGone", gone(step=-1), "step"),
    ("CommitStep", commit(outcome=store_pb.STEP_OUTCOME_UNSPECIFIED), "outcome"),
    ("CommitStep", commit(outcome=7), "outcome"),
    ("CommitStep", commit(weights=None), "weights"),
    ("CommitStep", commit(weights=common_pb.WeightsRef(policy="other")), "weights.policy"),
    (
        "CommitStep",
        commit(weights=common_pb.WeightsRef(policy="solver", job_id="o")),
        "weights.job_id",
    ),
    ("OpenVersion", first(request_id=""), "request_id"),
    ("OpenVersion", first(weights=None), "weights"),
    ("OpenVersion", first(weights=common_pb.WeightsRef()), "weights.policy"),
    ("OpenVersion", first(weights=common_pb.WeightsRef(policy="a/b")), "weights.policy"),
    (
        "OpenVersion",
        first(weights=common_pb.WeightsRef(policy="solver", version=-1)),
        "weights.version",
    ),
    ("RestartVersion", restarted(weights=None), "weights"),
    ("RestartVersion", restarted(steps_done=-1), "steps_done"),
    ("ListPolicyVersions", listed(policy=""), "policy"),
    ("ListPolicyVersions", listed(page_size=-1), "page_size"),
    ("ListPolicyVersions", listed(page_token="-1"), "page_token"),
    (
        "ListSamples",
        lambda client: store_pb.ListSamplesRequest(
            job_id=client.job, policy="solver", page_size=-1
        ),
        "page_size",
    ),
]


async def test_bad_requests_name_the_field_and_change_nothing(client: Client) -> None:
    await client.create()
    await client.stub.OpenStep(client.open_request())
    for method, make, field in BAD:
        with pytest.raises(InvalidArgument) as error:
            await getattr(client.stub, method)(make(client))
        assert error.value.field == field, f"{method}: {error.value}"
    step = await client.stub.GetStep(store_pb.GetStepRequest(job_id=client.job, step=0))
    assert step.ended_trajectory_ids == []
    assert not (await client.stub.GetStep(store_pb.GetStepRequest(job_id=client.job, step=5))).open
