"""How batches are split into micro-batches."""

from __future__ import annotations

import collections
import dataclasses
import re

import pytest
import torch
from torch import Tensor

from weft.strategy.pipeline.micro_batches import batch_size_of, signature, split_batch

X, Y = torch.arange(10.0).reshape(5, 2), torch.arange(5)
Pair = collections.namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass(frozen=True)
class Sample:
    x: Tensor
    name: str


def test_batch_tensors_are_split_evenly():
    micro_batches = split_batch((X, Y), 3)
    assert [len(x) for x, _ in micro_batches] == [2, 2, 1]
    assert torch.equal(torch.cat([x for x, _ in micro_batches]), X) and torch.equal(
        torch.cat([y for _, y in micro_batches]), Y
    )
    assert micro_batches[0][0].data_ptr() == X.data_ptr()  # a view


def test_collections_keep_types_and_other_values():
    weights = torch.ones(3)
    batch = {"pair": Pair(X, Y), "list": [X, "text", None], "weights": weights, "scalar": torch.tensor(1.0), "n": 7}
    first, second = split_batch(batch, 2)
    assert isinstance(first["pair"], Pair) and len(first["pair"].x) == 3 and len(second["list"][0]) == 2
    assert second["weights"] is weights and second["scalar"] is batch["scalar"] and second["n"] == 7
    assert first["list"][1:] == ["text", None]
    sample = split_batch(Sample(X, "a"), 5)[4]
    assert isinstance(sample, Sample) and torch.equal(sample.x, X[4:]) and sample.name == "a"
    default = split_batch(collections.defaultdict(list, x=X), 2)[0]
    assert isinstance(default, collections.defaultdict) and default["missing"] == []
    ordered = split_batch(collections.OrderedDict(x=X, y=Y), 2)[0]
    assert isinstance(ordered, collections.OrderedDict) and list(ordered) == ["x", "y"]


def test_hugging_face_batches_are_split():
    encoding = pytest.importorskip("transformers").BatchEncoding
    micro_batches = split_batch(encoding({"input_ids": X, "labels": Y}), 5)
    assert (
        len(micro_batches) == 5
        and isinstance(micro_batches[0], encoding)
        and torch.equal(micro_batches[4]["labels"], Y[4:])
    )


def test_signatures_ignore_tensor_values():
    one, other = ({"x": torch.randn(2, 3), "n": 1} for _ in range(2))
    assert signature(one) == signature(other) and len({signature(one), signature(other)}) == 1
    for different in ({"x": torch.randn(2, 4), "n": 1}, {"x": torch.randn(2, 3), "n": 2}, {"x": one["x"].double()}):
        assert signature(one) != signature(different)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ("text", "has no tensor with a dim to split"),
        ({"a": torch.tensor(1.0)}, "has no tensor with a dim to split"),
        ((X, torch.zeros(4)), "have the sizes [4, 5] along dim 0, equally often"),
        ((X[:2], Y[:2]), "got 3 micro-batches for a batch of 2 samples; pass num_micro_batches of at most 2"),
    ],
)
def test_unsplittable_batches_raise(batch, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        split_batch(batch, 3)


def test_batch_size_is_the_most_common_size():
    assert batch_size_of((torch.zeros(3), X, Y)) == 5 and batch_size_of([X]) == 5
