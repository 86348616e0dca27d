"""Made-up work of the papers' shape, for benchmarks."""
