"""The record of one trajectory: who was asked for what, and what was said.

A turn gets its place when `chat` or `generate` is *called*, before anything is awaited: turns that
run concurrently under `asyncio.gather` are numbered in the order in which they were written, and
those of whole branches branch after branch (`numbering`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import xxhash

from troupe.workflow import numbering
from troupe.workflow.backend import Backend, Sampling
from troupe.workflow.errors import TurnError
from troupe.workflow.memory import Prompt
from troupe.workflow.messages import Message
from troupe.workflow.turns import Call, Role, Turn, digest_of, settle


class Record:
    """Turns of one trajectory, and where they are generated.

    All sampling derives from `seed`, the prompts and the branches, so that neither timing nor the
    order in which concurrent branches end changes what is drawn.
    """

    def __init__(self, backend: Backend, seed: int) -> None:
        self.backend = backend
        self._seed = seed
        self._root = numbering.Branch()
        self._ticks = 0
        self._asked: dict[tuple[numbering.Path, str, int], int] = {}
        self._begun: dict[str, int] = {}
        self._turns: list[Turn] = []
        self._closed = False
        # When it was closed: turns whose call nobody had awaited to its end.
        self.unawaited: list[Turn] = []

    @property
    def turns(self) -> list[Turn]:
        """Turns that have a reply, in the order in which they were asked for."""
        return [turn for turn in self._turns if turn.reply is not None]

    @property
    def begun(self) -> Sequence[Turn]:
        """All turns, in the order in which they were asked for."""
        return self._turns

    def enter(self) -> None:
        """As `Agents.enter`."""
        numbering.enter(self._root)

    def close(self) -> list[Turn]:
        """As `Agents.close`."""
        if not self._closed:
            self._closed = True
            self.unawaited = [turn for turn in self._turns if not turn.over]
            self._turns = [turn for turn in settle(self._turns) if turn.reply is not None]
        return self._turns

    def check_open(self, agent: str) -> None:
        """Raises `TurnError` when the trajectory has ended."""
        if self._closed:
            raise TurnError(
                f"'{agent}' was asked for a turn after its trajectory had ended",
                kind="trajectory_ended",
                remedy="Await every branch before the workflow returns.",
            )

    def begin(
        self,
        role: Role,
        messages: tuple[Message, ...],
        prompt: Prompt,
        sampling: Sampling,
        n: int | None = None,
    ) -> list[Turn]:
        """Record turns that are about to be generated from one prompt (called by `Agent`)."""
        self.check_open(role.name)
        branch = numbering.current(self._root)
        call = Call(branch.path, branch.step(), n)
        turns = []
        for sibling in range(n or 1):
            seed = sampling.seed
            if seed is None:
                seed = self.draw_seed(role.name, prompt.ids)
            elif sibling:
                seed = _draw(f"{seed}/{sibling}")
            number = self._begun.get(role.name, 0)
            self._begun[role.name] = number + 1
            turns.append(
                Turn(
                    role,
                    number,
                    len(self._turns) + sibling,
                    messages,
                    prompt.ids,
                    replace(sampling, seed=seed),
                    call,
                    sibling,
                    asked=self.tick(),
                    prefix_broken=prompt.broken,
                )
            )
        self._turns += turns
        return turns

    def tick(self) -> int:
        """A number above all that were given before: in which order turns begin and end."""
        self._ticks += 1
        return self._ticks

    def draw_seed(self, agent: str, prompt_ids: tuple[int, ...]) -> int:
        """Seed of the next turn of `agent` with this prompt: equal prompts get different ones."""
        digest = digest_of(prompt_ids)
        path = numbering.current(self._root).path
        occurrence = self._asked.get((path, agent, digest), 0)
        self._asked[path, agent, digest] = occurrence + 1
        branch = "".join(f"/{step}" for step in path)
        return _draw(f"{self._seed}/{agent}/{digest}/{occurrence}{branch}")

    def mix_seed(self, given: int) -> int:
        """A seed from `given` and the trajectory's own: equal ones give equal ones in a trajectory,
        and different ones in the others of its group."""
        return _draw(f"{self._seed}/given/{given}")


def _draw(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode()) & 0x7FFF_FFFF  # what every engine accepts
