"""Experience store: rollout appends rows per policy; trainers claim and commit each exactly once.

- `server`: the gRPC servicer, and the validation and translation of its requests (`requests`).
- `store`: wires the parts below; watchers of tables, the sweeper, audit, high-water mark.
- `database`: the Lua scripts (`lua/`) and their calls.
- `tables`: which policies of a job have a table, and the columns that a sample needs.
- `steps`: admits and amends steps, reports their counts, completes what a crash left half done.
- `trajectories`: ends a trajectory once, with its rows in all tables or in none.
- `samples`: late columns, raw rows, listing.
- `claims`: leases on ready samples, and commits: samples become TRAINED and the version moves.
- `versions`: every weight version of every policy, kept after the tables are dropped.
- `notices`: wakes callers that wait for a change, made here or by another replica.
- `log`: the fate of every sample, kept after its step is forgotten.

A Lua script makes every change of a sample's state, so each change is atomic.
"""
