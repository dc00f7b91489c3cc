"""The key-value caches of Transformers on a rank that has only some of a model's layers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from weft.strategy.pipeline.stages import ANY_STAGE

if TYPE_CHECKING:
    from weft.strategy.pipeline.staged_model import StagedModel


class StageCaches:
    """Tells caches of the tokens that layers of other stages have seen.

    Code between layers reads from a cache how many tokens it holds, to compute masks and positions. Transformers keeps
    that number in the cache's entry of each layer, and some classes of entries derive it from the shape of the keys.
    An entry of another rank's layer therefore gets keys and values of one byte for each token.

    staged: the model in stages.
    rank_of: the rank of each stage.
    rank: this rank.
    """

    def __init__(self, staged: StagedModel, rank_of: Sequence[int], rank: int) -> None:
        self._staged = staged
        owner_of: dict[int, int] = {}
        for name, stage in staged.layers.stage_of.items():
            if stage == ANY_STAGE:
                continue
            for module in staged.skeleton.get_submodule(name).modules():
                idx = vars(module).get("layer_idx")
                if type(idx) is int:
                    owner_of[idx] = rank_of[stage]
        self._own = sorted(idx for idx, owner in owner_of.items() if owner == rank)
        self._others = sorted(idx for idx, owner in owner_of.items() if owner != rank)

    @contextlib.contextmanager
    def of_other_stages(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[_Caches]:
        """Enclose a forward with these arguments; afterwards, the caches' entries of other stages are up to date.

        Raises:
            ValueError: a cache has entries that are not keys and values.
        """
        caches = _Caches(self._own, self._others, self._staged.device)
        caches.add((args, kwargs))
        yield caches
        for cache in caches.found:
            caches.extend(cache, _shape_of_tokens(args, kwargs))


class _Caches:
    """The caches of one forward; `own`, `others`: the indices of the entries of this rank's layers, and of others'."""

    def __init__(self, own: Sequence[int], others: Sequence[int], device: torch.device) -> None:
        self._own = own
        self._others = others
        self._device = device
        self.found: list[Any] = []
        self._lengths: list[int] = []  # before the forward

    def add(self, tree: Any, *, is_new: bool = False) -> None:
        """Add the caches in the arguments of a forward; with `is_new`, those in its output that it has made."""
        module: Any = sys.modules.get("transformers.cache_utils")
        for leaf in pytree.tree_leaves(tree) if module is not None else ():
            if isinstance(leaf, module.Cache) and all(leaf is not each for each in self.found):
                _check(leaf)
                self.found.append(leaf)
                self._lengths.append(0 if is_new else self._length(leaf))

    def _length(self, cache: Any) -> int:
        return int(cache.get_seq_length(self._own[0])) if self._own else 0

    def extend(self, cache: Any, tokens: tuple[int, int]) -> None:
        """Add a forward's tokens to the entries of other stages; `tokens`: (samples, tokens) of its input."""
        num_samples, num_tokens = tokens
        if self._own:
            num_tokens = self._length(cache) - self._lengths[self.found.index(cache)]
        zeros = torch.zeros(num_samples, 1, num_tokens, 1, dtype=torch.int8, device=self._device)
        for idx in self._others if num_tokens > 0 else ():
            if idx < len(cache.layers) or getattr(cache, "layer_class_to_replicate", None) is not None:
                cache.update(zeros, zeros, idx)


def _shape_of_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args)
    tokens = next((value for value in given if isinstance(value, Tensor)), None)
    if tokens is None:
        raise ValueError("pipeline: generate called the model without input_ids or inputs_embeds; pass one of them.")
    return tokens.shape[0], tokens.shape[1]


def _check(cache: Any) -> None:
    module = sys.modules["transformers.cache_utils"]
    unsupported = getattr(module, "LinearAttentionCacheLayerMixin", ())
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise ValueError(
            f"pipeline: generate got a {type(cache).__name__} without entries for layers, of an old transformers; "
            "upgrade transformers, or pass use_cache=False."
        )
    other = next((each for each in layers if isinstance(each, unsupported)), None)
    if other is not None:
        raise ValueError(
            f"pipeline: generate got a cache with a {type(other).__name__}, and stages support keys and values only; "
            "generate with tensor parallelism, or pass use_cache=False."
        )
