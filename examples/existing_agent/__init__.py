"""An agent that was written for OpenAI's API, trained as it is."""
