"""Writes a run's logs as one HTML page."""
