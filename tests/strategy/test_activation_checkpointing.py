"""checkpoint_activations: fewer saved bytes, recomputation, and unchanged results."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ops.collectives.profiled import collectives_of
from ops.memory.counting import counted
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import weft
from support.hugging_face import VOCAB, language_model
from support.models import EncoderClassifier, Gpt2, Llama, LlamaArgs, token_batches
from support.parity import assert_close, assert_same_training, tensor_parallel
from support.ranks import on_ranks
from weft.strategy import StepInBackward, checkpoint_activations
from weft.strategy.modules.activation_checkpointing import CheckpointedModule

TOKENS = token_batches(4, 37)
POLICIES = ["full", "full:1", "selective", {"layers.0": "full", "layers.*.attention": "selective"}]


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("policy", POLICIES, ids=["full", "first", "selective", "patterns"])
def test_checkpointed_training_matches_unsharded(world_size: int, policy: object) -> None:
    torch.manual_seed(0)
    mesh = tensor_parallel(world_size)

    def shard_and_checkpoint(model: nn.Module) -> nn.Module:
        weft.parallelize(model, mesh, {"layers.*.feed_forward": "column_row_mlp"})
        assert checkpoint_activations(model, policy)
        return model

    model = Llama(LlamaArgs(dtype=torch.float64))
    names = list(model.state_dict())
    trained = assert_same_training(shard_and_checkpoint, model, _loss, TOKENS, "SGD")
    assert list(trained.state_dict()) == names
    assert [name for name, _ in trained.named_parameters()] == [name for name, _ in model.named_parameters()]


def _gradients(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(5)  # for dropout
    model.train()
    _loss(model, TOKENS[0]).backward()
    gradients = [getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters()]
    model.zero_grad()
    return gradients


@on_ranks(2)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("policy", ["full", "selective"])
def test_recomputed_dropout_is_equal(world_size: int, policy: str, offload: bool) -> None:
    torch.manual_seed(0)
    model = weft.parallelize(Gpt2(dropout=0.3), tensor_parallel(world_size), "auto")
    expected = _gradients(model)
    checkpoint_activations(model, policy, offload=offload)
    assert all(torch.equal(a, b) for a, b in zip(_gradients(model), expected, strict=True))


@on_ranks(2)
def test_saved_bytes_and_communication(world_size: int) -> None:
    """Full checkpointing saves a block's input and the random state; selective repeats no communication."""
    mesh = tensor_parallel(world_size)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    tokens = TOKENS[0][0].repeat(16, 1)
    saved, collectives = {}, {}
    with counted() as count:
        weft.memory.tag([tokens], "saved_activations")  # as `watch` tags a batch in its first forward
        for policy in ("none", "full", "selective"):
            for num_layers in (2, 5):
                args = LlamaArgs(n_layers=num_layers)
                model = weft.parallelize(Llama(args), mesh, "auto")
                checkpoint_activations(model, policy)
                watch = weft.memory.watch(model)
                before = count.now("saved_activations")
                y = model(tokens)
                saved[policy, num_layers] = count.now("saved_activations") - before
                start = backend._get_sequence_number_for_group()
                y.sum().backward()
                collectives[policy, num_layers] = backend._get_sequence_number_for_group() - start
                watch.remove()
                del model, y, watch
    block_bytes = {policy: (saved[policy, 5] - saved[policy, 2]) / 3 for policy, _ in saved}
    assert block_bytes["full"] == tokens.numel() * args.dim * 4 + torch.get_rng_state().nbytes
    # Input; query, key, value; attention's result and its 2 sums per token; the two all-reduced results; gate and up.
    features = args.dim + 4 * (args.dim // 2) + 2 + 2 * args.dim + 2 * (args.hidden_dim // 2)
    assert block_bytes["selective"] == tokens.numel() * features * 4 + torch.get_rng_state().nbytes
    assert block_bytes["selective"] < 0.75 * block_bytes["none"]
    block_collectives = {policy: (collectives[policy, 5] - collectives[policy, 2]) / 3 for policy, _ in collectives}
    # The backward has 4: query, key, value, MLP. The forward, which full checkpointing repeats, has 2: attention, MLP.
    assert block_collectives == {"none": 4, "selective": 4, "full": 6}


@on_ranks(4)
def test_fsdp_and_step_in_backward_match_reference(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    for policy in ("none", "full", "selective"):
        torch.manual_seed(0)
        reference = Llama(LlamaArgs(dtype=torch.float64, hidden_dim=40))
        model = weft.parallelize(copy.deepcopy(reference), mesh, "auto")
        checkpoint_activations(model, policy)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["data_parallel"])
        fully_shard(model, mesh=mesh["data_parallel"])
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, reference)]
        stepper = StepInBackward(model, optimizers[0])
        for step in range(2):
            halves = TOKENS[2 * step : 2 * step + 2]
            _loss(model, halves[rank // 2]).backward()
            optimizers[0].step()
            (sum(_loss(reference, half) for half in halves) / 2).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
        stepper.remove()
        expected = dict(reference.named_parameters())
        for name, parameter in model.named_parameters():
            assert_close(name, parameter.full_tensor(), expected[name], 1e-10 * expected[name].norm().item())


@on_ranks(2)
@pytest.mark.parametrize("policy", ["full", "selective"])
def test_compiled_blocks_match_eager(world_size: int, policy: str) -> None:
    torch.manual_seed(0)
    model = weft.parallelize(Llama(LlamaArgs(n_layers=1)), tensor_parallel(world_size), "auto")
    expected = _gradients(model)
    checkpoint_activations(model, policy)
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    for ours, theirs in zip(_gradients(model), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@on_ranks(2)
def test_exported_copy_is_not_checkpointed(world_size: int) -> None:
    model = weft.parallelize(Llama(LlamaArgs()), tensor_parallel(world_size), "auto")
    checkpoint_activations(model)
    local = weft.export_local(model)
    assert type(local.layers[0]).__mro__[1] is nn.Module
    with torch.no_grad():
        torch.testing.assert_close(local(TOKENS[0][0]), model(TOKENS[0][0]))
    again = copy.deepcopy(model)
    assert torch.equal(again(TOKENS[0][0]), model(TOKENS[0][0]))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: Llama(LlamaArgs()), ["layers.0", "layers.1"]),
        (EncoderClassifier, ["encoder.layers.0", "encoder.layers.1"]),
        (
            lambda: nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2))),
            ["0", "1"],
        ),
        (lambda: nn.ModuleDict({"0": nn.Sequential(nn.Linear(2, 2))}), ["0"]),
    ],
    ids=["llama", "encoder", "sequential", "numbered dict"],
)
def test_blocks_are_found(make, names: list[str]) -> None:
    assert checkpoint_activations(make()) == names


@on_ranks(1)
def test_selective_saves_products_of_plain_layers(rank: int) -> None:
    block = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 6))
    x = torch.randn(64, 8, requires_grad=True)
    with counted() as count:
        model = nn.ModuleList([block])
        checkpoint_activations(model, "selective")
        before = count.now()
        y = model[0](x)
        assert count.now() - before == 64 * (32 + 6) * 4 + torch.get_rng_state().nbytes
        del y


class SequenceBlock(nn.Module):
    """Sequence-parallel layers, and the pairs of operators for users' own layers."""

    def __init__(self, group_name: str) -> None:
        super().__init__()
        self.group_name = group_name
        self.up = weft.nn.AllGatherLinear(8, 8, gather_dim=0, group_name=group_name)
        self.down = weft.nn.LinearReduceScatter(8, 8, scatter_dim=0, group_name=group_name)
        self.mlp = weft.nn.ColumnRowMLP(8, 8, sequence_dim=0, group_name=group_name)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mlp(self.down(self.up(x).sin()))
        heads = weft.ops.all_to_all(x, 1, 0, self.group_name)
        x = weft.ops.all_to_all(heads, 0, 1, self.group_name).sin()
        heads = x.unflatten(-1, (2, 4)).transpose(0, 1)[None]
        heads = weft.ops.ring_attention(heads, heads, heads, group_name=self.group_name, order="contiguous")
        x = heads[0].transpose(0, 1).flatten(1).sin()
        full = weft.ops.gather_from_sequence(x, 0, self.group_name).sin()
        shard = weft.ops.reduce_scatter_to_sequence(full, 0, self.group_name).sin()
        return weft.ops.scatter_to_group(
            weft.ops.gather_from_group(shard, 0, self.group_name).sin(), 0, self.group_name
        )


@on_ranks(2)
def test_selective_repeats_no_sequence_communication(rank: int) -> None:
    backward = {"all_gather_into_tensor": 6, "reduce_scatter_tensor": 2, "all_to_all_single": 2, "send": 2, "recv": 2}
    grads = []
    for selective in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(SequenceBlock(dist.group.WORLD.group_name))
        if selective:
            checkpoint_activations(model, {"0": "selective"})
        y = model(torch.ones(2, 8)).sum()
        collectives_of(y.backward, expected=backward)
        grads.append([parameter.grad for parameter in model.parameters()])
    for ours, expected in zip(*grads, strict=True):
        assert torch.equal(ours, expected)


@on_ranks(1)
def test_offload_copies_input(rank: int) -> None:
    x = torch.randn(64, 8, requires_grad=True)
    saved = {}
    with counted() as count:
        for offload in (False, True):
            model = nn.ModuleList([nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 6))])
            checkpoint_activations(model, offload=offload)
            before = count.now()
            y = model[0](x)
            saved[offload] = count.now() - before
            del y
    assert saved[True] - saved[False] == x.nbytes  # on the CPU, offload copies within CPU memory


def test_module_keywords_are_preserved() -> None:
    class Named(nn.Linear):
        def forward(self, x: Tensor, *, debug: bool = False, function: float = 1.0, context_fn: float = 1.0) -> Tensor:
            return super().forward(x) * (2.0 if debug else 1.0) * function * context_fn

    for mode in ("full", "selective"):
        model = nn.ModuleList([Named(2, 2)])
        expected = model[0](torch.ones(1, 2), debug=True, function=3.0, context_fn=5.0)
        checkpoint_activations(model, {"0": mode})
        assert torch.equal(model[0](torch.ones(1, 2), debug=True, function=3.0, context_fn=5.0), expected)


def test_nested_blocks_are_found_after_pattern() -> None:
    block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model = nn.ModuleList([nn.ModuleList([copy.deepcopy(block), block])])
    checkpoint_activations(model, "0.0")
    assert checkpoint_activations(model, "full") == ["0.0", "0.1"]


def test_first_blocks_are_checkpointed() -> None:
    model = Llama(LlamaArgs())
    assert checkpoint_activations(model, "selective:1") == ["layers.0"]
    assert model.layers[0].checkpoint_mode[0] == "selective"  # type: ignore[union-attr]
    model = Llama(LlamaArgs())
    assert checkpoint_activations(model, "full:9") == [f"layers.{i}" for i in range(len(model.layers))]
    for policy in ("full:0", "full:", "selective:-1", "full:x"):
        with pytest.raises(ValueError, match="give the number of blocks that are checkpointed, from 1"):
            checkpoint_activations(model, policy)


@pytest.mark.parametrize("policy", [None, [], {}, [1], 3])
def test_policy_of_wrong_type_raises(policy: object) -> None:
    with pytest.raises(TypeError, match="for what to checkpoint; pass 'none'"):
        checkpoint_activations(nn.Linear(2, 2), policy)


@on_ranks(2)
def test_recompute_rules_inside_checkpoints_raise(world_size: int) -> None:
    mesh = tensor_parallel(world_size)
    plan = {"layers.*.feed_forward": {"style": "column_row_mlp", "recompute": True}}
    model = weft.parallelize(Llama(LlamaArgs()), mesh, plan)
    with pytest.raises(ValueError, match=r"'feed_forward' in 'layers\.0' says recompute"):
        checkpoint_activations(model, "selective")
    assert checkpoint_activations(model, "full") == ["layers.0", "layers.1"]

    model = Llama(LlamaArgs())
    checkpoint_activations(model, "layers.*.feed_forward")
    with pytest.raises(ValueError, match=r"'layers\.0\.feed_forward' is checkpointed already"):
        weft.parallelize(model, mesh, plan)


ERRORS = {
    "no blocks": ("full", "finds no repeated blocks in a Sequential.*pass patterns"),
    "no match": ("layers.*", "pattern 'layers.*' matches no module; pass 'full'.*such as '0', '1'"),
    "mode": ({"0": "half"}, "pattern '0' has the value 'half'; pass 'full' or 'selective'"),
    "both": ({"0": "full", "*": "selective"}, "'0' gets 'full' from one pattern and 'selective' from another"),
}


@pytest.mark.parametrize("case", list(ERRORS))
def test_invalid_policies_raise(case: str) -> None:
    policy, message = ERRORS[case]
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(ValueError, match=message):
        checkpoint_activations(model, policy)
    assert type(model[0]) is nn.Linear


@on_ranks(2)
def test_fused_layer_and_conflicting_checkpoint_raise(world_size: int) -> None:
    model = weft.parallelize(Llama(LlamaArgs()), tensor_parallel(world_size), "auto")
    with pytest.raises(ValueError, match=r"'layers\.0\.feed_forward\.w1' is a layer of a fused MLP.*name the MLP"):
        checkpoint_activations(model, "layers.0.feed_forward.w1")
    checkpoint_activations(model, "layers.0")
    assert checkpoint_activations(model, "layers.0") == ["layers.0"]  # repeating a call changes nothing
    assert len([cls for cls in type(model.layers[0]).__mro__ if cls is CheckpointedModule]) == 1
    with pytest.raises(ValueError, match=r"'layers\.0' has a full checkpoint without offload already; give"):
        checkpoint_activations(model, "selective")
    with pytest.raises(ValueError, match="'layers' is to be recomputed, but a ModuleList has no forward"):
        checkpoint_activations(model, "layers")


@pytest.mark.cuda
def test_offloaded_inputs_leave_the_device() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)).cuda()
    x = torch.randn(4096, 64, device="cuda", requires_grad=True)
    allocated, gradients = {}, {}
    for offload in (False, True):
        blocks = copy.deepcopy(model)
        checkpoint_activations(blocks, "*", offload=offload)
        gc.collect()  # free the memory of earlier tests and models
        before = torch.cuda.memory_allocated()
        y = x
        for block in blocks:
            y = block(y)
        allocated[offload] = torch.cuda.memory_allocated() - before
        (gradients[offload],) = torch.autograd.grad(y.sum(), x)
        del y, block
    assert allocated[False] - allocated[True] == 3 * x.nbytes  # the outputs that are the next block's input
    assert torch.equal(gradients[False], gradients[True])


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("has_prefix", [False, True])
def test_recomputation_finds_caches_as_they_were(policy: str, has_prefix: bool) -> None:
    """Models of Transformers add each call's keys and values to a cache, which may have a prefix, also in training."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    expected_model = language_model("llama").train()
    assert expected_model.config.use_cache
    model = copy.deepcopy(expected_model)
    checkpoint_activations(model, policy)
    ids, prefix = torch.randint(0, VOCAB, (2, 9)), torch.randint(0, VOCAB, (2, 3))
    lengths, gradients = [], []
    for each in (expected_model, model):
        cache = each(prefix).past_key_values if has_prefix else None
        result = each(ids, past_key_values=cache)
        lengths.append(result.past_key_values.get_seq_length())
        result.logits.logsumexp(-1).mean().backward()
        gradients.append([parameter.grad for parameter in each.parameters()])
    assert lengths == [12 if has_prefix else 9] * 2
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
