# mypy: ignore-errors
"""A DSPy module over chat completions, without DSPy's cache."""

from __future__ import annotations

import json
import sys

import dspy

request = json.load(sys.stdin)
model = dspy.LM(
    f"openai/{request['model']}",
    api_base=request["base_url"],
    api_key=request["api_key"],
    cache=False,
    num_retries=0,
)
dspy.configure(lm=model, adapter=dspy.ChatAdapter(use_json_adapter_fallback=False))
print(
    json.dumps({"answer": dspy.Predict("question -> answer")(question=request["question"]).answer})
)
