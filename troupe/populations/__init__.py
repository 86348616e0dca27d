"""Population-based training as pure functions: pools, payoffs, meta-solvers, opponents.

Follows PSRO (Lanctot et al. 2017) and MALib. Functions here use no clock, no I/O, and no randomness
except from a given seed.
"""

from troupe.populations.games import nash_conv, values, zero_sum
from troupe.populations.matches import Precision, matches_due, seats
from troupe.populations.opponents import Weighting, pfsp
from troupe.populations.payoffs import PayoffTable
from troupe.populations.solvers import MetaSolver, NotZeroSum, solve

__all__ = [
    "MetaSolver",
    "NotZeroSum",
    "PayoffTable",
    "Precision",
    "Weighting",
    "matches_due",
    "nash_conv",
    "pfsp",
    "seats",
    "solve",
    "values",
    "zero_sum",
]
