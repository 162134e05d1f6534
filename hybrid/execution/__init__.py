"""Execution: who runs a call, and with which ranks."""
