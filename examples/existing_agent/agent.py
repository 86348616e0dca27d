"""The agent as its author wrote it, with Pydantic AI; nothing here is specific to Troupe.

It stands in front of a door, may look behind it with a tool, and says which letter is there.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic_ai import Agent, RunContext

QUESTION = "What is behind the door?"


@dataclass
class Room:
    """What the agent's tool acts on."""

    letter: str
    looked: bool = False


seeker = Agent(deps_type=Room, instructions="Look before you answer.")


@seeker.tool
def look(context: RunContext[Room]) -> str:
    """Look behind the door."""
    context.deps.looked = True
    return context.deps.letter
