"""A small language model learns Kuhn poker from itself, from its past versions, and by PSRO."""
