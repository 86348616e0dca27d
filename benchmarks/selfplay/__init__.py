"""Self-play of a small language model on Kuhn poker, measured by exploitability."""
