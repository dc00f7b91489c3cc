"""Encodes Python values as JSON, so that reading a checkpoint runs no code of it, unlike pickle.

JSON has numbers, texts, None, lists, and dicts with texts as keys. Other values are a dict with one key that begins
with "$" and names the kind:

    (1, 2)                 {"$tuple": [1, 2]}
    {1: "a"}               {"$dict": [[1, "a"]]}         also a dict that has a key that begins with "$"
    float("nan")           {"$float": "nan"}
    b"..."                 {"$bytes": base64}
    torch.float32          {"$dtype": "float32"}
    a tensor               {"$tensor": 3}                the index in the tensors that are stored beside
    any other object       {"$object": 0}                the index in the objects that are pickled beside

A numpy array is stored as a tensor, a numpy scalar as an array without dims.
"""

from __future__ import annotations

import base64
import collections
import math
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.strategy.tensor_files import DTYPES

_SEQUENCES: dict[type, str] = {tuple: "$tuple", set: "$set", frozenset: "$frozenset", torch.Size: "$size"}
_MAPPINGS: dict[type, str] = {
    dict: "$dict",
    collections.OrderedDict: "$ordered_dict",
    collections.Counter: "$counter",  # in the state of MultiStepLR
}
_MAX_DEPTH = 100
# The dtypes of tensors in a checkpoint, by name. Those that safetensors lacks are stored as bytes.
DTYPES_BY_NAME: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *(str(dtype).removeprefix("torch.") for dtype in DTYPES),
        *("complex128", "complex32", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if isinstance(getattr(torch, name, None), torch.dtype)
}
NAMES_OF_DTYPES = {dtype: name for name, dtype in DTYPES_BY_NAME.items()}


class Encoder:
    """Encodes values, and collects the values that JSON cannot carry.

    Attributes:
        tensors: the tensors in the encoded values, by index.
        objects: (path, object) of the values that only pickle can carry, by index; a path is as "callbacks.Mine.state".
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.objects: list[tuple[str, Any]] = []

    def encode(self, value: Any, path: str = "") -> Any:
        """Return the encoded value; `path` names it."""
        return self._encode(value, path, 0)

    def _encode(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if depth > _MAX_DEPTH:
            return self._object(value, path)
        if kind is list:
            return [self._encode(item, f"{path}[{idx}]", depth + 1) for idx, item in enumerate(value)]
        if kind in _SEQUENCES:
            items = [self._encode(item, f"{path}[{idx}]", depth + 1) for idx, item in enumerate(value)]
            return {_SEQUENCES[kind]: items}
        if kind in _MAPPINGS:
            return self._mapping(value, path, depth)
        if kind in (bytes, bytearray):
            return {f"${kind.__name__}": base64.b64encode(value).decode()}
        if kind is complex:
            return {"$complex": [self._encode(part, path, depth) for part in (value.real, value.imag)]}
        if kind is torch.dtype and value in NAMES_OF_DTYPES:
            return {"$dtype": NAMES_OF_DTYPES[value]}
        if kind is torch.device:
            return {"$device": str(value)}
        if isinstance(value, PurePath):
            return {"$path": str(value)}
        return self._array(value, path)

    def _mapping(self, value: Mapping[Any, Any], path: str, depth: int) -> Any:
        items = [(key, self._encode(item, f"{path}.{key}".lstrip("."), depth + 1)) for key, item in value.items()]
        is_plain = all(type(key) is str and not key.startswith("$") for key in value)
        if is_plain and type(value) is dict:
            return dict(items)
        return {
            _MAPPINGS[type(value)]: [
                [self._encode(key, f"the key {key!r} of {path}", depth + 1), item] for key, item in items
            ]
        }

    def _array(self, value: Any, path: str) -> Any:
        if type(value) is np.ndarray or isinstance(value, np.generic):
            try:
                tensor = torch.from_numpy(np.array(value))
            except (TypeError, ValueError):  # a dtype that torch lacks
                return self._object(value, path)
            return {"$numpy" if isinstance(value, np.ndarray) else "$numpy_scalar": self._tensor(tensor)}
        is_plain = type(value) in (Tensor, torch.nn.Parameter) and value.layout == torch.strided
        if is_plain and value.dtype in NAMES_OF_DTYPES:
            idx = self._tensor(value.detach())
            return {"$tensor": idx} if type(value) is Tensor else {"$parameter": [idx, value.requires_grad]}
        return self._object(value, path)

    def _tensor(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def _object(self, value: Any, path: str) -> Any:
        self.objects.append((path or "the value", value))
        return {"$object": len(self.objects) - 1}


def decode(encoded: Any, tensors: Callable[[int], Tensor], objects: Callable[[int], Any]) -> Any:
    """Return the value that `Encoder.encode` has encoded.

    Args:
        tensors, objects: return the tensor, or the object, of an index.

    Raises:
        ValueError: the encoded value has an unknown kind, or a kind has a wrong value.
    """
    if isinstance(encoded, list):
        return [decode(item, tensors, objects) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if len(encoded) != 1 or not next(iter(encoded)).startswith("$"):
        return {key: decode(item, tensors, objects) for key, item in encoded.items()}
    [(kind, content)] = encoded.items()
    readers: dict[str, Callable[[Any], Any]] = {
        **{name: _sequence(kind, tensors, objects) for kind, name in _SEQUENCES.items()},
        **{name: _mapping(kind, tensors, objects) for kind, name in _MAPPINGS.items()},
        "$float": _special_float,
        "$complex": lambda parts: _complex(decode(_list(parts), tensors, objects)),
        "$bytes": lambda text: base64.b64decode(text, validate=True),
        "$bytearray": lambda text: bytearray(base64.b64decode(text, validate=True)),
        "$dtype": dtype_of,
        "$device": torch.device,
        "$path": _path,
        "$tensor": lambda idx: tensors(_index(idx)),
        "$parameter": lambda pair: torch.nn.Parameter(tensors(_index(pair[0])), requires_grad=pair[1] is True),
        "$numpy": lambda idx: tensors(_index(idx)).numpy(),
        "$numpy_scalar": lambda idx: tensors(_index(idx)).numpy()[()],
        "$object": lambda idx: objects(_index(idx)),
    }
    if kind not in readers:
        raise ValueError(f"a value has the unknown kind {kind!r}")
    try:
        return readers[kind](content)
    except (TypeError, RuntimeError, LookupError) as error:
        raise ValueError(f"a value of the kind {kind!r} is wrong: {error}") from None


def shifted(encoded: Any, num_tensors: int, num_objects: int) -> Any:
    """Return an encoded value with larger indices, because other tensors and objects come before its own."""
    if isinstance(encoded, list):
        return [shifted(item, num_tensors, num_objects) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if len(encoded) == 1:
        [(kind, content)] = encoded.items()
        if kind in ("$tensor", "$numpy", "$numpy_scalar"):
            return {kind: content + num_tensors}
        if kind == "$parameter":
            return {kind: [content[0] + num_tensors, content[1]]}
        if kind == "$object":
            return {kind: content + num_objects}
    return {key: shifted(item, num_tensors, num_objects) for key, item in encoded.items()}


def dtype_of(name: Any) -> torch.dtype:
    """Return the dtype of a name such as "float32"; raises ValueError if there is none."""
    dtype: torch.dtype | None = DTYPES_BY_NAME.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ValueError(f"{name!r:.50} is no dtype that checkpoints have")
    return dtype


def _sequence(kind: type, tensors: Callable[[int], Tensor], objects: Callable[[int], Any]) -> Callable[[Any], Any]:
    return lambda items: kind(decode(_list(items), tensors, objects))


def _mapping(kind: type, tensors: Callable[[int], Tensor], objects: Callable[[int], Any]) -> Callable[[Any], Any]:
    return lambda pairs: kind(dict(_pairs(pairs, tensors, objects)))


def _pairs(pairs: Any, tensors: Callable[[int], Tensor], objects: Callable[[int], Any]) -> list[tuple[Any, Any]]:
    return [(decode(key, tensors, objects), decode(item, tensors, objects)) for key, item in _list(pairs)]


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.50} is no list")
    return value


def _index(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.50} is no index")
    return value


def _special_float(text: Any) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise ValueError(f"{text!r:.50} is no special number")
    return float(text)


def _complex(parts: list[Any]) -> complex:
    if [type(part) for part in parts] != [float, float]:
        raise ValueError(f"{parts!r:.50} is no complex number")
    return complex(*parts)


def _path(text: Any) -> Path:
    if not isinstance(text, str):
        raise ValueError(f"{text!r:.50} is no path")
    return Path(text)
