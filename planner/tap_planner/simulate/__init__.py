"""Program and cluster to time and memory: the additive price of objective A, the predicted time with overlap, and the
step slot by slot."""

from tap_planner.simulate.additive import Price, price_program, sent_by_program
from tap_planner.simulate.backgrounds import GATHER, GRADIENT, UPDATED
from tap_planner.simulate.bounds import LowerBounds, lower_bounds
from tap_planner.simulate.closing import TIED
from tap_planner.simulate.devices import Channels, kinds_of
from tap_planner.simulate.durations import Durations
from tap_planner.simulate.events import Event, MemoryPoint
from tap_planner.simulate.holding import held_by, waiting_by
from tap_planner.simulate.memory import stored_memory
from tap_planner.simulate.overlap import Background, Busy, hidden_ns
from tap_planner.simulate.passes import BLOCKING
from tap_planner.simulate.prediction import Prediction, predict
from tap_planner.simulate.products import PRODUCT
from tap_planner.simulate.routes import TRANSFER
from tap_planner.simulate.simulator import simulate
from tap_planner.simulate.timeline import StageMemory, StageTimeline, Timeline
from tap_planner.simulate.trace import to_trace, write_trace

__all__ = [
    "BLOCKING",
    "GATHER",
    "GRADIENT",
    "PRODUCT",
    "TIED",
    "TRANSFER",
    "UPDATED",
    "Background",
    "Busy",
    "Channels",
    "Durations",
    "Event",
    "LowerBounds",
    "MemoryPoint",
    "Prediction",
    "Price",
    "StageMemory",
    "StageTimeline",
    "Timeline",
    "held_by",
    "hidden_ns",
    "kinds_of",
    "lower_bounds",
    "predict",
    "price_program",
    "sent_by_program",
    "simulate",
    "stored_memory",
    "to_trace",
    "waiting_by",
    "write_trace",
]
