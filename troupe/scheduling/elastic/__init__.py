"""Elastic scheduling of actions over cores, memory, GPUs and quotas (ARL-Tangram, section 3)."""

from troupe.scheduling.elastic.actions import (
    Action,
    Amounts,
    Elastic,
    Grant,
    Running,
    lacking,
    turn,
)
from troupe.scheduling.elastic.curves import SpeedUp
from troupe.scheduling.elastic.decision import Rules, decide

__all__ = [
    "Action",
    "Amounts",
    "Elastic",
    "Grant",
    "Rules",
    "Running",
    "SpeedUp",
    "decide",
    "lacking",
    "turn",
]
