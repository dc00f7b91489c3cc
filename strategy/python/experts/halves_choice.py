"""The choice whether experts compute the tokens of a rank in two halves (`weft.strategy.experts.halves`).

WEFT_OVERLAP decides, as for the operators of sequence parallelism. In the mode auto, the first forward with gradients
of each kind of layer measures, on CUDA: it computes the layer, forward and backward, several times in both ways, and
the ranks choose halves if these take at most 95 % of the time on every rank. The choice then holds, since a
recomputation must do what its forward has done. A CPU is not measured: its all-to-all makes progress only while a rank
waits for it, so that nothing overlaps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from weft import overlap
from weft.nn.shard import group_size_and_rank, process_group

MEASURED_DEVICES = {"cuda"}
_MAX_RATIO = 0.95
_NUM_PAIRS = 7  # after a warm-up
_CHOICES: dict[Hashable, bool] = {}


def computes_in_halves(kind: Hashable, group_name: str, tokens: Tensor, run: Callable[[bool], Any]) -> bool:
    """Return whether a layer computes its tokens in two halves; may communicate over the group.

    `kind`: the key of a choice, the same on all ranks; `run` computes forward and backward, in halves or not.
    """
    mode = overlap.mode()
    is_traced = isinstance(tokens, FakeTensor) or torch.compiler.is_compiling()
    if mode == "never" or is_traced or group_size_and_rank(group_name)[0] == 1:
        return False
    if mode == "always":
        return True
    if tokens.device.type not in MEASURED_DEVICES or torch.are_deterministic_algorithms_enabled():
        return False
    is_recomputation = torch._C._current_graph_task_id() != -1
    if kind not in _CHOICES and torch.is_grad_enabled() and not is_recomputation:
        ratio = torch.tensor(_ratio(run, tokens.device), device=tokens.device)
        dist.all_reduce(ratio, dist.ReduceOp.MAX, group=process_group(group_name))
        _CHOICES[kind] = bool(ratio <= _MAX_RATIO)
    return _CHOICES.get(kind, False)


def discard_choices() -> None:
    """Let the next forwards measure again; all ranks must call it."""
    _CHOICES.clear()


def _ratio(run: Callable[[bool], Any], device: torch.device) -> float:
    """Return the median time in halves, divided by that without."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    # Neither an activation checkpoint nor an offload may record what the measurement saves.
    not_recorded = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with _disable_current_modes(), not_recorded:
        for repeat in range(_NUM_PAIRS + 1):
            for in_halves in (False, True) if repeat % 2 else (True, False):
                _synchronize(device)
                begin = time.perf_counter()
                run(in_halves)
                _synchronize(device)
                if repeat > 0:
                    seconds[in_halves].append(time.perf_counter() - begin)
    return statistics.median(seconds[True]) / statistics.median(seconds[False])


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
