"""Mathematics of policy optimization as pure functions: torch tensors in, tensors out."""
