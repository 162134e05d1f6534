"""Arithmetic on tensors: what a decoder is computed with on each kind of machine. Knows nothing of models."""
