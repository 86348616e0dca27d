"""Rewards and tools as users write them: plain functions that say what their calls cost.

Importing this package is cheap, for it happens whenever a sandbox starts.
"""

from troupe.functions.declaration import Declaration, DeclarationError, declaration_of, reward, tool

__all__ = ["Declaration", "DeclarationError", "declaration_of", "reward", "tool"]
