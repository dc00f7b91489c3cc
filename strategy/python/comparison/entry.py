"""`compare`: checks its arguments and starts the ranks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft.strategy.comparison.launch import launch
from weft.strategy.comparison.result import Comparison
from weft.strategy.comparison.subject import LossFunction
from weft.strategy.comparison.training import TOLERANCES, train_both
from weft.strategy.plan import Plan, Rules
from weft.strategy.planning.layout import AUTO, Sizes

MODES = ("train", "eval")


@dataclasses.dataclass(frozen=True)
class Request:
    """The arguments of `compare`, checked as far as possible without the model.

    Raises:
        ValueError: an argument is invalid for every model.
    """

    module: Any
    batch: Any
    layout: str
    plan: Rules | Plan
    steps: int
    learning_rate: float
    dtype: torch.dtype
    loss_fn: LossFunction | str | None
    tolerance: float | None
    zero_stage: int
    sequence_parallel: bool
    first_layers: int | None
    mode: str
    seed: int

    def __post_init__(self) -> None:
        sizes = Sizes.parse(self.layout)
        if sizes.pipeline_parallel > 1:
            raise ValueError(
                f"compare: the layout '{self.layout}' has a pipeline, which compare does not support; leave out 'pp' "
                "and compare the other axes."
            )
        if sizes.context_parallel > 1 and self.sequence_parallel:
            raise ValueError(
                f"compare: got sequence_parallel=True for the layout '{self.layout}' with context-parallel ranks, "
                "which are not supported together; leave one of them out."
            )
        if self.dtype not in TOLERANCES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in TOLERANCES)
            raise ValueError(f"compare: dtype is {self.dtype!r}; pass one of torch's {names}.")
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"compare: zero_stage is {self.zero_stage!r}; pass 0, 1, 2 or 3.")
        if self.mode not in MODES:
            raise ValueError(f"compare: mode is {self.mode!r}; pass 'train' or 'eval'.")
        for name, count in (("steps", self.steps), ("first_layers", self.first_layers)):
            if count is not None and count < 1:
                raise ValueError(f"compare: {name} is {count!r}; pass a number from 1 on.")
        Plan(self.plan)

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of the layout.

        Raises:
            ValueError: an axis is "auto", or the expert-parallel ranks do not divide the data-parallel ones.
        """
        sizes = Sizes.parse(self.layout)
        counts: tuple[Any, ...] = (
            sizes.data_replicate,
            sizes.data_parallel,
            sizes.context_parallel,
            sizes.tensor_parallel,
        )
        if AUTO in counts:
            raise ValueError(
                f"compare: the layout '{self.layout}' leaves a size to the number of ranks, and there is no process "
                "group; write a number for each axis, as in 'dp2,tp2'."
            )
        num_ranks: int = math.prod(counts)
        sizes.resolve(num_ranks, num_ranks)
        return num_ranks


def compare(
    module: nn.Module | Any,
    batch: Any = None,
    layout: str = "tp2",
    *,
    plan: Rules | Plan = "auto",
    steps: int = 3,
    learning_rate: float = 0.01,
    dtype: torch.dtype = torch.float64,
    loss_fn: LossFunction | str | None = None,
    tolerance: float | None = None,
    zero_stage: int = 3,
    sequence_parallel: bool = False,
    first_layers: int | None = None,
    mode: str = "train",
    seed: int = 0,
    timeout: float = 600.0,
) -> Comparison:
    """Train a few steps of a model sharded and unsharded, and return where they differ.

    Both sides have the same weights, batch and random numbers, and step by SGD. Every rank also holds the
    unsharded model, so the model must fit into a rank's memory twice: build a small configuration, or pass
    `first_layers`.

    If the default process group is initialised, `compare` is collective over it. Otherwise `compare` starts the
    layout's ranks itself, as CPU processes of this host: `module`, `batch` and `loss_fn` are pickled, and a script must
    call `compare` under `if __name__ == "__main__"`.

    Args:
        module: an nn.Module or a LightningModule, which is not changed; a callable without arguments that builds one;
            or the "package.module:name" of either.
        batch: the batch of all data-parallel ranks together, a callable that makes it, or the "package.module:name" of
            either. None: the model's `example_input_array`, or random tokens for a language model of Hugging Face; the
            default loss is then that of the forward, not of `training_step`.
        layout: the sizes of the axes, as in the Lightning strategies: "tp2", "dp2,tp2", "rep2,dp2,tp2"; no pipeline.
        plan: as in `weft.parallelize`.
        steps: the number of training steps.
        learning_rate: the learning rate of SGD.
        dtype: of all floating parameters, buffers and inputs: float64, float32, bfloat16 or float16.
        loss_fn: a function `(module, batch) -> loss` that returns a tensor `[]`, or its "package.module:name". None:
            the loss of a LightningModule is that of `training_step(batch, 0)`, without logging. Other modules are
            called with the batch: a tuple or list gives positional arguments, a dict keyword arguments. Their loss is
            the output's `loss` (attribute or key), else its first floating tensor if that has one element, else a
            fixed random projection of that tensor.
        tolerance: the largest relative difference that counts as agreement. None: 1e-9 for float64, 1e-4 for float32,
            5e-2 for half types, by the coarsest dtype that the unsharded forward computes in.
        zero_stage: the ZeRO stage over the data-parallel ranks, 0 to 3; see `weft.strategy.data_parallel`.
        sequence_parallel: as in `Plan`.
        first_layers: keep this many blocks of each list of repeated blocks. If `module` is a callable, the other blocks
            are never materialized.
        mode: "train", or "eval" (without dropout). If the two sides differ in train mode and the unsharded forward
            draws from torch's CPU generator, the result also has a comparison in eval mode.
        seed: of the random numbers of a callable `module` and of the steps.
        timeout: seconds for the entire comparison, if it starts ranks.

    Returns:
        The comparison, the same on every rank. An error of the sharded model is a result and is not raised.

    Raises:
        ValueError: arguments do not fit together, or the plan does not fit the model.
        TimeoutError: the ranks that `compare` started did not end in time.
        RuntimeError: a rank that `compare` started was killed, or raised an error, such as one of the unsharded model.
            In an initialised process group, an error of the unsharded model is raised unchanged.
    """
    request = Request(
        module,
        batch,
        layout,
        plan,
        steps,
        learning_rate,
        dtype,
        loss_fn,
        tolerance,
        zero_stage,
        sequence_parallel,
        first_layers,
        mode,
        seed,
    )
    if dist.is_available() and dist.is_initialized():
        return train_both(request)
    result: Comparison = launch(train_both, request, request.num_ranks, timeout)
    return result
