"""Jobs whose policies begin with what another job has learned, or with a checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.orchestrator.state.records import JobRecord
from tests.support.cluster import Cluster, job_yaml
from troupe.job import JobSpec, parse_job
from troupe.job.engines.sharing import engine_groups
from troupe.rpc import InvalidArgument
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

SOLVER = "policies__solver__init_from"
CHECKER = "policies__checker__init_from"


async def finished(cluster: Cluster, **over: Any) -> str:
    """The id of a job that has two checkpoints of each policy."""
    job_id = await cluster.submit(job_yaml("teacher", checkpoint__every=1, **over))
    assert (await cluster.wait(job_id)).state == common_pb.JOB_STATE_SUCCEEDED
    return job_id


def checkpoint(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def bound(cluster: Cluster, job_id: str, policy: str = "solver") -> JobSpec:
    """The specification under which a trainer bound a policy first."""
    binds = [one for one in cluster.trainers[0].binds if one.job_id == job_id]
    return JobSpec.model_validate_json(next(one.spec_json for one in binds if one.policy == policy))


@pytest.mark.parametrize(
    ("suffix", "version"), [("", 2), ("@1", 1)], ids=["the newest", "a version"]
)
async def test_a_policy_begins_with_another_jobs_checkpoint_that_is_kept_for_it(
    cluster: Cluster, suffix: str, version: int
) -> None:
    source = await finished(cluster)
    job_id = await cluster.submit(job_yaml("student", **{SOLVER: source + suffix}))
    # The other job may delete its checkpoints at any time.
    shutil.rmtree(cluster.directory / source)
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    folder = cluster.directory / job_id / "init" / "solver" / f"v{version}"
    assert (folder / "model.safetensors").is_file()
    assert dict(job.origins) == {
        "solver": orchestrator_pb.PolicyOrigin(
            job_id=source, policy="solver", version=version, path=str(folder)
        )
    }
    spec = bound(cluster, job_id)
    model = spec.policies["solver"].language_model
    assert (model.path, model.config, model.tokenizer) == (str(folder), None, "somewhere")
    assert spec.policies["checker"].language_model.path is None
    # The job itself is as it was submitted, so that its YAML can be submitted again.
    written = yaml.safe_load((cluster.directory / job_id / "job.yaml").read_text())
    assert json.loads(job.spec_json) == written
    given = written["policies"]["solver"]
    assert given["model"]["path"] is None
    assert (given["init_from"]["job"], given["init_from"]["optimizer"]) == (source, False)


async def test_a_repeated_submission_keeps_what_the_first_one_found(cluster: Cluster) -> None:
    source = await finished(cluster)
    request = orchestrator_pb.SubmitJobRequest(
        request_id="again", spec=job_yaml("student", **{SOLVER: source})
    )
    job = (await cluster.api.SubmitJob(request)).job
    await cluster.resume(source, overrides={"pipeline.steps": "3"})
    await cluster.wait(source)
    again = (await cluster.api.SubmitJob(request)).job
    assert again.job_id == job.job_id
    assert again.origins["solver"].version == job.origins["solver"].version == 2


async def test_a_policy_begins_with_a_directory_or_a_url(cluster: Cluster, tmp_path: Path) -> None:
    here = checkpoint(tmp_path / "here", model_type="qwen3")
    there = checkpoint(tmp_path / "there", model_type="qwen3")
    changes = {
        SOLVER: str(here),
        CHECKER: {"path": f"file://{there}"},
    }
    job_id = await cluster.submit(job_yaml(**changes))
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    assert bound(cluster, job_id).policies["solver"].language_model.path == str(here)
    fetched = cluster.directory / job_id / "init" / "checker" / "fetched"
    assert bound(cluster, job_id).policies["checker"].language_model.path == str(fetched)
    assert (fetched / "model.safetensors").read_bytes() == b"weights"
    assert job.origins["checker"].path == f"file://{there}"
    assert not job.origins["checker"].HasField("version")


@pytest.mark.parametrize(
    ("given", "kind", "field", "message"),
    [
        ("nobody", "job_not_found", ".job", "no such job"),
        ("SOURCE@7", "checkpoint_not_found", ".version", "no checkpoint of solver at version 7"),
        (
            {"job": "SOURCE", "policy": "critic"},
            "policy_not_found",
            ".policy",
            "no policy of this name",
        ),
        (
            {"job": "SOURCE", "optimizer": True},
            "state_not_found",
            ".optimizer",
            "no optimizer state of solver at version 2",
        ),
        ("DIR/llama", "init_from_mismatch", ".path", "`model_type` is llama in the checkpoint"),
        ("DIR/adapter", "init_from_mismatch", ".path", "is an adapter, and the policy trains all"),
        ("DIR/nothing", "checkpoint_not_found", ".path", "it has no config.json"),
        ("file://DIR/nothing", "checkpoint_not_found", ".path", "no files of a checkpoint"),
        ("nosuch://DIR", "invalid_argument", ".path", "known file system"),
    ],
)
async def test_an_origin_that_does_not_exist_or_fit_is_refused_at_submit(
    cluster: Cluster, tmp_path: Path, given: Any, kind: str, field: str, message: str
) -> None:
    source = await finished(cluster)
    checkpoint(tmp_path / "llama", model_type="llama")
    adapter = checkpoint(tmp_path / "adapter")
    (adapter / "config.json").rename(adapter / "adapter_config.json")
    (adapter / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
    text = json.dumps(given).replace("SOURCE", source).replace("DIR", str(tmp_path))
    with pytest.raises(InvalidArgument, match=message) as refused:
        await cluster.submit(job_yaml("student", **{SOLVER: json.loads(text)}), "student")
    error = refused.value
    assert (error.kind, error.field) == (kind, f"policies.solver.init_from{field}")
    assert error.value
    assert error.remedy
    reply = await cluster.api.ListJobs(orchestrator_pb.ListJobsRequest())
    assert [job.job_id for job in reply.jobs] == [source]


async def test_policies_that_must_share_engines_cannot_begin_with_different_bases(
    cluster: Cluster, tmp_path: Path
) -> None:
    base, other = (checkpoint(tmp_path / name, model_type="qwen3") for name in ("base", "other"))
    over: dict[str, Any] = {}
    for name in ("solver", "checker"):
        over[f"policies__{name}__model"] = {"path": str(base)}
        over[f"policies__{name}__lora"] = {"rank": 4}
        over[f"policies__{name}__engine"] = {"share": "crew"}
    with pytest.raises(InvalidArgument, match="the bases of group 'crew' differ") as caught:
        await cluster.submit(job_yaml(**over, **{SOLVER: str(other)}))
    assert caught.value.kind == "init_from_mismatch"
    assert caught.value.field == "policies.solver.engine.share"
    # Left to themselves, each has engines of its own.
    for name in ("solver", "checker"):
        del over[f"policies__{name}__engine"]
    job_id = await cluster.submit(job_yaml(**over, **{SOLVER: str(other)}))
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    assert engine_groups(bound(cluster, job_id)) == ()


async def test_a_language_model_does_not_begin_with_a_network(cluster: Cluster) -> None:
    spec = parse_job(
        json.dumps(
            {
                "name": "particles",
                "environment": {"source": "simple_spread"},
                "agents": {"one": {"policy": "solver"}},
                "policies": {"solver": {"network": {"learning": {"paradigm": "ppo"}}}},
                "pipeline": {"steps": 2, "queries_per_step": 1},
            }
        )
    )
    record = JobRecord(
        job_id="particles",
        request_id="",
        spec_json=spec.model_dump_json(),
        directory=cluster.directory / "particles",
        created_at=1.0,
        state=common_pb.JOB_STATE_SUCCEEDED,
    )
    await cluster.orchestrator.service._at.shared.store.create(record)  # type: ignore[union-attr]
    with pytest.raises(InvalidArgument, match="is a network in job particles") as refused:
        await cluster.submit(job_yaml("student", **{SOLVER: "particles"}))
    assert refused.value.kind == "init_from_mismatch"


async def test_the_optimizers_state_must_fit_the_algorithm(cluster: Cluster) -> None:
    source = await finished(cluster)
    changes = {SOLVER: {"job": source, "optimizer": True}, "algorithm__advantage": "rloo"}
    with pytest.raises(InvalidArgument, match=r"`algorithm\.advantage`, which differs") as refused:
        await cluster.submit(job_yaml("student", **changes))
    assert refused.value.field == "policies.solver.init_from.optimizer"


async def test_a_state_is_kept_for_the_trainer_that_binds_first(cluster: Cluster) -> None:
    source = await finished(cluster)
    state = cluster.directory / source / "state" / "solver" / "v2-abcdefabcdef"
    state.mkdir(parents=True)
    (state / "state.json").write_text("{}")
    changes = {SOLVER: {"job": source, "optimizer": True}}
    job_id = await cluster.submit(job_yaml("student", **changes))
    held = cluster.directory / job_id / "init" / "state" / "solver" / "v2-abcdefabcdef"
    assert (held / "state.json").read_text() == "{}"
    await cluster.wait(job_id)
    found = bound(cluster, job_id).policies["solver"].init_from
    assert found is not None
    assert (found.job, found.policy, found.version, found.optimizer) == (source, "solver", 2, True)


async def test_a_refused_submission_leaves_nothing_that_the_next_one_begins_with(
    cluster: Cluster,
) -> None:
    first, second = [await finished(cluster) for _ in range(2)]
    for source, text in ((first, b"first"), (second, b"second")):
        model = cluster.directory / source / "checkpoints" / "checker" / "v2" / "model.safetensors"
        model.write_bytes(text)
        state = cluster.directory / source / "state" / "checker" / f"v2-{source[-8:]}abcd"
        state.mkdir(parents=True)
    begins = {"optimizer": True, "version": 2}
    wrong = {SOLVER: "nobody"}
    with pytest.raises(InvalidArgument, match="no such job"):
        await cluster.submit(job_yaml(**{CHECKER: {"job": first, **begins}}, **wrong), "student")
    await cluster.submit(job_yaml(**{CHECKER: {"job": second, **begins}}), "student")
    init = cluster.directory / "student" / "init"
    assert (init / "checker" / "v2" / "model.safetensors").read_bytes() == b"second"
    states = [one.name for one in (init / "state" / "checker").iterdir()]
    assert states == [f"v2-{second[-8:]}abcd"]


async def test_the_base_of_an_adapter_is_the_checkpoint_that_its_policy_began_with(
    cluster: Cluster,
) -> None:
    """That checkpoint replaced its `model`."""
    first = await finished(cluster)
    lora = {"policies__solver__lora": {"rank": 8, "alpha": 16}}
    second = await finished(cluster, **lora, **{SOLVER: first})
    adapter = cluster.directory / second / "checkpoints" / "solver" / "v2"
    (adapter / "config.json").unlink()
    (adapter / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
    with pytest.raises(InvalidArgument, match="is an adapter of another base") as refused:
        await cluster.submit(job_yaml("student", **lora, **{SOLVER: second}))
    base = str(cluster.directory / second / "init" / "solver" / "v2")
    assert refused.value.kind == "init_from_mismatch"
    assert base in refused.value.message
    assert "policies.solver.model.path" in (refused.value.remedy or "")
    model = {"policies__solver__model": {"path": base, "tokenizer": "somewhere"}}
    job_id = await cluster.submit(job_yaml("student", **lora, **model, **{SOLVER: second}))
    assert (await cluster.job(job_id)).origins["solver"].job_id == second


async def test_an_adapter_of_random_weights_needs_their_seed(cluster: Cluster) -> None:
    lora = {"policies__solver__lora": {"rank": 8, "alpha": 16}}
    source = await finished(cluster, **lora, seed=3)
    adapter = cluster.directory / source / "checkpoints" / "solver" / "v2"
    (adapter / "config.json").unlink()
    (adapter / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
    with pytest.raises(InvalidArgument, match="follow from the seed 3") as refused:
        await cluster.submit(job_yaml("student", **lora, **{SOLVER: source}, seed=4))
    assert refused.value.kind == "init_from_mismatch"
    await cluster.submit(job_yaml("student", **lora, **{SOLVER: source}, seed=3))
