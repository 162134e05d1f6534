"""Engines for models that do not train: loading, checkpoints, tensor parallelism by rules."""
