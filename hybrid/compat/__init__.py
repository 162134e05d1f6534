"""Integration with other libraries: DeepSpeed's entry points, its rollout interface, and TRL."""
