"""Checkpoints as folders that `transformers`, PEFT and SGLang load, and their origin."""
