"""The checks of `conformance` on episodes: each says what it tried, or raises what it found."""

from __future__ import annotations

import math
from typing import Any

from troupe.outcomes import Interruption, described
from troupe.workflow.environments import wire
from troupe.workflow.environments.interface import Environment
from troupe.workflow.environments.playing import Record, plain_step, play_randomly
from troupe.workflow.environments.trial import TOLERANCE, Broken, Inapplicable, Trial
from troupe.workflow.errors import WorkflowError


def interface(trial: Trial) -> str:
    """It can be made, declares something sensible and begins by the contract."""
    environment = trial.new()
    if not isinstance(environment, Environment):
        raise Broken(f"makes a {type(environment).__name__}, not an Environment")
    declared = environment.properties
    trial.name, trial.properties = declared.name, declared
    if not declared.seats or len(set(declared.seats)) != len(declared.seats):
        raise Broken(f"properties.seats must name at least one seat once: {declared.seats}")
    if declared.zero_sum and declared.cooperative and len(declared.seats) > 1:
        raise Broken("properties: a game of several seats is not both zero-sum and cooperative")
    if declared.symmetric and not declared.simultaneous:
        raise Broken("properties: only simultaneous games are declared symmetric")
    if declared.max_steps < 1:
        raise Broken(f"properties.max_steps is {declared.max_steps}")
    if environment.properties != declared:
        raise Broken("properties change from one look to the next")
    environment.close()
    environment = trial.new()
    try:
        record = play_randomly(environment, trial.seeds[0], trial.move, limit=1)
    finally:
        environment.close()
    return f"seats {', '.join(record.reset.agents)}; first to move: {', '.join(record.moves[0])}"


def same_seed_same_episode(trial: Trial) -> str:
    """A seed and the moves determine the episode: on a new object, and on a used one."""
    if not trial.declared.deterministic:
        raise Inapplicable("declared not deterministic")
    environment = trial.new()
    try:
        for record in trial.all():
            for again in ("a new object", "the same object, reset"):
                other = environment if again.startswith("the same") else trial.new()
                _compare(record, other, f"seed {record.seed} on {again}")
                if other is not environment:
                    other.close()
    finally:
        environment.close()
    return f"{len(trial.seeds)} seeds, on new and on used objects"


def instances_independent(trial: Trial) -> str:
    """Two objects that are played alternately do as each did alone."""
    if not trial.declared.deterministic:
        raise Inapplicable("declared not deterministic")
    records = [trial.record(seed) for seed in (trial.seeds[0], trial.seeds[-1])]
    objects = [trial.new() for _ in records]
    try:
        for environment, record in zip(objects, records, strict=True):
            environment.reset(record.seed)
        for number in range(max(len(record.steps) for record in records)):
            for environment, record in zip(objects, records, strict=True):
                if number >= len(record.steps):
                    continue
                step = environment.step(dict(record.moves[number]))
                if plain_step(step) != plain_step(record.steps[number]):
                    raise Broken(
                        f"seed {record.seed}, step {number}: another object, played alternately, "
                        "changes what this one does"
                    )
    finally:
        for environment in objects:
            environment.close()
    return "two objects, step by step in turn"


def agents_fixed(trial: Trial) -> str:
    """Seats are the same from reset to the end. (The contract refuses strangers on the way.)"""
    for record in trial.all():
        ended = {
            seat
            for step in record.steps
            for flags in (step.terminations, step.truncations)
            for seat, flag in flags.items()
            if flag
        }
        if set(record.reset.agents) != ended:
            never = sorted(set(record.reset.agents) - ended)
            raise Broken(f"seed {record.seed}: {', '.join(never)} never ended")
    return "every seat of the reset, and no other, came to its end"


def terminates(trial: Trial) -> str:
    """Episodes end within the declared number of steps, and say so."""
    longest = max(len(record.steps) for record in trial.all())
    for record in trial.all():
        if record.steps and record.steps[-1].current:
            raise Broken(f"seed {record.seed}: not over after {len(record.steps)} steps")
    return f"at most {longest} steps of {trial.declared.max_steps} declared"


def rewards_finite(trial: Trial) -> str:
    """All rewards are finite numbers. (The contract refuses others on the way.)"""
    values = [r for record in trial.all() for step in record.steps for r in step.rewards.values()]
    if not all(math.isfinite(value) for value in values):
        raise Broken("a reward is not finite")
    return f"{len(values)} rewards" + (f" in [{min(values):g}, {max(values):g}]" if values else "")


def observations(trial: Trial) -> str:
    """Observations are texts within the declared size. (The contract refuses others.)"""
    longest = max(
        len(seen.text)
        for record in trial.all()
        for obs in (record.reset.obs, *(step.obs for step in record.steps))
        for seen in obs.values()
    )
    return f"at most {longest:,} characters of {trial.declared.max_observation_chars:,} declared"


def zero_sum(trial: Trial) -> str:
    """The rewards of every step add up to zero."""
    if not trial.declared.zero_sum:
        raise Inapplicable("not declared")
    for record in trial.all():
        for number, step in enumerate(record.steps):
            total = sum(step.rewards.values())
            scale = max(1.0, *(abs(r) for r in step.rewards.values()), 1.0)
            if abs(total) > TOLERANCE * scale:
                raise Broken(
                    f"seed {record.seed}, step {number}: rewards {dict(step.rewards)} add up to "
                    f"{total:g}"
                )
    return "every step"


def cooperative(trial: Trial) -> str:
    """All seats get the same rewards."""
    if not trial.declared.cooperative:
        raise Inapplicable("not declared")
    for record in trial.all():
        for number, step in enumerate(record.steps):
            rewards = {float(step.rewards.get(seat, 0.0)) for seat in record.reset.agents}
            if max(rewards) - min(rewards) > TOLERANCE:
                raise Broken(f"seed {record.seed}, step {number}: {dict(step.rewards)}")
    return "every step"


def hosted_alike(trial: Trial) -> str:
    """What it gives survives the way to a process of its own and back."""
    for record in trial.all():
        reset = wire.to_reset(_travelled(wire.from_reset(record.reset)))
        steps = [wire.to_step(_travelled(wire.from_step(step))) for step in record.steps]
        moves = _travelled({"moves": record.moves})["moves"]
        arrived = Record(record.seed, reset, moves, steps)
        if arrived.plain() != record.plain() or moves != record.moves:
            raise Broken(
                f"seed {record.seed}: what it gives is not JSON (tuples and sets among actions "
                "become lists, keys become strings)"
            )
    return "resets, steps and moves as JSON"


def close_repeatable(trial: Trial) -> str:
    """`close` twice, before a reset, in the middle of an episode and after it."""
    for when in ("before a reset", "in the middle"):
        environment = trial.new()
        if when == "in the middle":
            environment.reset(trial.seeds[0])
        for _ in range(2):
            try:
                environment.close()
            except Interruption:
                raise
            except BaseException as error:
                raise Broken(f"close {when} raises {described(error)}") from error
    return "before a reset, in the middle of an episode"


def _compare(record: Record, environment: Environment, where: str) -> None:
    try:
        again = play_randomly(environment, record.seed, moves=record.moves)
    except WorkflowError as error:
        raise Broken(f"{where}: {error.message}") from error
    for number, (was, now) in enumerate(zip(record.plain(), again.plain(), strict=False)):
        if was != now:
            what = "the reset" if number == 0 else f"step {number - 1}"
            raise Broken(f"{where}: {what} differs")
    if len(record.steps) != len(again.steps):
        raise Broken(f"{where}: {len(again.steps)} steps instead of {len(record.steps)}")


def _travelled(message: dict[str, Any]) -> dict[str, Any]:
    return wire.unpack(wire.pack(message)[wire.HEADER_BYTES :])
