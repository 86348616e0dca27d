"""Engine groups: policies over one base that share engines (`policies.X.engine.share`).

Engine number i of each member of a group stands on host i of the group: one server, or one embedded
model, with the base once and the adapters of all members.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from troupe.job.fields import JobFields
from troupe.job.sections.policy import PolicySpec, server_of

AUTO: Final = "auto"
NEVER: Final = "never"
# Parts of `model` that determine the base; the others are read outside engines, which take and give
# token ids.
_BASE: Final = ("path", "config", "revision", "dtype")


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """Policies that share engines, two or more, in the job's order."""

    name: str
    """The name that the job gives the group, or its first policy's."""
    policies: tuple[str, ...]

    def __str__(self) -> str:
        return f"{', '.join(self.policies)} share engines (1 base instead of {len(self.policies)})"


def engine_groups(spec: JobFields) -> tuple[EngineGroup, ...]:
    """Return the groups of a valid job, in the order of their first policies."""
    # Engines that the job wants to move are of one policy at a time.
    automatic = spec.balancing.inter is not True
    found: dict[tuple[object, ...], list[str]] = {}
    for name, policy in spec.policies.items():
        share = policy.engine.share
        if share == NEVER or (share == AUTO and not automatic) or unshareable(spec, name):
            continue
        key = (share,) if share != AUTO else (AUTO, *_needs(spec, policy, name).values())
        found.setdefault(key, []).append(name)
    return tuple(
        EngineGroup(names[0] if share == AUTO else str(share), tuple(names))
        for (share, *_), names in found.items()
        if len(names) > 1
    )


def group_of(spec: JobFields, policy: str) -> EngineGroup | None:
    """Return the group of a policy; None: its engines are its own."""
    return next((group for group in engine_groups(spec) if policy in group.policies), None)


def shared_policies(spec: JobFields) -> frozenset[str]:
    """Return the policies whose engines are shared. These engines never move."""
    return frozenset(name for group in engine_groups(spec) for name in group.policies)


def same_base(one: PolicySpec, other: PolicySpec) -> bool:
    """Return whether the adapters of two policies are over the same frozen weights, as far as the
    job tells."""
    ours, theirs = one.language_model, other.language_model
    return all(getattr(ours, part) == getattr(theirs, part) for part in _BASE)


def followers(spec: JobFields) -> dict[str, str]:
    """Return, by policy, the first of its group, for all others of groups: engines of these are
    counted once, with the first."""
    return {name: group.policies[0] for group in engine_groups(spec) for name in group.policies[1:]}


def check_sharing(spec: JobFields) -> None:
    """Raise ValueError that names the field of a policy that cannot be in the group that it names,
    or whose server another policy has, too."""
    named: dict[str, list[str]] = {}
    for name, policy in spec.policies.items():
        if (share := policy.engine.share) not in (AUTO, NEVER):
            named.setdefault(share, []).append(name)
    for group, members in named.items():
        _check_group(spec, group, members)
    _check_servers(spec)


def unshareable(spec: JobFields, name: str) -> str:
    """Return why a policy can share no engine, with a remedy; empty: it can."""
    policy = spec.policies[name]
    if policy.model is None:
        return "is a network, which has no engine; remove `share`"
    if policy.simulated is not None:
        return "is simulated, and has no base to share; remove `share` or `simulated`"
    if policy.lora is not None:
        return ""
    if policy.trainable:
        return "trains all weights, so it has no base to share; give it `lora`, or use `never`"
    if policy.init_from is not None:
        return "begins with weights of its own (`init_from`); use `never`, or name them as `model`"
    return ""


def differences(spec: JobFields, one: str, other: str) -> list[str]:
    """Return the fields, as below a policy, in which two policies that could share engines differ
    too much to do so."""
    ours, theirs = (_needs(spec, spec.policies[name], name) for name in (one, other))
    return [field for field in ours if ours[field] != theirs[field]]


def reasons_apart(spec: JobFields) -> Iterator[tuple[str, str, list[str]]]:
    """Yield pairs of policies over one base that do not share engines although nothing says that
    they should not, each policy once and with the first such other, and the fields in which they
    differ."""
    if spec.balancing.inter is True:
        return
    seen: list[str] = []
    shared = followers(spec)
    for name, policy in spec.policies.items():
        if policy.engine.share != AUTO or name in shared or unshareable(spec, name):
            continue
        for other in seen:
            differing = differences(spec, other, name)
            if not any(field.startswith("model.") for field in differing):
                yield other, name, differing
                break
        seen.append(name)


def _needs(spec: JobFields, policy: PolicySpec, name: str) -> dict[str, str]:
    """Return what must be equal within a group, as text by field."""
    model = policy.language_model
    base = {f"model.{part}": _text(getattr(model, part)) for part in _BASE}
    if model.path is None and policy.lora is None:
        # Random weights depend on the policy's name; those under adapters do not.
        base["model.config"] += f" with random weights of '{name}'"
    engine = policy.engine.model_dump(exclude={"share"})
    engine["urls"] = [server_of(url) for url in policy.engine.urls]
    return (
        base
        | {f"engine.{part}": _text(value) for part, value in engine.items()}
        | {"colocate": repr(name in spec.colocated)}
    )


def _text(value: object) -> str:
    # The order of a configuration's fields has no meaning.
    return json.dumps(value, sort_keys=True) if isinstance(value, dict) else repr(value)


def _check_group(spec: JobFields, group: str, members: list[str]) -> None:
    first, *others = members
    field = f"policies.{first}.engine.share"
    if group in spec.policies and group not in members:
        raise ValueError(
            f"{field}: '{group}' is a policy that is not in the group; choose another name"
        )
    for name in members:
        if why := unshareable(spec, name):
            raise ValueError(f"policies.{name}.engine.share: policy '{name}' {why}")
    if not others:
        raise ValueError(
            f"{field}: no other policy is in group '{group}'; give another policy the same "
            "`engine.share`, or use `auto`"
        )
    for name in others:
        if not (differing := differences(spec, first, name)):
            continue
        part = differing[0]
        ours = _needs(spec, spec.policies[first], first)[part]
        theirs = _needs(spec, spec.policies[name], name)[part]
        what = "bases" if part.startswith("model.") else "engines"
        raise ValueError(
            f"policies.{name}.engine.share: the {what} of group '{group}' differ: `{part}` is "
            f"{_short(theirs)} in '{name}' and {_short(ours)} in '{first}'; make them equal, or "
            "use `never`"
        )


def _check_servers(spec: JobFields) -> None:
    group = {name: one.name for one in engine_groups(spec) for name in one.policies}
    holders: dict[str, str] = {}
    for name, policy in spec.policies.items():
        for url in policy.engine.urls:
            other = holders.setdefault(server_of(url), name)
            if other == name or group.get(other, other) == group.get(name, name):
                continue
            raise ValueError(
                f"policies.{name}.engine.urls: {url} serves policy '{other}' already; "
                "a server has one policy's weights, or one base with the adapters of policies that "
                "share engines (docs/engines.md)"
            )


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
