"""What can only be measured on a GPU, in one command; on a CPU the same with a tiny model."""
