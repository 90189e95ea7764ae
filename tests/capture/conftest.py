"""Exports take seconds each: every module is exported once per session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tap_planner.capture import CapturedGraph, export_graph
from tests.capture.modules import EXAMPLES, build

Exported = Callable[..., CapturedGraph]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """The tensors are tiny: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """``exported(name, kind)``: an example ``real`` or ``absent`` (without its weights), or a place of ``build``."""
    folder = tmp_path_factory.mktemp("exported")
    made: dict[tuple[str, str], CapturedGraph] = {}

    def export(name: str, kind: str = "real") -> CapturedGraph:
        if (name, kind) not in made:
            example = EXAMPLES[name]
            module = build(name, "cpu" if kind in ("real", "absent") else kind)
            path = folder / f"{name}_{kind.replace(' ', '_')}.onnx"
            made[name, kind] = export_graph(
                module, example.inputs, path, weights=kind == "real", dynamic_dims=example.dims
            )
        return made[name, kind]

    return export
