"""Environments of rollouts with several turns: messages, tools, chat templates, and how rows step."""
