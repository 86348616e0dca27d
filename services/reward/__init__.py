"""Function runtime: runs rewards and tools in worker processes, with one outcome per invocation."""
