"""A workflow and a tokenizer that several benchmarks use."""
