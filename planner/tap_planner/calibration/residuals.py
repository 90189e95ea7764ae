"""What a fit leaves unexplained."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tap_planner.cluster import FitRow


def fit_rows(kinds: Sequence[str], log_errors: np.ndarray) -> tuple[FitRow, ...]:
    """Median and worst of abs(model / measured - 1) per kind, kinds in order of first occurrence.

    Args:
        kinds: of each measurement.
        log_errors: [measurements] log(model / measured).
    """
    shares = np.abs(np.expm1(log_errors))
    found: list[FitRow] = []
    for kind in dict.fromkeys(kinds):
        of_kind = shares[[one == kind for one in kinds]]
        found.append(
            FitRow(
                kind=kind,
                rows=len(of_kind),
                median_permille=round(1000 * float(np.median(of_kind))),
                worst_permille=round(1000 * float(of_kind.max())),
            )
        )
    return tuple(found)
