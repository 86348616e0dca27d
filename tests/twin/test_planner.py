"""The planner: splits that fit, its recommendation, and `troupe plan`."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import planner as benchmark
from troupe.client.cli.app import main
from troupe.client.cli.specification import apply_assignments
from troupe.devices import parse_devices
from troupe.job import JobSpec
from troupe.job.engines.sharing import engine_groups
from troupe.job.loading import job_of, with_overrides
from troupe.rpc import InvalidArgument
from troupe.twin import planner
from troupe.twin.costs import device_costs
from troupe.twin.job import TwinJob
from troupe.twin.planner import Habits, JobPlan, plan_job
from troupe.twin.plans import assignments, plan_devices
from troupe.twin.plans import planned as planned_values

FEW = Habits(turns=2, prompt_tokens=300, response_tokens=400, wait_seconds=0.5)


def job(**pipeline: Any) -> dict[str, Any]:
    """A team of two policies, by the names of their models."""
    return {
        "name": "planned",
        "workflow": "benchmarks.workloads.plain_turns:play",
        "tasks": {"source": "benchmarks.workloads.plain_turns:Queries"},
        "agents": {
            "solver": {"policy": "solver", "sampling": {"max_new_tokens": 2048}},
            "checker": {"policy": "checker", "sampling": {"max_new_tokens": 512}},
        },
        "policies": {
            "solver": {
                "model": {"path": "Qwen/Qwen3-8B"},
                "engine": {"kind": "sglang", "max_context": 8192},
            },
            "checker": {
                "model": {"path": "Qwen/Qwen3-0.6B"},
                "engine": {"kind": "sglang", "max_context": 8192},
            },
        },
        "pipeline": {
            "mode": "micro_batch",
            "steps": 10,
            "queries_per_step": 8,
            "group_size": 4,
            "micro_batch_samples": 16,
            **pipeline,
        },
        "evaluation": {"queries": 0},
    }


def planned(devices: str, hosts: int = 1, more: bool = False, **pipeline: Any) -> JobPlan:
    given = parse_devices(devices)
    costs = device_costs(given[0].device_class, memory=given[0].memory)
    spec = JobSpec.model_validate(job(**pipeline))
    return plan_job(spec, given, costs, hosts=hosts, habits=FEW, more=more)


def test_the_best_split_fits_and_is_the_fastest_that_was_tried() -> None:
    found = planned("16xH100-80GB", hosts=2, more=True)
    best = found.best
    engines, trainers = best.split.devices
    assert engines + trainers == 16
    assert all(best.means.seconds <= one.means.seconds for one in found.others)
    assert found.considered >= 1 + len(found.others)
    for split in best.split.policies.values():
        assert split.engines * split.tensor_parallel <= 8
        assert 0 < split.trainer_bytes < 80 << 30
        assert split.gang <= trainers
    # The large policy has at least as many of the engines' devices.
    solver, checker = (best.split.policies[one] for one in ("solver", "checker"))
    assert solver.engines * solver.tensor_parallel >= checker.engines * checker.tensor_parallel
    assert found.more_seconds is not None
    assert found.more_seconds < 1.02 * best.means.seconds


def test_gangs_that_train_side_by_side_are_tried() -> None:
    """The smallest gangs leave devices idle, and the largest wait for each other."""
    spec = JobSpec.model_validate(job())
    case = planner._case(spec, device_costs("H100"), 4, 8, FEW)
    gangs = {name: planner._gangs(case, name, 16) for name in case.names}
    sizes = [
        {name: size for name, (size, _) in one.items()}
        for one in planner._chosen_gangs(case, gangs, 16)
    ]
    smallest, side, largest = sizes
    assert largest == {"solver": 16, "checker": 16}
    assert sum(smallest.values()) < sum(side.values()) <= 16
    assert side["solver"] >= side["checker"]  # whose work is less


def test_a_mode_that_overlaps_is_predicted_to_be_faster() -> None:
    seconds = {
        mode: planned("8xH100-80GB", mode=mode).best.means.seconds
        for mode in ("sync", "micro_batch")
    }
    assert seconds["sync"] > seconds["micro_batch"]


def test_colocated_engines_and_trainers_have_all_devices_in_turns() -> None:
    best = planned("8xH100-80GB", mode="sync", colocate=True).best
    assert best.split.devices == (8, 8)


def twin_of(raw: dict[str, Any]) -> TwinJob:
    """The twin of the first split that the planner would try."""
    spec = JobSpec.model_validate(raw)
    case = planner._case(spec, device_costs("H100"), 1, 8, FEW)
    split = next(planner._splits(case, parse_devices("8xH100-80GB")))
    return planner.twin_of(case, split)


def test_redundant_trajectories_run_in_the_twin_and_count_in_no_bound() -> None:
    twin = twin_of(job(redundant_trajectories=2))
    assert twin.redundant == 2
    assert len(twin.workload(0)) == 4 + 2
    rows = [
        planner._case(JobSpec.model_validate(raw), device_costs("H100"), 1, 8, FEW).rows["solver"]
        for raw in (job(redundant_trajectories=4), job(group_size=8))
    ]
    assert rows[0] < rows[1]  # both start eight trajectories per query
    assert planned("8xH100-80GB", redundant_trajectories=2).best.means.seconds > 0


def test_the_twin_routes_as_the_job_says() -> None:
    spec = JobSpec.model_validate(job() | {"routing": {"policy": "round_robin", "sticky": False}})
    case = planner._case(spec, device_costs("H100"), 1, 8, FEW)
    split = next(planner._splits(case, parse_devices("8xH100-80GB")))
    routing = planner.twin_of(case, split).routing
    assert (routing.policy, routing.sticky, routing.priority) == ("round_robin", False, True)


def test_a_policy_with_its_own_alpha_has_it_in_the_twin() -> None:
    raw = job(mode="async", alpha=3)
    raw["policies"]["checker"]["alpha"] = 1
    bounds = {name: policy.alpha for name, policy in twin_of(raw).policies.items()}
    assert bounds == {"solver": 3, "checker": 1}
    assert {policy.alpha for policy in twin_of(job()).policies.values()} == {0}


def alike(**balancing: Any) -> dict[str, Any]:
    """A team of two policies of one small model, between which engines can move."""
    raw = job()
    raw["policies"]["solver"] = raw["policies"]["checker"]
    raw["balancing"] = balancing
    return raw


def test_engines_of_policies_of_one_model_move_in_the_twin_by_the_rules_of_the_job() -> None:
    raw = alike(threshold=7)
    spec = JobSpec.model_validate(raw)
    case = planner._case(spec, device_costs("H100"), 1, 8, FEW)
    some = next(planner._splits(case, parse_devices("8xH100-80GB")))
    solver = some.policies["solver"]
    policies = {"solver": replace(solver, engines=2), "checker": replace(solver, engines=1)}
    split = replace(some, policies=policies)
    twin = planner.twin_of(case, split)
    assert twin.balancing == spec.balancing.rules
    assert not twin.barred
    # The split decides: with one engine each, none is left over; engines of other widths differ.
    single = {name: replace(one, engines=1) for name, one in policies.items()}
    assert planner.twin_of(case, replace(split, policies=single)).balancing is None
    wide = policies | {"checker": replace(solver, engines=1, tensor_parallel=2)}
    assert planner.twin_of(case, replace(split, policies=wide)).balancing is None


ROLES = ("solver", "critic", "judge", "editor")


def roles(share: str = "auto") -> dict[str, Any]:
    """A team of four LoRA roles on one base."""
    raw = job()
    engine = {"kind": "sglang", "max_context": 8192, "share": share}
    policy = {"model": {"path": "Qwen/Qwen3-8B"}, "lora": {"rank": 16}, "engine": engine}
    raw["agents"] = {name: {"policy": name, "sampling": {"max_new_tokens": 512}} for name in ROLES}
    raw["policies"] = dict.fromkeys(ROLES, policy)
    return raw


def planned_roles(share: str, devices: str) -> JobPlan:
    spec = JobSpec.model_validate(roles(share))
    return plan_job(spec, parse_devices(devices), device_costs("H100"), habits=FEW, more=False)


def test_roles_on_one_group_need_one_base_instead_of_four() -> None:
    found = planned_roles("auto", "2xH100-80GB")
    assert list(found.shared) == [
        "solver, critic, judge, editor: 4 roles on one group: 1 base instead of 4, "
        "3 x 15 GB less for each engine"
    ]
    policies = found.best.split.policies
    assert {one.engines for one in policies.values()} == {1}
    assert [one.shares for one in policies.values()] == ["", "solver", "solver", "solver"]
    # Apart, they need four engines.
    with pytest.raises(InvalidArgument, match="an engine of each policy takes 4 devices"):
        planned_roles("never", "2xH100-80GB")


def test_shared_engines_are_as_many_as_the_work_of_all_their_roles_fills() -> None:
    together, apart = (planned_roles(share, "8xH100-80GB").best for share in ("auto", "never"))
    shared = together.split.policies["solver"]
    devices = together.split.devices[0]
    assert shared.engines * shared.tensor_parallel == devices
    assert sum(one.engines for one in apart.split.policies.values()) <= apart.split.devices[0]
    # No role waits while an engine of another is idle.
    assert together.means.seconds <= apart.means.seconds


def test_adapters_of_all_roles_take_room_from_conversations() -> None:
    raw = roles()
    raw["policies"] = {
        name: {**one, "lora": {"rank": 256}} for name, one in raw["policies"].items()
    }
    raw["policies"]["solver"] = raw["policies"]["solver"] | {"lora": {"rank": 16}}

    def turns(**over: Any) -> int:
        spec = JobSpec.model_validate(raw | over)
        case = planner._case(spec, device_costs("H100"), 1, 8, Habits(turns=2, prompt_tokens=8000))
        return case.rates.turns("solver", 1)

    several = turns()
    alone = turns(
        policies={"solver": raw["policies"]["solver"]}, agents={"solver": {"policy": "solver"}}
    )
    assert 0 < several < alone


def test_the_command_says_which_roles_share_engines_and_writes_equal_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "job.yaml", tmp_path / "planned.yaml"
    path.write_text(yaml.safe_dump(roles(), sort_keys=False))
    options = ["--turns", "2", "--response-tokens", "200", "--wait-seconds", "0"]
    assert main(["plan", str(path), "--devices", "4xH100-80GB", *options, "--write", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "4 roles on one group: 1 base instead of 4" in shown
    assert "with solver" in shown
    spec = JobSpec.model_validate(yaml.safe_load(out.read_text()))
    (group,) = engine_groups(spec)
    assert set(group.policies) == set(ROLES)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (alike(inter=False), None),
        (job(), None),
        (alike(inter=True, measure="tokens"), "balancing.measure: tokens"),
        (alike(inter=True, rebuild=True), "balancing.rebuild"),
    ],
)
def test_balancing_that_trials_leave_out_is_listed_as_assumed(
    raw: dict[str, Any], said: str | None
) -> None:
    for policy in raw["policies"].values():
        policy["engine"] |= {"replicas": 2}
    spec = JobSpec.model_validate(raw)
    found = plan_job(
        spec, parse_devices("8xH100-80GB"), device_costs("H100"), habits=FEW, more=False
    )
    listed = [one for one in found.assumed if "balancing." in one]
    assert len(listed) == (said is not None)
    assert said is None or said in listed[0]


@pytest.mark.parametrize(
    ("devices", "hosts", "change", "said"),
    [
        ("2xL4-24GB", 1, {}, "training solver over 2 devices needs"),
        ("4xH100-80GB", 1, {}, "an engine of each policy takes 2 devices"),
        ("4xH100-80GB+4xA100-80GB", 1, {}, "2 classes"),
        ("8xH100-80GB", 3, {}, "spread evenly over 3 hosts"),
        ("8xH100-80GB", 0, {}, "spread evenly over 0 hosts"),
        ("8xH100-80GB", 1, {"model": {"path": "some/thing"}}, "size of policy solver is unknown"),
    ],
)
def test_a_job_that_cannot_be_planned_is_refused_with_the_reason(
    devices: str, hosts: int, change: dict[str, Any], said: str
) -> None:
    raw = job()
    raw["policies"]["solver"] |= change
    given = parse_devices(devices)
    with pytest.raises(InvalidArgument, match=said):
        plan_job(JobSpec.model_validate(raw), given, device_costs("H100"), hosts=hosts, habits=FEW)


def test_a_job_of_networks_is_refused() -> None:
    spec = JobSpec.model_validate(job())
    network = spec.policies["solver"].model_copy(update={"model": None})
    spec = spec.model_copy(update={"policies": {**spec.policies, "solver": network}})
    with pytest.raises(InvalidArgument, match="is a network"):
        plan_job(spec, parse_devices("8xH100-80GB"), device_costs("H100"), habits=FEW)


@pytest.mark.parametrize(
    "wrong",
    [
        {"turns": 0},
        {"turns": -2},
        {"turns": 1e9},
        {"turns": float("inf")},
        {"prompt_tokens": 1e300},
        {"response_tokens": -1},
        {"response_tokens": 1e12},
        {"wait_seconds": float("nan")},
        {"wait_seconds": 1e300},
    ],
)
def test_habits_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        Habits(**wrong)


def test_the_command_prints_an_object_and_writes_a_job_that_is_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "job.yaml", tmp_path / "planned.yaml"
    path.write_text(yaml.safe_dump(job()))
    options = ["--turns", "2", "--response-tokens", "200", "--wait-seconds", "0"]
    line = ["plan", str(path), "--devices", "8xH100-80GB", *options]
    assert main([*line, "--json", "--write", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"]["seconds_per_step"] > 0
    split = found["best"]["policies"]["solver"]
    written = JobSpec.model_validate(yaml.safe_load(out.read_text())).policies["solver"]
    assert written.engine.replicas == split["replicas"]
    assert written.engine.tensor_parallel == split["tensor_parallel"]
    assert written.trainer.gang == split["gang"]
    assert main(line) == 0
    shown = capsys.readouterr().out
    assert "s per step (predicted" in shown
    assert f"--set policies.solver.trainer.gang={split['gang']}" in shown
    # An existing file is not replaced; an unknown device leads to a question.
    assert main([*line, "--write", str(out)]) == 2
    for unknown in ("8xQuux-80GB", "8xQuux"):
        assert main(["plan", str(path), "--devices", unknown]) == 2
        said = capsys.readouterr().err
        assert "--tflops, --gigabytes-per-second" in said.replace("\n", " ")
        assert "8xQuux-80GB" in said


@pytest.mark.parametrize(
    ("text", "count", "gigabytes"),
    [("8xH100", 8, 80), ("h100", 1, 80), (" 4xH200 ", 4, 141), ("8xH20-141GB", 8, 141)],
)
def test_a_known_class_has_its_usual_memory(text: str, count: int, gigabytes: int) -> None:
    devices = plan_devices(text, "--devices")
    assert [one.memory for one in devices] == [gigabytes << 30] * count
    with pytest.raises(InvalidArgument, match="device class 'X9' is unknown") as refused:
        plan_devices("8xX9", "--devices")
    assert refused.value.field == "--devices"
    assert "memory" in refused.value.remedy


@pytest.mark.parametrize("workload", ["engines", "trainers"])
def test_simulated_policies_are_planned_with_the_costs_that_the_job_gives(
    tmp_path: Path, workload: str
) -> None:
    spec = benchmark.job(workload, (1, 1, 1), tmp_path)
    found = planned_values(
        spec, parse_devices("6xSimulated-8GB"), habits=asdict(FEW), tflops=1, gigabytes_per_second=1
    )
    splits = [benchmark._split_of(one) for one in (found.best, *found.others)]
    assert len(set(splits)) == len(splits) >= 4
    assert set(splits) <= set(benchmark.splits())
    # Also other shares of engines than those by work: two splits with as many trainers.
    assert len({trainers for _, _, trainers in splits}) < len(splits)
    assert {one.gang for one in found.best.split.policies.values()} == {1}
    assert len(found.measured) == 2
    assert (found.best.bottleneck == "trainers") <= (workload == "trainers")


def test_the_fields_of_a_plan_make_a_valid_job() -> None:
    """They are in the file that `--write` writes, whatever else the job has."""
    rows = {"tasks": {"dataset": "/data/rows.jsonl"}, "steps": 2}
    every: tuple[dict[str, Any], ...] = (
        {"population": {}},
        {"population": {"engine": {"kind": "sglang"}}},
        {"pipeline.deterministic": True, "policies.solver.model.path": "Qwen/Qwen3-0.6B"},
        {"pipeline.mode": "sync", "pipeline.colocate": True},
        {
            "pipeline.mode": "sync",
            "policies.solver.colocate": True,
            "policies.checker.colocate": True,
        },
        {"supervised": rows},
        {"policies.checker.trainable": False},
    )
    for changes in every:
        raw = with_overrides(job(), changes)
        spec = job_of(raw)
        found = planned_values(spec, plan_devices("16xH100", "devices"), habits=asdict(FEW))
        lines = assignments(spec, found.best)
        made = job_of(apply_assignments(yaml.safe_dump(raw), lines))
        for name, split in found.best.split.policies.items():
            assert made.policies[name].engine.replicas == split.engines, (changes, name)
        learned = any("rows" in one for one in found.assumed)
        assert learned is ("supervised" in changes)
        assert any("slots" in one for one in found.assumed) is ("population" in changes)


def test_policies_that_all_colocate_are_planned_as_a_job_that_does() -> None:
    devices = plan_devices("8xH100", "devices")
    each = {f"policies.{name}.colocate": True for name in ("solver", "checker")}
    one = {**each, "policies.checker.colocate": False}
    found = [
        planned_values(
            job_of(with_overrides(job(mode="sync"), changes)), devices, habits=asdict(FEW)
        )
        for changes in ({"pipeline.colocate": True}, each, one)
    ]
    every, same, part = found
    assert same.best.split.devices == every.best.split.devices == (8, 8)
    assert sum(part.best.split.devices) == 8
    assert [any("colocate" in line for line in one.assumed) for one in found] == [0, 0, 1]


def test_a_deterministic_policy_that_needs_a_gang_does_not_fit() -> None:
    raw = job(deterministic=True)
    raw["policies"]["solver"]["model"]["path"] = "Qwen/Qwen3-32B"
    with pytest.raises(InvalidArgument, match="training solver over 1 device needs"):
        planned_values(job_of(raw), plan_devices("16xH100", "devices"))
