"""The experience store compared with the Redis that keeps its rows.

- `servers`: a Redis as started by the embedded cluster, and the store's process before it.
- `workload`: rows of a given length, and the steps that hold them.
- `served`: the same bytes through the store: append, reward, claim, commit.
- `echo`: the same bytes through gRPC alone.
- `conversations`: bytes of conversations of cumulative turns on their way to a trainer.
- `scale`: claims of a store with few and with many rows; memory per row.
"""
