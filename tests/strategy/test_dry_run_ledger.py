"""A dry run's ledger is a source of `weft.memory`."""

from __future__ import annotations

import torch

import weft
from weft.memory.source import counts_this_process, reading_from
from weft.strategy.dry_run.ledger import TensorLedger


def test_tags_and_phases_go_to_the_source() -> None:
    ledger = TensorLedger()
    tensor = torch.empty(10)
    ledger.hold([tensor, tensor[2:]])  # one storage
    with reading_from(ledger):
        assert weft.memory.is_tracking() and not counts_this_process()
        assert weft.memory.current() == 40
        weft.memory.begin_phase("mine")
        weft.memory.tag([tensor], "gradients")
        assert weft.memory.by_category()["gradients"] == 40
        view = tensor[:1]
        del tensor
        assert weft.memory.current() == 40
        del view
        assert weft.memory.current() == 0 and weft.memory.peak() == 40
        assert [phase.name for phase in weft.memory.timeline()] == ["start", "mine"]
    assert counts_this_process()


def test_resized_storages_have_their_new_size() -> None:
    ledger = TensorLedger()
    tensor = torch.empty(10)
    with ledger.seeing_resizes():
        ledger.hold([tensor])
        tensor.untyped_storage().resize_(0)
        assert sum(ledger.current().values()) == 0
        tensor.untyped_storage().resize_(16)
        assert sum(ledger.current().values()) == 16
    assert "seeing_resizes" not in torch.UntypedStorage.resize_.__qualname__
