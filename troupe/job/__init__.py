"""The job specification: what a user writes in YAML, validated, one docstring per field."""

from troupe.job.algorithm import AlgorithmSpec
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
from troupe.job.population import PopulationSpec
from troupe.job.section import no_directory
from troupe.job.sections import LimitsSpec, RoutingSpec, TasksSpec
from troupe.job.spec import JobSpec

__all__ = [
    "AlgorithmSpec",
    "EngineSpec",
    "FunctionSpec",
    "JobSpec",
    "JobSpecError",
    "LimitsSpec",
    "LoraSpec",
    "ModelSpec",
    "NetworkSpec",
    "OptimizerSpec",
    "PolicySpec",
    "PopulationSpec",
    "RoutingSpec",
    "SimulatedSpec",
    "TasksSpec",
    "TrainerSpec",
    "load_job",
    "no_directory",
    "parse_job",
]
