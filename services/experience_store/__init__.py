"""Rows per policy, exactly once: appended by rollout, claimed and committed by trainers.

One sentence per part; none of them knows the servicer, `store.py` wires them once:

- `database`: the connection to Redis, the scripts, and what a failure of Redis means to a caller.
- `tables`: which policies of a job have a table, and the columns a sample needs.
- `steps`: admits a step, reports its counts, completes what a crash left half done.
- `trajectories`: ends a trajectory once, in all tables or none.
- `samples`: late columns, payloads, listing.
- `claims`: leases ready samples, and waits for them without polling.
- `commits`: ends a policy's step: samples become TRAINED and the version moves, at once.
- `watching`: pushes the counts of a job's tables whenever they change.
- `notices`: wakes whoever waits for a change, made here or by another replica.
- `sweeper`: what must happen though nobody calls: leases expire, halves are completed.

Every move of a sample's state is made by a Lua script (`lua/`), so it is atomic.
"""
