"""The job specification: what a user writes in YAML, validated, one docstring per field."""

from troupe.job.loading import JobSpecError, load_job, parse_job
from troupe.job.spec import (
    AgentSpec,
    AlgorithmSpec,
    CheckpointSpec,
    EngineSpec,
    EvaluationSpec,
    FunctionSpec,
    JobSpec,
    LimitsSpec,
    LoggingSpec,
    ModelSpec,
    OptimizerSpec,
    PipelineSpec,
    PolicySpec,
    SamplingSpec,
    TasksSpec,
)

__all__ = [
    "AgentSpec",
    "AlgorithmSpec",
    "CheckpointSpec",
    "EngineSpec",
    "EvaluationSpec",
    "FunctionSpec",
    "JobSpec",
    "JobSpecError",
    "LimitsSpec",
    "LoggingSpec",
    "ModelSpec",
    "OptimizerSpec",
    "PipelineSpec",
    "PolicySpec",
    "SamplingSpec",
    "TasksSpec",
    "load_job",
    "parse_job",
]
