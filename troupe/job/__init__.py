"""The job specification: the validated form of a user's YAML, with one docstring per field."""

from troupe.job.algorithm import AlgorithmSpec as AlgorithmSpec
from troupe.job.data import RowsSpec as RowsSpec
from troupe.job.data import TasksSpec as TasksSpec
from troupe.job.functions import FunctionSpec as FunctionSpec
from troupe.job.loading import JobSpecError as JobSpecError
from troupe.job.loading import load_job as load_job
from troupe.job.loading import parse_job as parse_job
from troupe.job.loading import parse_job_in_thread as parse_job_in_thread
from troupe.job.network import NetworkSpec as NetworkSpec
from troupe.job.policy import EngineSpec as EngineSpec
from troupe.job.policy import LoraSpec as LoraSpec
from troupe.job.policy import ModelSpec as ModelSpec
from troupe.job.policy import OptimizerSpec as OptimizerSpec
from troupe.job.policy import PolicySpec as PolicySpec
from troupe.job.policy import SimulatedSpec as SimulatedSpec
from troupe.job.policy import TrainerSpec as TrainerSpec
from troupe.job.population import PopulationSpec as PopulationSpec
from troupe.job.section import no_directory as no_directory
from troupe.job.sections import CodeSpec as CodeSpec
from troupe.job.sections import LimitsSpec as LimitsSpec
from troupe.job.sections import RoutingSpec as RoutingSpec
from troupe.job.spec import JobSpec as JobSpec
