"""What the scripts share: engines, rollouts, losses, checkpoints, logs."""
