"""Adds up a job's log, step by step, and says in words what contradicts the promise.

The promise: every trajectory that was admitted ends once; every row that came with one is trained
(at most `max_uses` times) or dropped for a reason, unless its step is live; what a commit says of
itself is what its rows say; versions rise by one per applied commit, and between two steps only as
the roster of the next says (a policy that begins again). Pure: reads no Redis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

import xxhash

from services.experience_store.log import Roster
from services.experience_store.records import REDUNDANT, Ending, samples_digest
from services.experience_store.requests import clean_reason
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as store_pb

# What a long list of violations is cut to; the figures beside it count all of them.
LONGEST_LIST: Final = 200
_TRAINED, _DROPPED = pb.SAMPLE_STATE_TRAINED, pb.SAMPLE_STATE_DROPPED
# Rows that another trajectory's row kept out: counted, and not in the book.
_TAKEN: Final = "sample_id_taken"


@dataclass
class _Policy:
    """What was added up of one policy."""

    audit: store_pb.PolicyAudit
    version: int | None = None
    committed_until: int = -1
    uses: dict[int, int] = field(default_factory=dict)
    """Hash of a sample's name and origin -> applied steps that trained it."""


class Ledger:
    """Takes the steps of a job in their order; afterwards `report` is the audit."""

    def __init__(self, policies: Collection[str], max_uses: int) -> None:
        self._max_uses = max_uses
        self._policies = {name: _Policy(store_pb.PolicyAudit(policy=name)) for name in policies}
        self._ended: dict[int, int] = {}
        self._report = store_pb.AuditTablesResponse()
        self._hidden = 0
        self._last: int | None = None
        self.live = False
        """Whether some step is not over: then the next look may see it otherwise."""

    def add(
        self, step: int, roster: Roster | None, tables: Mapping[str, store_pb.LoggedStep]
    ) -> None:
        """The next step: who was admitted, how they ended, and what became of their rows."""
        if self._last is not None and step != self._last + 1:
            self._say(f"steps {self._last + 1} to {step - 1} are in no log")
        self._last = step
        self._report.steps += 1
        if roster is None:
            self._say(f"step {step}: its roster is in no log")
            return
        over = any(table.HasField("commit") for table in tables.values())
        self._add_endings(roster, over=over)
        for name, policy in self._policies.items():
            self._add_table(policy, step, roster, tables[name])

    def report(self, heads: Mapping[str, int]) -> store_pb.AuditTablesResponse:
        """The audit. `heads`: the version that each policy's table says it is at."""
        for name, policy in self._policies.items():
            audit = policy.audit
            audit.version = -1 if policy.version is None else policy.version
            audit.lost = max(0, audit.appended - audit.trained - audit.dropped - audit.live)
            head = heads.get(name)
            applied = audit.steps_applied > 0
            if head is not None and applied and head != audit.version:
                self._say(f"{name}: the table is at version {head}, its commits at {audit.version}")
            self._report.policies.append(audit)
        if self._hidden:
            self._report.violations.append(f"and {self._hidden} more")
        return self._report

    def _say(self, violation: str) -> None:
        if len(self._report.violations) < LONGEST_LIST:
            self._report.violations.append(violation)
        else:
            self._hidden += 1

    # -- trajectories

    def _add_endings(self, roster: Roster, *, over: bool) -> None:
        step, size = roster.step, roster.group_size + roster.redundant
        ended = Counter(ending.query for ending in roster.endings.values())
        self._compare_groups(roster)
        queries = roster.queries
        # Those of queries that left are ended too, all of them.
        left = ended.keys() - set(queries)
        self._report.trajectories_admitted += size * (len(queries) + len(left))
        self._report.trajectories_ended += len(roster.endings)
        for query in [*queries, *sorted(left)]:
            number = ended[query]
            if number > size or (number < size and (over or query in left)):
                self._say(f"step {step}: {number} of {size} trajectories of query {query} ended")
        for trajectory, ending in roster.endings.items():
            self._report.trajectories_by_state[ending.state] += 1
            if "\t" in trajectory:
                # Nobody told its name; a query may be taken again in another step.
                continue
            name = xxhash.xxh3_64_intdigest(trajectory.encode())
            earlier = self._ended.setdefault(name, step)
            if earlier != step:
                self._say(f"trajectory {trajectory} ended in step {earlier} and in step {step}")

    def _compare_groups(self, roster: Roster) -> None:
        """Where trajectories are redundant no group has more than its members; and who was left out
        of one was left out for a full one."""
        if not roster.redundant:
            return
        where, size = f"step {roster.step}", roster.group_size
        endings = roster.endings.items()
        completed = Counter(ending.query for _, ending in endings if ending.state == "COMPLETED")
        for query, number in sorted(completed.items()):
            if number > size:
                self._say(f"{where}: {number} of {size} trajectories of query {query} completed")
        left_out = {ending.query for name, ending in endings if _was_redundant(name, ending)}
        for query in sorted(left_out):
            if completed[query] < size:
                self._say(
                    f"{where}: trajectories of query {query} were ended as redundant, but only "
                    f"{completed[query]} of {size} had completed"
                )

    # -- rows

    def _add_table(
        self, policy: _Policy, step: int, roster: Roster, table: store_pb.LoggedStep
    ) -> None:
        name = policy.audit.policy
        own = [sample for sample in table.samples if not sample.HasField("origin_step")]
        self._compare_endings(policy, roster, own, table)
        committed = table.HasField("commit")
        over = committed or table.job_over
        self.live = self.live or not over
        for sample in table.samples:
            self._add_sample(policy, step, sample, committed=committed, over=over)
        if committed:
            if policy.committed_until not in (-1, step - 1) and policy.audit.steps_applied:
                self._say(f"{name}: step {step} is committed, but not the one before")
            policy.committed_until = step
            self._compare_commit(policy, roster, table)

    def _compare_endings(
        self,
        policy: _Policy,
        roster: Roster,
        own: Collection[store_pb.LoggedSample],
        table: store_pb.LoggedStep,
    ) -> None:
        """Every row that a trajectory came with is there, and no other."""
        name, step = policy.audit.policy, roster.step
        there = Counter(sample.trajectory_id for sample in own)
        # Who kept which row out is not known, only how many.
        excused = table.drop_reasons.get(_TAKEN, 0)
        missing: list[str] = []
        for trajectory, ending in roster.endings.items():
            wrote = ending.claimed_rows().get(name, 0) if ending.rows else there[trajectory]
            policy.audit.appended += max(wrote, there[trajectory])
            if wrote != there[trajectory]:
                missing.append(
                    f"step {step}, {name}: trajectory {trajectory} wrote {wrote} rows, "
                    f"the table has {there[trajectory]}"
                )
            if there[trajectory] < wrote:
                short = wrote - there[trajectory]
                pardoned = min(short, excused)
                excused -= pardoned
                policy.audit.appended -= pardoned
                if pardoned == short:
                    missing.pop()
        for violation in missing:
            self._say(violation)
        for trajectory in there.keys() - roster.endings.keys():
            policy.audit.appended += there[trajectory]
            self._say(f"step {step}, {name}: rows of {trajectory}, which has not ended there")

    def _add_sample(
        self,
        policy: _Policy,
        step: int,
        sample: store_pb.LoggedSample,
        *,
        committed: bool,
        over: bool,
    ) -> None:
        audit, name, state = policy.audit, sample.sample_id, sample.state
        back = sample.HasField("origin_step")
        origin = sample.origin_step if back else step
        key = xxhash.xxh3_64_intdigest(f"{origin}\t{name}".encode())
        used = policy.uses.get(key, 0)
        wrong: list[str] = []
        if back and not used:
            wrong.append(f"comes back from step {sample.origin_step}, which did not train it")
        if state == _TRAINED:
            if not committed:
                wrong.append("is trained, but the step is not committed")
            policy.uses[key] = used = used + 1
            if used > self._max_uses:
                audit.duplicated += 1
                wrong.append(f"is trained {used} times, {self._max_uses} allowed")
            elif sample.uses > self._max_uses:
                wrong.append(f"says that it was used {sample.uses} times")
            if not back:
                audit.trained += 1
        elif state == _DROPPED:
            if not sample.reason:
                wrong.append("is dropped without a reason")
            if not back:
                audit.dropped += 1
                audit.drop_reasons[sample.reason.partition(":")[0][:64]] += 1
        elif over:
            word = pb.SampleState.Name(state).removeprefix("SAMPLE_STATE_")
            wrong.append(f"is {word}, but the step is over")
        elif not back:
            audit.live += 1
        for what in wrong:
            self._say(f"step {step}, {audit.policy}: {name} {what}")

    # -- commits

    def _compare_commit(self, policy: _Policy, roster: Roster, table: store_pb.LoggedStep) -> None:
        """What the commit says of itself is what its rows say."""
        commit, audit = table.commit, policy.audit
        where = f"step {roster.step}, {audit.policy}"
        trained = [s.sample_id for s in table.samples if s.state == _TRAINED]
        began = roster.versions.get(audit.policy)
        before = began if policy.version is None else policy.version
        if before is not None and began == before + 1:
            before = began  # it began again between the two
        rise = 0
        if commit.outcome == store_pb.STEP_OUTCOME_APPLIED:
            audit.steps_applied += 1
            rise, expected = 1, len(trained)
            named = commit.samples_digest if commit.HasField("samples_digest") else None
            if named not in (None, samples_digest(trained)):
                self._say(f"{where}: the trainer accumulated other samples than are trained")
        else:
            if commit.outcome == store_pb.STEP_OUTCOME_SKIPPED:
                audit.steps_skipped += 1
                reason = clean_reason(commit.reason) or "step_skipped"
                expected = sum(s.state == _DROPPED and s.reason == reason for s in table.samples)
            else:
                audit.steps_empty += 1
                expected = 0
            if trained:
                self._say(f"{where}: {len(trained)} samples are trained, but no step was applied")
        if commit.num_samples != expected:
            self._say(f"{where}: the commit counts {commit.num_samples} samples, not {expected}")
        version = commit.weights.version if commit.HasField("weights") else before
        if before is not None and version != before + rise:
            self._say(f"{where}: the commit moves version {before} to {version}")
        policy.version = version


def _was_redundant(name: str, ending: Ending) -> bool:
    """Whether the store ended it because its group was complete: such an ending has no name."""
    return "\t" in name and ending.reason == REDUNDANT
