"""Jobs with populations on a standing cluster, and the properties of each ended job."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file

from examples.games.model import make_model
from tests.e2e.conftest import House
from tests.e2e.standing import Ended
from troupe.client.records.jobs import JobState
from troupe.client.records.populations import Match, Population
from troupe.transfer import checksum_of

KUHN = "examples.games.kuhn:workflow"
TABLES = "tests.support.tables_of_three:"


def population_job(
    models: Path,
    agents: Mapping[str, str],
    *,
    workflow: str = KUHN,
    others: Iterable[str] = (),
    pipeline: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
    **population: Any,
) -> str:
    """Return a job of `agents` (by name: their policy) and learners without agents by default
    (`others`), in two iterations of one step."""
    model = models / "games"
    if not model.is_dir():
        make_model(model)
    policies = dict.fromkeys([*agents.values(), *others])
    spec: dict[str, Any] = {
        "name": population.get("algorithm", "psro"),
        "workflow": workflow,
        "tasks": {"source": "troupe.workflow.environments:Episodes"},
        "agents": {
            name: {"policy": policy, "sampling": {"max_new_tokens": 1}}
            for name, policy in agents.items()
        },
        "policies": {
            policy: {
                "model": {"path": str(model)},
                "optimizer": {"lr": 0.01},
                "engine": {"max_context": 128},
            }
            for policy in policies
        },
        # Even an untrained policy's answers give a signal to learn from.
        "algorithm": {"advantage": "rae"},
        "pipeline": {"steps": 2, "queries_per_step": 4, "group_size": 4, **(pipeline or {})},
        "limits": {"trajectory_seconds": 200, "turn_seconds": 200, "step_seconds": 400},
        "logging": {"tensorboard": False},
        "population": {"iteration_steps": 1, "matches": {"least": 4}, **population},
        **(changes or {}),
    }
    return yaml.safe_dump(spec)


async def check_population(end: Ended, data_dir: Path) -> Population:
    """Check a job that has succeeded: nothing is lost or counted twice, and members are the trained
    versions."""
    assert end.job.state == JobState.SUCCEEDED, end.job.problem
    audit = await end.handle.audit()
    assert not audit.violations, audit
    found = await end.handle.population()
    matches = await end.handle.matches(limit=10_000)
    check_payoffs(found, matches)
    await check_members(end, found, data_dir)
    return found


def check_payoffs(found: Population, matches: list[Match]) -> None:
    """Check that the payoff table has the matches' payoffs, each counted once."""
    assert len({one.trajectory_id for one in matches}) == len(matches) == found.matches_played
    assert sum(cell.matches for cell in found.cells) == found.matches_played
    names = [[one.id for one in found.pool_of(agent).members] for agent in found.agents]
    paid: defaultdict[tuple[str, ...], list[Match]] = defaultdict(list)
    for match in matches:
        held = [match.members[agent] for agent in found.agents]
        paid[tuple(sorted(held) if found.symmetric else held)].append(match)
    assert len(paid) == len(found.cells)
    for cell in found.cells:
        members = [own[place] for own, place in zip(names, cell.members, strict=True)]
        own = paid[tuple(sorted(members) if found.symmetric else members)]
        assert len(own) == cell.matches
        # A member on several sides gets their mean.
        for member in dict.fromkeys(members):
            expected = [
                match.payoffs[agent]
                for match in own
                for agent, one in match.members.items()
                if one == member
            ]
            got = [mean for one, mean in zip(members, cell.mean, strict=True) if one == member]
            assert abs(sum(got) / len(got) - sum(expected) / len(expected)) < 1e-9
        assert abs(sum(cell.mean)) < 1e-9, "what one side gets the others lose"


async def check_members(end: Ended, found: Population, data_dir: Path) -> None:
    """Members follow from each other, and their files hold the bits that were published."""
    for learner in dict.fromkeys(name for pool in found.pools for name in pool.learners):
        versions = await end.handle.versions(learner)
        committed = {one.version: one.checksum for one in versions}
        restarts = [one.version for one in versions if one.outcome == "restarted"]
        first = before = ""
        since = 0
        members = [one for pool in found.pools for one in pool.members if one.learner == learner]
        for one in {one.id: one for one in members}.values():
            again = any(since < version < one.version for version in restarts)
            assert one.parent == (first if again else before)
            assert one.checksum == committed[one.version]
            first, before, since = first or one.id, one.id, one.version
            folder = data_dir / end.job.id / "members" / learner / f"v{one.version}"
            if one.state == "retired" and not folder.is_dir():
                continue
            files = {path.name: path for path in folder.glob("*.safetensors")}
            bits = files.get("published.safetensors", files.get("model.safetensors"))
            assert bits is not None
            assert checksum_of(load_file(bits)) == one.checksum


def match_seats(matches: list[Match]) -> Counter[tuple[str, str]]:
    """How often each member was each agent, in matches of several members."""
    mixed = [one for one in matches if len(set(one.members.values())) > 1]
    return Counter((member, agent) for one in mixed for agent, member in one.members.items())


async def training_casts(end: Ended) -> list[dict[str, str]]:
    """Return, by stored training trajectory, the policy of each agent."""
    found = []
    for one in await end.handle.trajectories(limit=10_000):
        if not one.evaluation and one.state == "completed":
            whole = await end.handle.trajectory(one.id)
            found.append({turn.agent: turn.policy for turn in whole.conversation})
    return found


async def another(house: House, pid: int) -> bool:
    """Whether the orchestrator is another process than `pid`."""
    return house.pid("orchestrator") != pid
