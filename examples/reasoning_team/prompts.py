"""What the agents are told: plain chat messages, whatever the model."""

from __future__ import annotations

Message = dict[str, str]


def propose(question: str) -> list[Message]:
    """The solver's first turn."""
    return [{"role": "user", "content": question}]


def criticise(question: str, proposal: str) -> list[Message]:
    """The checker's turn: it answers with what it holds to be right."""
    return [{"role": "user", "content": f"{question}\nanswer: {proposal}"}]


def revise(question: str, proposal: str, critique: str) -> list[Message]:
    """The solver's second turn: its own proposal, then the critique."""
    return [
        *propose(question),
        {"role": "assistant", "content": proposal},
        {"role": "user", "content": critique},
    ]
