"""A small language model learns Kuhn poker from itself, from its past, and by PSRO."""
