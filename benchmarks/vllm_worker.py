"""What runs in vLLM's process: a line of JSON on stdin is a request, a line on stdout its answer.

The first line is the model's; each one after it a request's. Needs vLLM and the standard library only.
"""

import json
import os
import sys


def main() -> None:
    """Serve until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's own words go to the log, from its import on
    from vllm import LLM

    engine = LLM(skip_tokenizer_init=True, enable_prefix_caching=True, **json.loads(sys.stdin.readline()))
    answer(answers, "ready")
    for line in sys.stdin:
        answer(answers, completion_lengths(engine, **json.loads(line)))


def answer(answers, value) -> None:
    """Give an answer."""
    answers.write(json.dumps(value) + "\n")
    answers.flush()


def completion_lengths(engine, prompts: list[list[int]], lengths: list[int], group: int) -> list[int]:
    """Tokens of each completion of `prompts`, which are sampled to their lengths, a prompt's next to each other."""
    from vllm import SamplingParams

    sampling = [
        SamplingParams(n=group, max_tokens=length, temperature=1.0, ignore_eos=True, detokenize=False)
        for length in lengths
    ]
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = engine.generate(requests, sampling, use_tqdm=False)
    return [len(completion.token_ids) for output in outputs for completion in output.outputs]


if __name__ == "__main__":
    main()
