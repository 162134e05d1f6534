"""How the training engine's parameters become inference tensors: gather, merge, write into the snapshot."""
