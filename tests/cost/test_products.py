"""Matrix products in whole tiles."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tap_planner.cluster import catalogue_device
from tap_planner.cost import ComputeModel, operator_times_ns, padded_points
from tap_planner.operators import OperatorSignature, TensorType, rule_of


def matmul(*shapes: tuple[int, ...]) -> OperatorSignature:
    """[b, m, k] x [b, k, n]."""
    left, right = (TensorType(dtype="float32", shape=shape) for shape in shapes)
    output = TensorType(dtype="float32", shape=(*shapes[0][:-1], shapes[1][-1]))
    return OperatorSignature(type="MatMul", attributes=(), inputs=(left, right), outputs=(output,))


def sizes_of(signature: OperatorSignature) -> list[int]:
    """Sizes of the factors of its rule."""
    return [factor.size for factor in rule_of(signature).factors]


def test_three_sides_are_filled_up() -> None:
    """5 products of 100 x 70 x 3 in tiles of 64 are 128 x 128 x 64 each; batches are not filled up."""
    signature = matmul((5, 100, 3), (5, 3, 70))
    assert padded_points(rule_of(signature), sizes_of(signature), 64) == 5 * 128 * 128 * 64
    assert padded_points(rule_of(signature), sizes_of(signature), 1) == 5 * 100 * 70 * 3


def test_rows_of_a_weight_product_are_one_side() -> None:
    """Batch and sequence together are the rows of a product with a matrix: 3 x 50 = 150 -> 192."""
    signature = matmul((3, 50, 64), (64, 64))
    assert padded_points(rule_of(signature), sizes_of(signature), 64) == 192 * 64 * 64


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 8), st.sampled_from((8, 16, 64)))
def test_no_part_has_fewer_than_its_share(rows: int, columns: int, parts: int, padding: int) -> None:
    """Whichever side is split, the parts together have at least the points of the whole: bounds that share work evenly
    stay bounds."""
    whole = matmul((2, rows, 7), (2, 7, columns))
    part = matmul((2, -(-rows // parts), 7), (2, 7, columns))
    points = [padded_points(rule_of(one), sizes_of(one), padding) for one in (part, whole)]
    assert parts * points[0] >= points[1]


def test_a_device_that_pads_is_slower_on_skinny_products() -> None:
    """A product of one row takes as long as one of 64, forward and backward, where the device fills up to 64."""
    device = replace(
        catalogue_device("a100-sxm4-80gb"), launch_ns=0, backward_launch_ns=0, memory_bandwidth_bytes_per_s=10**18
    )
    padded = replace(device, matrix_padding=64)

    def times(rows: int, one: object) -> tuple[int, int]:
        signature = matmul((1, rows, 4096), (1, 4096, 4096))
        return operator_times_ns(
            ComputeModel(one, "bf16"),  # pyright: ignore[reportArgumentType]
            signature,
            factor_sizes=tuple(sizes_of(signature)),
            input_elements=[rows * 4096, 4096 * 4096],
            output_elements=[rows * 4096],
            requires_gradient=[True, True],
        )

    assert times(1, padded) == times(64, padded) == times(64, device)
    assert times(1, device)[0] < times(64, device)[0] / 60
