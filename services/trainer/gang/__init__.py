"""Training of a policy on several devices (a gang): FSDP2 ranks under torchrun, led by a worker."""
