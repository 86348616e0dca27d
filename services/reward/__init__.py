"""Function runtime: rewards and tools run in worker processes, one outcome per invocation."""
