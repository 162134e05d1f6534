"""The code of vLLM's process: each line of JSON on stdin is a request, and is answered by a line on stdout.

The first line describes the model, every later line a rollout. Needs only vLLM and the standard library.
"""

import json
import os
import re
import sys
from pathlib import Path


def main() -> None:
    """Serve until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's output goes to the log, from its import on
    import vllm

    engine = vllm.LLM(skip_tokenizer_init=True, enable_prefix_caching=True, **json.loads(sys.stdin.readline()))
    answer(answers, " ".join(["vllm", vllm.__version__, *kernel_libraries()]))
    for line in sys.stdin:
        answer(answers, completion_lengths(engine, **json.loads(line)))


def answer(answers, value) -> None:
    """Write an answer."""
    answers.write(json.dumps(value) + "\n")
    answers.flush()


def kernel_libraries() -> list[str]:
    """File names of vLLM's compiled kernels in this process: which one it loads depends on the CPU's instructions."""
    return sorted(set(re.findall(r"/vllm/(_C[^/\n]*\.so)$", Path("/proc/self/maps").read_text(), re.M)))


def completion_lengths(engine, prompts: list[list[int]], lengths: list[int], group: int) -> list[int]:
    """Sample completions of the given lengths, with each token's logprob, as this engine returns them; returns the
    tokens of each, those of a prompt adjacent."""
    from vllm import SamplingParams

    settings = {"temperature": 1.0, "ignore_eos": True, "detokenize": False, "logprobs": 0}
    sampling = [SamplingParams(n=group, max_tokens=length, **settings) for length in lengths]
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = engine.generate(requests, sampling, use_tqdm=False)
    return [len(completion.token_ids) for output in outputs for completion in output.outputs]


if __name__ == "__main__":
    main()
