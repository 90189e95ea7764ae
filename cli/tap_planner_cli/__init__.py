"""The command line: tap-plan, tap-diff, tap-show, tap-apply. It parses, calls ``tap_planner`` and renders."""
