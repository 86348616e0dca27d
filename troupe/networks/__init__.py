"""Policies that are small networks, on environments that play many copies at once.

`spec` says what a network is, `vector` what an environment is; an `actor` plays whole episodes of
all copies with one forward per step and gives a `Fragment` per policy; a learner
(`learning.make_learner`) updates on fragments with TorchRL's losses. Importing this package imports
no torch.
"""
