"""Checkpoints as folders that `transformers`, PEFT and SGLang load, and where they come from."""
