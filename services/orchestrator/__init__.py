"""The orchestrator: jobs, versions, the pipeline of steps, the placement of work."""
