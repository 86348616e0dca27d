"""The job specification: what a user writes in YAML, validated, one docstring per field."""

from troupe.job.affinity import AffinitySpec, PoolSpec
from troupe.job.algorithm import AlgorithmSpec
from troupe.job.balancing import BalancingSpec
from troupe.job.critic import CriticSpec
from troupe.job.environment import EnvironmentSpec
from troupe.job.functions import FunctionSpec
from troupe.job.loading import JobSpecError, load_job, parse_job
from troupe.job.lora import LoraSpec
from troupe.job.network import NetworkSpec
from troupe.job.policy import EngineSpec, ModelSpec, OptimizerSpec, PacedSpec, PolicySpec
from troupe.job.pools import Pool, Pools
from troupe.job.population import LearnerSpec, MatchesSpec, PopulationSpec, StopSpec
from troupe.job.routing import RoutingSpec
from troupe.job.section import no_directory
from troupe.job.sections import (
    AgentSpec,
    CheckpointSpec,
    EvaluationSpec,
    LimitsSpec,
    LoggingSpec,
    PipelineSpec,
    SamplingSpec,
    TasksSpec,
)
from troupe.job.spec import JobSpec
from troupe.job.training import TrainerSpec

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
    "OptimizerSpec",
    "PacedSpec",
    "PipelineSpec",
    "PolicySpec",
    "Pool",
    "PoolSpec",
    "Pools",
    "PopulationSpec",
    "RoutingSpec",
    "SamplingSpec",
    "StopSpec",
    "TasksSpec",
    "TrainerSpec",
    "load_job",
    "no_directory",
    "parse_job",
]
