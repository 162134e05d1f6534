"""Sampling parameters of tests that sample from given logits."""

from hybrid.sampling.params import SamplingParams


def params_of(
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    min_new_tokens: int = 0,
) -> SamplingParams:
    """SamplingParams in the order of the kernels' table; their max_new_tokens is not read."""
    return SamplingParams(200, temperature, top_p, top_k, min_p, min_new_tokens, repetition_penalty)
