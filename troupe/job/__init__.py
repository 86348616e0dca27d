"""The job specification: what a user writes in YAML, validated, one docstring per field."""

from troupe.job.algorithm import AlgorithmSpec, CriticSpec
from troupe.job.balancing import BalancingSpec
from troupe.job.environment import EnvironmentSpec
from troupe.job.functions import FunctionSpec
from troupe.job.loading import JobSpecError, load_job, parse_job
from troupe.job.network import NetworkSpec
from troupe.job.policy import (
    EngineSpec,
    LoraSpec,
    ModelSpec,
    OptimizerSpec,
    PolicySpec,
    SimulatedSpec,
    TrainerSpec,
)
from troupe.job.population import (
    LearnerSpec,
    MatchesSpec,
    OpponentPool,
    Pools,
    PopulationSpec,
    StopSpec,
)
from troupe.job.section import no_directory
from troupe.job.sections import (
    AffinitySpec,
    AgentSpec,
    CheckpointSpec,
    EvaluationSpec,
    LimitsSpec,
    LoggingSpec,
    PipelineSpec,
    PoolSpec,
    RoutingSpec,
    SamplingSpec,
    TasksSpec,
)
from troupe.job.spec import JobSpec

__all__ = [
    "AffinitySpec",
    "AgentSpec",
    "AlgorithmSpec",
    "BalancingSpec",
    "CheckpointSpec",
    "CriticSpec",
    "EngineSpec",
    "EnvironmentSpec",
    "EvaluationSpec",
    "FunctionSpec",
    "JobSpec",
    "JobSpecError",
    "LearnerSpec",
    "LimitsSpec",
    "LoggingSpec",
    "LoraSpec",
    "MatchesSpec",
    "ModelSpec",
    "NetworkSpec",
    "OpponentPool",
    "OptimizerSpec",
    "PipelineSpec",
    "PolicySpec",
    "PoolSpec",
    "Pools",
    "PopulationSpec",
    "RoutingSpec",
    "SamplingSpec",
    "SimulatedSpec",
    "StopSpec",
    "TasksSpec",
    "TrainerSpec",
    "load_job",
    "no_directory",
    "parse_job",
]
