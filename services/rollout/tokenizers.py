"""Tokenizers and stop tokens, as `troupe workflow try` has them too."""

from troupe.workflow.languages import IMPORTING, Language, load_language, role_of, stop_ids

__all__ = ["IMPORTING", "Language", "load_language", "role_of", "stop_ids"]
