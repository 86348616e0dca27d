"""vLLM servers: their HTTP API and command line behind `InferenceServer`."""
