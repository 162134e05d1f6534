"""Other libraries' ways to ask for rollouts: DeepSpeed's entry points, TRL, DeepSpeed's rollout interface."""
