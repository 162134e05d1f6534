"""RLHF on the public API of `hybrid`: short scripts that read from top to bottom."""
