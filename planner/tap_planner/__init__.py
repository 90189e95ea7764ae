"""Strategy planner for distributed neural-network training and inference."""
