"""A language model's play of Kuhn poker, exactly: values of seats, NashConv, variance of gradients.

Everything follows from the probabilities of single tokens in the 12 information states and from
their gradients, without sampled games.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.papers.rae.workflow import GAME
from examples.self_play.kuhn import kuhn
from troupe.populations.enumerated import Enumeration, Question
from troupe.populations.games import Array

FIRST_BETS: Final = {"jack": 0.35, "queen": 0.5, "king": 0.65}
"""The first model's probability of a bet by its card."""
# OpenSpiel's action.
_BET: Final = 1


@dataclass(frozen=True)
class Line:
    """One course of the game: its probability, the moves with their questions, the returns."""

    chance: float
    turns: Sequence[tuple[int, int, int]]
    """(seat, number of the question, action)."""
    returns: Sequence[float]


class ExactPlay:
    """A model that plays both seats, every answer that is no move being a fair coin."""

    def __init__(self, checkpoint: Path) -> None:
        """Load the model and compute its probabilities."""
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self._game = Enumeration.of(kuhn(), GAME.rules)
        self._prompts: list[list[int]] = [
            self._tokenizer.apply_chat_template(
                [dict(one) for one in question.messages],
                add_generation_prompt=True,
                return_dict=False,
            )
            for question in self._game.questions
        ]
        with torch.no_grad():
            self._chances = [one.exp().double() for one in self._all_logprobs()]
        self._moves = [self._tokens(one) for one in self._game.questions]
        given = [
            {action: float(chances[token]) for token, action in moves.items()}
            for chances, moves in zip(self._chances, self._moves, strict=True)
        ]
        self._behaviours = self._game.behaviours(given)
        self._plans = self._game.plans(self._behaviours)

    def warm_started(self, steps: int, lr: float = 3e-3) -> float:
        """Teach the model the moves and the cards: to bet with the probabilities `FIRST_BETS`.

        Return the last loss. The object describes the model as it was: make another one of the
        saved checkpoint.
        """
        bets = [
            FIRST_BETS[str(one.messages[-1]["content"]).split()[0]] for one in self._game.questions
        ]
        wanted = torch.zeros(len(bets), len(self._chances[0]))
        for row, (bet, moves) in enumerate(zip(bets, self._moves, strict=True)):
            for token, action in moves.items():
                wanted[row, token] = bet if action == _BET else 1 - bet
        optimizer = torch.optim.Adam(self._model.parameters(), lr=lr)
        loss = torch.zeros(())
        for _ in range(steps):
            logprobs = torch.stack(self._all_logprobs())
            loss = -(wanted * logprobs).sum(dim=1).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return float(loss.detach())

    def save(self, directory: Path) -> None:
        """Save the model with its tokenizer."""
        self._model.save_pretrained(directory)
        self._tokenizer.save_pretrained(directory)

    @property
    def seat_values(self) -> Array:
        """The expected returns of the seats [2] in self-play."""
        return self._game.form.values(self._plans)

    @property
    def exploitability(self) -> float:
        """Half of NashConv in self-play."""
        return max(self._game.form.nash_conv(self._plans), 0.0) / 2

    def lines(self) -> Iterator[Line]:
        """Yield every course of the game with its probability."""
        numbers = {(one.player, one.state): i for i, one in enumerate(self._game.questions)}

        def walk(state: Any, chance: float, turns: list[tuple[int, int, int]]) -> Iterator[Line]:
            if state.is_terminal():
                yield Line(chance, turns, state.returns())
            elif state.is_chance_node():
                for action, share in state.chance_outcomes():
                    yield from walk(state.child(action), chance * share, turns)
            else:
                seat = state.current_player()
                name = state.information_state_string(seat)
                for action, share in self._behaviours[seat][name].items():
                    turn = (seat, numbers[seat, name], action)
                    yield from walk(state.child(action), chance * share, [*turns, turn])

        yield from walk(kuhn().game.new_initial_state(), 1.0, [])

    def mean_return(self, seat: int, *, by_turn: bool) -> float:
        """Return the mean of a seat's returns over its games, or over its turns."""
        weighed = [
            (line.chance * (sum(one == seat for one, *_ in line.turns) if by_turn else 1), line)
            for line in self.lines()
        ]
        total = sum(weight for weight, _ in weighed)
        return sum(weight * line.returns[seat] for weight, line in weighed) / total

    def variances(self, baselines: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Return the variance of a game's policy gradient for each pair of baselines by seat.

        The gradient of a game is the sum over its turns of (return - baseline) times the gradient
        of the answer's log-prob in all parameters; its variance is E|g|^2 - |E g|^2.
        """
        means, squares = self._gradients()
        inner = means @ means.T
        place = {key: row for row, key in enumerate(squares)}
        found = {}
        for name, by_seat in baselines.items():
            expected = np.zeros(len(place))
            second = 0.0
            for line in self.lines():
                rows = [place[question, action] for _, question, action in line.turns]
                weights = np.array([line.returns[seat] - by_seat[seat] for seat, *_ in line.turns])
                products = inner[np.ix_(rows, rows)].copy()
                # Answers are drawn independently, given the moves that they are read as.
                np.fill_diagonal(products, [squares[q, a] for _, q, a in line.turns])
                second += line.chance * float(weights @ products @ weights)
                np.add.at(expected, rows, line.chance * weights)
            found[name] = second - float(expected @ inner @ expected)
        return found

    def _gradients(self) -> tuple[Array, dict[tuple[int, int], float]]:
        """Return, per question and action, the mean gradient of the log-prob of the answer that was
        read as the action [m, parameters], and its mean squared norm by (question, action)."""
        rows: list[Array] = []
        squares: dict[tuple[int, int], float] = {}
        parameters = list(self._model.parameters())
        for number, moves in enumerate(self._moves):
            logprobs = self._logprobs([number])[0]
            chances = self._chances[number].numpy()
            each = np.stack(
                [
                    torch.cat(
                        [
                            part.flatten()
                            for part in torch.autograd.grad(one, parameters, retain_graph=True)
                        ]
                    )
                    .double()
                    .numpy()
                    for one in logprobs
                ]
            )
            norms = (each**2).sum(axis=1)
            for action in moves.values():
                # P(answer | read as the action): the move itself, or a coin that fell so.
                weights = np.array(
                    [
                        chances[token] * (moves[token] == action if token in moves else 0.5)
                        for token in range(len(chances))
                    ]
                )
                weights /= weights.sum()
                rows.append(weights @ each)
                squares[number, action] = float(weights @ norms)
        return np.stack(rows), squares

    def _all_logprobs(self) -> list[torch.Tensor]:
        """Return the log-probs of all tokens as the answer, by question."""
        found: dict[int, torch.Tensor] = {}
        for length in {len(one) for one in self._prompts}:
            numbers = [i for i, one in enumerate(self._prompts) if len(one) == length]
            found |= zip(numbers, self._logprobs(numbers), strict=True)
        return [found[number] for number in range(len(self._prompts))]

    def _logprobs(self, numbers: Sequence[int]) -> torch.Tensor:
        """Return the log-probs [n, vocabulary] of the answers to n questions of equal length."""
        ids = torch.tensor([self._prompts[number] for number in numbers])
        return torch.log_softmax(self._model(ids).logits[:, -1], dim=-1)

    def _tokens(self, question: Question) -> dict[int, int]:
        """Return the actions by the token of their names."""
        found = {}
        for name, action in question.moves.items():
            [token] = self._tokenizer(name, add_special_tokens=False)["input_ids"]
            found[token] = action
        return found
