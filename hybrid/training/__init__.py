"""The training engine: its modes and verbs, how it is built, and its memory plans."""
