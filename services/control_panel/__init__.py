"""REST and one live page over the orchestrator's gRPC. Holds no state of its own."""
