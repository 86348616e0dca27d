"""The orchestrator: jobs, the pipeline of steps, the placement of work."""
