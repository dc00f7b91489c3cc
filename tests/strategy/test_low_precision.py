"""Low-precision optimizer states: the same bits on every layout, split weights that lose none, states that load."""

from __future__ import annotations

import copy
import gc
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ops.memory.counting import counted
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

import weft
from support.ranks import on_ranks
from weft import ops
from weft.strategy import StepInBackward, fuse
from weft.strategy.data_parallel import apply_fsdp
from weft.strategy.data_parallel.local import local_shard
from weft.strategy.optimizers.row_steps import RowSteps
from weft.strategy.optimizers.saved_states import states_to_load, states_to_save
from weft.strategy.optimizers.state_format import StateFormat
from weft.strategy.optimizers.state_shards import has_aligned_blocks
from weft.strategy.optimizers.use_low_precision import use_low_precision

OPTIMIZERS: dict[str, Any] = {
    "adam": lambda p: Adam(p, lr=1e-2, weight_decay=0.1),
    "adamw": lambda p: AdamW(p, lr=1e-2),
    "momentum": lambda p: SGD(p, lr=0.05, momentum=0.9, dampening=0.2, nesterov=False, weight_decay=0.01),
}
SHAPES = ((13, 512), (70, 300), (12, 512, 3), (512,), (3,))
NUM_STEPS = 4


def _values(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * 10 ** (idx - 2) for idx, shape in enumerate(SHAPES)]


def _parameters(place: Any, dtype: torch.dtype = torch.float32) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(place(value.to(dtype))) for value in _values(0))


def _train(parameters: nn.ParameterList, optimizer: Optimizer, place: Any, first_step: int = 1) -> None:
    for step in range(first_step, first_step + NUM_STEPS):
        for parameter, grad in zip(parameters, _values(step), strict=True):
            # The same numbers in every dtype: those that bfloat16 has.
            parameter.grad = place(grad.to(torch.bfloat16).to(parameter.dtype))
        optimizer.step()


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _full_states(optimizer: Optimizer, in_float32: bool = False) -> list[dict[str, Tensor]]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [states_to_save(optimizer.state[p], p, in_float32) for p in parameters]
    return [{name: _full(value) for name, value in values.items()} for values in states]


def _by_name(states: list[dict[str, Tensor]]) -> list[Tensor]:
    return [values[name] for values in states for name in sorted(values)]


def _placements(world_size: int) -> dict[str, tuple[DeviceMesh, list[Placement]]]:
    """Placements whose blocks are those of the unsharded [13, 512]."""
    line = dist.init_device_mesh("cpu", (world_size,))
    found: dict[str, tuple[DeviceMesh, list[Placement]]] = {"rows": (line, [Shard(0)])}
    if world_size == 2:
        found["columns"] = (line, [Shard(1)])
    if world_size == 4:
        grid = dist.init_device_mesh("cpu", (2, 2))
        found |= {"rows and columns": (grid, [Shard(0), Shard(1)]), "replicas": (grid, [Replicate(), Shard(0)])}
    return found


def _placer(mesh: DeviceMesh, placements: list[Placement]) -> Any:
    def place(value: Tensor) -> DTensor:
        fitting = [p if not isinstance(p, Shard) or p.dim < value.dim() else Shard(0) for p in placements]
        return distribute_tensor(value, mesh, fitting)

    return place


@on_ranks(2, 3, 4, keeps_groups=True)
@pytest.mark.parametrize("states", ["float32", "bfloat16", "int8"])
def test_every_layout_has_the_bits_of_one_device(rank: int, world_size: int, states: str) -> None:
    """`fuse` leaves float32 states with float32 weights to torch's kernels, whose bits depend on the layout."""
    for optimizer_name, make in OPTIMIZERS.items():
        for weights in ("float32", "split", "split8"):
            expected = _parameters(lambda value: value)
            reference = make(expected)
            use_low_precision(reference, expected, StateFormat(states, weights))
            _train(expected, reference, lambda value: value)
            for name, (mesh, placements) in _placements(world_size).items():
                place = _placer(mesh, placements)
                parameters = _parameters(place)
                optimizer = make(parameters)
                use_low_precision(optimizer, parameters, StateFormat(states, weights))
                _train(parameters, optimizer, place)
                aligned = [has_aligned_blocks(parameter) for parameter in parameters]
                got, wanted = _full_states(optimizer), _full_states(reference)
                for idx, parameter in enumerate(parameters):
                    if aligned[idx] or states != "int8" or parameter.dim() == 1:
                        message = f"{optimizer_name} {weights} {name} {SHAPES[idx]}"
                        assert torch.equal(_full(parameter), expected[idx]), message
                        assert got[idx].keys() == wanted[idx].keys(), message
                        for key, value in wanted[idx].items():
                            assert torch.equal(got[idx][key], value), f"{message} {key}"
                    else:  # other blocks: other rounding of the states
                        torch.testing.assert_close(_full(parameter).float(), expected[idx].float(), rtol=0.05, atol=0.1)
                assert aligned[0] and aligned[2]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_have_the_bytes_of_their_format(name: str) -> None:
    parameters = _parameters(lambda value: value)
    optimizer = OPTIMIZERS[name](parameters)
    fuse(optimizer, parameters, optimizer_state="int8", master_weights="split8")
    _train(parameters, optimizer, lambda value: value)
    num_states = 1 if name == "momentum" else 2
    for parameter, shape in zip(parameters, SHAPES, strict=True):
        values = optimizer.state[parameter]
        num_bytes = sum(value.nbytes for key, value in values.items() if key != "step")
        if len(shape) == 1:
            assert parameter.dtype == torch.float32
            assert num_bytes == num_states * 4 * parameter.numel()
        else:
            assert parameter.dtype == torch.bfloat16
            blocks = shape[0] * -(-parameter.numel() // shape[0] // 256)
            assert num_bytes == (num_states + 1) * parameter.numel() + num_states * 4 * blocks


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_float32_states_step_like_torch(name: str) -> None:
    expected, parameters = _parameters(lambda value: value), _parameters(lambda value: value)
    reference, optimizer = OPTIMIZERS[name](expected), OPTIMIZERS[name](parameters)
    fuse(optimizer, parameters, master_weights="split")
    _train(expected, reference, lambda value: value)
    _train(parameters, optimizer, lambda value: value)
    for wanted, parameter in zip(expected, parameters, strict=True):
        joined = parameter
        if parameter.dtype == torch.bfloat16:
            joined = ops.join_float(parameter.detach(), optimizer.state[parameter]["low_bits"])
        torch.testing.assert_close(joined, wanted, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("states", ["float32", "bfloat16", "int8"])
def test_split_weights_step_to_the_bits_of_float32_weights(name: str, states: str) -> None:
    results = []
    for weights in ("float32", "split", "split8"):
        parameters = _parameters(lambda value: value)
        optimizer = OPTIMIZERS[name](parameters)
        # Not by `fuse`, which leaves float32 weights with float32 states to torch's kernels.
        use_low_precision(optimizer, parameters, StateFormat(states, weights))
        _train(parameters, optimizer, lambda value: value)
        results.append(
            [
                ops.join_float(p.detach(), optimizer.state[p]["low_bits"]) if p.dtype == torch.bfloat16 else p.detach()
                for p in parameters
            ]
        )
    for whole, exact, rounded in zip(*results, strict=True):
        assert torch.equal(exact, whole)
        if states != "float32":
            continue  # weight decay makes other gradients of other weights, and a state may be rounded in another way
        # Each step rounds to 24 bits, of which 16 are of the mantissa.
        bound = NUM_STEPS * 2**-17 * float(whole.abs().max()) * 1.5
        torch.testing.assert_close(rounded, whole, rtol=0, atol=bound)


@on_ranks(1, 2, 4, keeps_groups=True)
def test_states_move_between_formats_and_meshes(rank: int, world_size: int) -> None:
    """Saved states are loaded into each format on each placement, and training goes on."""
    for saved_format in ("int8", "bfloat16"):
        plain = _parameters(lambda value: value)
        source = AdamW(plain, lr=1e-2)
        fuse(source, plain, optimizer_state=saved_format)
        _train(plain, source, lambda value: value)
        saved = copy.deepcopy(source.state_dict())
        in_float32 = _full_states(source, in_float32=True)
        for name, (mesh, placements) in _placements(world_size).items() if world_size > 1 else [("one", (None, None))]:
            place = _placer(mesh, placements) if mesh is not None else (lambda value: value)
            for states in ("float32", "bfloat16", "int8"):
                parameters = _parameters(place)
                optimizer = AdamW(parameters, lr=1e-2)
                fuse(optimizer, parameters, optimizer_state=states)
                converted = {
                    idx: {
                        key: value if key == "step" or mesh is None else place(value)
                        for key, value in states_to_load(optimizer, values, parameters[idx]).items()
                    }
                    for idx, values in saved["state"].items()
                }
                # A copy, because torch's own optimizers go on with the loaded tensors.
                optimizer.load_state_dict(copy.deepcopy({"state": converted, "param_groups": saved["param_groups"]}))
                rtol = {"float32": 0, "bfloat16": 2**-7, "int8": 0.02}[states]
                for got, wanted in zip(_full_states(optimizer, in_float32=True), in_float32, strict=True):
                    assert got["step"] == wanted["step"] == NUM_STEPS
                    for key in ("exp_avg", "exp_avg_sq"):
                        atol = float(wanted[key].abs().max()) * (0.01 if states == "int8" else 0)
                        torch.testing.assert_close(
                            got[key].float(),
                            wanted[key].float(),
                            rtol=rtol,
                            atol=atol,
                            msg=f"{saved_format} {name} {key}",
                        )
                _train(parameters, optimizer, place, first_step=NUM_STEPS + 1)
                assert float(optimizer.state[parameters[0]]["step"]) == 2 * NUM_STEPS


def test_state_dict_loads_to_the_bit() -> None:
    results = []
    for is_interrupted in (False, True):
        parameters = _parameters(lambda value: value)
        optimizer = AdamW(parameters, lr=1e-2)
        fuse(optimizer, parameters, optimizer_state="int8", master_weights="split")
        _train(parameters, optimizer, lambda value: value)
        if is_interrupted:
            saved = copy.deepcopy((parameters.state_dict(), optimizer.state_dict()))
            parameters = _parameters(lambda value: value)
            optimizer = AdamW(parameters, lr=1e-2)
            fuse(optimizer, parameters, optimizer_state="int8", master_weights="split")
            parameters.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        _train(parameters, optimizer, lambda value: value, first_step=NUM_STEPS + 1)
        results.append([*parameters, *_by_name(_full_states(optimizer))])
    for uninterrupted, resumed in zip(*results, strict=True):
        assert torch.equal(uninterrupted, resumed) and uninterrupted.dtype == resumed.dtype


@pytest.mark.parametrize("is_before", [True, False])
def test_learning_rate_schedules_work(is_before: bool) -> None:
    parameters = _parameters(lambda value: value)
    optimizer = AdamW(parameters, lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if is_before:
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        fuse(optimizer, parameters, optimizer_state="int8")
        if not is_before:
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        for _ in range(3):
            before = local_shard(parameters[0]).clone()
            parameters[0].grad = torch.ones_like(parameters[0])
            optimizer.step()
            moved = float((before - parameters[0].detach()).abs().max())
            # Adam moves an element by about the learning rate if all gradients are equal.
            assert moved == pytest.approx(optimizer.param_groups[0]["lr"], rel=0.2)
            schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert optimizer.state[parameters[0]]["exp_avg"].dtype == torch.int8


@pytest.mark.parametrize("weights", ["float32", "split8"])
@on_ranks(1, 2)
def test_steps_in_the_backward_have_the_same_bits(rank: int, world_size: int, weights: str) -> None:
    results = []
    for in_backward in (False, True):
        torch.manual_seed(3)
        model = nn.ModuleDict({"mlp": _Mlp()})
        mesh = dist.init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor_parallel",))
        weft.parallelize(model, mesh, {"mlp": "column_row_mlp"})
        optimizer = AdamW(model.parameters(), lr=1e-2)
        fuse(optimizer, model, optimizer_state="int8", master_weights=weights)
        if in_backward:
            StepInBackward(model, optimizer)
        for step in range(NUM_STEPS):
            x = torch.randn(5, 64, generator=torch.Generator().manual_seed(step))
            with torch.autocast("cpu", torch.bfloat16, enabled=weights != "float32"):
                loss = model["mlp"](x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        states = [optimizer.state[parameter] for parameter in model.parameters()]
        results.append([local_shard(each) for each in (*model.parameters(), *_by_name(states))])
    for usual, inside in zip(*results, strict=True):
        assert torch.equal(usual, inside)


@on_ranks(2)
@pytest.mark.parametrize("has_policy", [False, True])
def test_weights_of_fsdp_units_are_split_before_or_after_a_forward(
    rank: int, world_size: int, has_policy: bool
) -> None:
    mesh = dist.init_device_mesh("cpu", (world_size,), mesh_dim_names=("data_parallel",))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    results = []
    for runs_before in (False, True):
        torch.manual_seed(3)
        model = nn.Sequential(nn.LayerNorm(64), _Mlp())
        apply_fsdp(model, mesh, mp_policy=policy)
        if runs_before:
            with torch.autocast("cpu", torch.bfloat16):
                model(torch.ones(5, 64)).float().sum().backward()
            model.zero_grad()
        optimizer = AdamW(model.parameters(), lr=1e-2)
        fuse(optimizer, model, optimizer_state="int8", master_weights="split")
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        for step in range(NUM_STEPS):
            x = torch.randn(5, 64, generator=torch.Generator().manual_seed(step))
            with torch.autocast("cpu", torch.bfloat16):
                model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([local_shard(each) for each in model.parameters()])
    for before, after in zip(*results, strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("states", ["bfloat16", "int8"])
def test_steps_by_rows_have_the_same_bits(name: str, states: str) -> None:
    """The factors of gradients are whole numbers, so that their products are exact in any order."""
    results = []
    for by_rows in (False, True):
        parameter = nn.Parameter(_values(0)[1])
        optimizer = OPTIMIZERS[name]([parameter])
        fuse(optimizer, optimizer_state=states)
        model = nn.ParameterList([parameter])
        rows = RowSteps(optimizer, StepInBackward(model, optimizer)._apply)
        rows.rows_per_block = lambda weight: 7
        for step in range(NUM_STEPS):
            generator = torch.Generator().manual_seed(step)
            left, right = (torch.randint(-3, 4, (5, size), generator=generator).float() for size in parameter.shape)
            if by_rows:
                with torch.no_grad():
                    rows.step(parameter, left, right)
            else:
                parameter.grad = left.t() @ right
                optimizer.step()
        assert optimizer.state[parameter]["step"] == NUM_STEPS
        results.append([parameter.detach(), *_by_name([optimizer.state[parameter]])])
    for usual, by_row in zip(*results, strict=True):
        assert torch.equal(usual, by_row)


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.gate_proj = nn.Linear(64, 520, bias=False), nn.Linear(64, 520, bias=False)
        self.down_proj = nn.Linear(520, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (torch.optim.RMSprop, "RMSprop, and only Adam, AdamW, SGD have low-precision states"),
        (lambda p: SGD(p, lr=0.1), "SGD without momentum"),
        (lambda p: AdamW(p, amsgrad=True), "amsgrad=True"),
        (lambda p: AdamW([each.to(torch.float64) for each in p]), "dtype torch.float64"),
        (lambda p: AdamW([each.t() for each in p]), r"shape \[512, 8\] that is not contiguous"),
    ],
)
def test_optimizers_without_low_precision_states_raise(make: Any, text: str) -> None:
    parameters = [torch.zeros(8, 512)]
    optimizer = make(parameters)
    kind = type(optimizer)
    with pytest.raises(ValueError, match=text):
        fuse(optimizer, optimizer_state="int8")
    assert type(optimizer) is kind and not optimizer.state


@on_ranks(1)
def test_split_weights_count_as_parameters(rank: int) -> None:
    with counted():
        gc.collect()
        before = weft.memory.by_category()
        parameters = _parameters(lambda value: value)
        watch = weft.memory.watch(parameters)
        optimizer = AdamW(parameters)
        fuse(optimizer, parameters, master_weights="split")
        watch.add_optimizer(optimizer)
        _train(parameters, optimizer, lambda value: value)
        usage = {name: size - before[name] for name, size in weft.memory.by_category().items()}
        assert usage["parameters"] == sum(parameter.nbytes for parameter in parameters)
        states = [value for values in optimizer.state.values() for value in values.values()]
        assert usage["optimizer_state"] == sum(value.nbytes for value in states)
        watch.remove()


def test_optimizer_that_has_stepped_raises() -> None:
    parameters = _parameters(lambda value: value)
    optimizer = AdamW(parameters)
    _train(parameters, optimizer, lambda value: value)
    with pytest.raises(ValueError, match="AdamW that has made a step already"):
        fuse(optimizer, optimizer_state="int8")


@pytest.mark.parametrize("options", [{"optimizer_state": "int4"}, {"master_weights": "bfloat16"}])
def test_unknown_formats_raise(options: dict[str, str]) -> None:
    [(name, value)] = options.items()
    with pytest.raises(ValueError, match=f"got {name}='{value}'; pass one of 'float32'"):
        fuse(AdamW([torch.zeros(2)]), **options)
