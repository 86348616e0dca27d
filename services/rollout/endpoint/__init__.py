"""OpenAI's API for the agents of running trajectories: an existing framework trains unchanged."""
