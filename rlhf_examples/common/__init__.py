"""Shared by the scripts: engines, rollouts, losses, checkpoints, logs."""
