"""The chaos harness: runs one job twice, undisturbed and with injected faults, and compares."""

from testbed.chaos.harness import Screen, run
from testbed.chaos.plan import ChaosPlan
from testbed.chaos.report import ChaosReport
from testbed.chaos.schedule import KINDS, parse_kinds

__all__ = ["KINDS", "ChaosPlan", "ChaosReport", "Screen", "parse_kinds", "run"]
