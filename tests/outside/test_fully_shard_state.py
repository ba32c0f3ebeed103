"""torch: test/distributed/_composable/fsdp/test_fully_shard_init.py, test_fully_shard_state.py and
test_fully_shard_state_dict.py: modules that may be sharded, meshes, initial values, and state dicts.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeroshard
from tests.outside.common import (
    MLP,
    PLANS,
    Block,
    State,
    Transformer,
    Twins,
    expect_close,
    expect_same_on_all_ranks,
    numbers,
    state_of,
    tokens,
    under_all_plans,
)
from tests.together import in_turn, on_ranks
from zeroshard.placement import Plan
from zeroshard.testing import run_ranks


def units_of(handle: zeroshard.Handle) -> dict[str, set[str]]:
    return {unit.name: {slot.name for slot in unit.layout.slots} for unit in handle.engine.units}


# What belongs together -----------------------------------------------------------------------------------------------


@on_ranks(1)
def test_a_parameter_belongs_to_the_innermost_unit_around_it(rank: int) -> None:
    """TestFullyShardManagedModulesAndStates, TestFullyShardLazyInit.test_fully_shard_is_root,
    ..._module_and_param_fqns: parameters of no other unit belong to the root unit, and names are those of the model."""
    model = nn.Sequential(MLP(8), MLP(8))
    inner = (model[0].in_proj, model[0].out_proj)
    handle = zeroshard.shard(model, "zero3", units=lambda module: module in inner)
    assert units_of(handle) == {
        "0.in_proj": {"0.in_proj.weight", "0.in_proj.bias"},
        "0.out_proj": {"0.out_proj.weight", "0.out_proj.bias"},
        "root": {"1.in_proj.weight", "1.in_proj.bias", "1.out_proj.weight", "1.out_proj.bias"},
    }


@on_ranks(2)
def test_shared_parameters_and_modules_count_once(rank: int) -> None:
    """test_managed_modules_duplicate, test_managed_states_shared_params_and_buffers, TestFullyShardParamModuleInfos: a
    parameter with several names is one slot, and `tied` knows the other names."""
    mlp = MLP(8)
    twice = nn.Sequential(mlp, mlp)
    handle = zeroshard.shard(twice, "zero3", units=MLP)
    assert sum(len(names) for names in units_of(handle).values()) == 4
    assert set(handle.engine.tied()) == {f"1.{name}" for name, _ in mlp.named_parameters()}
    shared = nn.Sequential(*(MLP(8, with_buffer=True) for _ in range(3)))
    shared[0].in_proj.weight = shared[1].in_proj.weight
    shared[2].in_proj.weight = shared[1].in_proj.weight
    shared[1].buffer = shared[2].buffer
    plain = state_of(shared)
    handle = zeroshard.shard(shared, "zero3", units=MLP)
    assert sum(len(names) for names in units_of(handle).values()) == 10
    expect_close(handle.full_state_dict(), plain)


@on_ranks(1)
def test_a_group_of_modules_is_one_unit(rank: int) -> None:
    """test_managed_modules_list_of_mlps, test_managed_states_list_of_mlps, test_get_param_module_infos_list_of_mlps."""
    model = nn.Sequential(*(MLP(8, with_buffer=True) for _ in range(5)))
    handle = zeroshard.shard(model, "zero3", units=[("0", "1", "2")])
    of_three = {f"{i}.{name}" for i in range(3) for name, _ in model[0].named_parameters()}
    assert of_three in units_of(handle).values() and len(handle.engine.units) == 2


@on_ranks(3)
def test_shards_cut_a_flat_buffer(rank: int) -> None:
    """TestFullyShardShardedParameterTensor.test_shard_tensor_parameters, TestFullyShardShardPlacementFn: every rank
    has an equal part, and the parts in rank order are the parameters; there is no dimension to choose. Odd sizes."""
    torch.manual_seed(0)
    model = nn.Sequential(*(MLP(3, 3) for _ in range(3)))
    model[0].in_proj = model[1].in_proj
    plain = {name: p.detach().clone() for name, p in model.named_parameters()}
    handle = zeroshard.shard(model, "zero3")
    for unit in handle.engine.units:
        own = unit.weights.own()
        parts = [torch.empty_like(own) for _ in range(3)]
        dist.all_gather(parts, own)
        flat = torch.cat(parts)
        for slot in unit.layout.slots:
            assert torch.equal(flat[slot.world.slice].view(slot.shape), plain[slot.name])


@on_ranks(2)
def test_scalars_and_other_strides_are_parameters_too(rank: int) -> None:
    """test_raise_scalar_parameter, test_raise_noncontiguous_parameter: refused there, trained here."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x) * self.scale

    def train(rank: int, plan: Plan) -> State:
        twins = Twins(Model(), plan)
        return twins.train(lambda model, step: model(numbers(25, rank, step).view(2, 2, 5, 5)).sum())

    under_all_plans(rank, train)


@on_ranks(2)
def test_frozen_8_bit_floats_beside_trained_weights(rank: int) -> None:
    """TestFullyShardMixedDtypeParam.test_mixed_dtypes_no_grad_param. `shard` raised "Invalid scalar type": gloo
    does not broadcast 8-bit floats."""

    class Model(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            frozen = torch.full((8, 8), value).to(torch.float8_e4m3fn)
            self.frozen = nn.Parameter(frozen, requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.frozen.float().mean()

    for plan in PLANS:
        model = Model(1.0 + rank)
        handle = zeroshard.shard(model, plan)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        model(torch.ones(1, 4)).sum().backward()
        assert handle.gradient("linear.bias").eq(1).all()
        optimizer.step()
        frozen = handle.full_state_dict()["frozen"]
        assert frozen.dtype == torch.float8_e4m3fn and frozen.float().eq(1).all()


# A handle, not a class -----------------------------------------------------------------------------------------------


@on_ranks(2)
def test_the_model_keeps_its_class_and_is_sharded_once(rank: int) -> None:
    """test_fully_shard_reapply, test_fully_shard_cls, test_fully_shard_deepcopy: classes stay, a slice of a
    Sequential is an ordinary one, copying is refused."""
    model = nn.Sequential(*(MLP(8) for _ in range(3)))
    classes = [type(module) for module in model.modules()]
    zeroshard.shard(model, "zero3")
    assert [type(module) for module in model.modules()] == classes
    assert type(model[:2]) is nn.Sequential
    with pytest.raises(ValueError, match="sharded already"):
        zeroshard.shard(model, "zero3")
    with pytest.raises((RuntimeError, TypeError), match=r"close\(\)|full_state_dict"):
        copy.deepcopy(model)
    with pytest.raises((RuntimeError, TypeError), match=r"close\(\)|full_state_dict"):
        pickle.dumps(model)


@on_ranks(2)
def test_containers_without_a_forward(rank: int) -> None:
    """test_fully_shard_unsupported_module_cls: refused there; here a ModuleList or ModuleDict may be sharded,
    because its members are called, and their units are gathered by these calls."""

    class Caller(nn.Module):
        def __init__(self, container: nn.Module) -> None:
            super().__init__()
            self.container = container

        def forward(self, x: Tensor) -> Tensor:
            members = self.container.values() if isinstance(self.container, nn.ModuleDict) else self.container
            for member in members:
                x = member(x)
            return x

    def train(rank: int, plan: Plan) -> State:
        result = {}
        for number, make in enumerate(
            (lambda: nn.ModuleList([MLP(8), MLP(8)]), lambda: nn.ModuleDict({"a": MLP(8), "b": MLP(8)}))
        ):
            twins = Twins(make(), plan, shard={"units": MLP})
            weights = twins.train(lambda container, step: Caller(container)(numbers(8, rank, step)).sum())
            result.update({f"{number}.{name}": value for name, value in weights.items()})
        return result

    under_all_plans(rank, train)


# Meshes --------------------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_which_meshes_are_refused(rank: int) -> None:
    """TestFullyShardMeshArg: meshes with three axes, or two axes with other names, are refused. Two axes without names
    are taken as replicate, shard (refused there)."""
    for shape, names in (((4, 1, 1), None), ((2, 2), ("a", "b"))):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        with pytest.raises(ValueError, match="mesh"):
            zeroshard.shard(MLP(8), "zero3", mesh=mesh)
    handle = zeroshard.shard(MLP(8), "zero3", mesh=init_device_mesh("cpu", (2, 2)))
    assert handle.engine.collectives.mesh.shard.ranks == (rank // 2 * 2, rank // 2 * 2 + 1)


@on_ranks(4)
def test_a_group_of_some_ranks(rank: int) -> None:
    """TestFullyShardProcessGroupInit.test_1d_process_group_init: ranks 0 and 2, ranks 1 and 3, each pair its own
    model."""

    def check(rank: int, kind: str) -> None:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mesh: Any = groups[rank % 2]
        if kind == "mesh from a group":
            mesh = DeviceMesh.from_group(groups[rank % 2], "cpu", mesh_dim_names=("dp",))
        elif kind == "mesh of a mesh":
            mesh = whole["dp"]
        torch.manual_seed(rank)
        model = MLP(8)
        handle = zeroshard.shard(model, "zero3", mesh=mesh)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.Adam, lr=1e-2)
        first = handle.full_state_dict()["in_proj.weight"]
        torch.manual_seed(rank % 2)
        assert torch.equal(first, MLP(8).in_proj.weight)
        for step in range(2):
            model(numbers(8, rank, step)).sum().backward()
            optimizer.step()
        expect_same_on_all_ranks(handle.full_state_dict(), groups[rank % 2])

    in_turn(check, ["group", "mesh from a group", "mesh of a mesh"])(rank)


@on_ranks(4)
def test_two_groups_make_a_mesh_of_replicas(rank: int) -> None:
    """TestFullyShardProcessGroupInit.test_2d_process_group_init: the mesh that is made of the two groups, and the same
    training as with a mesh of torch's own."""
    shards = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    names = ("replicate", "shard")
    ranks = torch.tensor([[0, 1], [2, 3]])
    of_groups = DeviceMesh.from_group([replicas[rank % 2], shards[rank // 2]], "cpu", mesh=ranks, mesh_dim_names=names)
    of_torch = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    results = []
    for mesh in (of_groups, of_torch):
        torch.manual_seed(0)
        model = MLP(8)
        handle = zeroshard.shard(model, "zero3", mesh=mesh)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.Adam, lr=1e-2)
        for step in range(2):
            model(numbers(8, rank, step)).sum().backward()
            optimizer.step()
        results.append(handle.full_state_dict())
    expect_same_on_all_ranks(results[0])
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@on_ranks(4)
def test_replicas_start_with_rank_0s_values(rank: int) -> None:
    """TestFullyShardHSDPBroadcast.test_hsdp_broadcast_across_replicas: there the user broadcasts; here `shard` does."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(rank)
    model = Transformer(layers=1)
    model.register_buffer("buf", torch.randn(5))
    handle = zeroshard.shard(model, "zero3", units=Block, mesh=mesh)
    torch.manual_seed(0)
    plain = Transformer(layers=1)
    assert torch.equal(handle.full_state_dict()["embed.weight"], plain.embed.weight)
    expect_same_on_all_ranks(handle.full_state_dict())
    model(tokens(rank)).sum().backward()


# From the meta device ------------------------------------------------------------------------------------------------


@on_ranks(3)
def test_built_on_the_meta_device(rank: int) -> None:
    """TestFullyShardMetaDeviceInit.test_meta_device_1d_init: even, uneven and almost empty shards, a buffer; every
    value comes from `reset_parameters`, and a step works."""

    class Buffered(MLP):
        def __init__(self, dim: int) -> None:
            super().__init__(dim, 1, bias=False, with_buffer=True)

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.reset_parameters()
        if isinstance(module, Buffered):
            module.buffer.fill_(2.0)

    def check(rank: int, precision: str | None) -> None:
        for dim in (8, 3, 1):
            for plan in PLANS:
                torch.manual_seed(0)
                with torch.device("meta"):
                    model = nn.Sequential(Buffered(dim), MLP(dim, 1, bias=False))
                handle = zeroshard.shard(model, plan, units=MLP, precision=precision, materialize=init)
                state = handle.full_state_dict(main=True)
                assert state["0.buffer"].eq(2).all()
                assert all(value.isfinite().all() and value.any() for value in state.values())
                optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.Adam, lr=1e-2)
                model(numbers(dim, rank)).sum().backward()
                optimizer.step()
                expect_same_on_all_ranks(handle.full_state_dict(main=True))

    in_turn(check, [None, "bf16"])(rank)


@on_ranks(2)
def test_a_model_on_the_meta_device_without_values_is_refused(rank: int) -> None:
    """test_invalid_meta_device_init: `shard` refuses it, and names a parameter."""
    with torch.device("meta"):
        model = nn.Sequential(MLP(8), MLP(8))
    with pytest.raises(ValueError, match=r"0\.in_proj\.weight is on the meta device"):
        zeroshard.shard(model, "zero3")


@on_ranks(2)
def test_only_rank_0_has_the_values(rank: int) -> None:
    """test_rank0_broadcast_meta_device_init: a state dict on rank 0, the meta device everywhere; then parity of one
    step."""
    torch.manual_seed(42)
    plain = Transformer()
    full = plain.state_dict() if rank == 0 else None

    for plan in PLANS:
        with torch.device("meta"):
            model = Transformer()
        names = {id(module): name for name, module in model.named_modules()}

        def init(module: nn.Module, names: dict[int, str] = names) -> None:
            for name, parameter in module.named_parameters(recurse=False):
                if full is not None:
                    parameter.copy_(full[f"{names[id(module)]}.{name}"])
                else:
                    parameter.fill_(1337)

        handle = zeroshard.shard(model, plan, units=Block, materialize=init)
        expect_close(handle.full_state_dict(), state_of(plain))
        torch.testing.assert_close(model(tokens(rank)), plain(tokens(rank)))


@on_ranks(2)
def test_a_parameter_that_is_computed_from_others_is_written_afterwards(rank: int) -> None:
    """test_reset_sharded_param_in_lazy_init: a norm of two other weights, after they have their values."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer1, self.layer2 = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.norm = nn.Parameter(torch.empty(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer2(self.layer1(x)).sum() + self.norm.sum()

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.reset_parameters()
        elif isinstance(module, Model):
            module.norm.zero_()

    for plan in PLANS:
        with torch.device("meta"):
            model = Model()
        handle = zeroshard.shard(model, plan, units=nn.Linear, materialize=init)
        with handle.unsharded(write=True), torch.no_grad():
            expected = model.layer1.weight.norm(dim=1) + model.layer2.weight.norm(dim=1)
            model.norm.copy_(expected)
        assert torch.equal(handle.full_state_dict()["norm"], expected)
        model(numbers(3, rank)).backward()


# State dicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", ["one axis", "replicas"])
def test_state_dicts_go_out_and_in(mesh: str) -> None:
    """test_dp_state_dict_save_load, test_cached_state_dict: before and after a forward, with uneven sizes. Loaded
    values take effect, and state dicts taken before do not change."""
    shape = (2,) if mesh == "one axis" else (2, 2)

    def check(rank: int) -> None:
        device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for dim in (2, 5):
            for plan in PLANS:
                torch.manual_seed(42)
                model = nn.Sequential(MLP(dim), nn.Sequential(MLP(dim), nn.Linear(dim, dim)), MLP(dim))
                plain = state_of(model)
                handle = zeroshard.shard(model, plan, units=MLP, mesh=device_mesh)
                first = handle.full_state_dict()
                expect_close(first, plain)
                model(numbers(dim, rank))
                expect_close(handle.full_state_dict(), plain)
                handle.load_full_state_dict({name: torch.full_like(value, 42.0) for name, value in plain.items()})
                assert all(value.eq(42).all() for value in handle.full_state_dict().values())
                expect_close(first, plain)

    run_ranks(check, 2 if mesh == "one axis" else 4)


@on_ranks(2)
def test_a_state_dict_without_the_handle_raises_where_it_would_be_wrong(rank: int) -> None:
    """test_dp_state_dict_save_load uses `model.state_dict()` with shards; here it has full values, or raises."""
    for plan in PLANS:
        torch.manual_seed(0)
        model = nn.Sequential(MLP(4), MLP(4))
        plain = state_of(model)
        handle = zeroshard.shard(model, plan)
        with handle.unsharded():
            expect_close(state_of(model), plain)
        if plan is zeroshard.ZERO3:
            with pytest.raises(RuntimeError, match="full_state_dict"):
                model.state_dict()
        else:
            expect_close(state_of(model), plain)
        with pytest.raises(RuntimeError, match="load_full_state_dict"):
            model.load_state_dict(plain)


@on_ranks(2)
def test_a_state_dict_for_rank_0_on_the_cpu(rank: int) -> None:
    """TestFullyShardStateDictMultiThread.test_rank0_offload_full_state_dict."""
    for plan in PLANS:
        torch.manual_seed(0)
        model = Transformer()
        plain = state_of(model)
        handle = zeroshard.shard(model, plan, units=Block)
        found = handle.full_state_dict(rank0_only=True, device="cpu")
        if rank == 0:
            expect_close(found, plain)
            assert all(value.device.type == "cpu" for value in found.values())
        else:
            assert not found


@on_ranks(2)
def test_a_state_dict_in_pieces(rank: int) -> None:
    """test_dp_state_dict_cpu_offload: values come in several dicts, each with a part of the names."""
    for plan in PLANS:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        torch.manual_seed(1)
        full = {name: torch.randn(4, 4) for name in ("0.weight", "1.weight")}
        with pytest.raises(ValueError, match=r"1\.weight"):
            handle.load_full_state_dict({"0.weight": full["0.weight"]})
        for name, value in full.items():
            left = handle.load_full_state_dict({name: value}, strict=False)
            assert left.missing_keys == [other for other in full if other != name]
        expect_close(handle.full_state_dict(), full)
        assert torch.isfinite(model(torch.rand(4, 4))).all()
