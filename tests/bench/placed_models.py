"""The models whose operators are placed one by one, by family, and the features that orders might depend on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx

from tap_planner.device_placement import Problem
from tap_planner.device_placement.bounds import critical_path_ns
from tap_planner.graph import BindOptions, Graph, LossOptions, ModelFile, bind, load_model
from tests.bench.instances import light_models
from tests.bench.irregular_graphs import (
    bidirectional_rnn,
    mixture,
    nas_cells,
    random_wiring,
    recommender,
    unrolled_lstm,
    unrolled_rnn,
)
from tests.search.models import model_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A model, and the batch of a training step at which work weighs more than launches."""

    name: str
    family: str
    batch: int | None
    """None: the file's own, which is fixed."""
    made: Callable[[], onnx.ModelProto] | None = None
    """None: it is read from a file."""
    dims: Mapping[str, int] = field(default_factory=dict)
    freeze: tuple[str, ...] = ()
    """Scales and shifts that the exporter gave to several operators because they were equal: trained, they would tie
    these together, which the model did not."""

    def graph(self, data: Path, *, training: bool) -> Graph:
        """Bound for a training step, or for an inference of one example."""
        batch = self.batch if training or self.batch is None else 1
        options = BindOptions(
            batch=batch,
            dims=self.dims,
            training=training,
            ends=not training,
            loss=LossOptions(kind="mean"),
            freeze=self.freeze if training else (),
        )
        return bind(self._file(data), options)

    def _file(self, data: Path) -> ModelFile:
        if self.made is not None:
            return model_file(self.made().graph)
        light = {instance.name: instance.path for instance in light_models()}
        return load_model(light.get(self.name, data / f"{self.name}.onnx"))


_SEQ = {"seq": 128}

MODELS: tuple[Placed, ...] = (
    Placed(name="light_inception_v1", family="branchy CNN", batch=256),
    Placed(name="light_inception_v2", family="branchy CNN", batch=256),
    Placed(name="light_squeezenet", family="branchy CNN", batch=256),
    Placed(name="nas_cells_0", family="random CNN", batch=256, made=lambda: nas_cells(0)),
    Placed(name="nas_cells_1", family="random CNN", batch=256, made=lambda: nas_cells(1)),
    Placed(name="nas_cells_2", family="random CNN", batch=256, made=lambda: nas_cells(2, blocks=7)),
    Placed(name="random_wiring_0", family="random CNN", batch=256, made=lambda: random_wiring(0)),
    Placed(name="random_wiring_1", family="random CNN", batch=256, made=lambda: random_wiring(1, nodes=20)),
    Placed(name="light_resnet50", family="residual CNN", batch=128),
    Placed(name="resnet_small", family="residual CNN", batch=8192),
    Placed(name="light_densenet121", family="residual CNN", batch=128),
    Placed(name="light_shufflenet", family="residual CNN", batch=512),
    Placed(name="light_bvlc_alexnet", family="chain CNN", batch=256),
    Placed(name="light_vgg19", family="chain CNN", batch=64),
    Placed(name="light_zfnet512", family="chain CNN", batch=128),
    Placed(name="bert_tiny", family="encoder", batch=4096, dims=_SEQ),
    Placed(name="vit_tiny", family="encoder", batch=32768),
    Placed(name="gpt2_tiny", family="decoder", batch=4096, dims=_SEQ),
    Placed(name="llama_tiny", family="decoder", batch=4096, dims=_SEQ),
    Placed(name="llama3_8b_2l", family="decoder", batch=8, dims=_SEQ),
    Placed(name="t5_tiny", family="encoder-decoder", batch=4096, dims={"seq": 128, "dec_seq": 128}),
    Placed(
        name="deep_t5_2", family="encoder-decoder", batch=None, freeze=("m.encoder.block.0.layer.0.layer_norm.weight",)
    ),
    Placed(name="unrolled_lstm", family="RNN", batch=8192, made=unrolled_lstm),
    Placed(name="unrolled_rnn", family="RNN", batch=4096, made=unrolled_rnn),
    Placed(name="bidirectional_rnn", family="RNN", batch=4096, made=bidirectional_rnn),
    Placed(name="mixture", family="MoE", batch=4096, made=mixture),
    Placed(name="gshard_moe_tiny", family="MoE", batch=131072),
    Placed(name="hm_mixtral_tiny", family="MoE", batch=4096, dims=_SEQ),
    Placed(name="dlrm_tiny", family="recommendation", batch=1 << 20),
    Placed(name="recommender", family="recommendation", batch=32768, made=recommender),
    Placed(name="unet_tiny", family="U-Net", batch=2048, freeze=("val_50", "val_53")),
    Placed(name="deep_unet", family="U-Net", batch=2048, freeze=("onnx::Mul_*", "onnx::Add_*")),
)


def features(problem: Problem) -> dict[str, float]:
    """What is seen of a problem before anything is placed.

    ``groups``: how many; ``depth``: those on the longest way; ``width``: most at one distance from the sources;
    ``branching``: mean successors of those that have any; ``forks``: share of these with several; ``parallelism``: all
    work over the longest way, each task on its fastest device; ``comm``: sending all that tasks make once, over all
    work.
    """
    tasks = problem.index.tasks
    level = [0] * problem.num_groups
    for group in range(problem.num_groups):
        level[group] = 1 + max((level[before] for before in tasks.predecessors[group]), default=0)
    after = [len(found) for found in tasks.successors if found]
    work = problem.task_ns.min(axis=1)
    apart = ~np.eye(problem.num_devices, dtype=bool)
    read = np.unique(problem.edge_tensor)
    pace = float(np.median(problem.links.bytes_per_s[apart]))
    sent = float(problem.tensor_bytes[read].sum()) * 1e9 / pace
    sent += float(np.median(problem.links.latency_ns[apart])) * int((problem.tensor_bytes[read] > 0).sum())
    return {
        "groups": problem.num_groups,
        "depth": max(level),
        "width": int(np.bincount(level).max()),
        "branching": round(float(np.mean(after)) if after else 0.0, 3),
        "forks": round(float(np.mean([count > 1 for count in after])) if after else 0.0, 3),
        "parallelism": round(float(work.sum()) / max(critical_path_ns(problem), 1), 3),
        "comm": round(sent / max(float(work.sum()), 1.0), 3),
    }
