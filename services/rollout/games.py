"""Questions to a game's players in every information state: the DescribeGame call."""

from __future__ import annotations

from math import factorial
from typing import Any

from troupe.job import JobSpec
from troupe.rpc.errors import FailedPrecondition, TroupeError
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.workflow import WorkflowError
from troupe.workflow.environments import GameWorkflow
from troupe.workflow.environments.adapters.openspiel import OpenSpiel
from troupe.workflow.environments.episode import job_rules


def describe(workflow: Any, spec: JobSpec, game: str) -> rollout_pb.DescribeGameResponse:
    """Return how `workflow` plays OpenSpiel's `game` with the agents of `spec`. Slow, since it
    walks the game tree.

    Raises FailedPrecondition of kind "game_not_enumerable", field `population.game`: the workflow
    plays something else, the game is unknown, or its tree is too large.
    """
    # Imported here: few jobs enumerate games.
    from troupe.populations.enumerated import questions

    if not isinstance(workflow, GameWorkflow):
        raise not_enumerable(
            f"the workflow {spec.workflow} is no GameWorkflow",
            game,
            "Play it by a GameWorkflow over OpenSpiel, or remove the field: matches fill the table",
        )
    try:
        environment = workflow.make()
        if not isinstance(environment, OpenSpiel):
            raise not_enumerable(
                f"the workflow plays {environment.properties.name}, which is not OpenSpiel's",
                game,
                "Remove the field: matches fill the table",
            )
        played = environment.game
        if _identity(OpenSpiel(game).game) != _identity(played):
            raise not_enumerable(f"the workflow plays {played}", game, f'Say game: "{played}"')
        rules = job_rules(workflow.rules, spec.tasks.args if spec.tasks is not None else {})
        found = questions(environment, rules)
        seatings = _seatings(workflow, environment, list(spec.agents))
    except WorkflowError as error:
        raise not_enumerable(error.message, game, error.remedy or "") from error
    except TroupeError:
        raise
    except Exception as error:  # from OpenSpiel, or from code that describes its states
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise not_enumerable(reason, game, "Remove the field: matches fill the table") from error
    properties = environment.properties
    return rollout_pb.DescribeGameResponse(
        questions=[
            rollout_pb.GameQuestion(
                player=one.player,
                state=one.state,
                messages=[common_pb.ChatMessage(**message) for message in one.messages],
                moves=[rollout_pb.GameMove(name=name, action=a) for name, a in one.moves.items()],
            )
            for one in found
        ],
        illegal=rules.illegal or properties.illegal,
        resamples=rules.resamples,
        illegal_reward=properties.illegal_reward,
        seatings=[rollout_pb.GameSeating(agents=one) for one in seatings],
    )


def not_enumerable(message: str, game: str, remedy: str) -> FailedPrecondition:
    """Return the error for a game whose exact values cannot be computed."""
    return FailedPrecondition(
        message, kind="game_not_enumerable", field="population.game", value=game, remedy=remedy
    )


def _identity(game: Any) -> tuple[str, dict[str, Any]]:
    """Name and parameters of a game, with omitted parameters at their defaults."""
    kind = game.get_type()
    return kind.short_name, {**kind.parameter_specification, **game.get_parameters()}


def _seatings(
    workflow: GameWorkflow, environment: OpenSpiel, agents: list[str]
) -> list[tuple[str, ...]]:
    """Return all distinct assignments of agents to seats, in order of the seats. Raises
    `SeatingError`."""
    seats = environment.properties.seats
    arrangements = range(factorial(len(seats)) if workflow.permutes else 1)
    found = [workflow.seating(seats, agents, number) for number in arrangements]
    return list(dict.fromkeys(tuple(one.agent_of[seat] for seat in seats) for one in found))
