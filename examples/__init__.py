"""Examples that the documentation walks through."""
