"""OpenAI's API for the agents of a trajectory: an existing framework is trained unchanged."""
