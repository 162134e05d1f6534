"""Reads records and turns them into tokens."""
