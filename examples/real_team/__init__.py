"""A real pretrained language model (SmolLM2-135M-Instruct) as a team of two: `make demo-real`."""
