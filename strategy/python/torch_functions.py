"""Tells what a function of torch does by its name."""

from __future__ import annotations

_IN_PLACE = ("add", "sub", "mul", "truediv", "floordiv", "and", "or", "xor", "lshift", "rshift", "pow", "matmul", "mod")


def writes_in_place(name: str) -> bool:
    """Return whether a tensor's method of this name changes the tensor."""
    is_method = name.endswith("_") and not name.startswith("__")
    return is_method or name == "__setitem__" or name in {f"__i{operation}__" for operation in _IN_PLACE}
