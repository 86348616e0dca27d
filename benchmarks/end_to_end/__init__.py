"""One policy's whole job through all services, against TRL's GRPOTrainer on the same work."""
