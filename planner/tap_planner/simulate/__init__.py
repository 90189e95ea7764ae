"""Program and cluster to time and memory: for now the additive price of objective A."""

from tap_planner.simulate.additive import Price, price_program

__all__ = ["Price", "price_program"]
