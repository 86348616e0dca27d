"""The pipeline modes against each other, on one cluster of real processes (docs/benchmarks.md)."""
