"""Names that several processes must spell alike. Imports nothing: workflows and workers of reward
functions read it, too."""
