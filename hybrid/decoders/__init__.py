"""Decoders: a whole decoder for each device, and containers that run a model's own modules."""
