"""Sampling: counter-based keys, the sampler, vocabulary slices, logprobs."""
