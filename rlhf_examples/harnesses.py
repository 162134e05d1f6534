"""A program that calls a model by OpenAI's API: the sums of `environments.py`, with the calculator as its tool.

It knows a base URL and a record, and returns the reward. `agent.py` trains on it by `--harness
rlhf_examples.harnesses:calculator`.
"""

import json
from typing import Any

import httpx2
from transformers.utils import get_json_schema

from rlhf_examples.environments import OPERANDS, add

TIMEOUT_S = 600.0


def calculator(base_url: str, record: dict[str, Any]) -> float:
    """Play a sum; returns 1 for the right answer, else 0."""
    messages, tools = list(record["prompt"]), [get_json_schema(add)]
    with httpx2.Client(timeout=TIMEOUT_S, trust_env=False) as client:
        for _ in range(OPERANDS + 1):
            request = {"model": "policy", "messages": messages, "tools": tools}
            answer = client.post(f"{base_url}/chat/completions", json=request)
            answer.raise_for_status()
            message = answer.json()["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return float((message["content"] or "").strip() == str(record["answer"]))
            for call in message["tool_calls"]:
                result = add(**{name: int(value) for name, value in json.loads(call["function"]["arguments"]).items()})
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(result)})
    return 0.0
