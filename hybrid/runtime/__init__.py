"""Shared by all packages: ranks, locks, interrupts, event loops, input casts, messages."""
