"""The manifests of checkpoints that belong together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.jobs.checkpoints import spec_hash, write_manifest
from tests.support.cluster import Cluster, job_yaml
from tests.support.fake_trainer import weights_of
from troupe.job import parse_job
from troupe.v1 import common_pb2 as common_pb


def manifests(directory: Path) -> dict[int, dict[str, Any]]:
    found = {}
    for path in (directory / "checkpoints").glob("manifest-step*.json"):
        content = json.loads(path.read_text())
        found[content["step"]] = content
    return found


@pytest.mark.parametrize("mode", ["micro_batch", "async"])
async def test_a_manifest_names_the_versions_and_seed_of_its_step(
    cluster: Cluster, mode: str
) -> None:
    cluster.trainers[0].script.skip = frozenset({1})
    text = job_yaml(
        seed=5, pipeline__mode=mode, pipeline__steps=5, checkpoint__every=2, checkpoint__keep=2
    )
    job_id = await cluster.submit(text)
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    found = manifests(cluster.directory / job_id)
    assert sorted(found) == [4, 5], "after step 2, 4 and 5; the newest two are kept"
    for step, content in found.items():
        assert content["seed"] == 5
        assert content["spec_hash"] == spec_hash(parse_job(text))
        assert content["cursor"] == 2 * step
        stored = await cluster.step(job_id, step - 1)
        for commit in stored.commits:
            policy = content["policies"][commit.policy]
            # Step 2 was skipped: versions lag one behind the steps.
            assert policy["version"] == step - 1 == commit.weights.version
            assert policy["checksum"] == weights_of(job_id, commit.policy, step - 1).checksum
            assert policy["path"].endswith(f"checkpoints/{commit.policy}/v{step - 1}")
            frontier = policy["frontier"]
            assert frontier["committed_step"] == step - 1
            assert frontier["samples"] == commit.num_samples == 4
            assert frontier["samples_digest"] == f"{commit.samples_digest:016x}"


async def test_no_manifest_without_all_checkpoints(cluster: Cluster) -> None:
    cluster.trainers[0].script.disk_full = True
    job_id = await cluster.submit(job_yaml(pipeline__steps=1))
    assert (await cluster.wait(job_id)).state == common_pb.JOB_STATE_FAILED
    assert manifests(cluster.directory / job_id) == {}


def test_a_manifest_is_whole_or_not_there(tmp_path: Path) -> None:
    write_manifest(tmp_path, {"step": 9}, keep=1)
    (tmp_path / "checkpoints" / ".manifest-step11.json.new").write_text("{ half")
    write_manifest(tmp_path, {"step": 10}, keep=1)
    write_manifest(tmp_path, {"step": 10}, keep=1)
    assert manifests(tmp_path) == {10: {"step": 10}}
    with pytest.raises(OSError, match="Not a directory"):
        write_manifest(tmp_path / "checkpoints" / "manifest-step10.json", {"step": 1}, keep=1)
