"""`weft estimate` for models unknown to the memory model, and for pipelines, compared with training ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import weft
from support.hugging_face import CONFIGS, VOCAB
from support.ranks import on_ranks
from weft.strategy.data_parallel import apply_fsdp
from weft.strategy.estimate import RankEstimate, estimate_training
from weft.strategy.estimate.config import read_config
from weft.strategy.pipeline import Pipeline
from weft.strategy.planning.layout import Sizes

SEQUENCES, TOKENS = 4, 16
T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "architectures": ["T5ForConditionalGeneration"],
}
MODELS: dict[str, dict[str, Any]] = {**CONFIGS, "t5": T5, "llama": {**CONFIGS["llama"], "num_hidden_layers": 4}}


def _estimate(rank: int, family: str, **config: Any) -> RankEstimate:
    """Return the prediction for this rank; ranks with equal predictions share one."""
    batch = {"sequences": SEQUENCES, "tokens": TOKENS}
    model = {"model_type": family, **MODELS[family]}
    found = estimate_training(read_config({"model": model, "batch": batch, **config}, Path()))
    assert sum(each.num_ranks for each in found.ranks) == torch.distributed.get_world_size()
    return next(each for each in reversed(found.ranks) if each.rank <= rank)


def _model(family: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **MODELS[family])
    auto = transformers.AutoModelForSeq2SeqLM if family == "t5" else transformers.AutoModelForCausalLM
    model: nn.Module = auto.from_config(config)
    return model.eval()  # no dropout


def _local_bytes(tensors: Any) -> int:
    local = [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def _state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "parameters": _local_bytes([*model.parameters(), *model.buffers()]),
        "gradients": _local_bytes(p.grad for p in model.parameters() if p.grad is not None),
        "optimizer_state": _local_bytes(states),
    }


def _tokens() -> Tensor:
    return torch.arange(SEQUENCES * TOKENS).remainder(VOCAB).view(SEQUENCES, TOKENS)


@on_ranks(2)
@pytest.mark.parametrize(("family", "layout"), [("gpt2", "tp2"), ("t5", "tp2"), ("gpt2", "dp2")])
def test_predicted_state_matches_training(rank: int, world_size: int, family: str, layout: str) -> None:
    predicted = _estimate(rank, family, layout=layout).phases
    model = _model(family)
    axis = {"tp2": "tensor_parallel", "dp2": "data_parallel"}[layout]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    if layout == "tp2":
        weft.parallelize(model, mesh, "auto")
        assert any(isinstance(p, DTensor) and p.placements[0].is_shard() for p in model.parameters())
    else:
        apply_fsdp(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=_tokens(), labels=_tokens()).loss.backward()
    optimizer.step()
    assert predicted["step"] == _state_bytes(model, optimizer)
    assert predicted["init"] == {**dict.fromkeys(predicted["step"], 0), "parameters": predicted["step"]["parameters"]}


def _check_pipeline(rank: int, family: str, layout: str, cuts: list[str]) -> None:
    predicted = _estimate(rank, family, layout=layout, pipeline_cuts=cuts, num_micro_batches=4).phases
    sizes = Sizes.parse(layout)
    shape = {"pipeline_parallel": sizes.pipeline_parallel, "data_parallel": sizes.data_parallel}
    mesh = init_device_mesh("cpu", (*shape.values(), sizes.tensor_parallel), mesh_dim_names=(*shape, "tensor_parallel"))
    model = _model(family)
    pipeline = Pipeline(model, mesh["pipeline_parallel"], cuts, num_micro_batches=4)
    weft.parallelize(model, mesh["tensor_parallel"], "auto", keeps_plain_on_one_rank=True)
    if sizes.data_parallel > 1:
        pipeline.fully_shard(mesh["data_parallel"])
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: Tensor) -> Tensor:
        logits = model(input_ids=batch, use_cache=False).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())

    pipeline.step(_tokens(), step)
    optimizer.step()
    for category, size in _state_bytes(model, optimizer).items():
        # The memory model leaves out the frequencies of Llama's rotary positions, some bytes.
        assert abs(predicted["step"][category] - size) <= (64 if family == "llama" else 0), category


@on_ranks(2)
@pytest.mark.parametrize(("family", "cut"), [("gpt2", "transformer.h.1"), ("llama", "model.layers.1")])
def test_predicted_stages_match_training(rank: int, world_size: int, family: str, cut: str) -> None:
    """GPT-2's embedding is the weight of its output layer: both stages have a copy."""
    _check_pipeline(rank, family, "pp2", [cut])


LOW_PRECISION: dict[str, dict[str, Any]] = {
    "int8": {"optimizer_state": "int8"},
    "split8": {"optimizer_state": "int8", "master_weights": "split8", "precision": "bf16-mixed"},
    "bf16-true": {"optimizer_state": "bfloat16", "master_weights": "split", "precision": "bf16-true"},
}


@on_ranks(2)
@pytest.mark.parametrize("layout", ["tp2", "dp2"])
def test_predicted_low_precision_states_match_training(rank: int, world_size: int, layout: str) -> None:
    """Matrices with at least 4096 elements, and smaller ones; rows with several blocks."""
    from weft.strategy import fuse

    config = {**MODELS["gpt2"], "n_embd": 68}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "gpt2", config)
        for name, options in LOW_PRECISION.items():
            predicted = _estimate(rank, "gpt2", layout=layout, **options).phases
            model = _model("gpt2")
            if name == "bf16-true":
                model.to(torch.bfloat16)
            axis = {"tp2": "tensor_parallel", "dp2": "data_parallel"}[layout]
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
            weft.parallelize(model, mesh, "auto") if layout == "tp2" else apply_fsdp(model, mesh)
            optimizer = torch.optim.AdamW(model.parameters())
            given = {key: options[key] for key in ("optimizer_state", "master_weights") if key in options}
            fuse(optimizer, model, **given)
            with torch.autocast("cpu", torch.bfloat16, enabled=name == "split8"):
                model(input_ids=_tokens(), labels=_tokens()).loss.backward()
            optimizer.step()
            assert predicted["step"] == _state_bytes(model, optimizer), name


@on_ranks(4)
def test_predicted_stages_on_several_axes_match_training(rank: int, world_size: int) -> None:
    for layout in ("pp2,tp2", "pp2,dp2"):
        _check_pipeline(rank, "llama", layout, ["model.layers.2"])
