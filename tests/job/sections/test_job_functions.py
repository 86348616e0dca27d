"""Rewards and tools of a job: their code, and the costs that the job sets."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.cluster import job_yaml
from troupe.functions.costs import DEFAULTS, costs_of, to_spec
from troupe.job import FunctionSpec, JobSpecError, parse_job


def test_only_costs_that_the_job_gives_are_set() -> None:
    given = FunctionSpec(entrypoint="tasks:score", cores=2, quota="judge")
    assert given.costs == {"cores": 2, "quota": "judge"}


def test_costs_come_from_the_job_then_the_declaration_then_defaults() -> None:
    declared = {"cores": 4, "timeout_seconds": 7.0, "stateful": True}
    declared |= {"expected_seconds": 2.0, "seconds_per": {"query.data.tests": 0.5}}
    spec = to_spec("score", "1", "tasks:score", {"cores": 0}, declared=declared)
    assert (spec.cores, spec.timeout_seconds, spec.stateful) == (0, 7.0, True)
    assert spec.memory_mib == DEFAULTS["memory_mib"]
    assert not spec.HasField("idle_seconds")
    assert costs_of(spec) == {**DEFAULTS, **declared, "cores": 0}


def test_every_cost_of_a_job_has_a_place_on_the_wire() -> None:
    costs = set(FunctionSpec.model_fields) - {
        *("entrypoint", "function", "ready", "arguments", "version")
    }
    from troupe.v1 import reward_pb2 as reward_pb

    assert costs <= set(reward_pb.FunctionSpec.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ({}, "exactly one of `entrypoint`, `function` and"),
        ({"entrypoint": "a:b", "function": "c@1"}, "exactly one of `entrypoint`, `function` and"),
        ({"function": "c"}, "must look like 'name@version'"),
        ({"function": "c@1", "cores": 2}, "`cores` of a deployed function"),
        ({"function": "c@1", "version": "2"}, "`version` of a deployed function"),
        ({"entrypoint": "a:b", "cores": 3, "max_cores": 2}, "less than `cores`"),
        ({"entrypoint": "a:b", "expected_seconds": float("nan")}, "finite"),
        ({"entrypoint": "a:b", "expected_seconds": -1}, "greater than or equal"),
        ({"entrypoint": "a:b", "seconds_per": {"a b": 1.0}}, "pattern"),
        ({"entrypoint": "a:b", "seconds_per": {"a": -1.0}}, "greater than or equal"),
        ({"entrypoint": "a:b", "arguments": {"x": float("inf")}}, "JSON"),
        ({"entrypoint": "a:b", "mcp": {"url": "http://a"}}, "no such field"),
        ({"entrypoint": "a:b", "arguments": {"query": {}}}, "each call passes its own `query`"),
        ({"entrypoint": "a:b", "arguments": {"turns": []}}, "each call passes its own `turns`"),
        ({"function": "c@1", "arguments": {"rewards": {}}}, "passes its own `rewards`"),
    ],
)
def test_a_function_that_cannot_work_is_refused_by_name(
    function: dict[str, Any], said: str
) -> None:
    with pytest.raises(JobSpecError, match=said) as refused:
        parse_job(job_yaml(rewards={"score": function}))
    assert refused.value.problems[0].field.startswith("rewards.score")


def test_an_mcp_server_is_a_tool_with_the_costs_of_a_call() -> None:
    given = {"mcp": {"command": ["server"], "env": {"KEY": "$KEY"}}, "timeout_seconds": 5}
    job = parse_job(job_yaml(tools={"search": given}))
    tool = job.tools["search"]
    assert tool.costs == {"timeout_seconds": 5}
    assert tool.mcp is not None
    assert tool.mcp.offered is None
    assert parse_job(job.model_dump_json()) == job, "as the orchestrator keeps it"


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        ({"mcp": {}}, "exactly one of `command` and `url`"),
        ({"mcp": {"command": ["x"], "url": "http://a"}}, "exactly one of `command` and `url`"),
        ({"mcp": {"command": []}}, "at least 1 item"),
        ({"mcp": {"command": [""]}}, "must begin with a program"),
        ({"mcp": {"command": "server --fast"}}, "list"),
        ({"mcp": {"url": "ftp://a"}}, "pattern"),
        ({"mcp": {"url": "http://a", "env": {"A": "b"}}}, "`env` is for a server with `command`"),
        ({"mcp": {"command": ["x"], "headers": {"A": "b"}}}, "`headers` is for a server with"),
        ({"mcp": {"command": ["x"], "env": {"A": "$"}}}, "`env.A` is not a template"),
        ({"mcp": {"command": ["x"], "prefix": "a b"}}, "pattern"),
        ({"mcp": {"command": ["x"], "start_seconds": 0}}, "greater than 0"),
        ({"mcp": {"command": ["x"], "pool": 3}}, "no such field"),
        ({"mcp": {"command": ["x"]}, "entrypoint": "a:b"}, "`entrypoint` is not for an MCP server"),
        ({"mcp": {"command": ["x"]}, "arguments": {"a": 1}}, "`arguments` is not for an MCP"),
    ],
)
def test_an_mcp_server_that_cannot_work_is_refused(tool: dict[str, Any], said: str) -> None:
    with pytest.raises(JobSpecError, match=said) as refused:
        parse_job(job_yaml(tools={"search": tool}))
    assert refused.value.problems[0].field.startswith("tools.search")
