"""An agent written for OpenAI's API, trained without changes."""
