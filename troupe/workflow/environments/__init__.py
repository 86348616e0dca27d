"""Games and other environments that agents play through text.

    class MyGame(Environment): ...
    workflow = GameWorkflow(MyGame)      # in the job: `workflow: my_module:workflow`

`adapters` wraps games of TextArena, PettingZoo, OpenSpiel and Gymnasium; `conformance` tests an
environment; `hosted` runs one in a process of its own. See docs/environments.md.
"""

from troupe.workflow.environments.episode import (
    Episode,
    Outcome,
    PlayedTurn,
    PlayRules,
    Seating,
    SeatingError,
    job_rules,
    legal_help,
    prompt,
    read_move,
)
from troupe.workflow.environments.game import Episodes, GameWorkflow, play_game, reward_turns
from troupe.workflow.environments.host import (
    COUNTERS,
    AsyncEnvironment,
    Counters,
    FaultLimits,
    Local,
)
from troupe.workflow.environments.interface import (
    Action,
    Environment,
    EnvironmentFactory,
    IllegalRule,
    Observation,
    Properties,
    Reset,
    Step,
)
from troupe.workflow.environments.process import EnvironmentPool, Hosted, hosted
from troupe.workflow.errors import (
    EnvironmentContractError,
    EnvironmentFault,
    EpisodeOverError,
    IllegalMoveError,
    MissingLibraryError,
    MoveError,
    ObservationTooLargeError,
    RewardNotFiniteError,
    UnknownPlayerError,
)

__all__ = [
    "COUNTERS",
    "Action",
    "AsyncEnvironment",
    "Counters",
    "Environment",
    "EnvironmentContractError",
    "EnvironmentFactory",
    "EnvironmentFault",
    "EnvironmentPool",
    "Episode",
    "EpisodeOverError",
    "Episodes",
    "FaultLimits",
    "GameWorkflow",
    "Hosted",
    "IllegalMoveError",
    "IllegalRule",
    "Local",
    "MissingLibraryError",
    "MoveError",
    "Observation",
    "ObservationTooLargeError",
    "Outcome",
    "PlayRules",
    "PlayedTurn",
    "Properties",
    "Reset",
    "RewardNotFiniteError",
    "Seating",
    "SeatingError",
    "Step",
    "UnknownPlayerError",
    "hosted",
    "job_rules",
    "legal_help",
    "play_game",
    "prompt",
    "read_move",
    "reward_turns",
]
