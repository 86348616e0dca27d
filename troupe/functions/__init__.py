"""Rewards and tools as users write them: plain functions that declare what their calls cost.

Importing this package is cheap: every sandbox does when it starts.
"""

from troupe.functions.declaration import Declaration, DeclarationError, declaration_of, reward, tool

__all__ = ["Declaration", "DeclarationError", "declaration_of", "reward", "tool"]
