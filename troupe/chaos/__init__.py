"""The chaos harness: one job twice, once undisturbed and once under fire, compared bit by bit."""

from troupe.chaos.harness import Screen, run
from troupe.chaos.plan import ChaosPlan
from troupe.chaos.report import Report
from troupe.chaos.schedule import KINDS, parse_kinds

__all__ = ["KINDS", "ChaosPlan", "Report", "Screen", "parse_kinds", "run"]
