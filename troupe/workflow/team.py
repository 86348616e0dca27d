"""What the team knew when one of its agents was asked for a turn.

For a critic that observes the whole team (`algorithm.critic.observes: team`). A value must not
know what it is to judge: nothing that could have come of the turn's response is in it.
"""

from __future__ import annotations

from collections.abc import Sequence

from troupe.workflow.turns import Turn


def team_context(turn: Turn, turns: Sequence[Turn], limit: int) -> tuple[int, ...]:
    """The last `limit` tokens of what the other agents had seen and said when `turn` was asked for.

    Of every other agent of the trajectory, in the order of their names: the prompt of its latest
    turn that was asked for before `turn` was answered, and the response to that, if it had been
    given when `turn` was asked for. So agents that move at once see each other's prompts, and who
    moves later sees what was said before. `turns` are those of the trajectory.
    """
    latest: dict[str, Turn] = {}
    for other in turns:
        name = other.role.name
        if name == turn.role.name or other.asked > turn.answered:
            continue
        if name not in latest or latest[name].asked < other.asked:
            latest[name] = other
    tokens: list[int] = []
    for _, other in sorted(latest.items()):
        tokens += other.prompt_ids
        if other.reply is not None and other.answered < turn.asked:
            tokens += other.reply.token_ids
    return tuple(tokens[-limit:])
