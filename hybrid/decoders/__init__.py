"""What runs a model in inference: whole decoders on each kind of machine, and containers over its own modules."""
