"""Loop and Scan for ONNX's reference implementation, whose own ones stack results wrongly and know no axes.

(In onnx 1.23 Loop stacks matrices along their first dim and takes an absent condition for false; Scan refuses axes
and directions other than 0.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun

__all__ = ["LOOPS"]


def _stack(items: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """Items as slices of a new dim; of none nothing is known but that there are none."""
    return np.stack(items, axis) if items else np.empty((0,))


class Loop(OpRun):
    """ONNX Loop: up to M rounds while the condition holds."""

    op_domain = ""

    def need_context(self) -> bool:
        """The body may read any outer value."""
        return True

    def _run(  # type: ignore[override]
        self,
        count: np.ndarray | None = None,
        condition: np.ndarray | None = None,
        *carried: np.ndarray,
        context: Mapping[str, np.ndarray] | None = None,
        attributes: Mapping[str, Any] | None = None,
        **_: object,
    ) -> tuple[np.ndarray, ...]:
        body: Any = self.body  # type: ignore[attr-defined]
        names = body.input_names
        values = list(carried)
        stacked: list[list[np.ndarray]] = [[] for _ in range(len(body.output_names) - 1 - len(values))]
        more = np.array(True) if condition is None else condition
        index = 0
        while bool(np.all(more)) and (count is None or index < int(np.asarray(count).reshape(-1)[0])):
            feeds = dict(context or {})
            feeds.update(zip(names, (np.array(index, np.int64), np.asarray(more), *values), strict=True))
            more, *results = body.run(None, feeds, attributes=dict(attributes or {}))
            values = results[: len(values)]
            for items, item in zip(stacked, results[len(values) :], strict=True):
                items.append(item)
            index += 1
        return (*values, *(_stack(items, 0) for items in stacked))


class Scan(OpRun):
    """ONNX Scan (since operator set 9): one round per slice of the scanned operands."""

    op_domain = ""

    def need_context(self) -> bool:
        """The body may read any outer value."""
        return True

    def _integers(self, name: str, count: int) -> list[int]:
        found = getattr(self, name, None)
        return [0] * count if found is None else list(found)

    def _run(  # type: ignore[override]
        self,
        *operands: np.ndarray,
        context: Mapping[str, np.ndarray] | None = None,
        attributes: Mapping[str, Any] | None = None,
        **_: object,
    ) -> tuple[np.ndarray, ...]:
        body: Any = self.body  # type: ignore[attr-defined]
        number: int = self.num_scan_inputs  # type: ignore[attr-defined]
        split = len(operands) - number
        values, scanned = list(operands[:split]), operands[split:]
        rows = [
            np.moveaxis(array, axis, 0)[:: -1 if back else 1]
            for array, axis, back in zip(
                scanned,
                self._integers("scan_input_axes", number),
                self._integers("scan_input_directions", number),
                strict=True,
            )
        ]
        stacked: list[list[np.ndarray]] = [[] for _ in range(len(body.output_names) - split)]
        for index in range(len(rows[0])):
            feeds = dict(context or {})
            feeds.update(zip(body.input_names, (*values, *(row[index] for row in rows)), strict=True))
            results = body.run(None, feeds, attributes=dict(attributes or {}))
            values = results[:split]
            for items, item in zip(stacked, results[split:], strict=True):
                items.append(item)
        axes = self._integers("scan_output_axes", len(stacked))
        backwards = self._integers("scan_output_directions", len(stacked))
        return (
            *values,
            *(
                _stack(items[::-1] if back else items, axis)
                for items, axis, back in zip(stacked, axes, backwards, strict=True)
            ),
        )


LOOPS: list[type[OpRun]] = [Loop, Scan]
"""To be given to the reference evaluator."""
