"""Elastic scheduling of actions over cores, memory, GPUs and quotas (ARL-Tangram, section 3)."""

from troupe.scheduling.elastic.curves import SpeedUp as SpeedUp
from troupe.scheduling.elastic.decision import Action as Action
from troupe.scheduling.elastic.decision import Amounts as Amounts
from troupe.scheduling.elastic.decision import DecisionBounds as DecisionBounds
from troupe.scheduling.elastic.decision import Elastic as Elastic
from troupe.scheduling.elastic.decision import Grant as Grant
from troupe.scheduling.elastic.decision import Running as Running
from troupe.scheduling.elastic.decision import lacking as lacking
from troupe.scheduling.elastic.decision import turn as turn
from troupe.scheduling.elastic.durations import Durations as Durations
from troupe.scheduling.elastic.durations import Kin as Kin
from troupe.scheduling.elastic.hosts import Host as Host
from troupe.scheduling.elastic.hosts import Placed as Placed
from troupe.scheduling.elastic.hosts import decide_over as decide_over
from troupe.scheduling.elastic.hosts import nowhere as nowhere
from troupe.scheduling.elastic.order import Discipline as Discipline
