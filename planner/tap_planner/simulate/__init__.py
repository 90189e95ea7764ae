"""Program and cluster to time and memory: the additive price of objective A, and the predicted time with overlap."""

from tap_planner.simulate.additive import Price, price_program, sent_by_program
from tap_planner.simulate.overlap import Background, Busy, hidden_ns
from tap_planner.simulate.prediction import GATHER, GRADIENT, Prediction, predict

__all__ = [
    "GATHER",
    "GRADIENT",
    "Background",
    "Busy",
    "Prediction",
    "Price",
    "hidden_ns",
    "predict",
    "price_program",
    "sent_by_program",
]
