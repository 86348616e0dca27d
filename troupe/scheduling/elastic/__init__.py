"""Elastic scheduling of actions over cores, memory, GPUs and quotas (ARL-Tangram, section 3)."""

from troupe.scheduling.elastic.curves import SpeedUp
from troupe.scheduling.elastic.decision import (
    Action,
    Amounts,
    DecisionBounds,
    Elastic,
    Grant,
    Running,
    lacking,
    turn,
)
from troupe.scheduling.elastic.durations import Durations, Kin
from troupe.scheduling.elastic.hosts import Host, Placed, decide_over, nowhere
from troupe.scheduling.elastic.order import Discipline

__all__ = [
    "Action",
    "Amounts",
    "DecisionBounds",
    "Discipline",
    "Durations",
    "Elastic",
    "Grant",
    "Host",
    "Kin",
    "Placed",
    "Running",
    "SpeedUp",
    "decide_over",
    "lacking",
    "nowhere",
    "turn",
]
