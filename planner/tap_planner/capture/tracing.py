"""Running the exporter of torch, without its talk."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tap_planner.capture.arguments import Arguments
from tap_planner.capture.failures import explained


def trace(module: torch.nn.Module, arguments: Arguments) -> torch.onnx.ONNXProgram:
    """Trace a module and translate its operators.

    The exporter's own optimisation stays off: it merges parameters that are equal today, folds them, and fails on the
    meta device. Planning folds by itself, without touching a parameter.

    Raises:
        CaptureError: what the exporter could not do, in one line.
    """
    try:
        with torch.no_grad(), _quiet():
            program = torch.onnx.export(
                module,
                arguments.args,
                kwargs=dict(arguments.kwargs),
                input_names=arguments.names,
                dynamic_shapes=arguments.dynamic_shapes,
                dynamo=True,
                optimize=False,
                verbose=False,
            )
    except Exception as error:
        raise explained(error, module) from error
    assert program is not None
    return program


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns of training mode, of optional packages and of outputs that are None: none is for the user."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
