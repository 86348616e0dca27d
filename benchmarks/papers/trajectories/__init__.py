"""What trajectories that never wait for each other are worth (docs/benchmarks/trajectories.md)."""
