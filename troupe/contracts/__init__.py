"""Names that several processes must spell alike. The package imports nothing, because workflows and
workers of reward functions import it, too."""
