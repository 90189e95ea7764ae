"""Export of a 70 B-width Llama of 16 layers without weights: time, size of the file, memory, and a plan of it.

python -m tests.bench.bench_capture [--layers 16] [--json build/capture.json]
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from tap_planner.capture import export_graph, parameters_on_meta
from tests.bench.instances import table, write_json

CLUSTER = "2x8:h100-sxm5-80gb"
MOST_BYTES = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Llama 3 70B (Grattafiori et al. 2024, table 3), with fewer layers."""

    vocabulary: int = 128_256
    hidden: int = 8192
    heads: int = 64
    key_value_heads: int = 8
    feed_forward: int = 28_672
    layers: int = 16
    rotary_base: float = 500_000.0

    @property
    def head(self) -> int:
        """Size of a head."""
        return self.hidden // self.heads


class RmsNorm(nn.Module):
    """Root mean square normalisation (Zhang and Sennrich 2019)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Unit mean square over the last dim, then scale."""
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class Rotary(nn.Module):
    """Cosines and sines of rotary positions (Su et al. 2021)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        exponents = torch.arange(0, sizes.head, 2).float() / sizes.head
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", sizes.rotary_base**-exponents, persistent=False)

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        """[length, head] each."""
        angles = torch.outer(torch.arange(length).float(), self.inv_freq)
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Attention(nn.Module):
    """Causal attention with grouped queries (Ainslie et al. 2023)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head = sizes.head
        narrow = sizes.key_value_heads * sizes.head
        self.q_proj = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.k_proj = nn.Linear(sizes.hidden, narrow, bias=False)
        self.v_proj = nn.Linear(sizes.hidden, narrow, bias=False)
        self.o_proj = nn.Linear(sizes.hidden, sizes.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, seq, hidden] to the same."""
        projections = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (part.unflatten(-1, (-1, self.head)).transpose(1, 2) for part in projections)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and a gated feed-forward part (Shazeer 2020)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.input_norm = RmsNorm(sizes.hidden)
        self.attention = Attention(sizes)
        self.post_norm = RmsNorm(sizes.hidden)
        self.gate_proj = nn.Linear(sizes.hidden, sizes.feed_forward, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, sizes.feed_forward, bias=False)
        self.down_proj = nn.Linear(sizes.feed_forward, sizes.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, seq, hidden] to the same."""
        x = x + self.attention(self.input_norm(x), cos, sin)
        normal = self.post_norm(x)
        return x + self.down_proj(functional.silu(self.gate_proj(normal)) * self.up_proj(normal))


class Llama(nn.Module):
    """A decoder-only language model."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.rotary = Rotary(sizes)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = RmsNorm(sizes.hidden)
        self.lm_head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        """[batch, seq] to logits."""
        cos, sin = self.rotary(input_ids.shape[1])
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return {"logits": self.lm_head(self.norm(x))}


def measure(layers: int) -> dict[str, object]:
    """Build, export and plan; seconds are wall clock, CPU seconds those of this process."""
    sizes = Sizes(layers=layers)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "llama.onnx"
        with parameters_on_meta():
            module = Llama(sizes).eval()
        parameters = sum(parameter.numel() for parameter in module.parameters())
        started, cpu = time.perf_counter(), time.process_time()
        captured = export_graph(
            module,
            torch.zeros(2, 8, dtype=torch.int64),
            path,
            weights=False,
            dynamic_dims={"input_ids": {0: "batch", 1: "seq"}},
        )
        export_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        started = time.perf_counter()
        planned = _plan(path)
        plan_s = time.perf_counter() - started
    return {
        "layers": layers,
        "parameters_billion": round(parameters / 1e9, 2),
        "export_s": round(export_s, 1),
        "cpu_s": round(cpu_s, 1),
        "nodes": captured.num_nodes,
        "file_bytes": captured.num_bytes,
        "peak_rss_mb": round(peak / 1e6),
        "names_kept": set(captured.parameters) == {name for name, _ in module.named_parameters()},
        "plan_exit": planned,
        "plan_s": round(plan_s, 1),
    }


def _plan(path: Path) -> int:
    command = [str(Path(sys.executable).with_name("tap-plan")), str(path), "--cluster", CLUSTER]
    options = ["--batch", "16", "--dim", "seq=512", "-q", "-o", str(path.with_suffix(".json"))]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
    return done.returncode


def main(arguments: Sequence[str] | None = None) -> dict[str, object]:
    """Measure, print the figures, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    result = measure(options.layers)
    print(table([result]))
    write_json(options.json, {"capture": [result]})
    return result


def test_wide_llama() -> None:
    """Sixteen layers of 70 B width export without weights into less than 1 MB, all names kept, and get a plan."""
    result = main([])
    assert result["names_kept"]
    assert isinstance(result["file_bytes"], int) and result["file_bytes"] < MOST_BYTES
    assert result["plan_exit"] == 0


if __name__ == "__main__":
    main()
