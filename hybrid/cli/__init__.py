"""The commands of `hybrid`: doctor, plan, serve, report."""
