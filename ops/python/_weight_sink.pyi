"""The bindings of ops/bindings/weight_sink.cpp, documented in <weft/ops/weight_sink.h>."""

from collections.abc import Callable
from typing import Protocol, TypeVar

from torch import Tensor

_T = TypeVar("_T")

class WeightSink(Protocol):
    def begin_backward(self) -> None: ...
    def take(self, index: int, grad: Tensor, x: Tensor) -> bool: ...

def call_with(sink: WeightSink, function: Callable[[], _T]) -> _T: ...
