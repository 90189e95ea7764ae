"""The instances that benchmarks run on, and how their results are printed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

DATA = Path(__file__).parents[1] / "data"
CLUSTERS = ("1x8", "2x8", "4x8", "128x8")
DEVICE = "a100-sxm4-80gb"
LIGHT_NAMES = (
    "bvlc_alexnet",
    "densenet121",
    "inception_v1",
    "inception_v2",
    "resnet50",
    "shufflenet",
    "squeezenet",
    "vgg19",
    "zfnet512",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A model with the symbolic dims that it needs besides the batch."""

    name: str
    path: Path
    dims: Mapping[str, int] = field(default_factory=dict)
    is_transformer: bool = False


def required_models(data: Path = DATA) -> tuple[Instance, ...]:
    """The models that the planner must answer for.

    Args:
        data: folder of the ONNX files; the ``light_*`` networks come from the onnx package.
    """
    return (*_exported(data), *_written(data), *light_models())


def _exported(data: Path) -> tuple[Instance, ...]:
    dims: dict[str, dict[str, int]] = {
        "gpt2_tiny": {"seq": 512},
        "bert_tiny": {"seq": 512},
        "llama_tiny": {"seq": 512},
        "vit_tiny": {},
        "resnet_small": {},
        "t5_tiny": {"seq": 512, "dec_seq": 512},
        "gshard_moe_tiny": {},
    }
    return tuple(
        Instance(name=name, path=data / f"{name}.onnx", dims=values, is_transformer=name != "resnet_small")
        for name, values in dims.items()
    )


def _written(data: Path) -> tuple[Instance, ...]:
    names = ("hm_llama3_8b", "hm_llama3_70b", "hm_gpt3_175b", "hm_mixtral_8x7b")
    return tuple(
        Instance(name=name, path=data / f"{name}.onnx", dims={"seq": 512}, is_transformer=True) for name in names
    )


def light_models() -> tuple[Instance, ...]:
    """The nine CNNs that come with the onnx package; their batch is fixed at 1 in the file."""
    spec = find_spec("onnx")
    assert spec is not None and spec.submodule_search_locations is not None
    folder = Path(next(iter(spec.submodule_search_locations))) / "backend" / "test" / "data" / "light"
    return tuple(Instance(name=f"light_{name}", path=folder / f"light_{name}.onnx") for name in LIGHT_NAMES)


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows of equal keys as a text table."""
    if not rows:
        return "(nothing)"
    cells = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in cells)


def markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows of equal keys as a Markdown table."""
    if not rows:
        return "(nothing)"
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def write_json(path: Path | None, result: object) -> None:
    """Write the figures, where a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
