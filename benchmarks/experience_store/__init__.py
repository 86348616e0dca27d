"""The experience store next to the Redis that it keeps its rows in.

- `servers`: a Redis as the embedded cluster starts it, and the store's process before it.
- `workload`: rows of a given length, and the steps that hold them.
- `served`: the same bytes through the store: append, reward, claim, commit.
- `echo`: the same bytes through gRPC alone.
- `conversations`: bytes of conversations of cumulative turns on their way to a trainer.
- `scale`: claims of a store with few and with many rows; memory per row.
"""
