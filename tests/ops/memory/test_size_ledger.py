"""The ledger of sizes counts as the counter of a process does."""

from __future__ import annotations

import pytest

from weft import _memory


def test_size_ledger_counts_by_category_and_phase() -> None:
    ledger = _memory.SizeLedger()
    first = ledger.add(100)
    ledger.begin_phase("forward", "scratch")
    mark = ledger.mark()
    second = ledger.add(50)
    ledger.remove(ledger.add(7))
    ledger.set_category(first, "parameters")
    ledger.set_category_since(mark, "scratch", "saved_activations")
    ledger.set_shared_memory(8)
    assert {name: size for name, size in ledger.current().items() if size} == {
        "parameters": 100,
        "saved_activations": 50,
        "communication": 8,
    }
    name, _, peak = ledger.phases()[-1]
    assert name == "forward" and peak["parameters"] == 100 and peak["scratch"] == 7
    ledger.remove(second)
    with pytest.raises(ValueError, match=f"got the block {second}, which is not in the ledger"):
        ledger.remove(second)
