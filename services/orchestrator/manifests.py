"""Manifests: what belongs together in the checkpoints that are written after one step.

Every policy's checkpoint is complete by itself. The manifest beside them is written last, so one
that exists names a set that is complete and consistent: weights, the items of the tasks that they
have seen, and the samples that the store counts as trained.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from troupe.job import JobSpec
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as es
from troupe.v1 import trainer_pb2 as tr

_NAME: Final = re.compile(r"manifest-step([0-9]+)\.json")


def manifest(
    spec: JobSpec,
    directory: Path,
    step: int,
    last: es.GetStepResponse,
    weights: Mapping[str, pb.WeightsRef],
    saved: Mapping[str, tr.SaveCheckpointResponse],
) -> dict[str, Any]:
    """The manifest after `step` steps, as JSON.

    Paths are relative to the job's `directory`, which may be moved. `last` is the newest step as
    the store knows it, `weights` the ledger's, `saved` the checkpoint of every trained policy. The
    same facts give the same bytes.
    """
    commits = {commit.policy: commit for commit in last.commits}
    return {
        "step": step,
        "spec_hash": spec_hash(spec),
        # All randomness of rollout derives from it and from a query's index.
        "seed": spec.seed,
        # The first item of the training split that no step has taken.
        "cursor": last.cursor,
        "policies": {
            policy: {
                "version": weights[policy].version,
                "checksum": weights[policy].checksum,
                "path": _within(directory, saved[policy].path),
                "frontier": _frontier(commits[policy]),
            }
            for policy in sorted(saved)
        },
    }


def _within(directory: Path, path: str) -> str:
    """The path relative to the directory, if it is in there."""
    with suppress(ValueError):
        return str(Path(path).relative_to(directory))
    return path


def _frontier(commit: es.StepCommit) -> dict[str, Any]:
    """What the store counts as trained up to here."""
    digest = f"{commit.samples_digest:016x}" if commit.HasField("samples_digest") else None
    return {
        "committed_step": commit.step,
        "outcome": es.StepOutcome.Name(commit.outcome).removeprefix("STEP_OUTCOME_"),
        "samples": commit.num_samples,
        "samples_digest": digest,
    }


def spec_hash(spec: JobSpec) -> str:
    """A hash of the specification with its defaults filled in: hex blake2b-128."""
    text = json.dumps(spec.model_dump(mode="json"), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def write_manifest(directory: Path, content: Mapping[str, Any], keep: int) -> Path:
    """Write a manifest into a job's `directory`, whole or not at all; only the newest `keep` stay.

    Raises `OSError`.
    """
    folder = directory / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"manifest-step{content['step']}.json"
    draft = folder / f".{path.name}.new"
    with draft.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    there = _manifests(folder)
    for old in sorted(there)[:-keep]:
        there[old].unlink(missing_ok=True)
    return path


def _manifests(folder: Path) -> dict[int, Path]:
    named = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return {int(match[1]): path for match, path in named if match}
