"""The decisions of `population.algorithm`: opponents of each learner, settled members, restarts.

A *learner* is a policy in training, a *member* one of its frozen versions in a pool. A new member
is a *candidate* until it is *settled*, that is, counted in the meta-strategy. All functions are
pure functions of the specification and the state, so that a runner that takes over a job makes the
same decisions.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from services.orchestrator.populations.state import (
    CANDIDATE,
    SETTLED,
    Mixture,
    PopulationState,
    Solution,
    live,
)
from troupe.job import JobSpec, PopulationSpec
from troupe.job.sections.population import OpponentPool, Pools
from troupe.populations import NotZeroSum, pfsp, solve
from troupe.populations.games import Array, Profile, member_values, values
from troupe.populations.opponents import (
    LeagueMember,
    LeagueRules,
    is_due,
    league_opponents,
    past_selves,
)
from troupe.rpc import FailedPrecondition


def sections(spec: JobSpec) -> tuple[PopulationSpec, Pools]:
    """Return the `population` section and the pools of a job with a population."""
    assert spec.population is not None, "the job has one"
    assert spec.pools is not None, "the job has one"
    return spec.population, spec.pools


def solve_pools(spec: JobSpec, state: PopulationState, visible: dict[str, list[int]]) -> Profile:
    """Solve for each player's meta-strategy over the members at `visible` indices of its pool.

    Raises FailedPrecondition of kind "not_zero_sum" or "no_meta_strategy", naming the field.
    """
    population, pools = sections(spec)
    places = [visible[pools.pool_of(agent).name] for agent in pools.agents]
    if all(len(one) == 1 for one in places):
        return [np.ones(1) for _ in places]
    try:
        return solve(population.meta_solver, state.table.tensor(places))
    except NotZeroSum as error:
        raise FailedPrecondition(
            str(error),
            kind="not_zero_sum",
            field="population.meta_solver",
            value=population.meta_solver,
            remedy="Choose another solver, or fix the workflow's rewards if the game is zero-sum.",
        ) from error
    except (ValueError, ImportError, ArithmeticError) as error:
        raise FailedPrecondition(
            f"no meta-strategy can be found: {error}",
            kind="no_meta_strategy",
            field="population.meta_solver",
            value=population.meta_solver,
            remedy="Choose another solver.",
        ) from error


def measured(spec: JobSpec) -> bool:
    """Return whether the job measures payoffs, by matches or exactly."""
    population, _ = sections(spec)
    return population.matches.least > 0 or population.game is not None


def settle_due(spec: JobSpec, state: PopulationState) -> list[str]:
    """Return the learners whose candidates become settled members."""
    population, pools = sections(spec)
    fresh = [name for name in pools.learners if state.newest(name).state == CANDIDATE]
    if population.algorithm == "pipeline_psro":
        # Only the lowest level of each pool is due: the learner that was settled longest ago.
        lowest = {levels(pool, state)[0] for pool in pools.pools}
        return [name for name in fresh if name in lowest]
    if population.algorithm != "league":
        return fresh
    rules, league = _rules(population), _league(pools, state)
    wins = _live_wins(pools, state)
    found = []
    for name in fresh:
        learner = next(one for one in league if one.name == name)
        since = state.iteration - state.settled_at.get(name, 0)
        if is_due(learner, league, wins, since, rules):
            found.append(name)
    return found


def restart_due(
    spec: JobSpec, state: PopulationState, settled: Collection[str] | None = None
) -> list[str]:
    """Return the learners that restart from their first weights now (`restart: base`).

    This happens after an iteration or, with `settled`, after these learners' candidates were
    settled.
    """
    population, pools = sections(spec)
    if population.restart == "latest":
        return []
    if population.algorithm == "pipeline_psro":
        return sorted(settled or ())
    if population.algorithm == "league":
        # Main agents are never reset (Vinyals et al. 2019, methods).
        return [name for name in sorted(settled or ()) if pools.learners[name].kind != "main"]
    return list(pools.learners) if settled is None else []


def levels(pool: OpponentPool, state: PopulationState) -> list[str]:
    """Return a pool's learners by level of `pipeline_psro`, lowest (settled longest ago) first."""
    return sorted(
        pool.learners, key=lambda name: (state.settled_at.get(name, 0), pool.learners.index(name))
    )


def mixtures(spec: JobSpec, state: PopulationState) -> dict[str, dict[str, Mixture]]:
    """Return the opponents' probabilities by learner and pool; opponents are members or live
    learners."""
    population, pools = sections(spec)
    if pools.together:
        return {}
    settled = {pool.name: state.places(pool.name, SETTLED) for pool in pools.pools}
    common: dict[str, Mixture] = {}
    if population.algorithm == "psro":
        common = by_pool(pools, state, settled, solve_pools(spec, state, settled))
    found = {}
    for learner in pools.learners:
        own: dict[str, Mixture] = {}
        for pool in pools.pools:
            if population.algorithm == "psro":
                own[pool.name] = common[pool.name]
            elif population.algorithm == "pipeline_psro":
                own[pool.name] = _below(spec, state, learner)[pool.name]
            elif population.algorithm == "league":
                own[pool.name] = _league_mixture(population, pools, pool, state, learner)
            else:
                own[pool.name] = _past(population, state, pool.name, learner)
        found[learner] = own
    return found


def solution(spec: JobSpec, state: PopulationState, step: int) -> Solution:
    """Return the meta-strategy over all settled members, and the newest members' gains."""
    _, pools = sections(spec)
    settled = {pool.name: state.places(pool.name, SETTLED) for pool in pools.pools}
    if not measured(spec):
        return Solution(state.iteration, step, {}, [], {})
    profile = solve_pools(spec, state, settled)
    places = [settled[pools.pool_of(agent).name] for agent in pools.agents]
    payoffs = state.table.tensor(places)
    found = by_pool(pools, state, settled, profile)
    gains = _gains(pools, state, settled, payoffs)
    return Solution(state.iteration, step, found, values(payoffs, profile).tolist(), gains)


def by_pool(
    pools: Pools, state: PopulationState, visible: dict[str, list[int]], profile: Profile
) -> dict[str, Mixture]:
    """Convert a profile by agent to mixtures by pool: the mean over the agents of a pool."""
    found = {}
    for pool in pools.pools:
        rows = [profile[pools.agents.index(agent)] for agent in pool.agents]
        mean = np.mean(rows, axis=0)
        names = [state.pools[pool.name][at] for at in visible[pool.name]]
        found[pool.name] = {
            name: float(share) for name, share in zip(names, mean, strict=True) if share > 0
        }
    return found


def _gains(
    pools: Pools, state: PopulationState, settled: dict[str, list[int]], payoffs: Array
) -> dict[str, float]:
    """Return the payoff gain of each pool's newest members over the mixture of the last solution.

    Both are measured against that mixture. Empty if no pool has a new member.
    """
    if not state.history:
        return {}
    before = []
    for agent in pools.agents:
        pool = pools.pool_of(agent).name
        shares = state.history[-1].mixtures.get(pool, {})
        names = [state.pools[pool][at] for at in settled[pool]]
        before.append(np.array([shares.get(name, 0.0) for name in names]))
    if any(one.sum() <= 0 for one in before):
        return {}
    before = [one / one.sum() for one in before]
    found: dict[str, float] = {}
    for player, agent in enumerate(pools.agents):
        pool = pools.pool_of(agent).name
        each = member_values(payoffs, before, player)
        newest = [
            gain
            for at, gain in zip(settled[pool], each, strict=True)
            if state.members[state.pools[pool][at]].iteration == state.iteration
        ]
        if newest:
            gain = float(max(newest) - each @ before[player])
            found[pool] = max(found.get(pool, gain), gain)
    # In the order of the pools; 0 for a pool without a new member.
    return {pool.name: found.get(pool.name, 0.0) for pool in pools.pools} if found else {}


def _past(population: PopulationSpec, state: PopulationState, pool: str, learner: str) -> Mixture:
    names = [state.pools[pool][at] for at in state.places(pool, SETTLED)]
    if population.algorithm == "fictitious":
        shares = past_selves(len(names), delta=population.delta)
    else:
        rates, newest = state.win_rates(), state.newest(learner).member_id
        wins = [rates.get((newest, name), 0.5) for name in names]
        shares = pfsp(wins, weighting=population.weighting)
    return {name: float(share) for name, share in zip(names, shares, strict=True) if share > 0}


def _below(spec: JobSpec, state: PopulationState, learner: str) -> dict[str, Mixture]:
    """Return the mixtures of `pipeline_psro`: over settled members and candidates of lower
    levels."""
    _, pools = sections(spec)
    visible = {}
    for pool in pools.pools:
        order = levels(pool, state)
        mine = order.index(learner) if learner in order else len(order)
        below = set(order[:mine])
        visible[pool.name] = [
            at
            for at in state.places(pool.name, SETTLED, CANDIDATE)
            if (one := state.members[state.pools[pool.name][at]]).state == SETTLED
            or one.learner in below
        ]
    return by_pool(pools, state, visible, solve_pools(spec, state, visible))


def _league_mixture(
    population: PopulationSpec,
    pools: Pools,
    pool: OpponentPool,
    state: PopulationState,
    learner: str,
) -> Mixture:
    league = _league(pools, state)
    me = next(one for one in league if one.name == learner)
    shares = league_opponents(me, league, _live_wins(pools, state), _rules(population))
    # Only members and learners of this pool.
    found = {live(name): shares.get(name, 0.0) for name in pool.learners}
    found |= {name: shares.get(name, 0.0) for name in state.pools[pool.name]}
    total = sum(found.values())
    if not total:
        newest = state.pools[pool.name][state.places(pool.name, SETTLED)[-1]]
        return {newest: 1.0}
    return {name: share / total for name, share in found.items() if share > 0}


def _league(pools: Pools, state: PopulationState) -> list[LeagueMember]:
    members = [
        LeagueMember(name, learner.kind, frozen=False) for name, learner in pools.learners.items()
    ]
    for one in state.members.values():
        if one.state == SETTLED:
            kind = pools.learners[one.learner].kind
            members.append(LeagueMember(one.member_id, kind, frozen=True, parent=one.learner))
    return members


def _live_wins(pools: Pools, state: PopulationState) -> dict[tuple[str, str], float]:
    """Return the win rates between members; a live learner has the rates of its newest member."""
    rates = state.win_rates()
    names = {state.newest(learner).member_id: learner for learner in pools.learners}
    found = dict(rates)
    for (one, other), rate in rates.items():
        for a in (one, names.get(one)):
            for b in (other, names.get(other)):
                if a is not None and b is not None:
                    found[a, b] = rate
    return found


def _rules(population: PopulationSpec) -> LeagueRules:
    league = population.league
    return LeagueRules(
        self_play=league.self_play,
        forgotten=league.forgotten,
        weighting=population.weighting,
        exploiter_hopeless=league.exploiter_hopeless,
        freeze_at=league.freeze_at,
        freeze_after=league.freeze_after,
    )


def stop_reason(spec: JobSpec, state: PopulationState, seconds: float) -> str:
    """Return why the population is complete after its newest iteration, `seconds` after the job
    began; empty if it is not."""
    stop = sections(spec)[0].stop
    newest = state.history[-1].nash_conv
    if stop.nash_conv is not None and newest is not None and newest <= stop.nash_conv:
        return f"NashConv is {newest:.4g}"
    if stop.improvement is not None and len(state.history) > stop.patience:
        last = state.history[-stop.patience :]
        gains = [gain for one in last for gain in one.gains.values()]
        if all(one.gains for one in last) and max(gains) <= stop.improvement:
            return (
                f"new members got at most {max(gains):.4g} more than earlier members in "
                f"{stop.patience} iterations"
            )
    if stop.iterations is not None and state.iteration >= stop.iterations:
        return f"{state.iteration} iterations are over"
    if stop.seconds is not None and seconds >= stop.seconds:
        return f"{seconds:.0f} s have passed"
    return ""
