"""The benchmarks of calibration: rank correlation, and the script for one GPU on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from tap_planner.calibration import Sample, attention, elementwise, fused_attention, layer, product
from tap_planner.cluster import Cluster, catalogue_device, parse_calibration
from tap_planner.cluster import calibration_text as text_of
from tests.bench import gpu_calibration
from tests.bench.spearman import spearman


@pytest.mark.parametrize("seed", range(5))
def test_rank_correlation(seed: int) -> None:
    """It is that of scipy, also with ties."""
    generator = np.random.default_rng(seed)
    first, second = generator.integers(0, 5, (2, 8)).tolist()
    assert spearman(first, second) == pytest.approx(stats.spearmanr(first, second).statistic)


def _few(cluster: Cluster) -> tuple[Sample, ...]:
    samples = (layer(1, 8, 32, 2, "fp32"), product(64, 64, 64, "fp32"), elementwise(64, 256, "fp32"))
    return (*samples, attention(2, 16, 2, 8, "fp32"), fused_attention(2, 16, 2, 8, "fp32"))


def test_the_script_for_one_gpu_runs_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of every step, attention in one operator too, and figures that a calibration file can hold."""
    monkeypatch.setattr(gpu_calibration, "samples_for", _few)
    rows, calibration = gpu_calibration.measure(catalogue_device("cpu-core"), "cpu", 1.0)
    assert [row.sample.split()[0] for row in rows] == ["layer", "product", "elementwise", "attention", "fused"]
    assert all(row.forward_us > 0 and row.backward_us > 0 for row in rows)
    product_row = rows[1]
    assert product_row.forward_tflops == pytest.approx(2 * 2 * 64**3 / product_row.forward_us / 1e6, abs=1e-3)
    assert parse_calibration(text_of(calibration), file="c.json") == calibration
