"""Policies that several devices hold together: FSDP2 ranks under torchrun, led by one worker."""
