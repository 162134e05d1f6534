"""`init_inference`: engines for models that do not train, loading of checkpoints, automatic tensor parallelism."""
