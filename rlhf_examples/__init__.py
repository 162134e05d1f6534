"""RLHF on the public face of `hybrid`: short scripts that read from top to bottom."""
