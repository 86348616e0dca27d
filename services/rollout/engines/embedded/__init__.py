"""The engine whose model is computed by the rollout process: its host, its batcher, its slots."""
