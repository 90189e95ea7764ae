"""Program -> torch: runs a plan, in lockstep or with one process per rank, and verifies it."""

from tap_planner.apply.communicator import Communicator, Issued, RecordingCommunicator
from tap_planner.apply.executor import StepExecutor, run_stages
from tap_planner.apply.in_flight import StepResult
from tap_planner.apply.inputs import load_inputs, synthetic_inputs
from tap_planner.apply.jobs import ApplyJob, ApplyResult, run_job
from tap_planner.apply.launch import run_task
from tap_planner.apply.lockstep import LockstepCommunicator
from tap_planner.apply.measuring import StepTimes, measure_steps
from tap_planner.apply.measuring_links import CollectiveCase, measure_collectives
from tap_planner.apply.operators import OperatorContext, custom_operator
from tap_planner.apply.parameters import ParameterStore
from tap_planner.apply.process_group import ProcessGroupCommunicator
from tap_planner.apply.runner import apply_job
from tap_planner.apply.team import Team, alone, joined_team
from tap_planner.apply.verify import Comparison, VerificationReport, collective_findings, verify_program
from tap_planner.apply.weights import RandomWeights, StoredWeights, WeightSource, random_part

__all__ = [
    "ApplyJob",
    "ApplyResult",
    "CollectiveCase",
    "Communicator",
    "Comparison",
    "Issued",
    "LockstepCommunicator",
    "OperatorContext",
    "ParameterStore",
    "ProcessGroupCommunicator",
    "RandomWeights",
    "RecordingCommunicator",
    "StepExecutor",
    "StepResult",
    "StepTimes",
    "StoredWeights",
    "Team",
    "VerificationReport",
    "WeightSource",
    "alone",
    "apply_job",
    "collective_findings",
    "custom_operator",
    "joined_team",
    "load_inputs",
    "measure_collectives",
    "measure_steps",
    "random_part",
    "run_job",
    "run_stages",
    "run_task",
    "synthetic_inputs",
    "verify_program",
]
