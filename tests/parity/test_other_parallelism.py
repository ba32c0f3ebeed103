"""Beside tensor and pipeline parallelism (docs/parallelism.md): what each rank has of the model is a model of its own,
sharded over the ranks that have the same. Two parts on two ranks each, beside one plain process with the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.nn.functional import mse_loss

import zeroshard
from tests.together import in_turn
from zeroshard.testing import run_ranks

State = dict[str, Tensor]
Built = tuple[zeroshard.Handle, zeroshard.ShardedOptimizer]
STEPS, WIDTH, MICRO_BATCHES, LIMIT = 4, 8, 4, 0.3


class Block(nn.Module):
    """Two linear layers. `tensor`: a mesh over whose ranks they are divided, by columns and by rows (Megatron)."""

    def __init__(self, seed: int, tensor: DeviceMesh | None = None) -> None:
        super().__init__()
        torch.manual_seed(seed)
        up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm, self.down_bias, self.tensor = nn.LayerNorm(WIDTH), down.bias, tensor
        rank, size = (0, 1) if tensor is None else (tensor.get_local_rank(), tensor.size())
        self.up, self.up_bias, self.down = (
            nn.Parameter(whole.detach().chunk(size, axis)[rank].clone())
            for whole, axis in ((up.weight, 0), (up.bias, 0), (down.weight, 1))
        )
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        group = None if self.tensor is None else self.tensor.get_group()
        inner = torch.tanh(nn.functional.linear(_Enter.apply(self.norm(x), group), self.up, self.up_bias))
        return x + _Leave.apply(nn.functional.linear(inner, self.down), group) + self.down_bias


def axis_of(name: str) -> int | None:
    """The axis along which a parameter is divided."""
    return {"up": 0, "up_bias": 0, "down": 1}.get(name.rpartition(".")[2])


class _Enter(torch.autograd.Function):
    """What each rank of the group has, and uses in its own way: the gradient is the sum over these ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _add_up(grad, ctx.group), None


class _Leave(torch.autograd.Function):
    """The output of layers that are divided: the sum over their ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        return _add_up(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _add_up(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    x = x.clone()
    if group is not None:
        dist.all_reduce(x, group=group)
    return x


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    values = torch.randn(2, MICRO_BATCHES, WIDTH, generator=generator, dtype=torch.float64)
    return values[0], values[1]


def reference(num_blocks: int) -> list[State]:
    """The weights of each block, trained in one process on the batches of both data-parallel ranks."""
    blocks = [Block(seed) for seed in range(num_blocks)]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(mse_loss(model(x), y) / 2 for x, y in (batch(step, 0), batch(step, 1))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
    return [{name: value.detach() for name, value in block.named_parameters()} for block in blocks]


def built(part: nn.Module, plan: str, data: DeviceMesh) -> Built:
    handle = zeroshard.shard(part, plan, units=Block, mesh=data)
    return handle, zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1, momentum=0.9)


def clip(parameters: Iterable[nn.Parameter], squares: Iterable[Tensor], parts_of_model: DeviceMesh) -> None:
    """By the norm of the whole model. `squares`: of the norms that this rank counts."""
    total = torch.stack([*squares]).sum()
    dist.all_reduce(total, group=parts_of_model.get_group())
    nn.utils.clip_grads_with_norm_(parameters, LIMIT, total.sqrt())


def in_a_pipeline(rank: int, kind: str, plan: str, folder: Path) -> dict[int, State]:
    """The weights of this rank's blocks, by number. After two steps they are saved, and loaded into new ones."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    stage, data, group = mesh["pipeline"].get_local_rank(), mesh["data"], mesh["pipeline"].get_group()
    numbers = [stage] if kind == "1f1b" else [stage, stage + 2]

    def build() -> tuple[list[nn.Module], list[Built], Any]:
        parts = [nn.Sequential(Block(number)) for number in numbers]
        stages = [
            PipelineStage(part, number, 2 * len(parts), torch.device("cpu"), group=group)
            for part, number in zip(parts, numbers, strict=True)
        ]
        if kind == "1f1b":
            schedule: Any = Schedule1F1B(stages[0], MICRO_BATCHES, loss_fn=mse_loss)
        else:
            schedule = ScheduleInterleavedZeroBubble(stages, MICRO_BATCHES, loss_fn=mse_loss)
        return [*parts], [built(part, plan, data) for part in parts], schedule

    parts, of_parts, schedule = build()
    for step in range(STEPS):
        if step == 2:
            for number, (handle, optimizer) in zip(numbers, of_parts, strict=True):
                zeroshard.save(folder / f"part-{number}", handle, optimizer, step=step)
                handle.close()
            parts, of_parts, schedule = build()
            for number, (handle, optimizer) in zip(numbers, of_parts, strict=True):
                zeroshard.load(folder / f"part-{number}", handle, optimizer)
        x, y = batch(step, data.get_local_rank())
        with ExitStack() as scopes:
            for handle, optimizer in of_parts:
                optimizer.zero_grad()
                if kind == "zero bubble":  # it computes the gradients of weights later, past all hooks
                    scopes.enter_context(handle.unsharded())
            schedule.step(x) if stage == 0 else schedule.step(target=y)
        squares = [optimizer.clip_grad_norm_(math.inf) ** 2 for _, optimizer in of_parts]
        clip((p for part in parts for p in part.parameters()), squares, mesh["pipeline"])
        for _, optimizer in of_parts:
            optimizer.step()
    states = [handle.full_state_dict() for handle, _ in of_parts]
    names = [{name.removeprefix("0."): value for name, value in state.items()} for state in states]
    return dict(zip(numbers, names, strict=True))


def in_divided_layers(rank: int, plan: str) -> list[State]:
    """The weights of this rank's part of each block."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    tensor, data = mesh["tensor"], mesh["data"]
    blocks = [Block(seed, tensor) for seed in range(2)]
    model = nn.Sequential(*blocks)
    handle, optimizer = built(model, plan, data)
    for step in range(STEPS):
        x, y = batch(step, data.get_local_rank())
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        # What is not divided is there on both ranks, and counts once.
        counted = [
            p for name, p in model.named_parameters() if tensor.get_local_rank() == 0 or axis_of(name) is not None
        ]
        clip(model.parameters(), [p.grad.norm() ** 2 for p in counted if p.grad is not None], tensor)
        optimizer.step()
    state = handle.full_state_dict()
    return [
        {name: state[f"{number}.{name}"] for name, _ in block.named_parameters()} for number, block in enumerate(blocks)
    ]


class Mixture(nn.Module):
    """Two experts and their gate. `expert`: a mesh over whose ranks the experts are divided; each rank then takes the
    tokens of all of them to its expert."""

    def __init__(self, seed: int, expert: DeviceMesh | None = None) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.gate, experts = nn.Linear(WIDTH, 2), [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
        self.expert = expert
        self.experts = nn.ModuleList(experts if expert is None else [experts[expert.get_local_rank()]])
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.expert is None:
            weights = self.gate(x).softmax(-1)
            return x + sum(weights[:, [i]] * expert(x) for i, expert in enumerate(self.experts))
        group, rank, num_tokens = self.expert.get_group(), self.expert.get_local_rank(), len(x)
        of_all = _OfAll.apply(x, group)
        weights = _OfAll.apply(self.gate(x).softmax(-1), group)
        outputs = _Leave.apply(weights[:, [rank]] * self.experts[0](of_all), group)
        return x + _Enter.apply(outputs, group)[rank * num_tokens : (rank + 1) * num_tokens]


class _OfAll(torch.autograd.Function):
    """The tokens of all ranks of the group; their gradients are summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.num_tokens = group, len(x)
        found = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, x.contiguous(), group=group)
        return torch.cat(found)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _add_up(grad, ctx.group).split(ctx.num_tokens)[dist.get_rank(ctx.group)], None


def with_experts(rank: int, plan: str, folder: Path) -> State:
    """This rank's weights: the experts are a model of their own."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    model = nn.Sequential(*(Mixture(seed, mesh["expert"]) for seed in range(2)))
    experts = nn.ModuleList(mixture.experts for mixture in model)
    handles = [
        zeroshard.shard(experts, plan, units=nn.Linear, mesh=mesh["data"]),
        zeroshard.shard(model, plan, units=Mixture, ignored=[*experts]),
    ]
    optimizers = [zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1, momentum=0.9) for handle in handles]
    for step in range(STEPS):
        x, y = batch(step, rank)
        for optimizer in optimizers:
            optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        for parameter in experts.parameters():  # an expert has the gradients of the tokens of both ranks of its group
            assert parameter.grad is not None
            parameter.grad.div_(2)
        for optimizer in optimizers:
            optimizer.step()
    of_experts, of_model = handles
    if plan == "zero3":  # what the model's `state_dict()` has is asked for, and one handle cannot see the other's
        for call in (of_model.full_state_dict, lambda: zeroshard.save(folder, of_model, optimizers[1], step=1)):
            with pytest.raises(zeroshard.Error, match=r"sharded by another one.*inside of `with other.unsharded"):
                call()
    with of_experts.unsharded():
        states = [of_experts.full_state_dict(), of_model.full_state_dict()]
        zeroshard.save(folder, of_model, optimizers[1], step=1)
    with of_experts.unsharded(write=True):
        zeroshard.load(folder, of_model, optimizers[1])
    number, (by_experts, by_model) = mesh["expert"].get_local_rank(), states
    for name, value in by_experts.items():
        block, _, kind = name.split(".")
        assert torch.equal(by_model[f"{block}.experts.0.{kind}"], value)
    return {name.replace("experts.0", f"experts.{number}"): value for name, value in by_model.items()}


def test_experts_of_another_group(tmp_path: Path) -> None:
    model = nn.Sequential(*(Mixture(seed) for seed in range(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(4):
            x, y = batch(step, rank)
            (mse_loss(model(x), y) / 4).backward()
        optimizer.step()
    expected = model.state_dict()
    for of_plans in run_ranks(in_turn(with_experts, [(plan, tmp_path / plan) for plan in ("zero1", "zero3")]), 4):
        for state in of_plans:
            assert len(state) == 8
            torch.testing.assert_close(state, {name: expected[name] for name in state})


@pytest.mark.filterwarnings("ignore")  # of torch, about its own pipelines
@pytest.mark.parametrize(("kind", "num_blocks"), [("1f1b", 2), ("zero bubble", 4)])
def test_stages_of_a_pipeline(kind: str, num_blocks: int, tmp_path: Path) -> None:
    expected = reference(num_blocks)
    cases = [(kind, plan, tmp_path / plan) for plan in ("zero1", "zero3")]
    for of_rank in run_ranks(in_turn(in_a_pipeline, cases), 4):
        for found in of_rank:
            for number, state in found.items():
                torch.testing.assert_close(state, expected[number])


def test_layers_that_are_divided_over_ranks() -> None:
    expected = reference(2)
    for rank, of_plans in enumerate(run_ranks(in_turn(in_divided_layers, ["ddp", "zero2", "zero3"]), 4)):
        for of_plan in of_plans:
            for found, whole in zip(of_plan, expected, strict=True):
                for name, value in found.items():
                    axis = axis_of(name)
                    part = whole[name] if axis is None else whole[name].chunk(2, axis)[rank % 2]
                    torch.testing.assert_close(value, part)
