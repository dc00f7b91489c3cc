"""`precision` in a rule: the module and its submodules compute in that dtype, and no other dtype changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ops.collectives.profiled import collectives_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from support.models import FeedForward, Gpt2, Llama, LlamaArgs, RMSNorm
from support.parity import assert_same_training, tensor_parallel
from support.ranks import on_ranks
from support.rule_plans import MLP, NORM, TOKENS, rules, token_loss
from weft.strategy import Plan
from weft.strategy.data_parallel import apply_fsdp


class DtypeRecorder(nn.Module):
    """Records the dtypes that its layers compute in."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(8, 12, dtype=dtype),
            RMSNorm(12, dtype),
            nn.Linear(12, 8, dtype=dtype),
        )
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen += [x.dtype, self.norm.weight.dtype]
        hidden = self.up(x)
        self.seen.append(hidden.dtype)
        return self.down(self.norm(hidden))


RECORDER_RULES = {"inner.up": "column_gather_output", "inner.down": "row_split_input"}


class Outer(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.inner = DtypeRecorder(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def _reference(model: Outer, x: Tensor, dtype: torch.dtype, norm: torch.dtype) -> Tensor:
    inner = model.inner
    hidden = F.linear(x.to(dtype), inner.up.weight.to(dtype), inner.up.bias.to(dtype)).to(norm)
    normed = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-5) * inner.norm.weight.to(norm)
    return F.linear(normed.to(dtype), inner.down.weight.to(dtype), inner.down.bias.to(dtype)).to(x.dtype)


@on_ranks(1, 2)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("norm", ["", "float32"])
def test_submodules_compute_in_precision(world_size: int, stored: torch.dtype, precision: str, norm: str) -> None:
    torch.manual_seed(0)
    model, reference = Outer(stored), Outer(stored)
    reference.load_state_dict(model.state_dict())
    plan = {"inner": {"style": "replicate", "precision": precision}, **RECORDER_RULES}
    if norm:
        plan["inner.norm"] = {"style": "replicate", "precision": norm}
    weft.parallelize(model, tensor_parallel(world_size), plan)
    dtype = getattr(torch, precision)
    norm_dtype = getattr(torch, norm or precision)
    x = torch.randn(3, 8, dtype=stored)
    output, expected = model(x), _reference(reference, x, dtype, norm_dtype)
    assert model.inner.seen == [dtype, norm_dtype, dtype] and output.dtype == stored
    bound = 4 * torch.finfo(torch.bfloat16 if torch.bfloat16 in (dtype, stored) else dtype).eps
    assert_close(output, expected, rtol=bound, atol=bound)
    output.float().square().mean().backward()
    expected.float().square().mean().backward()
    for name, parameter in reference.named_parameters():
        grad = model.get_parameter(name).grad
        assert grad.dtype == stored
        assert_close(grad.full_tensor(), parameter.grad, rtol=8 * bound, atol=bound)


@on_ranks(2)
def test_precision_overrides_autocast(world_size: int) -> None:
    """Autocast is off inside the module; the result keeps its dtype, since autocast accepts any dtype."""
    torch.manual_seed(0)
    model = Outer()
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    expected = copy.deepcopy(model)(x.float())
    plan = {"inner": {"style": "replicate", "precision": torch.float32}, **RECORDER_RULES}
    weft.parallelize(model, tensor_parallel(world_size), plan)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
    assert model.inner.seen == [torch.float32] * 3
    assert_close(output, expected, rtol=1e-5, atol=1e-6)


@on_ranks(1, 2)
@pytest.mark.parametrize("family", [Llama, Gpt2])
def test_every_style_computes_in_precision(world_size: int, family: type[nn.Module]) -> None:
    """The rules compute in float32 in a float64 model, so errors are as large as float32's; Llama shards sequences."""
    torch.manual_seed(0)
    is_llama = family is Llama
    model = Llama(LlamaArgs(dtype=torch.float64)) if is_llama else Gpt2(dtype=torch.float64)
    plan = rules(precision="float32")
    if not is_llama:
        styles = {"h.*.attn": "attention", "h.*.mlp": "column_row_mlp", "h.*.ln_2": "replicate"}
        plan = {pattern: {"style": style, "precision": "float32"} for pattern, style in styles.items()}
    exact = copy.deepcopy(model)(TOKENS[0][0])

    def parallelize(m: nn.Module) -> nn.Module:
        weft.parallelize(m, tensor_parallel(world_size), Plan(plan, sequence_parallel=is_llama))
        distance = (m(TOKENS[0][0]) - exact).abs().max() / exact.abs().max()
        assert distance > 1e-9, "the model must compute in float32"
        return m

    assert_same_training(
        parallelize,
        model,
        token_loss,
        TOKENS,
        "SGD",
        tolerance=1e-4,
    )


@on_ranks(2)
def test_module_without_weights_computes_in_precision(world_size: int) -> None:
    model = nn.ModuleDict({"mlp": FeedForward(8, 16), "soft": nn.Softmax(dim=-1)}).bfloat16()
    plan = {"mlp": "column_row_mlp", "soft": {"style": "replicate", "precision": "float32"}}
    weft.parallelize(model, tensor_parallel(world_size), plan)
    x = torch.randn(4, 8, dtype=torch.bfloat16) * 3
    expected = torch.softmax(x.float(), -1).bfloat16()
    seen: list[torch.dtype] = []
    with _SoftmaxDtypes(seen):
        result = model["soft"](x)
    assert torch.equal(result, expected) and seen == [torch.float32]


class _SoftmaxDtypes(TorchDispatchMode):
    """Records the dtype of softmax's input."""

    def __init__(self, seen: list[torch.dtype]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._softmax.default:
            self.seen.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


class RecordingNorm(RMSNorm):
    """Records the values of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["seen"] = self.weight.detach().clone()
        return super().forward(x)


@on_ranks(2)
@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("is_model_float16", [False, True], ids=["", "model in float16"])
def test_fully_sharded_weights_are_gathered_in_their_precision(
    world_size: int, reshard: bool, is_model_float16: bool
) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    model = Llama(LlamaArgs())
    for layer in model.layers:
        layer.attention_norm, layer.ffn_norm = RecordingNorm(16, torch.float32), RecordingNorm(16, torch.float32)
    values = torch.linspace(1.0, 1.1, 16)  # bfloat16 cannot represent most of them
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_norm" in name:
                parameter.copy_(values)
    plan = {MLP: "column_row_mlp", NORM: {"style": "replicate", "precision": "float32"}}
    plan |= {"": {"style": "replicate", "precision": "float16"}} if is_model_float16 else {}
    weft.parallelize(model, mesh, plan)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    units = apply_fsdp(model, mesh["data_parallel"], reshard_after_forward=reshard, mp_policy=policy)
    assert sorted(units) == ["", "layers.0", "layers.0.ffn_norm", "layers.1", "layers.1.ffn_norm"]
    output = model(TOKENS[0][0])
    dtype = torch.float16 if is_model_float16 else torch.bfloat16
    assert output.dtype == dtype
    for layer in model.layers:
        assert torch.equal(layer.ffn_norm.seen, values), "gathered in the rule's float32"
        assert torch.equal(layer.attention_norm.seen, values.to(dtype)), "gathered in the dtype of the other weights"
    # The last block and its norm stay gathered after the forward.
    gathered = {"all_gather_into_tensor": 2} if reshard else {}
    collectives_of(output.float().square().mean().backward, {**gathered, "reduce_scatter_tensor": 5})
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


@on_ranks(2)
def test_weight_of_two_precisions_raises(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    plan = {"output": {"style": "replicate", "precision": "float32"}, MLP: "column_row_mlp"}
    model = weft.parallelize(Llama(LlamaArgs(tie_head=True)), mesh, plan)
    with pytest.raises(ValueError, match=r"rule of 'output' says precision, but the module shares a weight"):
        apply_fsdp(model, mesh["data_parallel"], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
