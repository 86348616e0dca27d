"""The job specification: the validated form of a user's YAML, with one docstring per field."""

from troupe.job.loading import JobSpecError as JobSpecError
from troupe.job.loading import load_job as load_job
from troupe.job.loading import parse_job as parse_job
from troupe.job.loading import parse_job_in_thread as parse_job_in_thread
from troupe.job.section import no_directory as no_directory
from troupe.job.sections.agents import RoutingSpec as RoutingSpec
from troupe.job.sections.algorithm import AlgorithmSpec as AlgorithmSpec
from troupe.job.sections.data import RowsSpec as RowsSpec
from troupe.job.sections.data import TasksSpec as TasksSpec
from troupe.job.sections.functions import FunctionSpec as FunctionSpec
from troupe.job.sections.network import NetworkSpec as NetworkSpec
from troupe.job.sections.policy import EngineSpec as EngineSpec
from troupe.job.sections.policy import LoraSpec as LoraSpec
from troupe.job.sections.policy import ModelSpec as ModelSpec
from troupe.job.sections.policy import OptimizerSpec as OptimizerSpec
from troupe.job.sections.policy import PolicySpec as PolicySpec
from troupe.job.sections.policy import SimulatedSpec as SimulatedSpec
from troupe.job.sections.policy import TrainerSpec as TrainerSpec
from troupe.job.sections.population import PopulationSpec as PopulationSpec
from troupe.job.sections.run import CodeSpec as CodeSpec
from troupe.job.sections.run import LimitsSpec as LimitsSpec
from troupe.job.spec import JobSpec as JobSpec
