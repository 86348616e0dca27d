"""OpenAI's and Anthropic's APIs for a trajectory's agents, so that an unchanged framework can be
trained."""
