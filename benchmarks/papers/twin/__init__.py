"""The twin of a cluster against live runs and against four papers; see docs/benchmarks/twin.md."""
