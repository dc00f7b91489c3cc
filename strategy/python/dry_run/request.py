"""The arguments of a dry run, and what they say about optimizer and precision."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import torch
from torch import nn

from weft.strategy._plan import SCHEDULES
from weft.strategy.comparison import subject
from weft.strategy.context.attention import Attention
from weft.strategy.modules.activation_checkpointing import split_count
from weft.strategy.plan import Plan, Rules
from weft.strategy.planning.layout import AUTO, MeshSizes, Sizes

PRECISIONS = {
    "32-true": torch.float32,
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
}
_PIPELINE_OPTIONS = ("pipeline_cuts", "pipeline_schedule", "num_micro_batches", "pipeline_module")
CHECKPOINTING = ("none", "selective", "full")
# The first makes the optimizer's states; in two, collectives may not have used all halves of their staging buffers.
_NUM_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Request:
    """A training whose memory a dry run predicts; `estimate_module` describes the attributes.

    Raises:
        ValueError: an attribute is invalid for every model.
    """

    module: Any
    layout: str = "tp1"
    batch: Any = None
    plan: Rules | Plan = "auto"
    loss_fn: Any = None
    precision: str = "32-true"
    optimizer: Any = None
    optimizer_state: str = "float32"
    master_weights: str = "float32"
    fused_optimizers: bool = True
    optimizer_in_backward: bool | str = False
    activation_checkpointing: str = "none"
    sequence_parallel: bool = False
    context_attention: Attention = "ring"
    zero_stage: int = 3
    pipeline_cuts: str | Sequence[str] | None = None
    pipeline_schedule: str | None = None
    num_micro_batches: int | None = None
    pipeline_module: str | None = None
    rank: int | None = None
    num_steps: int = _NUM_STEPS
    accumulate_grad_batches: int = 1
    num_rows: int | None = None  # of the batch; None: as given
    is_traced: bool = False  # whether the prediction has a digest

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(f"estimate: precision is {self.precision!r}; pass one of {', '.join(PRECISIONS)}.")
        if split_count(self.activation_checkpointing)[0] not in CHECKPOINTING:
            raise ValueError(
                f"estimate: activation_checkpointing is {self.activation_checkpointing!r}; pass one of "
                f"{', '.join(CHECKPOINTING)}."
            )
        if self.optimizer_in_backward not in (False, True, "rows"):
            raise ValueError(
                f"estimate: optimizer_in_backward is {self.optimizer_in_backward!r}; pass False, True or 'rows'."
            )
        if self.accumulate_grad_batches < 1:
            raise ValueError(
                f"estimate: accumulate_grad_batches is {self.accumulate_grad_batches!r}; pass a number from 1."
            )
        if self.accumulate_grad_batches > 1 and (self.has_stages or self.optimizer_in_backward == "rows"):
            raise ValueError(
                f"estimate: got accumulate_grad_batches={self.accumulate_grad_batches} with a pipeline or steps by "
                "rows, which accumulate nothing over batches; pass 1."
            )
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"estimate: zero_stage is {self.zero_stage!r}; pass 0, 1, 2 or 3.")
        if self.master_weights != "float32" and not self.precision.startswith("bf16"):
            raise ValueError(
                f"estimate: master_weights is {self.master_weights!r} with precision {self.precision!r}, which does "
                "not compute with bfloat16 weights; pass precision='bf16-mixed' or 'bf16-true'."
            )
        if self.context_attention not in get_args(Attention):
            raise ValueError(
                f"estimate: context_attention is {self.context_attention!r}; pass 'ring', 'ulysses' or 'ring_ulysses'."
            )
        self._check_pipeline()
        if self.sizes.context_parallel > 1 and self.sequence_parallel:
            raise ValueError(
                f"estimate: got sequence_parallel=True for the layout '{self.layout}' with context-parallel ranks, "
                "which are not supported together; leave one of them out."
            )
        if self.rank is not None and not 0 <= self.rank < self.num_ranks:
            raise ValueError(
                f"estimate: rank is {self.rank} for the {self.num_ranks} ranks of the layout '{self.layout}'; pass a "
                "rank of the layout."
            )
        Plan(self.plan)

    def _check_pipeline(self) -> None:
        given = [name for name in _PIPELINE_OPTIONS if getattr(self, name) is not None]
        if not self.has_stages:
            if given:
                raise ValueError(
                    f"estimate: got {given[0]} for the layout '{self.layout}', which has no pipeline; add 'pp' to the "
                    "layout, or leave it out."
                )
            return
        if self.pipeline_schedule not in (None, *SCHEDULES):
            raise ValueError(
                f"estimate: pipeline_schedule is {self.pipeline_schedule!r}; pass one of {', '.join(SCHEDULES)}."
            )
        cuts = self.cuts
        if not (cuts is None or (isinstance(cuts, (list, tuple)) and all(cuts))):
            raise ValueError(f"estimate: pipeline_cuts is {self.pipeline_cuts!r}; pass 'auto', or names of modules.")
        if self.optimizer_in_backward == "rows":
            raise ValueError(
                f"estimate: optimizer_in_backward is 'rows' with the pipeline of the layout '{self.layout}', whose "
                "stages accumulate full gradients over micro-batches; give it without 'rows'."
            )

    @property
    def sizes(self) -> MeshSizes:
        """Return the number of ranks on each axis.

        Raises:
            ValueError: an axis is "auto", or the expert-parallel ranks do not divide the data-parallel ones.
        """
        sizes = Sizes.parse(self.layout)
        counts: tuple[Any, ...] = (
            sizes.pipeline_parallel,
            sizes.data_replicate,
            sizes.data_parallel,
            sizes.context_parallel,
            sizes.tensor_parallel,
        )
        if AUTO in counts:
            raise ValueError(
                f"estimate: the layout '{self.layout}' leaves a size to the number of devices, which an estimate does "
                "not have; give numbers."
            )
        num_ranks = math.prod(counts)
        try:
            return sizes.resolve(num_ranks, num_ranks)
        except ValueError as error:
            raise ValueError(f"estimate: {error}") from None

    @property
    def num_ranks(self) -> int:
        return self.sizes.num_ranks

    @property
    def ranks(self) -> Sequence[int]:
        """Return the ranks to play: the one that was asked for, or the first rank of each position in the pipeline."""
        if self.rank is not None:
            return (self.rank,)
        return range(0, self.num_ranks, self.num_ranks // self.sizes.pipeline_parallel)

    @property
    def has_stages(self) -> bool:
        return self.sizes.pipeline_parallel > 1

    @property
    def schedule(self) -> str:
        """Return the name of the pipeline's schedule."""
        return self.pipeline_schedule or "1f1b"

    @property
    def cuts(self) -> Sequence[str] | None:
        """Return the names of the first module of each stage but the first; None: weft chooses them."""
        given = self.pipeline_cuts
        if given in (None, AUTO):
            return None
        return [name.strip() for name in given.split(",")] if isinstance(given, str) else given

    @property
    def num_shards(self) -> int:
        """Return the number of ranks over which the parameters of a stage are sharded."""
        return self.sizes.tensor_parallel * (self.sizes.sharding_ranks if self.shards_parameters else 1)

    @property
    def shards_parameters(self) -> bool:
        """Return whether FSDP2 shards parameters."""
        return self.zero_stage >= 2 and self.sizes.sharding_ranks > 1

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of parameters and of floating inputs."""
        return PRECISIONS[self.precision] if self.precision.endswith("-true") else torch.float32

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Inside, forwards compute in the precision, as under Lightning's plugins."""
        if self.precision.endswith("-mixed"):
            with torch.autocast("cpu", PRECISIONS[self.precision]):
                yield
            return
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of a sharded model: the one given, else that of `configure_optimizers`, else AdamW.

        Raises:
            ValueError: it gives no optimizer, or several.
        """
        given = self.optimizer
        configure: Any = getattr(model, "configure_optimizers", None)
        if given is None and subject.is_lightning_module(model) and callable(configure):
            return _single_optimizer(configure(), f"{type(model).__name__}.configure_optimizers")
        if isinstance(given, str) and ":" not in given:
            cls = getattr(torch.optim, given, None)
            if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
                raise ValueError(
                    f"estimate: the optimizer is {given!r}; pass the name of a class of torch.optim, or the "
                    "'package.module:name' of a function (module) -> optimizer."
                )
            given = cls
        make = torch.optim.AdamW if given is None else subject.resolve(given)
        if isinstance(make, type):
            return _single_optimizer(make([p for p in model.parameters() if p.requires_grad]), make.__name__)
        return _single_optimizer(make(model), getattr(make, "__name__", "the optimizer's function"))


def _single_optimizer(configured: Any, name: str) -> torch.optim.Optimizer:
    found = configured
    if isinstance(found, dict):
        found = found.get("optimizer")
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], (list, tuple)):
        found = found[0]  # optimizers and their schedulers
    if isinstance(found, (list, tuple)) and len(found) == 1:
        found = found[0].get("optimizer") if isinstance(found[0], dict) else found[0]
    if not isinstance(found, torch.optim.Optimizer):
        raise ValueError(
            f"estimate: {name} returns a {type(configured).__name__} without exactly one optimizer, and a dry run "
            "trains with one; pass optimizer=... (--optimizer)."
        )
    return found
