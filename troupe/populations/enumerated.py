"""A language model's exact policy in a small game, from its answers in all information states.

In each information state the model is given the prompt that it would get in a match. Its
probabilities of the moves' names are its behaviour policy, and so a plan of the game in sequence
form (`troupe.populations.tree`), from which payoffs and NashConv follow without any match.

The policy is exact if a valid answer is a move's name and nothing else, as with
`sampling.max_new_tokens: 1` and names of one token. Longer answers that also contain a move count
as illegal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, cast

from troupe.populations.games import Array
from troupe.populations.tree import SequenceForm, load_sequential
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.workflow.environments.adapters.openspiel import OpenSpiel
from troupe.workflow.environments.episode import PlayRules
from troupe.workflow.environments.interface import IllegalRule, Properties

FORFEIT: Final = -1
"""The action of making an illegal move and losing, in games with that rule."""

Behaviour = dict[str, dict[int, float]]
"""Information state -> action -> probability."""
Messages = tuple[Mapping[str, str], ...]

# Largest tree; one with more histories takes minutes to walk, and gigabytes of memory.
MAX_HISTORIES: Final = 200_000
# Tolerance of the sum of the moves' probabilities, for rounding.
_ROUNDING: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Question:
    """One information state as the prompt to the player that moves there."""

    player: int
    state: str
    """The game's name of the information state."""
    messages: Messages
    """The conversation to which the move is the answer."""
    moves: Mapping[str, int]
    """By name of a legal move: its action."""


@dataclass(frozen=True, slots=True)
class Enumeration:
    """A text game in sequence form, with the prompts of all its information states."""

    form: SequenceForm
    """The game; if an illegal move may lose it, with `FORFEIT` as one more action of every set."""
    questions: tuple[Question, ...]
    rule: IllegalRule
    resamples: int

    @classmethod
    def of(
        cls, environment: OpenSpiel, rules: PlayRules, *, rule: IllegalRule | None = None
    ) -> Enumeration:
        """Enumerate the information states of `environment`, with the prompts of `rules`.

        `rule`: the job's rule for illegal moves. With `history: all` the conversation contains
        earlier answers as the moves' names. Raises ValueError if an information state has two
        prompts (the text reveals hidden information) or there are more than `MAX_HISTORIES`, and
        the errors of `SequenceForm.of`.
        """
        rule = rule or rules.illegal or environment.properties.illegal
        return cls.of_questions(environment, questions(environment, rules), rule, rules.resamples)

    @classmethod
    def of_questions(
        cls,
        environment: OpenSpiel,
        questions: Sequence[Question],
        rule: IllegalRule,
        resamples: int,
    ) -> Enumeration:
        """Make an enumeration from `questions` that a process with the job's code has listed."""
        game = environment.game
        # Forfeits add leaves to the tree, but no information states.
        if rule != "random_legal":
            game = cast(Any, _Forfeitable(game, environment.properties))
        form = SequenceForm.of(game)
        return cls(form, tuple(questions), rule, resamples if rule == "resample" else 0)

    def behaviours(self, probabilities: Sequence[Mapping[int, float]]) -> tuple[Behaviour, ...]:
        """Return the behaviour policy by player of a model that answers with `probabilities`.

        `probabilities`: by question, the probability of each move's name by action; the rest up to
        1 is the probability of an illegal answer. With `random_legal` the rest is divided among the
        legal moves, with `lose` it is the probability of `FORFEIT`. With `resample` the model
        answers again up to `resamples` times, as if the correction in the conversation had no
        effect, and then forfeits. Raises ValueError for invalid probabilities.
        """
        found: tuple[Behaviour, ...] = tuple({} for _ in range(self.form.players))
        for question, given in zip(self.questions, probabilities, strict=True):
            legal = sum(given.values())
            if set(given) != set(question.moves.values()) or not (
                min(given.values()) >= 0 and legal <= 1 + _ROUNDING
            ):
                raise ValueError(
                    f"in {question.state!r} the moves {sorted(question.moves.values())} have no "
                    f"probabilities {dict(given)}"
                )
            illegal = max(0.0, 1.0 - legal)
            if self.rule == "random_legal":
                share = illegal / len(given)
                whole = {action: chance + share for action, chance in given.items()}
            else:
                lost = illegal ** (self.resamples + 1)
                kept = (1.0 - lost) / legal if legal > 0 else 0.0
                whole = {action: chance * kept for action, chance in given.items()}
                whole[FORFEIT] = lost
            total = sum(whole.values())
            found[question.player][question.state] = {a: p / total for a, p in whole.items()}
        return found

    def plans(self, behaviours: Sequence[Behaviour]) -> list[Array]:
        """Return the plans in `form` of behaviour policies, by player."""
        return [self.form.plan_of(player, one) for player, one in enumerate(behaviours)]


def questions(environment: OpenSpiel, rules: PlayRules) -> tuple[Question, ...]:
    """List the prompts of all information states. Raises the errors of `Enumeration.of`."""
    game = environment.game
    load_sequential(game)
    asked: dict[tuple[int, str], Question] = {}
    talks: list[Messages] = [()] * game.num_players()
    _collect(environment, rules, game.new_initial_state(), talks, asked, count(1))
    return tuple(asked.values())


def _collect(
    environment: OpenSpiel,
    rules: PlayRules,
    state: Any,
    talks: list[Messages],
    asked: dict[tuple[int, str], Question],
    seen_before: Iterator[int],
) -> None:
    """Visit all histories below `state`; `talks`: the players' conversations so far."""
    if next(seen_before) > MAX_HISTORIES:
        raise ValueError(f"the tree of {environment.game} has more than {MAX_HISTORIES:,} nodes")
    if state.is_terminal():
        return
    if state.is_chance_node():
        for action, _ in state.chance_outcomes():
            _collect(environment, rules, state.child(action), talks, asked, seen_before)
        return
    player = state.current_player()
    name = state.information_state_string(player)
    seen = environment.seen(state, player)
    before = talks[player] if rules.history == "all" else ()
    properties = environment.properties
    text = rules.prompt(properties, properties.seats[player], seen, not before)
    messages = (*before, {"role": "user", "content": text})
    question = Question(player, name, messages, dict(seen.legal or {}))
    known = asked.setdefault((player, name), question)
    if known != question:
        raise ValueError(
            f"player {player} sees two different texts in the information state {name!r}: "
            f"{known.messages[-1]['content']!r} and {text!r}"
        )
    for label, action in question.moves.items():
        after = list(talks)
        after[player] = (*messages, {"role": "assistant", "content": label})
        _collect(environment, rules, state.child(action), after, asked, seen_before)


class _Forfeitable:
    """An OpenSpiel game, or a state of it, with `FORFEIT` as an additional legal action."""

    def __init__(
        self, of: Any, properties: Properties, state: Any = None, loser: int | None = None
    ) -> None:
        self._of = of
        self._properties = properties
        self._state = state
        self._loser = loser

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of if self._state is None else self._state, name)

    def new_initial_state(self) -> _Forfeitable:
        return self._at(self._of.new_initial_state())

    def is_terminal(self) -> bool:
        return self._loser is not None or self._state.is_terminal()

    def returns(self) -> list[float]:
        """Return the returns so far, including the reward of a forfeit as in `Episode`."""
        found = list(self._state.returns())
        if self._loser is None:
            return found
        lost, others = self._properties.illegal_reward, len(found) - 1
        for player in range(len(found)):
            if player == self._loser or self._properties.cooperative:
                found[player] += lost
            elif self._properties.zero_sum:
                found[player] -= lost / others
        return found

    def legal_actions(self, player: int) -> list[int]:
        return [*self._state.legal_actions(player), FORFEIT]

    def child(self, action: int) -> _Forfeitable:
        if action == FORFEIT:
            loser = self._state.current_player()
            return _Forfeitable(self._of, self._properties, self._state, loser)
        return self._at(self._state.child(action))

    def _at(self, state: Any) -> _Forfeitable:
        return _Forfeitable(self._of, self._properties, state)


def score_request(
    questions: Sequence[Question],
    job_id: str,
    policy: str,
    *,
    ends: bool = False,
    version: int | None = None,
) -> rollout_pb.ScoreRequest:
    """Return a request for the log-probs of all moves' names in all questions.

    With `ends` a name is scored with the end of the answer, for answers that may be longer than a
    move (`sampling.max_new_tokens`).
    """
    prompts = [
        rollout_pb.ScorePrompt(
            messages=[common_pb.ChatMessage(**message) for message in question.messages],
            continuations=[
                rollout_pb.ScoreContinuation(text=name, ends=ends) for name in question.moves
            ],
        )
        for question in questions
    ]
    return rollout_pb.ScoreRequest(job_id=job_id, policy=policy, prompts=prompts, version=version)


def probabilities(
    questions: Sequence[Question], answer: rollout_pb.ScoreResponse
) -> list[dict[int, float]]:
    """Return the probabilities of moves' names, by question and action, for
    `Enumeration.behaviours`."""
    return [
        {
            action: math.exp(one.logprob)
            for action, one in zip(question.moves.values(), prompt.continuations, strict=True)
        }
        for question, prompt in zip(questions, answer.prompts, strict=True)
    ]
