"""Serving: requests one by one."""
