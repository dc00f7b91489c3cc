"""Unmodified models with a sharded sequence: training as on one device, memory, communication, and errors."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.hugging_face import VOCAB, language_model
from support.models import Gpt2, Llama, LlamaArgs
from support.parity import assert_same_training
from support.ranks import on_ranks
from weft import flight
from weft.nn.shard import process_group
from weft.strategy.context import ShardedSequence, full_sequences, parallelize_context
from weft.strategy.context.entry import Context
from weft.strategy.context.groups import grids_of
from weft.strategy.modules.activation_checkpointing import checkpoint_activations

# Relative; Gemma computes its norms in float32.
FAMILIES = {"llama": 1e-10, "qwen3": 1e-10, "gpt2": 1e-10, "opt": 1e-10, "gemma2": 1e-5, "phi3": 1e-10}


@contextmanager
def no_gathers() -> Iterator[None]:
    """Inside, a function that gathers the full sequence is an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="weft gathers all tokens")
        yield


def token_batches(num: int, tokens: int, vocab_size: int = VOCAB) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, vocab_size, (2, tokens), generator=generator) for _ in range(num)]


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss of the next token, shifted by the caller."""
    result = model(ids)
    logits = result if isinstance(result, Tensor) else result.logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def in_context(model: nn.Module, attention: str, change: Callable[[nn.Module], Any] | None = None) -> nn.Module:
    """Shard a model's sequence over all ranks, and average its gradients."""
    group = dist.group.WORLD
    parallelize_context(model, group, attention=attention)
    if change is not None:
        change(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_average)
    return model


def _average(parameter: Tensor) -> None:
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()


@on_ranks(2, 4)
@pytest.mark.parametrize("attention", ["ring", "ulysses"])
@pytest.mark.parametrize("family", FAMILIES)
def test_hugging_face_models_train_as_on_one_device(attention: str, family: str) -> None:
    torch.manual_seed(0)
    model = language_model(family)
    with no_gathers():
        parallelize, tolerance = functools.partial(in_context, attention=attention), FAMILIES[family]
        assert_same_training(parallelize, model, next_token_loss, token_batches(10, 13), "SGD", tolerance=tolerance)


def _loss_of_padded_documents(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss for a mask that Hugging Face's models make of a batch with padding."""
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids.masked_fill(mask == 0, -100)[:, 1:].flatten())


class _LayersWithOtherHeads(nn.Module):
    """Has layers with 1, 2, 3 and 4 heads, of which 4 ranks divide 1, 2, 1 and 4."""

    def __init__(self) -> None:
        super().__init__()
        args = [LlamaArgs(dim=24, n_heads=heads, dtype=torch.float64) for heads in (1, 2, 3, 4)]
        self.layers = nn.ModuleList(Llama(each) for each in args)

    def forward(self, ids: Tensor) -> Tensor:
        embed, head = self.layers[0].tok_embeddings, self.layers[0].output
        x = embed(ids)
        for model in self.layers:
            x = model.layers[0](x, model.cos, model.sin)
        return head(x)


@on_ranks(4)
def test_more_ranks_than_heads() -> None:
    """Models with 1 to 4 heads, grouped queries, a window and padding, with uneven shards and with empty ones."""
    two = {"num_attention_heads": 2, "num_key_value_heads": 2}
    cases = [
        (_LayersWithOtherHeads(), next_token_loss, 16, 37),
        (Llama(LlamaArgs(n_heads=2, dtype=torch.float64)), next_token_loss, 3, 37),
        (language_model("qwen3"), next_token_loss, 13, VOCAB),
        (language_model("mistral", **two, sliding_window=5), next_token_loss, 21, VOCAB),
        (language_model("llama", **two), _loss_of_padded_documents, 13, VOCAB),
    ]
    parallelize = functools.partial(in_context, attention="ring_ulysses")
    for model, loss_of, tokens, vocab_size in cases:
        with no_gathers():
            assert_same_training(parallelize, model, loss_of, token_batches(3, tokens, vocab_size), "SGD")


@on_ranks(2, 4)
def test_groups_of_grids_are_created_once(rank: int, world_size: int) -> None:
    world = dist.group.WORLD
    grids = grids_of(world)
    num_groups = len(dist.distributed_c10d._world.pg_map)
    assert grids_of(world) is grids and len(dist.distributed_c10d._world.pg_map) == num_groups
    found = [tuple(_ranks_of(name) for name in grid[1:]) for grid in grids]
    inner, ring = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
    all_ranks, none = list(range(world_size)), []
    assert found == [(all_ranks, none), *([(inner, ring)] if world_size == 4 else []), (none, all_ranks)]
    assert [grid.num_ulysses for grid in grids if grid.takes(12, 2)] == [2, 1]
    assert [grid.num_ulysses for grid in grids if grid.takes(12, 3)] == [1]
    if world_size == 4:  # a user, or another test, may have destroyed a group
        dist.destroy_process_group(process_group(grids[1].ring_group_name))
        again = grids_of(world)
        assert again is not grids and _ranks_of(again[1].ring_group_name) == ring


def _ranks_of(group_name: str) -> list[int]:
    return dist.get_process_group_ranks(process_group(group_name)) if group_name else []


@on_ranks(2, 4)
@pytest.mark.parametrize("tokens", [2, 3, 16, 31])
def test_sequences_of_all_lengths(tokens: int) -> None:
    """Some ranks have no tokens."""
    torch.manual_seed(0)
    model = Llama(LlamaArgs(dtype=torch.float64))
    with no_gathers():
        batches = token_batches(3, tokens, LlamaArgs().vocab_size)
        assert_same_training(functools.partial(in_context, attention="ring"), model, next_token_loss, batches, "SGD")


class _TorchTransformer(nn.Module):
    """The layers of torch.nn, with a mask and its hint, with a mask alone, or with returned weights."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(VOCAB, 16)
        options = {"dim_feedforward": 24, "dropout": 0.0, "batch_first": kind != "mask"}
        layer = nn.TransformerEncoderLayer(16, 4, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=torch.float64)
        x = self.embedding(ids)
        if self.kind == "mask":
            return self.head(self.encoder(x.transpose(0, 1), mask).transpose(0, 1))
        x = self.encoder(x, mask, is_causal=True)
        if self.kind == "weights":
            y, weights = self.attention(x, x, x, attn_mask=mask)
            x = y + weights @ x
        return self.head(x)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["hint", "mask", "weights"])
def test_layers_of_torch(kind: str) -> None:
    torch.manual_seed(0)
    model = _TorchTransformer(kind).double()
    if kind != "weights":
        del model.attention
    with no_gathers():
        parallelize = functools.partial(in_context, attention="ring")
        assert_same_training(parallelize, model, next_token_loss, token_batches(5, 13), "SGD")


@on_ranks(2)
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_activations(mode: str) -> None:
    torch.manual_seed(0)
    model = Llama(LlamaArgs(dtype=torch.float64))
    change = functools.partial(checkpoint_activations, what=mode)
    with no_gathers():
        batches = token_batches(3, 13, LlamaArgs().vocab_size)
        parallelize = functools.partial(in_context, attention="ring", change=change)
        assert_same_training(parallelize, model, next_token_loss, batches, "SGD")


class _Positions(nn.Module):
    """Has a table that is neither a parameter nor a buffer, as a parameter's local tensor is."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.table = torch.randn(16, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids) + self.table[: ids.shape[1]]


@on_ranks(2)
def test_forwards_see_new_values_of_tables() -> None:
    """Fused optimizers change values without changing their version."""
    torch.manual_seed(0)
    model = _Positions()
    parallelize_context(model, dist.group.WORLD)
    for _ in range(2):
        version = model.table._version
        model.table.mul_(-1.5)
        torch._C._autograd._unsafe_set_version_counter((model.table,), (version,))
        found = full_sequences(model(torch.zeros(1, 13, dtype=torch.int64)))[0]
        torch.testing.assert_close(found, model.embedding.weight[0] + model.table[:13])


def _padded_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Return Hugging Face's own loss for a batch with padding."""
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0
    loss: Tensor = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    return loss


@on_ranks(2)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_padded_batches(family: str) -> None:
    torch.manual_seed(0)
    model = language_model(family)
    with no_gathers():
        parallelize = functools.partial(in_context, attention="ring")
        # Hugging Face computes the loss in float32.
        assert_same_training(parallelize, model, _padded_loss, token_batches(3, 13), "SGD", tolerance=1e-6)


@on_ranks(2, 4)
def test_dropout_is_that_of_one_device(rank: int, world_size: int) -> None:
    """The masks of weft.nn.Dropout on the full sequence: each rank drops the elements of its own tokens."""
    context = Context(dist.group.WORLD, "ring")
    x = torch.ones(2, 13, 3, dtype=torch.float64)
    torch.manual_seed(4)
    results = [
        full_sequences(F.dropout(context.shard(x, 1).flatten(*dims), 0.4).view(x.shape)) for dims in ((0, 0), (0, 1))
    ]
    torch.manual_seed(4)
    for actual in results:
        seed = torch.randint(0, 1 << 62, (), dtype=torch.int64)
        torch.testing.assert_close(actual, torch.ops.weft.dropout(x, seed, p=0.4, group_name=""), rtol=0, atol=0)


@on_ranks(2)
def test_dropout_of_scores_drops_each_pair_with_equal_probability() -> None:
    context = Context(dist.group.WORLD, "ring")
    torch.manual_seed(4)
    q, value = torch.zeros(1, 2, 40, 4), torch.eye(40).expand(1, 2, 40, 40)
    sharded = [context.shard(each, 2) for each in (q, q, value)]
    weights = full_sequences(F.scaled_dot_product_attention(*sharded, dropout_p=0.25))  # 0 or 1 / 40 / 0.75
    kept = weights > 0
    assert abs(kept.double().mean().item() - 0.75) < 0.03
    torch.testing.assert_close(weights[kept], torch.full_like(weights[kept], 1 / 40 / 0.75))
    assert not torch.equal(kept[:, :, :20], kept[:, :, 20:])  # not the same mask on each rank


def _train_with_dropout(model: nn.Module) -> list[float]:
    model.train()
    losses = []
    for ids in token_batches(3, 16, 37):
        loss = next_token_loss(model, ids)
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
    return losses


@on_ranks(2)
def test_models_with_dropout_keep_equal_random_states(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = Gpt2(dtype=torch.float64, dropout=0.2)
    parallelize_context(model, dist.group.WORLD)
    torch.manual_seed(9)
    losses = _train_with_dropout(model)
    states = torch.stack([torch.get_rng_state().double().sum(), torch.tensor(losses, dtype=torch.float64).sum()])
    gathered = [torch.empty_like(states) for _ in range(world_size)]
    dist.all_gather(gathered, states)
    assert all(torch.equal(each, states) for each in gathered)


class _Embeddings(nn.Module):
    """Calls an embedding by a keyword, and adds a table whose values a training loop replaces through `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8, 4, dtype=torch.float64)
        self.table = nn.Parameter(torch.ones(5, 4, dtype=torch.float64), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(input=ids) + self.table


@on_ranks(2)
def test_tables_that_change_without_a_version() -> None:
    model = _Embeddings()
    reference = copy.deepcopy(model)
    parallelize_context(model, dist.group.WORLD)
    ids = torch.arange(10).reshape(2, 5) % 8
    for _ in range(3):
        for each in (model, reference):
            each.table.data.mul_(2)
        result = model(ids)
        assert isinstance(result, ShardedSequence)
        torch.testing.assert_close(full_sequences(result), reference(ids))


class _Saved:
    """The bytes of the tensors that a forward saves for the backward, without parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.storages: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    def num_bytes(self, model: nn.Module, ids: Tensor) -> int:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor):
            loss = next_token_loss(model, ids)
        del loss
        return sum(self.storages.values())


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_saved_activations_are_proportional_to_the_tokens_of_a_rank(world_size: int, family: str) -> None:
    [ids] = token_batches(1, 64)
    torch.manual_seed(0)
    model = language_model(family)
    full = _Saved(model).num_bytes(model, ids)
    parallelize_context(model, dist.group.WORLD)
    own = _Saved(model).num_bytes(model, ids)
    assert own <= 1.05 * full / world_size
    assert own >= 0.8 * full / world_size


def _calls(run: Callable[[], Tensor | None]) -> tuple[Counter[str], Any]:
    """Return the number of calls of each collective, and the result."""
    before = max((each["begin"] for each in flight.calls()), default=0.0)
    result = run()
    calls = [each["call"].partition("(")[0] for each in flight.calls() if each["begin"] > before]
    return Counter(calls), result


@on_ranks(2, 4)
@pytest.mark.parametrize(
    ("attention", "num_heads"), [("ring", 4), ("ulysses", 4), *(("ring_ulysses", heads) for heads in (1, 2, 4))]
)
def test_number_of_communications(world_size: int, attention: str, num_heads: int) -> None:
    """Each layer communicates in its attention alone, and the loss in one sum: nothing is gathered."""
    torch.manual_seed(0)
    model = Llama(LlamaArgs(n_heads=num_heads, dtype=torch.float64))
    parallelize_context(model, dist.group.WORLD, attention=attention)
    [ids] = token_batches(1, 16, LlamaArgs().vocab_size)
    forward, loss = _calls(functools.partial(next_token_loss, model, ids))
    backward, _ = _calls(loss.backward)
    num_ulysses = 1 if attention == "ring" else math.gcd(num_heads, world_size)
    num_blocks = LlamaArgs().n_layers * (world_size // num_ulysses - 1)
    num_exchanges = 2 * LlamaArgs().n_layers if num_ulysses > 1 else 0
    others = Counter({"all_to_all": num_exchanges, "all_reduce": 1})
    assert +forward == +(others + Counter({"send": num_blocks, "recv": num_blocks}))
    assert +backward == +(others + Counter({"send": 2 * num_blocks, "recv": 2 * num_blocks}))


@on_ranks(2)
def test_errors() -> None:
    group = dist.group.WORLD
    with pytest.raises(ValueError, match=r"got attention='rings'; pass 'ring', 'ulysses' or 'ring_ulysses'"):
        parallelize_context(Llama(LlamaArgs()), group, attention="rings")
    with pytest.raises(TypeError, match=r"got a group of type str; pass a ProcessGroup, such as mesh.get_group\(\)"):
        parallelize_context(Llama(LlamaArgs()), group.group_name)
    with pytest.raises(ValueError, match=r"got a Linear without an nn.Embedding"):
        parallelize_context(nn.Linear(2, 2), group)
    with pytest.raises(ValueError, match=r"with attn_implementation='flex_attention', which takes no sharded"):
        parallelize_context(language_model("llama", attn_implementation="flex_attention"), group)
    reverse = dist.new_group([0, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_process_group_ranks", lambda group: [1, 0])
        with pytest.raises(ValueError, match=r"got a group with the ranks \[1, 0\] and attention='ring_ulysses'"):
            parallelize_context(Llama(LlamaArgs()), reverse, attention="ring_ulysses")
    x = Context(group, "ring").shard(torch.ones(2, 5), 1)
    with pytest.raises(ValueError, match="unsqueeze_ would change a sequence that is sharded"):
        x.unsqueeze_(0)
    embedded = Context(group, "ring").shard(torch.ones(2, 5, requires_grad=True) * 1, 1)
    for function in (_Double.apply, _Gather.apply, functools.partial(checkpoint, torch.sin, use_reentrant=True)):
        with pytest.raises(ValueError, match=r"went through a torch.autograd.Function"):
            function(embedded).sum().backward()
    layer = nn.Linear(5, 2)
    layer.register_full_backward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"went through a torch.autograd.Function"):
        layer(Context(group, "ring").shard(torch.ones(2, 5, requires_grad=True) * 1, 0))
    with torch.no_grad():
        assert (embedded * 2).sum().item() == 20  # no autograd function
    with pytest.raises(RuntimeError, match=r"The size of tensor a \(5\) must match"):
        x + torch.ones(4)  # the error has the shapes of the full tensors


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.cumsum(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
