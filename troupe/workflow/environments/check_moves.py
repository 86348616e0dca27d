"""The checks of `conformance` that are about moves: illegal ones, strangers', exchanged ones."""

from __future__ import annotations

import itertools
import math
from typing import Any, Final

from troupe.outcomes import Interruption, described
from troupe.workflow.environments.contract import Contract
from troupe.workflow.environments.errors import (
    EpisodeOverError,
    IllegalMoveError,
    MoveError,
    UnknownPlayerError,
)
from troupe.workflow.environments.interface import Action, Environment
from troupe.workflow.environments.playing import Record, plain_step, play_randomly
from troupe.workflow.environments.seating import Seating
from troupe.workflow.environments.trial import TOLERANCE, Broken, Inapplicable, Trial

# No game has such a move, whatever its moves are.
_NONSENSE: Final[Action] = {"no such move": [None, "\x00"]}
# All arrangements of four seats; of more only as many.
_PERMUTATIONS: Final = 24


def illegal_move(trial: Trial) -> str:
    """An illegal move raises `IllegalMoveError` and changes nothing, or is the game's affair."""
    declared = trial.declared
    record = trial.record(trial.seeds[0])
    if declared.illegal == "game":
        return _game_judges(trial)
    if declared.illegal == "random_legal" and any(
        record.reset.obs[seat].legal is None for seat in record.reset.current
    ):
        raise Broken("the rule is random_legal, but no legal moves are listed to draw from")
    environment = trial.new()
    refused = 0
    try:
        environment.reset(record.seed)
        for number, moves in enumerate(record.moves):
            for seat in moves:
                joint: dict[str, Action] = {**moves, seat: _NONSENSE}
                refused += _refuses(environment, joint, f"step {number}, seat '{seat}'")
            step = environment.step(dict(moves))
            if declared.deterministic and plain_step(step) != plain_step(record.steps[number]):
                raise Broken(f"step {number}: an illegal move has changed the state")
    finally:
        environment.close()
    if not refused:
        raise Inapplicable("any move is legal")
    return f"{refused} refused, the game went on as before (rule: {declared.illegal})"


def unknown_player(trial: Trial) -> str:
    """The contract in front of it tells moves of strangers and moves after the end apart."""
    environment = trial.new()
    contract = Contract(trial.declared)
    try:
        _expect(EpisodeOverError, contract, {trial.declared.seats[0]: 0}, "before reset")
        contract.began(environment.reset(trial.seeds[0]))
        _expect(UnknownPlayerError, contract, {"nobody's seat": 0}, "a stranger's move")
        _expect(UnknownPlayerError, contract, {}, "no move")
    finally:
        environment.close()
    record = trial.record(trial.seeds[0])
    contract.began(record.reset)
    for step in record.steps:
        contract.went(step)
    _expect(EpisodeOverError, contract, record.moves[-1], "after the end")
    return "strangers, nobody, before the beginning and after the end"


def seat_permutation(trial: Trial) -> str:
    """Who sits where changes whose rewards they are and nothing else; in a symmetric game seats
    that exchange their moves exchange their rewards."""
    record = trial.record(trial.seeds[0])
    seats = record.reset.agents
    if len(seats) < 2:
        raise Inapplicable("one seat")
    players = [f"player-{i}" for i in range(len(seats))]
    count = min(math.factorial(len(seats)), _PERMUTATIONS)
    held = set()
    for number in range(count):
        seating = Seating.of(seats, players, permutation=number)
        held.add(tuple(seating.agent_of[seat] for seat in seats))
        returns = _seated_returns(trial, record, seating)
        if trial.declared.deterministic and any(
            abs(returns[seating.agent_of[seat]] - record.returns[seat]) > TOLERANCE
            for seat in seats
        ):
            raise Broken(f"seating {number}: {returns} is no permutation of {record.returns}")
    if len(held) != count:
        raise Broken(f"{count} seatings, of which only {len(held)} differ")
    if not trial.declared.symmetric:
        return f"{count} seatings"
    _check_symmetry(trial)
    return f"{count} seatings; moves exchanged, rewards exchanged"


def _refuses(environment: Environment, joint: dict[str, Any], where: str) -> int:
    """1 when the move was refused as it should be. Raises `Broken`."""
    try:
        environment.step(joint)
    except IllegalMoveError:
        return 1
    except MoveError as error:
        raise Broken(f"{where}: refused as {type(error).__name__}, not as illegal") from error
    except Interruption:
        raise
    except BaseException as error:
        raise Broken(
            f"{where}: an illegal move raises {described(error)}, not IllegalMoveError"
        ) from error
    raise Broken(f"{where}: the move {_NONSENSE!r} was taken")


def joint_move_order(trial: Trial) -> str:
    """A joint move is the same in whatever order its seats are written."""
    if not trial.declared.simultaneous:
        raise Inapplicable("not simultaneous")
    if not trial.declared.deterministic:
        raise Inapplicable("declared not deterministic")
    for record in trial.all():
        environment = trial.new()
        try:
            environment.reset(record.seed)
            for number, joint in enumerate(record.moves):
                step = environment.step(dict(reversed(joint.items())))
                if plain_step(step) != plain_step(record.steps[number]):
                    raise Broken(f"seed {record.seed}, step {number}: the order of seats matters")
        finally:
            environment.close()
    return "every joint move, written backwards"


def _game_judges(trial: Trial) -> str:
    """The game takes any text: an episode of nonsense must still end by itself."""
    environment = trial.new()
    try:
        record = play_randomly(environment, trial.seeds[0], lambda seen, draw, seat: "?!")
    finally:
        environment.close()
    if record.steps[-1].current:
        raise Broken("an episode of nonsense does not end")
    return f"the game ended an episode of nonsense after {len(record.steps)} steps"


def _expect(
    kind: type[MoveError], contract: Contract, actions: dict[str, Action], where: str
) -> None:
    try:
        contract.moves(actions)
    except kind:
        return
    except MoveError as error:
        raise Broken(f"{where}: {type(error).__name__}, not {kind.__name__}") from error
    raise Broken(f"{where} was taken")


def _seated_returns(trial: Trial, record: Record, seating: Seating) -> dict[str, float]:
    """The episode played anew by players who sit as `seating` says; their returns by player."""
    environment = trial.new()
    try:
        again = play_randomly(environment, record.seed, trial.move)
    finally:
        environment.close()
    return {seating.agent_of[seat]: total for seat, total in again.returns.items()}


def _check_symmetry(trial: Trial) -> None:
    for record in trial.all():
        seats = record.reset.agents
        for order in itertools.islice(itertools.permutations(seats), _PERMUTATIONS):
            renamed = dict(zip(seats, order, strict=True))
            moves = [{renamed[s]: a for s, a in joint.items()} for joint in record.moves]
            environment = trial.new()
            try:
                again = play_randomly(environment, record.seed, moves=moves)
            finally:
                environment.close()
            for seat in seats:
                if abs(again.returns[renamed[seat]] - record.returns[seat]) > TOLERANCE:
                    raise Broken(
                        f"seed {record.seed}: moves exchanged as {renamed}, but the returns are "
                        f"{again.returns} after {record.returns}"
                    )
