"""Schemas of all operators; fake kernels, autograd and float64 gradients of all but messages; on a GPU, too."""

from __future__ import annotations

import pytest
import torch

import weft  # noqa: F401  (registers the operators)
from ops.operators import Call, sample_calls

CALLS = pytest.mark.parametrize("index", range(len(sample_calls())), ids=lambda i: f"{i}-{_sample(i).name}")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])


def _sample(index: int, device: str = "cpu") -> Call:
    torch.manual_seed(0)
    with torch.device(device):
        call = sample_calls()[index]
    if call.name == "dropout" and device != "cpu":
        x, seed = call.args
        assert isinstance(seed, torch.Tensor)
        call.args = (x, seed.reshape(()))  # when traced, only tensors without dims may be on another device than x
    return call


@CALLS
@DEVICES
def test_opcheck(index: int, device: str) -> None:
    call = _sample(index, device)
    results = torch.library.opcheck(call.op, call.args, call.kwargs)
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4


@CALLS
@DEVICES
def test_gradcheck(index: int, device: str) -> None:
    call = _sample(index, device)
    positions = [i for i, arg in enumerate(call.args) if isinstance(arg, torch.Tensor) and arg.requires_grad]

    def function(*tensors: torch.Tensor) -> torch.Tensor:
        args = list(call.args)
        for position, tensor in zip(positions, tensors, strict=True):
            args[position] = tensor
        return call.op(*args, **call.kwargs)

    assert torch.autograd.gradcheck(function, tuple(call.args[i] for i in positions))


PRIVATE: dict[str, tuple[object, ...]] = {
    "_vocab_cross_entropy": (torch.randn(2, 5), torch.tensor([1, 4]), 0, "", None, -100, 0.0),
    "_vocab_cross_entropy_backward": (
        torch.randn(2), torch.randn(2, 5), torch.tensor([1, 4]), torch.randn(2, 2), 0, 5, -100, 0.1,
    ),
    "_linear_cross_entropy": (torch.randn(2, 3), torch.randn(5, 3), torch.tensor([1, 4]), 0, "", 5, -100, 0.1),
    "_linear_cross_entropy_backward": (
        torch.randn(2), torch.randn(2, 3), torch.randn(5, 3), torch.tensor([1, 4]), torch.randn(2, 2), 0, 5, -100, 0.0,
        True, True,
    ),
    "_all_gather_linear_backward": (torch.randn(2, 3, 5), torch.randn(2, 3, 4), torch.randn(5, 4), 1, "", True, True),
    "_linear_reduce_scatter_backward": (
        torch.randn(2, 3, 5), torch.randn(2, 3, 4), torch.randn(5, 4), 1, "", True, False, True,
    ),
    "_cross_entropy_statistics": (torch.randn(2, 5), torch.tensor([1, 4]), 0, -100, True),
    "_cross_entropy_gradient": (
        torch.empty(2, 5), torch.randn(2), torch.randn(2, 5), torch.tensor([1, 4]), torch.randn(2, 2), 0, 5, -100, 0.1,
    ),
    "_sharded_linear_input_grad": (torch.randn(2, 3, 5), torch.randn(5, 4), ""),
    "_sharded_linear_shard_grad": (torch.randn(2, 3, 5), torch.randn(2, 3, 4), ""),
    "_check_document_offsets": (torch.tensor([0, 4]), 4, "weft::ulysses_attention"),
    "_ring_attention": (*torch.randn(3, 2, 3, 4, 5), "", True, None, None, "head_tail", 2, None),
    "_ring_attention_backward": (
        *torch.randn(5, 2, 3, 4, 5), torch.randn(2, 3, 4), "", False, 0.5, 4, "contiguous", None, torch.tensor([1]),
    ),
    "_grouped_weight_grad": (torch.randn(4, 3), torch.randn(4, 5), torch.tensor([1, 0, 3])),
    "_grouped_bias_grad": (torch.randn(4, 3), torch.tensor([1, 0, 3])),
    "_moe_dispatch": (torch.randn(3, 5), torch.tensor([[2, 0], [2, 2], [0, 3]]), 4, ""),
    "_moe_dispatch_backward": (
        torch.randn(4, 5), torch.tensor([1, 3, 0, 2]), torch.tensor([4]), torch.tensor([[1, 3]]), 2, "",
    ),
    "_moe_combine": (
        torch.randn(4, 5), torch.randn(2, 2), torch.tensor([1, 3, 0, 2]), torch.tensor([4]), torch.tensor([[1, 3]]), "",
    ),
    "_moe_combine_backward": (
        torch.randn(2, 5), torch.randn(2, 2), torch.randn(4, 5), torch.tensor([1, 3, 0, 2]), torch.tensor([4]),
        torch.tensor([[1, 3]]), 4, "", True, True,
    ),
    "_dropout_of_shard": (torch.randn(3, 5), 7, 0.5, 5, 3, 3, 9),
    "_norm": (torch.randn(3, 5), torch.randn(3, 5), torch.randn(5), None, True, 1e-5),
    "_norm_backward": (
        torch.randn(3, 5), None, torch.randn(3, 5), None, torch.zeros(3), torch.ones(3), True, True, 2,
    ),
    "_activation": (torch.randn(3, 5), "silu"),
    "_activation_backward": (torch.randn(3, 5), torch.randn(3, 5), "gelu"),
    "_gated_activation": (torch.randn(3, 5), torch.randn(3, 5), "gelu_tanh"),
    "_gated_activation_backward": (torch.randn(3, 5), torch.randn(3, 5), torch.randn(3, 5), "relu"),
    "_gate_up_activation": (torch.randn(3, 10), "gelu_tanh"),
    "_gate_up_activation_backward": (torch.randn(3, 5), torch.randn(3, 10), "relu"),
    "_vocab_embedding_backward": (torch.randn(2, 5), torch.tensor([1, 3]), 3, 1),
    "_column_row_mlp_saving": (
        torch.randn(3, 5), torch.randn(6, 5), torch.randn(4, 6), None, None, None, None, "silu", "", 0, None, False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PRIVATE)
@DEVICES
def test_opcheck_private_operators(name: str, device: str) -> None:
    args = tuple(arg.to(device) if isinstance(arg, torch.Tensor) else arg for arg in PRIVATE[name])
    results = torch.library.opcheck(getattr(torch.ops.weft, name).default, args)
    assert set(results.values()) == {"SUCCESS"}


# Saved TorchScript modules and exported programs refer to these schemas, so a change of a schema breaks them.
SCHEMAS = """
weft::column_row_mlp(Tensor x, Tensor w1, Tensor w2, Tensor? w3=None, Tensor? b1=None, Tensor? b2=None, \
Tensor? b3=None, *, str activation, str group_name, bool recompute=False, int? sequence_dim=None, \
SymInt? sequence_size=None) -> Tensor
weft::column_linear(Tensor x, Tensor weight, Tensor? bias=None, *, str group_name) -> Tensor
weft::row_linear(Tensor x, Tensor weight, Tensor? bias=None, *, str group_name) -> Tensor
weft::all_gather_linear(Tensor x, Tensor weight, Tensor? bias=None, *, int gather_dim, str group_name, \
SymInt? dim_size=None) -> Tensor
weft::linear_reduce_scatter(Tensor x, Tensor weight, Tensor? bias=None, *, int scatter_dim, str group_name) -> Tensor
weft::sharded_linear(Tensor x, Tensor weight, Tensor? bias=None, *, str group_name, \
SymInt? out_features=None) -> Tensor
weft::vocab_parallel_embedding(Tensor input, Tensor weight, int vocab_start, *, str group_name, \
int? vocab_size=None) -> Tensor
weft::vocab_parallel_cross_entropy(Tensor logits, Tensor target, int vocab_start, *, str group_name, \
int? vocab_size=None, int ignore_index=-100, float label_smoothing=0., str reduction="mean") -> Tensor
weft::vocab_parallel_linear_cross_entropy(Tensor x, Tensor weight, Tensor target, int vocab_start, *, \
str group_name, int? vocab_size=None, int ignore_index=-100, float label_smoothing=0., str reduction="mean") -> Tensor
weft::rms_norm(Tensor x, Tensor? weight=None, *, str group_name, float eps=9.9999999999999995e-07) -> Tensor
weft::layer_norm(Tensor x, Tensor? weight=None, Tensor? bias=None, *, str group_name, \
float eps=1.0000000000000001e-05) -> Tensor
weft::add_rms_norm(Tensor x, Tensor residual, Tensor? weight=None, *, str group_name, \
float eps=9.9999999999999995e-07) -> (Tensor, Tensor)
weft::add_layer_norm(Tensor x, Tensor residual, Tensor? weight=None, Tensor? bias=None, *, str group_name, \
float eps=1.0000000000000001e-05) -> (Tensor, Tensor)
weft::pipeline_send(Tensor[] tensors, int peer, int channel, str group_name) -> Tensor
weft::pipeline_recv(Tensor[] like, int peer, int channel, str group_name) -> Tensor
weft::pipeline_wait(Tensor token) -> Tensor[]
weft::pipeline_flush(str group_name) -> ()
weft::join(Tensor x, Tensor[] tokens) -> Tensor
weft::dropout(Tensor x, Tensor seed, *, float p, str group_name, int? dim=None, SymInt? dim_size=None) -> Tensor
weft::ring_attention(Tensor query, Tensor key, Tensor value, *, str group_name, bool is_causal=False, \
float? scale=None, SymInt? sequence_size=None, str order="head_tail", int? window=None, \
Tensor? document_offsets=None) -> Tensor
weft::ulysses_attention(Tensor query, Tensor key, Tensor value, *, str group_name, bool is_causal=False, \
float? scale=None, SymInt? sequence_size=None, int? window=None, Tensor? document_offsets=None, \
str order="contiguous", str ring_group_name="") -> Tensor
weft::grouped_linear(Tensor x, Tensor weight, Tensor counts, Tensor? bias=None) -> Tensor
weft::moe_dispatch(Tensor x, Tensor expert_ids, *, int num_experts, str group_name) -> (Tensor rows, Tensor counts, \
Tensor order, Tensor sent, Tensor received)
weft::moe_combine(Tensor rows, Tensor weights, Tensor order, Tensor sent, Tensor received, *, str group_name) -> Tensor
weft::adam_step_(Tensor(a!) parameter, Tensor grad, Tensor(b!) exp_avg, Tensor(c!)? exp_avg_scale, \
Tensor(d!) exp_avg_sq, Tensor(e!)? exp_avg_sq_scale, Tensor(f!)? low_bits, *, int step, float lr, float beta1, \
float beta2, float eps, float weight_decay, bool decoupled_weight_decay, bool maximize, int seed, int row, \
int column, int full_columns) -> ()
weft::momentum_step_(Tensor(a!) parameter, Tensor grad, Tensor(b!) momentum_buffer, Tensor(c!)? momentum_scale, \
Tensor(d!)? low_bits, *, int step, float lr, float momentum, float dampening, float weight_decay, bool nesterov, \
bool maximize, int seed, int row, int column, int full_columns) -> ()
weft::split_float(Tensor x, ScalarType low_dtype) -> (Tensor, Tensor)
weft::join_float(Tensor high, Tensor low) -> Tensor
weft::quantize_blocks(Tensor x, bool signed_codes) -> (Tensor, Tensor)
weft::dequantize_blocks(Tensor codes, Tensor scale) -> Tensor
weft::copy_to_group(Tensor x, str group_name) -> Tensor
weft::reduce_from_group(Tensor x, str group_name) -> Tensor
weft::scatter_to_group(Tensor x, int dim, str group_name) -> Tensor
weft::gather_from_group(Tensor x, int dim, str group_name, *, SymInt? dim_size=None) -> Tensor
weft::gather_from_sequence(Tensor x, int dim, str group_name, *, SymInt? dim_size=None) -> Tensor
weft::reduce_scatter_to_sequence(Tensor x, int dim, str group_name) -> Tensor
weft::all_to_all(Tensor x, int split_dim, int cat_dim, str group_name, *, SymInt? cat_size=None) -> Tensor
"""


def test_public_schemas_are_unchanged() -> None:
    registered = {
        str(schema)
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("weft::") and not schema.name.startswith("weft::_")
    }
    assert registered == set(SCHEMAS.strip().splitlines())


def test_every_operator_is_tagged_for_compile() -> None:
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("weft::"):
            op = getattr(torch.ops.weft, schema.name.removeprefix("weft::")).default
            assert torch.Tag.pt2_compliant_tag in op.tags, schema.name
