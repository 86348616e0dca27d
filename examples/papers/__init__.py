"""Published results of multi-agent training as recipes: arms, seeds, criteria, pages of results."""
