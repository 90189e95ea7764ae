"""How what the planner has to say besides its answer is ranked."""

NOTE = 25
"""Logging level of a note that everybody should see: no warning, but more than what ``-v`` shows."""
