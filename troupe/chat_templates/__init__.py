"""Chat templates of model directories, rendered within bounds on time, memory and text.

A chat template is a program that somebody else wrote, and it runs in the event loop of a rollout
worker. `ChatTemplates` renders as transformers' `apply_chat_template` does, in the same sandbox of
Jinja, and counts what the template does: every statement, every character that it reads or makes.
What could grow without a loop (`center`, `*`, `**`, formats, ...) is bounded before it is computed,
and what cannot be bounded is not offered. So a hostile template ends within a second or so, after
the same number of steps on every machine.
"""

from typing import Final

# Arguments of `apply_chat_template` that users cannot set.
RESERVED_ARGUMENTS: Final = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "messages",
        "max_length",
        "padding",
        "processor_kwargs",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


class TemplateLimitError(Exception):
    """A chat template exceeds a bound, or uses what is not offered to templates."""
