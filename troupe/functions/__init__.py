"""Rewards and tools of users: plain functions that declare the costs of their calls.

Importing this package must be cheap: every sandbox does so when it starts.
"""

from troupe.functions.declaration import Declaration, DeclarationError, declaration_of, reward, tool

__all__ = ["Declaration", "DeclarationError", "declaration_of", "reward", "tool"]
