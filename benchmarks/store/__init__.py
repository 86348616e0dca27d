"""Parts of `benchmarks.experience_store`.

- `servers`: a Redis as the embedded cluster starts it, and the store's process before it.
- `workload`: rows of a given length, and the steps that hold them.
- `raw`: the same bytes through pipelined redis-py.
- `served`: the same bytes through the store: append, reward, claim, commit.
- `scale`: claims of a store with few and with many rows; memory per row.
"""
