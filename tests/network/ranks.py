"""Processes over gloo on two nodes: started once, then asked to do one thing after another."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from tests.network.namespaces import LINK, Namespace

_TIMEOUT_S = 120
"""Longest that one thing may take."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What left each node over the link while something ran."""

    bytes_by_node: tuple[int, int]
    """Payload, without headers of packets."""

    @property
    def both(self) -> int:
        """Both directions together."""
        return sum(self.bytes_by_node)


class Ranks:
    """One process per rank, each inside its node; what they do is told by functions of modules.

    Args:
        nodes: the two nodes.
        pipes: to the process of each rank.
    """

    def __init__(self, nodes: tuple[Namespace, Namespace], pipes: Sequence[Connection]) -> None:
        self._nodes = nodes
        self._pipes = pipes

    def call(self, function: Callable[..., Result], *arguments: Any) -> list[Result]:
        """Call a function in every rank at once; what it returns, in the order of ranks."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers = [self._answer(pipe, function.__name__) for pipe in self._pipes]
        failed = [f"rank {rank} in {function.__name__}: {error}" for rank, (error, _) in enumerate(answers) if error]
        if failed:
            raise RuntimeError("; ".join(failed))
        return [result for _, result in answers]

    @staticmethod
    def _answer(pipe: Connection, name: str) -> tuple[str | None, Any]:
        if not pipe.poll(_TIMEOUT_S):
            return f"no answer in {_TIMEOUT_S} s", None
        try:
            return pipe.recv()
        except EOFError:
            return f"its process ended in {name}", None

    def measured(self, function: Callable[..., Result], *arguments: Any) -> tuple[list[Result], Traffic]:
        """Call a function in every rank at once; what it returns, and what left the nodes meanwhile."""
        before = [node.sent_bytes() for node in self._nodes]
        results = self.call(function, *arguments)
        first, second = (node.sent_bytes() - bytes_ for node, bytes_ in zip(self._nodes, before, strict=True))
        return results, Traffic(bytes_by_node=(first, second))


@contextmanager
def ranks_on(
    nodes: tuple[Namespace, Namespace], per_node: int, numbers: Sequence[int] | None = None
) -> Iterator[Ranks]:
    """Start ``per_node`` processes on each node, joined in one process group; they end with the context.

    Args:
        nodes: the two nodes.
        per_node: processes on each.
        numbers: rank of each process, node by node; None: in order.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tap_planner.apply.launch"])  # torch is imported once
    world = 2 * per_node
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="tap-ranks-") as folder:
        try:
            for place, rank in enumerate(numbers or range(world)):
                ours, theirs = context.Pipe()
                arguments = (nodes[place // per_node], rank, world, Path(folder, "store"), theirs)
                process = context.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            ranks = Ranks(nodes, pipes)
            ranks.call(_join, Path(folder, "store"), world)
            yield ranks
        finally:
            for pipe in pipes:
                pipe.close()
            for process in processes:
                process.join(2.0)
                if process.is_alive():
                    process.kill()
                    process.join()


def _serve(node: Namespace, rank: int, world: int, store: Path, pipe: Connection) -> None:
    """Body of a process: do what comes, until nothing comes any more."""
    node.enter()
    os.environ.update(GLOO_SOCKET_IFNAME=LINK, OMP_NUM_THREADS="1", RANK=str(rank), WORLD_SIZE=str(world))
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = (None, function(*arguments))
        except Exception as error:  # the parent reports it, whatever it is
            answer = (f"{type(error).__name__}: {error}", None)
        pipe.send(answer)


def _join(store: Path, world: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, patience = int(os.environ["RANK"]), timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=world, timeout=patience)
