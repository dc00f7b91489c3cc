"""Compares models in stages with the same models on one device: losses, gradients and weights; float64, SGD."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from support.hugging_face import language_model
from support.models import EncoderClassifier, Gpt2, Llama, LlamaArgs
from support.ranks import on_ranks
from weft.strategy._plan import default_stages_per_rank
from weft.strategy.pipeline import SCHEDULES, Pipeline

TOLERANCE = 1e-10
NUM_STEPS = 3  # the first step records the calls between stages; the second and third use the recording
SEVERAL_STAGES = tuple(kind for kind in SCHEDULES if default_stages_per_rank(kind) == 2)
V_SHAPED = ("zbv", "dualpipev", "v_half", "v_min")


class UNet(nn.Module):
    """Has values that skip one or two boundaries, two values that cross one together, and parameters of the trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.randn(6))
        self.down = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True))
        self.up = nn.ModuleList(nn.Linear(12, 6) for _ in range(3))
        self.scale = nn.Parameter(torch.randn(()))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.offset
        skips = []
        for layer in self.down:
            x = torch.tanh(layer(x).mul_(mask))
            skips.append(x)
        x = self.bottom(x)
        for layer in self.up:
            x = torch.tanh(layer(torch.cat((x, skips.pop()), dim=-1))) * self.scale
        return self.head(x)


class TwoStreams(nn.Module):
    """Has two tensors between layers, sends integers across boundaries, and passes dicts and tuples to layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Stream() for _ in range(4))
        self.head = nn.Linear(12, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        streams = {"a": self.embed(tokens), "b": self.embed(tokens.flip(-1))}
        for block in self.blocks:
            a, order = block(streams, shift=1)
            streams = {"a": a, "b": streams["b"].gather(1, order)}
        return self.head(torch.cat((streams["a"], streams["b"]), dim=-1).mean(1))


class Stream(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, streams: dict[str, Tensor], shift: int) -> tuple[Tensor, Tensor]:
        a = torch.tanh(self.linear(streams["a"]) + streams["b"].roll(shift, dims=-1))
        return a, a.detach().argsort(dim=1)


def chain() -> nn.Sequential:
    layers = [layer for _ in range(8) for layer in (nn.Linear(6, 6), nn.ReLU(inplace=True))]
    return nn.Sequential(*layers, nn.Linear(6, 3))


def features() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    mask = (torch.rand(8, 6, generator=generator) > 0.2).double()
    return {"x": x, "mask": mask, "y": torch.randint(0, 3, (8,), generator=generator)}


def tokens(vocab_size: int = 37) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {"x": torch.randint(0, vocab_size, (8, 9), generator=generator)}


def classify(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def classify_masked(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"], batch["mask"]), batch["y"])


def next_token(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["x"])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["x"][:, 1:].flatten())


def hugging_face_next_token(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["x"], use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["x"][:, 1:].flatten())


Case = tuple[Callable[[], nn.Module], dict[int, list[str]], Callable[[], dict[str, Tensor]], Callable[..., Tensor]]
LLAMA = LlamaArgs(n_layers=4, dtype=torch.float64)
CASES: dict[str, Case] = {
    "chain": (chain, {2: ["8"], 4: ["4", "8", "12"], 8: ["2", "4", "6", "8", "10", "12", "14"]}, features, classify),
    # Each cut is before a layer without parameters that changes its input in place.
    "in place": (chain, {2: ["9"], 4: ["3", "9", "13"]}, features, classify),
    "skips": (UNet, {2: ["bottom"], 4: ["down.2", "bottom", "up.1"]}, features, classify_masked),
    "streams": (TwoStreams, {2: ["blocks.2"], 4: ["blocks.0", "blocks.2", "blocks.3"]}, lambda: tokens(11), None),
    "llama": (lambda: Llama(LLAMA), {2: ["layers.2"], 4: ["layers.1", "layers.2", "layers.3"]}, tokens, next_token),
    "tied": (
        lambda: Llama(LlamaArgs(n_layers=4, tie_head=True, dtype=torch.float64)),
        {2: ["layers.2"], 4: ["layers.1", "layers.2", "layers.3"]},
        tokens,
        next_token,
    ),
    # The last stage, too, reads the weights of the first stage's embeddings as plain attributes.
    "read weights": (
        lambda: Gpt2(n_layer=3, dtype=torch.float64),
        {2: ["h.1"], 4: ["h.0", "h.1", "h.2"]},
        tokens,
        next_token,
    ),
    "encoder": (
        lambda: EncoderClassifier(dtype=torch.float64),
        {2: ["encoder.layers.1"], 4: ["encoder.layers.0", "encoder.layers.1", "head"]},
        tokens,
        next_token,
    ),
}
STREAMS_Y = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])


def loss_of(case: str) -> Callable[..., Tensor]:
    if case == "streams":
        return lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"])
    return CASES[case][3]


def batch_of(case: str) -> dict[str, Tensor]:
    batch = CASES[case][2]()
    return {**batch, "y": STREAMS_Y} if case == "streams" else batch


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def assert_same_training(
    model: nn.Module,
    reference: nn.Module,
    pipeline: Pipeline,
    batch: Any,
    loss_fn: Callable[..., Tensor],
    *,
    num_steps: int = NUM_STEPS,
    tolerance: float = TOLERANCE,
) -> None:
    """Compare the loss and gradients of every step, and the final weights; each rank compares its own stages."""
    ours = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    expected = dict(reference.named_parameters(remove_duplicate=False))
    names = [name for name, _ in model.named_parameters()]
    assert names and set(names) <= set(expected)
    for _ in range(num_steps):
        ours.zero_grad()
        theirs.zero_grad()
        loss = pipeline.step(batch, lambda micro_batch: loss_fn(model, micro_batch))
        expected_loss = loss_fn(reference, batch)
        expected_loss.backward()
        assert abs(loss - expected_loss) <= tolerance * abs(expected_loss)
        # The gradient of a key's bias is rounding noise, since softmax does not depend on the bias.
        least = 1e-3 * torch.stack([p.grad.norm() for p in reference.parameters()]).norm()
        for name, parameter in model.named_parameters():
            gradient = expected[name].grad
            assert (parameter.grad - gradient).norm() <= tolerance * max(gradient.norm(), least), name
        ours.step()
        theirs.step()
    for name, parameter in model.named_parameters():
        assert (parameter - expected[name]).norm() <= tolerance * expected[name].norm(), name


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_schedule_matches_one_device(world_size: int, kind: str) -> None:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("pipeline_parallel",))
    num_stages = 2 * world_size if kind in SEVERAL_STAGES else world_size
    for num_micro_batches in range(1, 9):
        model, reference = build(chain), build(chain)
        pipeline = Pipeline(
            model, mesh, CASES["chain"][1][num_stages], schedule=kind, num_micro_batches=num_micro_batches
        )
        assert pipeline.schedule(num_micro_batches).num_micro_batches == num_micro_batches
        assert_same_training(model, reference, pipeline, features(), classify)


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("case", [case for case in CASES if case != "chain"])
def test_unmodified_models_match_one_device(world_size: int, case: str, kind: str) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    make, cuts, _, _ = CASES[case]
    model, reference = build(make), build(make)
    pipeline = Pipeline(model, mesh, cuts[world_size], schedule=kind, num_micro_batches=3)
    assert_same_training(model, reference, pipeline, batch_of(case), loss_of(case))


@on_ranks(2, 4)
def test_steps_accumulate_gradients(world_size: int) -> None:
    """This includes tied parameters, whose gradients already hold the previous step's sum over the stages."""
    mesh = init_device_mesh("cpu", (world_size,))
    make, cuts, _, _ = CASES["tied"]
    model, reference = build(make), build(make)
    pipeline = Pipeline(model, mesh, cuts[world_size], num_micro_batches=2)
    batches = [{"x": tokens()["x"].roll(shift, dims=1)} for shift in range(3)]
    for batch in batches:
        pipeline.step(batch, lambda micro_batch: next_token(model, micro_batch))
        next_token(reference, batch).backward()
    expected = dict(reference.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters():
        gradient = expected[name].grad
        assert (parameter.grad - gradient).norm() <= TOLERANCE * gradient.norm(), name


HUGGING_FACE = {
    "llama": ("model.layers.2", None),
    "gpt2": ("transformer.h.2", None),
    "qwen3": ("model.layers.2", None),
    "gemma2": ("model.layers.2", None),
    "opt": ("model.decoder.layers.2", {"model.decoder.final_layer_norm": 1}),
}


@on_ranks(2, timeout=300)
@pytest.mark.parametrize("family", HUGGING_FACE)
def test_hugging_face_models_match_one_device(world_size: int, family: str) -> None:
    """Unmodified models with their code between layers: masks, positions, tied heads. Some compute norms in float32."""
    pytest.importorskip("transformers")
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    reference = language_model(family, **{"n_layer" if family == "gpt2" else "num_hidden_layers": 4})
    model = copy.deepcopy(reference)
    cut, layer_stages = HUGGING_FACE[family]
    pipeline = Pipeline(model, mesh, [cut], num_micro_batches=4, layer_stages=layer_stages)
    loss_fn, tolerance = hugging_face_next_token, TOLERANCE if family in ("gpt2", "opt") else 1e-6
    assert_same_training(model, reference, pipeline, tokens(64), loss_fn, num_steps=2, tolerance=tolerance)
