"""Parameters that zeroshard does not manage: `shard(..., ignored=)`.

Experts of another group have different values on each rank. Without `ignored`, `shard` gives every rank rank 0's values
and averages their gradients.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.kit import make, plans_of, same_bits
from zeroshard.model.managed import Managed
from zeroshard.model.units import choose_units
from zeroshard.planner import plan_memory
from zeroshard.testing import expect_same_logs, run_ranks


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 20)
        self.down = nn.Linear(20, 12)
        self.norm = nn.BatchNorm1d(12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.down(torch.tanh(self.up(x))))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(12, 12)
        self.expert = Expert()

    def forward(self, x: Tensor) -> Tensor:
        return self.expert(torch.relu(self.mix(x)))


def build(rank: int) -> nn.Module:
    """A model that is the same on all ranks except for the experts."""
    model = make(lambda: nn.Sequential(Layer(), Layer(), nn.Linear(12, 5)))
    torch.manual_seed(100 + rank)
    for name, parameter in model.named_parameters():
        if "expert" in name:
            nn.init.normal_(parameter)
    return model


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 12, generator=torch.Generator().manual_seed(7 * step + rank))


def ways(model: Any) -> list[Any]:
    by_name = [name for name, _ in model.named_parameters() if "expert" in name]
    buffers = [name for name, _ in model.named_buffers() if "expert" in name]
    parameters = [p for name, p in model.named_parameters() if "expert" in name]
    return [["0.expert", "1.expert"], [model[0].expert, model[1].expert], [*by_name, *buffers], [*parameters, *buffers]]


def plain(num_ranks: int, steps: int) -> list[dict[str, Tensor]]:
    """All ranks in one process: shared parameters get the mean gradient, experts the gradient of their own rank."""
    models = [build(rank) for rank in range(num_ranks)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(steps):
        for rank, model in enumerate(models):
            model.zero_grad()
            model(batch(rank, step)).square().mean().backward()
        for name, parameters in zip(
            [name for name, _ in models[0].named_parameters()],
            zip(*(model.parameters() for model in models), strict=True),
            strict=True,
        ):
            if "expert" not in name:
                mean = sum(p.grad for p in parameters) / num_ranks  # type: ignore[misc]
                for parameter in parameters:
                    parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
    return [dict(model.state_dict()) for model in models]


@pytest.mark.by_cpu
def test_they_keep_their_values_and_gradients_on_every_rank() -> None:
    def train(rank: int, plan: Any, way: int, units: Any) -> tuple[Any, Any]:
        model = build(rank)
        own = {name: value.clone() for name, value in model.state_dict().items() if "expert" in name}
        handle = zeroshard.shard(model, plan, units=units, ignored=ways(model)[way])
        kept = {name: value for name, value in handle.full_state_dict().items() if "expert" in name}
        assert same_bits(kept, own)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        experts = [p for name, p in model.named_parameters() if "expert" in name]
        own_optimizer = torch.optim.SGD(experts, lr=0.1)
        for step in range(2):
            own_optimizer.zero_grad()
            optimizer.backward(model(batch(rank, step)).square().mean())
            assert all(p.grad is not None and p.grad.shape == p.shape for p in experts)
            optimizer.step(), own_optimizer.step()
        return handle.full_state_dict(), handle.comm_log

    def check(rank: int) -> tuple[Any, Any]:
        results = [
            train(rank, plan, way, units)
            for plan, way, units in [
                *((plan, 0, Layer) for plan in plans_of(1)),
                *(("zero3", way, None) for way in (1, 2, 3)),
            ]
        ]
        assert all(same_bits(state, results[0][0]) for state, _ in results)
        return results[0][0], [log for _, log in results]

    found = run_ranks(check, 3)
    for rank, expected in enumerate(plain(3, 2)):
        for name, value in expected.items():
            torch.testing.assert_close(found[rank][0][name], value, rtol=1e-5, atol=1e-6)
    for logs in zip(*(logs for _, logs in found), strict=True):
        expect_same_logs(logs)


def test_what_else_a_handle_does_leaves_them_alone(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        for plan in plans_of(1):
            model: Any = build(rank)
            ignored = ways(model)[0]
            memory = plan_memory(
                model, plan, 2, units=Layer, ignored=ignored, state_bytes_per_element=0, state_scalars=0
            )
            handle = zeroshard.shard(model, plan, units=Layer, ignored=ignored)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
            own = {name: value.clone() for name, value in model[0].expert.state_dict().items()}
            assert {kind: handle.memory()[kind] for kind in ("weights", "grads")} == {
                kind: memory[kind] for kind in ("weights", "grads")
            }
            for parts in ((), (model,), ("0",)):
                with handle.unsharded(*parts):
                    assert not any(p.isnan().any() for p in model[0].parameters())
            with handle.unsharded(write=True), torch.no_grad():
                model[0].expert.up.weight.add_(0.0)
                model[2].bias.add_(1.0)
            handle.average_buffers()
            assert not Managed.without(model, None).ignored
            zeroshard.save(tmp_path / plan.name, handle, optimizer, step=1)
            with torch.no_grad():
                model[0].expert.up.weight.zero_()
            zeroshard.load(tmp_path / plan.name, handle, optimizer)  # like buffers, saved for each rank
            state = handle.full_state_dict()
            handle.load_full_state_dict({name: value + 1 for name, value in state.items()})
            assert torch.equal(model[0].expert.up.weight, own["up.weight"] + 1)
            handle.load_full_state_dict(state)
            handle.close()
            assert same_bits(model[0].expert.state_dict(), own)

    run_ranks(check, 2)


class Owned(nn.Sequential):
    """Other experts on each rank: of other names, of other shapes, on rank 0 or on rank 1 only."""

    def __init__(self, rank: int, kind: str) -> None:
        super().__init__(make(lambda: nn.Linear(12, 12)))
        if kind in ("names", "shapes") or kind == str(rank):
            self.add_module(f"of_{rank}" if kind == "names" else "expert", nn.Linear(12, 5 + rank * (kind == "shapes")))


def test_each_rank_has_its_own_from_a_checkpoint(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        for kind in ("names", "shapes", "0", "1"):
            first, then = Owned(rank, kind), Owned(rank, kind)
            handles = [zeroshard.shard(model, "zero3", ignored=[*model][1:]) for model in (first, then)]
            zeroshard.save(tmp_path / kind, handles[0], step=1)
            loaded = zeroshard.load(tmp_path / kind, handles[1])
            assert not loaded.missing and not loaded.unexpected
            assert same_bits(handles[1].full_state_dict(), handles[0].full_state_dict())

    run_ranks(check, 2)


def test_one_that_is_checked_or_filled_from_nothing(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        for source in ("function", "file"):
            with torch.device("meta"):
                model: Any = nn.Sequential(Layer(), Layer(), nn.Linear(12, 5))
            for index in (0, 1):
                model[index].expert = Expert()
            own = {name: value.clone() for name, value in model[0].expert.state_dict().items()}

            def init(module: nn.Module) -> None:
                for parameter in module._parameters.values():
                    nn.init.constant_(parameter, 0.5)  # type: ignore[arg-type]

            materialize: Any = init
            if source == "file":
                from safetensors.torch import save_file

                materialize = tmp_path / f"{rank}.safetensors"
                save_file({n: p.contiguous() for n, p in build(0).named_parameters() if "expert" not in n}, materialize)
            with pytest.raises(ValueError, match=r"1\.mix\.weight is ignored, and on the meta device"):
                zeroshard.shard(model, "zero3", ignored=["0.expert", "1"], materialize=materialize)
            handle = zeroshard.shard(model, "zero3", ignored=ways(model)[1], materialize=materialize)
            expected = 0.5 if source == "function" else build(0)[0].mix.weight  # type: ignore[union-attr]
            assert (handle.full_state_dict()["0.mix.weight"] == expected).all()
            assert same_bits(model[0].expert.state_dict(), own)
        model = build(rank)
        handle = zeroshard.shard(model, "zero3", ignored=ways(model)[0], values="check")
        with pytest.raises(ValueError, match=r"values='check': other values .* in 0\.expert\.up\.weight \(rank 1\)"):
            zeroshard.shard(build(rank), "zero3", values="check")

    run_ranks(check, 2)


def test_one_name_is_not_its_letters() -> None:
    """ "10" ignored the layers "1" and "0", and kept their weights in full: nothing was said."""
    for one in ("10", nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))):
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(12)))
        if isinstance(one, nn.Module):
            model[10] = one
        ignored = Managed.without(model, one).left_alone(model)
        assert ignored and {*ignored.values()} == {*model[10].parameters()}
        alone = next(model[10].parameters())
        assert [*Managed.without(model, alone).left_alone(model).values()] == [alone]
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(12)))
    for keep, kept in (("10", ["10"]), (nn.Linear, [*map(str, range(12))])):
        specs = choose_units(model, nn.Linear, None, keep_gathered=keep)
        assert [spec.name for spec in specs if spec.stays] == kept


def test_what_is_ignored_must_be_there() -> None:
    def check(rank: int) -> None:
        model: Any = build(rank)
        for wrong, told in (
            (["0.experts"], r"no parameter, buffer or module of the name '0\.experts'"),
            ([Expert()], "a Expert that is not in the model"),
            ([nn.Parameter(torch.ones(2))], r"a tensor of shape \(2,\) that is not in the model"),
            ([3], "ignored takes names, modules and parameters, found 3"),
        ):
            with pytest.raises(ValueError, match=told):
                zeroshard.shard(model, "zero3", ignored=wrong)
        handle = zeroshard.shard(model, "zero3", ignored=["0.expert"])
        with pytest.raises(ValueError, match="different handles"):
            zeroshard.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        model.extra = nn.Linear(1, 1)
        with pytest.raises(RuntimeError, match=r"extra\.weight has come into the model"):
            model(batch(rank, 0))
        handle.close()

    run_ranks(check, 2)
