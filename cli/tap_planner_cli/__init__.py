"""The command line: tap-plan, tap-diff, tap-show, tap-apply, tap-calibrate.

It parses, calls ``tap_planner`` and renders.
"""
