"""From prompts to tokens: the KV cache, the sampler, the decode loop. Knows nothing of where weights come from."""
