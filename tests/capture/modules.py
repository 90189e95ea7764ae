"""Small modules, one for each thing that exporters get wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from tap_planner.capture import parameters_on_meta


class Mlp(nn.Module):
    """Two layers whose biases are equal (zero), and a layer that ``forward`` never reads."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.unused = nn.Linear(3, 3)
        nn.init.zeros_(self.up.bias)
        nn.init.zeros_(self.down.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 8] to [batch, 8]."""
        return self.down(functional.gelu(self.up(x)))


class Attention(nn.Module):
    """Causal self-attention; with a cache also over what came before."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """[batch, seq, hidden] to the same, and the keys and values so far."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=x.device).tril(k.shape[2] - q.shape[2])
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(2)), (k, v)


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.norm2 = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """[batch, seq, hidden] to the same, and its cache."""
        mixed, present = self.attention(self.norm1(x), past)
        x = x + mixed
        return x + self.mlp(self.norm2(x)), present


class Tied(nn.Module):
    """A language model whose head is its embedding, with integer positions and a parameter called like an operator."""

    def __init__(self, vocabulary: int = 40, hidden: int = 16, heads: int = 4, layers: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(32, hidden)
        self.add = nn.Parameter(torch.full((hidden,), 0.5))
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("order", torch.arange(32))
        self.register_buffer("table", torch.linspace(0.5, 1.5, hidden), persistent=False)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        """[batch, seq] to logits."""
        x = self.embedding(input_ids) + self.positions(self.order[: input_ids.shape[1]])
        x = x * self.table + self.add
        for layer in self.layers:
            x, _ = layer(x)
        return {"logits": self.head(self.norm(x))}


class ConvNet(nn.Module):
    """A convolution without bias, batch normalisation (exporters fold the two) and dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(4, 5)
        with torch.no_grad():
            self.norm.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]
            self.norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]

    def forward(self, image: Tensor) -> Tensor:
        """[batch, 3, h, w] to [batch, 5]."""
        return self.head(self.dropout(functional.relu(self.norm(self.conv(image)))).mean((2, 3)))


class Decoder(nn.Module):
    """One step of a decoder: the cache of each layer comes in and goes out."""

    def __init__(self, vocabulary: int = 24, hidden: int = 16, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(layers))
        self.head = nn.Linear(hidden, vocabulary)

    def forward(
        self, input_ids: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """[batch, seq] and caches of [batch, heads, past, head] to logits and longer caches."""
        x, present = self.embedding(input_ids), []
        for layer, before in zip(self.layers, past, strict=True):
            x, after = layer(x, before)
            present.append(after)
        return self.head(x), present


@dataclass(frozen=True, kw_only=True)
class Example:
    """A module class with its inputs."""

    module: type[nn.Module]
    inputs: Mapping[str, object]
    dims: Mapping[str, Mapping[int, str]]
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Values of open dims beside the batch, for planning."""
    not_read: tuple[str, ...] = ()
    """Parameters that ``forward`` never reads."""
    train: bool = False


def _cache() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(2, 2, 5, 8, generator=generator), torch.randn(2, 2, 5, 8, generator=generator)) for _ in range(2)
    ]


def _image() -> Tensor:
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(4))


EXAMPLES = {
    "mlp": Example(
        module=Mlp,
        inputs={"x": torch.linspace(-2, 2, 24).reshape(3, 8)},
        dims={"x": {0: "batch"}},
        not_read=("unused.weight", "unused.bias"),
    ),
    "tied": Example(
        module=Tied,
        inputs={"input_ids": torch.arange(14).reshape(2, 7)},
        dims={"input_ids": {0: "batch", 1: "seq"}},
        sizes={"seq": 6},
    ),
    "conv": Example(module=ConvNet, inputs={"image": _image()}, dims={"image": {0: "batch"}}),
    "conv_train": Example(module=ConvNet, inputs={"image": _image()}, dims={"image": {0: "batch"}}, train=True),
    "decoder": Example(
        module=Decoder,
        inputs={"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]]), "past": _cache()},
        dims={"input_ids": {0: "batch", 1: "seq"}, "past": {0: "batch", 2: "past"}},
        sizes={"seq": 3, "past": 5},
    ),
}


def build(name: str, place: str = "cpu") -> nn.Module:
    """The module of an example, always with the same values.

    Args:
        name: key of ``EXAMPLES``.
        place: ``cpu``; ``meta`` for no values at all; ``parameters on meta`` for buffers with values.
    """
    example = EXAMPLES[name]
    torch.manual_seed(7)
    with parameters_on_meta() if place == "parameters on meta" else torch.device(place):
        return example.module().train(example.train)
