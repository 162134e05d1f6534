"""The engine in Ray actors and with threads."""
