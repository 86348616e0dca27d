"""Policies that are small networks, on environments that play many copies at once.

`spec` has the configuration of a network, `vector` the interface of environments; an `Actor` plays
whole episodes of all copies with one forward pass per step and returns a `Fragment` per policy; a
learner (`learning.make_learner`) updates on fragments with TorchRL's losses. Importing this package
imports no torch.
"""
