"""The chaos harness: one job twice, once undisturbed and once under fire, compared bit by bit."""

from testbed.chaos.harness import Screen, run
from testbed.chaos.plan import ChaosPlan
from testbed.chaos.report import ChaosReport
from testbed.chaos.schedule import KINDS, parse_kinds

__all__ = ["KINDS", "ChaosPlan", "ChaosReport", "Screen", "parse_kinds", "run"]
