"""Random calls of the embedding and the losses whose vocabulary is sharded over the group."""

from __future__ import annotations

from abc import abstractmethod
from types import SimpleNamespace
from typing import ClassVar

import torch
from torch import Tensor

from ops.fuzz import rules
from ops.fuzz.draws import REPLICATED, Draw, Placement, RankInGroup, Sharded, Value
from ops.fuzz.operator import EdgeCaseOptions, Operator, Options, Values
from ops.fuzz.rules import ExpectedError, MustMatchAcrossRanks, Undetectable, Violations

# First entries of the full vocabulary. test_fuzz.py tests a valid one beyond int32.
STARTS = (-(2**63), -50, -8, -1, 0, 3, 1000, 2**31 - 20, 2**32, 2**62, 2**63 - 100)
VOCAB_SIZES = (-1, 0, 1, 3, 8, 2**63 - 1, None)


def _ids(draw: Draw, shape: tuple[int, ...], vocab: int, is_checked: bool) -> Tensor:
    """Return ids of the vocabulary and, if the operator does not check ids, some outside of the vocabulary."""
    low, high = (0, vocab) if is_checked or draw.chance(0.7) else (-2, vocab + 3)
    dtype = draw.random.choice((torch.int64, torch.int32))
    return torch.randint(low, max(high, low + 1), shape, generator=draw.generator).to(dtype)


def _shard_start(first: int, num_entries: int, rank_in_group: RankInGroup) -> int:
    return first + rank_in_group.shard_range(num_entries)[0]


def _are_out_of_range(ids: Tensor, vocab_size: int | None) -> bool:
    if vocab_size is None or ids.numel() == 0 or ids.is_meta or ids.dtype not in (torch.int64, torch.int32):
        return False
    return bool(ids.min() < 0) or int(ids.max()) >= vocab_size


def _start_violations(given: SimpleNamespace) -> Violations:
    if given.vocab_start < 0:
        yield ExpectedError(ValueError, f"got vocab_start {given.vocab_start}")


class VocabParallelEmbedding(Operator):
    name = "vocab_parallel_embedding"
    edge_case_options: ClassVar[EdgeCaseOptions] = {"vocab_start": STARTS, "vocab_size": VOCAB_SIZES}

    def draw(self, draw: Draw) -> tuple[Values, Options]:
        vocab, width = max(1, draw.size() + draw.size()), draw.size()
        is_checked = draw.chance(0.5)
        ids = _ids(draw, draw.sizes(0, 3), vocab, is_checked)
        options: Options = {"vocab_start": 0, "vocab_size": vocab if is_checked else None}
        return {"input": ids, "weight": draw.values((vocab, width), draw.dtype())}, options

    def placements(self, values: Values, options: Options) -> dict[str, Placement]:
        return {"weight": Sharded(0)}

    def options_of(self, values: Values, options: Options, rank_in_group: RankInGroup) -> Options:
        rows = values["weight"].size(0) if values["weight"].dim() else 0
        return options | {"vocab_start": _shard_start(options["vocab_start"], rows, rank_in_group)}

    def violations(self, given: SimpleNamespace, rank_in_group: RankInGroup) -> Violations:
        yield from rules.floating(given.weight, "weight")
        yield from rules.integers(given.input, "input")
        yield from rules.matrix(given.weight, "weight", None)
        yield from _start_violations(given)
        yield from rules.one_device(given.weight, given.input, "input")
        if _are_out_of_range(given.input, given.vocab_size):
            yield ExpectedError(IndexError, "got token ids from ", reads_values=True)

    def results(self, values: Values, options: Options) -> tuple[Placement, ...]:
        return (REPLICATED,)

    def reference(
        self, values: SimpleNamespace, options: SimpleNamespace, ranks_in_group: list[RankInGroup]
    ) -> tuple[Value, ...]:
        rows = values.input.long() - options.vocab_start
        is_in_vocab = (rows >= 0) & (rows < values.weight.size(0))
        # An additional row of zeros, for ids that no rank has.
        table = torch.cat([values.weight, values.weight.new_zeros(1, values.weight.size(1))])
        return (table[rows.masked_fill(~is_in_vocab, values.weight.size(0))],)

    def result_dtype(self, values: Values) -> torch.dtype:
        return values["weight"].dtype


class Loss(Operator):
    """Common base of both losses: the tensor named by `tokens` has a row for each token, and `target` an id."""

    edge_case_options: ClassVar[EdgeCaseOptions] = {
        "vocab_start": STARTS,
        "vocab_size": VOCAB_SIZES,
        "label_smoothing": (-0.1, 0.0, 0.5, 1.0, 1.01, float("nan"), float("inf")),
        "reduction": ("none", "mean", "sum", "average", ""),
        "ignore_index": (-100, -1, 0, 2),
    }
    tokens: str  # the tensor with a row for each token

    @abstractmethod
    def classes(self, values: Values) -> int:
        """Return the number of classes of this rank's shard, or of the full tensor."""

    def targets_and_options(self, draw: Draw, shape: tuple[int, ...], vocab: int) -> tuple[Tensor, Options]:
        is_size_given = vocab % draw.num_ranks != 0 or draw.chance(0.6)
        target = _ids(draw, shape, vocab, is_size_given)
        ignore_index = draw.random.choice((-100, -100, -7, 0, 1))
        if draw.chance(0.5):
            is_ignored = torch.rand(shape, generator=draw.generator) < draw.random.choice((0.2, 1.0))
            target = target.masked_fill(is_ignored, ignore_index)
        options: Options = {
            "vocab_start": 0,
            "vocab_size": vocab if is_size_given else None,
            "ignore_index": ignore_index,
            "label_smoothing": draw.random.choice((0.0, 0.0, 0.1, 0.7, 1.0)),
            "reduction": draw.random.choice(("none", "mean", "sum")),
        }
        return target, options

    def options_of(self, values: Values, options: Options, rank_in_group: RankInGroup) -> Options:
        start = _shard_start(options["vocab_start"], self.classes(values), rank_in_group)
        return options | {"vocab_start": start}

    def loss_violations(
        self, given: SimpleNamespace, rows: Tensor, num_classes: int, rank_in_group: RankInGroup
    ) -> Violations:
        """Yield the errors of a loss; `rows` has a row for each token, and num_classes is this rank's."""
        target, options = given.target, given
        yield from rules.floating(rows, self.tokens)
        yield from rules.integers(target, "target")
        yield from rules.one_device(rows, target, "target")
        if rows.dim() == 0 or target.shape != rows.shape[:-1]:
            yield ExpectedError(ValueError, f"got target of shape {list(target.shape)} with {self.tokens} of shape ")
        yield from _start_violations(given)
        if not 0 <= options.label_smoothing <= 1:
            yield ExpectedError(ValueError, "got label_smoothing ")
        if options.reduction not in ("none", "mean", "sum"):
            yield ExpectedError(ValueError, f"got reduction '{options.reduction}'")
        if options.vocab_size is None:
            yield MustMatchAcrossRanks("classes", num_classes)
        else:
            if given.vocab_start + num_classes > options.vocab_size:
                yield ExpectedError(ValueError, f"got {num_classes} classes from vocab_start {given.vocab_start} on")
            elif (
                rank_in_group.rank == rank_in_group.num_ranks - 1
                and given.vocab_start + num_classes < options.vocab_size
            ):
                yield Undetectable("more classes than the ranks have")
            counted = target if target.is_meta else target[target != options.ignore_index]
            if _are_out_of_range(counted, options.vocab_size):
                yield ExpectedError(IndexError, "got targets from ", reads_values=True)

    def results(self, values: Values, options: Options) -> tuple[Placement, ...]:
        return (REPLICATED,)

    def loss(self, logits: Tensor, target: Tensor, options: SimpleNamespace) -> Tensor:
        """Compute the loss by its definition, so that targets outside of the vocabulary have a logit of 0."""
        target = target.long()
        row = target - options.vocab_start
        is_in_vocab = (row >= 0) & (row < logits.size(-1))
        padded = torch.cat([logits, logits.new_zeros(*logits.shape[:-1], 1)], -1)
        chosen = padded.gather(-1, row.masked_fill(~is_in_vocab, logits.size(-1)).unsqueeze(-1)).squeeze(-1)
        normalizer, smoothing = logits.logsumexp(-1), options.label_smoothing
        num_classes = options.vocab_size if options.vocab_size is not None else logits.size(-1)
        losses = (1 - smoothing) * (normalizer - chosen)
        if smoothing:
            losses = losses + smoothing * (normalizer - logits.sum(-1) / num_classes)
        is_counted = target != options.ignore_index
        losses = torch.where(is_counted, losses, 0.0)
        if options.reduction == "none":
            return losses
        return losses.sum() if options.reduction == "sum" else losses.sum() / is_counted.sum()

    def result_dtype(self, values: Values) -> torch.dtype:
        is_double = values[self.tokens].dtype == torch.float64
        return torch.float64 if is_double else torch.float32


class VocabParallelCrossEntropy(Loss):
    name = "vocab_parallel_cross_entropy"
    tokens = "logits"

    def classes(self, values: Values) -> int:
        return values["logits"].size(-1) if values["logits"].dim() else 0

    def draw(self, draw: Draw) -> tuple[Values, Options]:
        shape, vocab = draw.sizes(0, 3), max(1, draw.size() + draw.size())
        target, options = self.targets_and_options(draw, shape, vocab)
        return {"logits": draw.values((*shape, vocab), draw.dtype(), 3.0), "target": target}, options

    def placements(self, values: Values, options: Options) -> dict[str, Placement]:
        return {"logits": Sharded(-1)}

    def violations(self, given: SimpleNamespace, rank_in_group: RankInGroup) -> Violations:
        num_classes = given.logits.size(-1) if given.logits.dim() else 0
        yield from self.loss_violations(given, given.logits, num_classes, rank_in_group)

    def reference(
        self, values: SimpleNamespace, options: SimpleNamespace, ranks_in_group: list[RankInGroup]
    ) -> tuple[Value, ...]:
        return (self.loss(values.logits, values.target, options),)


class VocabParallelLinearCrossEntropy(Loss):
    name = "vocab_parallel_linear_cross_entropy"
    tokens = "x"
    # The logits are computed in the dtype of x.
    tolerances: ClassVar[dict[torch.dtype, float]] = Loss.tolerances | {torch.bfloat16: 0.1, torch.float16: 1e-2}

    def classes(self, values: Values) -> int:
        return values["weight"].size(0) if values["weight"].dim() else 0

    def draw(self, draw: Draw) -> tuple[Values, Options]:
        shape, vocab, width = draw.sizes(0, 3), max(1, draw.size() + draw.size()), draw.size()
        target, options = self.targets_and_options(draw, shape, vocab)
        dtype = draw.dtype()
        x, weight = draw.values((*shape, width), dtype), draw.values((vocab, width), dtype)
        return {"x": x, "weight": weight, "target": target}, options

    def placements(self, values: Values, options: Options) -> dict[str, Placement]:
        return {"weight": Sharded(0)}

    def violations(self, given: SimpleNamespace, rank_in_group: RankInGroup) -> Violations:
        yield from rules.linear(given.x, given.weight)
        num_classes = given.weight.size(0) if given.weight.dim() else 0
        yield from self.loss_violations(given, given.x, num_classes, rank_in_group)

    def reference(
        self, values: SimpleNamespace, options: SimpleNamespace, ranks_in_group: list[RankInGroup]
    ) -> tuple[Value, ...]:
        return (self.loss(values.x @ values.weight.t(), values.target, options),)
