"""Training parameters to inference tensors: gather, merge adapters, write into the snapshot."""
