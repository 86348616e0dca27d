"""One policy's whole job through all services, beside TRL's GRPOTrainer on the same work."""
