"""APIs of OpenAI and Anthropic for a trajectory's agents: a framework is trained unchanged."""
