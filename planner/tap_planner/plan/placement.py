"""What a plan that puts whole operators on devices says of that, beside its pipeline of one microbatch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tap_planner.plan.reader import Value

__all__ = ["DeviceLoad", "OrderOutcome", "PlacementSection", "placement_from_json", "placement_to_json"]

Json = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLoad:
    """One device that is used."""

    place: tuple[int, ...]
    """Outermost level first, (node, device)."""
    kind: str
    """Name of its kind."""
    operators: int
    compute_ns: int
    """Its operators and the optimizer, in one step."""
    sent_bytes: int
    """What it sends in one step."""
    memory_bytes: Mapping[str, int]
    """By kind, as in ``Predicted``."""
    limit_bytes: int | None
    """What it may hold; None: there is no limit."""

    @property
    def total_memory_bytes(self) -> int:
        """All kinds."""
        return sum(self.memory_bytes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderOutcome:
    """The best placement that the placers made of one traversal order, before it was improved."""

    order: str
    """Empty: everything on one device."""
    placer: str
    makespan_ns: int
    """As it was played."""
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSection:
    """How whole operators came onto devices."""

    order: str
    """The traversal order that won; empty: everything on one device, or CP-SAT's own placement."""
    placer: str
    """What dealt operators out along it, and whether that was improved."""
    devices: tuple[DeviceLoad, ...]
    """By stage."""
    orders: tuple[OrderOutcome, ...]
    """What was tried, fastest first."""


def placement_to_json(placement: PlacementSection) -> Json:
    """The section ``placement`` of a plan."""
    return {
        "order": placement.order,
        "placer": placement.placer,
        "devices": [
            {
                "place": list(load.place),
                "kind": load.kind,
                "operators": load.operators,
                "compute_ns": load.compute_ns,
                "sent_bytes": load.sent_bytes,
                "memory_bytes": dict(load.memory_bytes),
                **({} if load.limit_bytes is None else {"limit_bytes": load.limit_bytes}),
            }
            for load in placement.devices
        ],
        "orders": [
            {
                "order": outcome.order,
                "placer": outcome.placer,
                "makespan_ns": outcome.makespan_ns,
                **({} if outcome.fits else {"fits": False}),
            }
            for outcome in placement.orders
        ],
    }


def placement_from_json(value: Value) -> PlacementSection:
    """Inverse of ``placement_to_json``."""
    return PlacementSection(
        order=value["order"].text(),
        placer=value["placer"].text(),
        devices=value["devices"].each(_load),
        orders=value["orders"].each(_outcome),
    )


def _load(value: Value) -> DeviceLoad:
    return DeviceLoad(
        place=value["place"].integers(),
        kind=value["kind"].text(),
        operators=value["operators"].integer(),
        compute_ns=value["compute_ns"].integer(),
        sent_bytes=value["sent_bytes"].integer(),
        memory_bytes=value["memory_bytes"].counts(),
        limit_bytes=None if (limit := value.get("limit_bytes")) is None else limit.integer(),
    )


def _outcome(value: Value) -> OrderOutcome:
    return OrderOutcome(
        order=value["order"].text(),
        placer=value["placer"].text(),
        makespan_ns=value["makespan_ns"].integer(),
        fits=True if (fits := value.get("fits")) is None else fits.flag(),
    )
