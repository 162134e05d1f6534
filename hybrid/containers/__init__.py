"""Inference layers over the snapshot's tensors."""
