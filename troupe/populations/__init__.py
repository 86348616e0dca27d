"""Population-based training as pure functions: pools, payoffs, meta-solvers, opponents.

Follows PSRO (Lanctot et al. 2017) and MALib. Functions here use no clock, no I/O, and no randomness
except from a given seed.
"""

from troupe.populations.games import nash_conv as nash_conv
from troupe.populations.games import values as values
from troupe.populations.games import zero_sum as zero_sum
from troupe.populations.opponents import Weighting as Weighting
from troupe.populations.opponents import pfsp as pfsp
from troupe.populations.payoffs import PayoffTable as PayoffTable
from troupe.populations.payoffs import Precision as Precision
from troupe.populations.payoffs import matches_due as matches_due
from troupe.populations.payoffs import seats as seats
from troupe.populations.solvers import MetaSolver as MetaSolver
from troupe.populations.solvers import NotZeroSum as NotZeroSum
from troupe.populations.solvers import solve as solve
