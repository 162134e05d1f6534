"""Generation: the KV cache, the sampler, the decode loop, scoring. Independent of where the weights come from."""
