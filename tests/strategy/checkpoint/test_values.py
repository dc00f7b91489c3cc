"""Values as JSON: they are read back with their types, and wrong JSON raises errors."""

from __future__ import annotations

import collections
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.strategy.checkpoint.values import Encoder, decode


def _no_objects(idx: int) -> Any:
    raise AssertionError(f"object {idx}")


def _round_trip(value: Any) -> Any:
    encoder = Encoder()
    text = json.dumps(encoder.encode(value), allow_nan=False)
    assert not encoder.objects
    return decode(json.loads(text), lambda idx: encoder.tensors[idx].clone(), _no_objects)


_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=20)
    | st.complex_numbers(allow_nan=False)
)
_keys = st.text(max_size=5) | st.sampled_from(["$tuple", "$", "$object"]) | st.integers() | st.booleans()
_values = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(_keys, inner, max_size=4)
        | st.dictionaries(_keys, inner, max_size=4).map(collections.OrderedDict)
        | st.frozensets(st.integers() | st.text(max_size=3), max_size=4)
    ),
    max_leaves=20,
)


def _with_types(value: Any) -> Any:
    """Return a form in which values of different types, and 0.0 and -0.0, differ."""
    if isinstance(value, dict):
        return type(value), [(_with_types(key), _with_types(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [_with_types(item) for item in value]
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


@settings(max_examples=300, deadline=None)
@given(value=_values)
def test_values_are_read_back_with_their_types(value: Any) -> None:
    assert _with_types(_round_trip(value)) == _with_types(value)


@pytest.mark.parametrize(
    "value",
    [
        math.inf,
        -math.inf,
        torch.float8_e4m3fn,
        torch.device("cuda", 3),
        torch.Size([2, 3]),
        Path("/tmp/a"),
        {1, 2},
        np.float64(0.5),
        np.int32(7),
        np.True_,
        collections.Counter("aab"),
        bytearray(b"ab"),
    ],
)
def test_special_values(value: Any) -> None:
    found = _round_trip(value)
    assert found == value and type(found) is type(value)


def test_nan() -> None:
    assert math.isnan(_round_trip([float("nan")])[0])


def test_tensors_and_arrays() -> None:
    value = {
        "tensor": torch.randn(3, 4).bfloat16(),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 2),
        "transposed": torch.randn(3, 4).t(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "array": np.arange(6).reshape(2, 3),
        "rng": ("MT19937", np.arange(624, dtype=np.uint32), 3, 0, 0.0),
    }
    found = _round_trip(value)
    for name in ("tensor", "scalar", "empty", "transposed", "parameter"):
        assert type(found[name]) is type(value[name]) and found[name].dtype == value[name].dtype
        assert torch.equal(found[name], value[name])
    assert found["parameter"].requires_grad
    assert np.array_equal(found["array"], value["array"]) and found["array"].dtype == value["array"].dtype
    assert np.array_equal(found["rng"][1], value["rng"][1]) and found["rng"][1].dtype == np.uint32


def _schedulers() -> dict[str, Any]:
    """Return each of torch's schedulers, made for an optimizer of its own."""
    from torch.optim import lr_scheduler as schedulers

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)

    first = optimizer()
    parts = [schedulers.ConstantLR(first), schedulers.ExponentialLR(first, 0.9)]
    return {
        "LambdaLR": schedulers.LambdaLR(optimizer(), lambda step: 0.9**step),
        "MultiplicativeLR": schedulers.MultiplicativeLR(optimizer(), lambda step: 0.9),
        "StepLR": schedulers.StepLR(optimizer(), 2),
        "MultiStepLR": schedulers.MultiStepLR(optimizer(), [2, 3, 3]),
        "ConstantLR": schedulers.ConstantLR(optimizer()),
        "LinearLR": schedulers.LinearLR(optimizer()),
        "ExponentialLR": schedulers.ExponentialLR(optimizer(), 0.9),
        "SequentialLR": schedulers.SequentialLR(first, parts, [2]),
        "PolynomialLR": schedulers.PolynomialLR(optimizer()),
        "CosineAnnealingLR": schedulers.CosineAnnealingLR(optimizer(), 4),
        "ChainedScheduler": schedulers.ChainedScheduler(parts),
        "ReduceLROnPlateau": schedulers.ReduceLROnPlateau(optimizer()),
        "CyclicLR": schedulers.CyclicLR(optimizer(), 0.01, 0.1),
        "CosineAnnealingWarmRestarts": schedulers.CosineAnnealingWarmRestarts(optimizer(), 3),
        "OneCycleLR": schedulers.OneCycleLR(optimizer(), 0.1, 10),
    }


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step()` before")
def test_states_of_schedulers_need_no_pickle() -> None:
    for name, scheduler in _schedulers().items():
        if name == "ReduceLROnPlateau":
            scheduler.step(torch.tensor(0.5))
        else:
            scheduler.step()
        state = scheduler.state_dict()
        assert _with_types(_round_trip(state)) == _with_types(state), name


class _Settings:
    """An object that JSON cannot carry."""


class _Number(int):
    """Another type than int."""


def test_other_objects_are_collected_with_their_paths() -> None:
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    sparse, swapped = torch.ones(2).to_sparse(), np.arange(3, dtype=">i4")
    value = {"callbacks": {"Mine": [1, _Settings()]}, "f": math.sin, "n": _Number(3), "sparse": sparse}
    value |= {"swapped": swapped, "deep": deep}
    encoder = Encoder()
    encoded = json.loads(json.dumps(encoder.encode(value)))
    paths = [path for path, _ in encoder.objects]
    assert paths[:5] == ["callbacks.Mine[1]", "f", "n", "sparse", "swapped"] and paths[5].startswith("deep[0][0]")
    found = decode(encoded, _no_objects, lambda idx: encoder.objects[idx][1])
    assert found["callbacks"]["Mine"][1] is value["callbacks"]["Mine"][1] and found["f"] is math.sin
    assert type(found["n"]) is _Number and found["deep"] == deep


@pytest.mark.parametrize(
    "encoded",
    [
        {"$call": ["os.system", "true"]},
        {"$dtype": "nn"},
        {"$dtype": ["float32"]},
        {"$device": "nowhere"},
        {"$float": "1"},
        {"$tuple": 3},
        {"$dict": [[1, 2, 3]]},
        {"$dict": [[[], 1]]},
        {"$set": [[]]},
        {"$bytes": "%"},
        {"$tensor": -1},
        {"$tensor": True},
        {"$tensor": 5},
        {"$parameter": 5},
        {"$numpy": "0"},
        {"$object": 0.5},
        {"$complex": [1]},
        {"$counter": 3},
        {"$bytearray": 3},
        {"$dtype": "_inductor"},
        {"$dtype": "quint8"},
        {"$complex": ["a", "b"]},
        {"$path": 3},
    ],
)
def test_wrong_values_raise(encoded: Any) -> None:
    def lookup(idx: int) -> Any:
        return [][idx]

    with pytest.raises(ValueError):
        decode(encoded, lookup, lookup)
