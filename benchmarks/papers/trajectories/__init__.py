"""The gain from trajectories that never wait for each other (docs/benchmarks/trajectories.md)."""
