"""Models on this host's devices: resident while they are used, else in host memory."""
