"""The checkpoints that are kept of a policy."""

from __future__ import annotations

from pathlib import Path

from troupe.checkpoints.retention import none_such, prune, versions_in, versions_of_all


def _job(tmp_path: Path) -> Path:
    """Two policies with checkpoints, and other files next to them."""
    folder = tmp_path / "checkpoints"
    for name in ("solver/v9", "solver/v10", "solver/v2", "solver/.v11.ab.tmp", "critic/v1"):
        (folder / name).mkdir(parents=True)
    (folder / "idle").mkdir()
    (folder / ".base" / "00ff").mkdir(parents=True)
    (folder / "solver" / "v12").write_text("no checkpoint")
    return tmp_path


def test_versions_are_in_order_of_their_numbers(tmp_path: Path) -> None:
    found = versions_of_all(_job(tmp_path))
    assert {policy: [version for version, _ in kept] for policy, kept in found.items()} == {
        "critic": [1],
        "solver": [2, 9, 10],
    }
    assert found["solver"][-1][1] == tmp_path / "checkpoints" / "solver" / "v10"
    assert versions_of_all(tmp_path / "absent") == {}


def test_the_newest_are_kept(tmp_path: Path) -> None:
    folder = _job(tmp_path) / "checkpoints" / "solver"
    prune(folder, 2)
    assert [version for version, _ in versions_in(folder)] == [9, 10]
    assert (folder / ".v11.ab.tmp").is_dir(), "somebody is at it"
    prune(folder, 5)
    assert [version for version, _ in versions_in(folder)] == [9, 10]


def test_a_missing_checkpoint_names_the_existing_ones() -> None:
    error = none_such("solver", 3, ["solver@1", "solver@2"])
    assert "no checkpoint of solver@3; there are: solver@1, solver@2" in error.message
    assert (error.field, none_such("solver", None, []).field) == ("version", "policy")
