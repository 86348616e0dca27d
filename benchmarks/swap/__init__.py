"""The cost of moving a policy off its device and back, and the gain from sharing devices."""
