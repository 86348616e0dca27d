"""The pipeline modes against each other on one real cluster; see docs/benchmarks/pipeline.md."""
