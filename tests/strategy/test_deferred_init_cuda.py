"""Deferred initialization on a CUDA device gives the values of eager initialization."""

from __future__ import annotations

from ops.on_device import on_device

from strategy import test_deferred_init

test_values = on_device("cuda", test_deferred_init.test_values_are_bitwise_equal, num_ranks=1)
