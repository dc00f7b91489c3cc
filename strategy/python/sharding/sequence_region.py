"""The operations of sequence parallelism: gathers and scatters activations, and tells which gradients to sum.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022): between layers that tensor
parallelism shards by features, each rank holds a shard of the tokens. Tokens are the last dim but one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(eq=False)
class Region:
    """Adjacent blocks of one list, between which tokens are sharded.

    In a pipeline, a region may have blocks of several stages of this rank. Each stage shards the tokens before its
    first block and gathers them after its last block.

    lengths: (tokens of the full sequence, tokens of this rank) in the current forward, which may be a recomputed one;
    None before the first forward.
    """

    group_name: str
    lengths: tuple[int, int] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        return self

    @property
    def full_length(self) -> int | None:
        """Return the number of tokens of the full sequence; None before the first forward."""
        return None if self.lengths is None else self.lengths[0]

    @contextlib.contextmanager
    def with_lengths(self, lengths: tuple[int, int] | None) -> Iterator[None]:
        """Inside, use the lengths of the forward that is recomputed; the last forward may have had other lengths."""
        before, self.lengths = self.lengths, lengths
        try:
            yield
        finally:
            self.lengths = before

    def enter(self, x: Tensor) -> Tensor:
        """Return this rank's shard of the tokens; the backward all-gathers the gradient."""
        shard = torch.ops.weft.scatter_to_group(x, x.dim() - 2, self.group_name)
        self.lengths = (x.shape[-2], shard.shape[-2])
        return shard

    def exit(self, x: Tensor) -> Tensor:
        """Return all tokens on every rank, for replicated computation; the backward takes this rank's shard."""
        return torch.ops.weft.gather_from_group(x, x.dim() - 2, self.group_name, dim_size=self.full_length)

    def scatter(self, x: Tensor) -> Tensor:
        """Return this rank's shard of all tokens that `exit` has returned; the backward all-gathers the gradient."""
        return torch.ops.weft.scatter_to_group(x, x.dim() - 2, self.group_name)

    def gather(self, x: Tensor) -> Tensor:
        """Return all tokens, for layers sharded by features; the backward reduce-scatters the gradient."""
        return torch.ops.weft.gather_from_sequence(x, x.dim() - 2, self.group_name, dim_size=self.full_length)


def check_logits_not_recorded() -> None:
    """Raise ValueError if Transformers records router logits, which would be those of this rank's tokens only."""
    if torch.compiler.is_compiling():
        return
    collector: Any = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    if collector is not None and "router_logits" in (collector.get() or {}):
        raise ValueError(
            "sequence_parallel=True: got output_router_logits=True for a model whose routers have a shard of the "
            "tokens on each rank, but its auxiliary loss expects the logits of all tokens; leave one of them out."
        )


@dataclasses.dataclass(frozen=True)
class SequenceRole:
    """The role of a module in a region.

    kind: "block": an entry of the list; "gathers": its input is gathered for the layers inside; "inside": a column
    layer in a module that "gathers"; "scatters": a row layer in such a module, which reduce-scatters its output;
    "fused": an MLP whose operator gathers and reduce-scatters; "whole": computes on all tokens as without sequence
    parallelism, between an all-gather and a scatter; "experts": dispatches this rank's tokens to experts; "sharded":
    computes on this rank's tokens; "dropout": an nn.Dropout on this rank's tokens.
    features: the size of the last dim of the input tokens, by which a "block" and a module that "gathers" or is "whole"
    tell tokens from masks and tables.
    is_first_block, is_last_block: whether a block is the first, or the last, of the region on its pipeline stage.
    has_experts: whether routers in the blocks of the region choose experts for this rank's tokens.
    """

    region: Region
    kind: str
    features: int = 0
    is_first_block: bool = False
    is_last_block: bool = False
    has_experts: bool = False

    @property
    def needs_gradient_sum(self) -> bool:
        """Return whether the module's parameters see only this rank's tokens, so that gradients must be summed."""
        return self.kind in ("block", "sharded")

    def prepare_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a forward's arguments, with the first tensor of tokens scattered or gathered.

        The first block scatters, a module that "gathers" or is "whole" gathers, and for all others the arguments do not
        change. A tensor is gathered only if it has as many tokens as this rank's shard, unlike a mask.
        """
        if self.has_experts:
            check_logits_not_recorded()
        if self.kind == "block" and not self.is_first_block:
            self._check_tokens(args, kwargs)
        gathers = self.kind in ("gathers", "whole")
        if not (self.is_first_block or gathers):
            return args, kwargs
        change = self.region.gather if self.kind == "gathers" else self.region.exit
        if self.is_first_block:
            change = self.region.enter
        if gathers:
            self._check_single_input(args, kwargs)
        for position, value in enumerate(args):
            if self._is_activation(value):
                return (*args[:position], change(value), *args[position + 1 :]), kwargs
        for name, value in kwargs.items():
            if self._is_activation(value):
                return args, {**kwargs, name: change(value)}
        raise TypeError(
            f"sequence_parallel=True: a block, attention or MLP got no floating tensor of tokens with {self.features} "
            "features; leave sequence parallelism out."
        )

    def _check_tokens(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise TypeError for a block without sharded tokens: it may run before the first block, which shards them."""
        values = (*args, *kwargs.values())
        if self.region.lengths is None or not any(self._is_activation(value) for value in values):
            raise TypeError(
                f"sequence_parallel=True: a block got no floating tensor of this rank's tokens with {self.features} "
                "features, which the first block of its list makes; run the blocks in their order, or leave sequence "
                "parallelism out."
            )

    def _check_single_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise TypeError for a second input that requires a gradient: the gradient would be partial on each rank."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.requires_grad]
        if len(tensors) > 1:
            raise TypeError(
                f"sequence_parallel=True: an attention or MLP got {len(tensors)} tensors that require gradients, as in "
                "cross-attention, but only its tokens may require one; leave sequence parallelism out."
            )

    def _is_activation(self, value: object) -> bool:
        if not (isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2):
            return False
        lengths = self.region.lengths
        has_tokens = self.is_first_block or lengths is None or value.shape[-2] == lengths[1]
        return has_tokens and value.shape[-1] == self.features

    def finish_output(self, output: Any) -> Any:
        """Return a forward's result, or that of the first item of a tuple: the last block gathers, "whole" scatters."""
        if not self.is_last_block and self.kind != "whole":
            return output
        change = self.region.scatter if self.kind == "whole" else self.region.exit
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)
