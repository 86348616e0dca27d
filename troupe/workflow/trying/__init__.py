"""Trying a workflow without a model: `troupe workflow try`, and `play` for tests."""

from troupe.workflow.trying.functions import LocalFunctions
from troupe.workflow.trying.play import Played, Trial, make_role, play
from troupe.workflow.trying.policies import (
    EchoPolicy,
    Policy,
    Prompt,
    RandomPolicy,
    ScriptedPolicy,
    Spoken,
)

__all__ = [
    "EchoPolicy",
    "LocalFunctions",
    "Played",
    "Policy",
    "Prompt",
    "RandomPolicy",
    "ScriptedPolicy",
    "Spoken",
    "Trial",
    "make_role",
    "play",
]
