"""Requests one by one: `engine.serve()`."""
