"""Who plays whom in a trajectory: the job's own policies, or those that its ticket names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from services.rollout.policy import ServedPolicy
from troupe.job import JobSpec
from troupe.rpc.errors import InvalidArgument
from troupe.workflow import Role
from troupe.workflow.languages import role_of


@dataclass(frozen=True)
class Cast:
    """Agents and the served policies behind them."""

    policy_of: Mapping[str, ServedPolicy]
    roles: Mapping[str, Role]
    evaluation_roles: Mapping[str, Role]


class Casts:
    """The casts of one job, each made once."""

    def __init__(
        self,
        spec: JobSpec,
        policies: Mapping[str, ServedPolicy],
        roles: Mapping[str, Role],
        check_cast: Callable[[Mapping[str, str], str], None] | None = None,
    ) -> None:
        """`roles`: of the agents as the job has them; networks have none. `check_cast` (cast,
        field) raises what keeps a network from playing an agent."""
        self._check_cast = check_cast
        self._spec = spec
        self._policies = policies
        own = {name: policies[agent.policy] for name, agent in spec.agents.items()}
        self.own = Cast(own, roles, self._evaluating(roles))
        self._known: dict[frozenset[tuple[str, str]], Cast] = {}

    def of(self, named: Mapping[str, str], field: str = "ticket.cast") -> Cast:
        """The job's own, but for the agents that are `named` with their policy.

        Raises `InvalidArgument` naming an agent or policy that there is not, or that do not fit.
        """
        if not named:
            return self.own
        key = frozenset(named.items())
        if key not in self._known:
            self._known[key] = self._made(named, field)
        return self._known[key]

    def _made(self, named: Mapping[str, str], field: str) -> Cast:
        for what, names, known in (
            ("an agent", named, self._spec.agents),
            ("a policy", named.values(), self._policies),
        ):
            for name in names:
                if name not in known:
                    raise InvalidArgument(
                        f"is not {what} of this job",
                        field=field,
                        value=name,
                        remedy=f"Known: {', '.join(sorted(known))}.",
                    )
        roles = dict(self.own.roles)
        if self._check_cast is not None:
            self._check_cast(named, field)
        else:
            languages = {name: policy.language for name, policy in self._policies.items()}
            for name, policy in named.items():
                roles[name] = role_of(self._spec, name, languages, policy)
        policy_of = {**self.own.policy_of, **{n: self._policies[p] for n, p in named.items()}}
        return Cast(policy_of, roles, self._evaluating(roles))

    def _evaluating(self, roles: Mapping[str, Role]) -> Mapping[str, Role]:
        temperature = self._spec.evaluation.temperature
        if temperature is None:
            return roles
        return {
            name: replace(role, sampling=replace(role.sampling, temperature=temperature))
            for name, role in roles.items()
        }
