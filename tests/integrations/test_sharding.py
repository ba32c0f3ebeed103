"""`Sharding`, the record that all frameworks share: what it asks for of a model that is sharded already; models of
transformers generate."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from tests.kit import Block, Net, largest_difference, loss_of_tokens, make
from tests.patience import HANG
from zeroshard.integrations import Sharding
from zeroshard.integrations.sharding import is_retired, trained_state
from zeroshard.testing import run_ranks

UP = torch.nn.Linear
HALF = zeroshard.MixedPrecision()


def test_a_model_that_is_sharded_already_must_be_so_as_asked_for() -> None:
    """Otherwise a framework's own arguments would have no effect, and nobody would know."""

    def check(rank: int) -> None:
        grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        alone = [dist.new_group([one]) for one in range(2)][rank]
        norms = {torch.nn.LayerNorm: "fp32", "*": "bf16"}
        made: list[tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]] = [
            # (sharded so; asks for the same; asks for something else)
            (
                {"units": Block, "precision": "bf16", "keep_gathered": [Block]},
                [
                    {},
                    {"units": "Block", "precision": torch.bfloat16, "keep_gathered": ["blocks.*"]},
                    {"units": lambda module: isinstance(module, Block), "precision": HALF, "mesh": dist.group.WORLD},
                    {"units": [Block], "precision": {"*": "bf16-mixed"}},
                ],
                [
                    {"plan": "zero2"},
                    {"units": UP},
                    {"units": 1 << 20},
                    {"units": [Block, ("embed", "norm")]},
                    {"precision": "fp32"},
                    {"precision": zeroshard.MixedPrecision(output=torch.float32)},
                    {"precision": norms},
                    {"keep_gathered": True},
                    {"mesh": grid},
                    {"mesh": alone},
                ],
            ),
            (
                {"precision": norms, "mesh": grid},
                [{"precision": norms}, {"mesh": grid, "units": 32 << 20}],
                [{"precision": "bf16"}, {"mesh": dist.group.WORLD}, {"mesh": grid["shard"]}, {"units": 1 << 10}],
            ),
            (
                {"precision": zeroshard.MixedPrecision(output=torch.float32)},
                [{"precision": "bf16"}, {"precision": zeroshard.MixedPrecision(output=torch.float32)}],
                [{"precision": zeroshard.MixedPrecision(output=torch.float64)}, {"precision": "fp16"}],
            ),
            (
                {},
                [{"precision": "fp32"}, {"precision": "no"}],
                [{"precision": "bf16"}, {"units": "Block"}, {"ignored": "norm"}, {"max_transient_bytes": 1 << 30}],
            ),
            (
                {"ignored": "norm", "max_transient_bytes": 1 << 30},
                [{}, {"ignored": ["norm.weight", "norm.bias"]}, {"max_transient_bytes": 1 << 30}],
                [{"ignored": ["norm.weight"]}, {"max_transient_bytes": 1 << 29}],
            ),
        ]
        for how, same, others in made:
            model = make(Net)
            handle = zeroshard.shard(model, "zero3", **how)
            for asked in same:
                assert Sharding(**asked).shard(model) is handle, (how, asked)
            for asked in others:
                [name] = asked
                with pytest.raises(ValueError, match=rf"is sharded already, and not as asked for \({name}=.*zero3, "):
                    Sharding(**asked).shard(model)
            handle.close()

    run_ranks(check, 2)


class Around(torch.nn.Module):
    """A model with another one in it."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, torch.nn.Linear(2, 2)


def test_a_model_around_a_sharded_one_is_refused() -> None:
    """It was taken for that one: what it has besides was not reduced, and was not in its state."""

    def check(rank: int) -> None:
        model = make(Net)
        handle = zeroshard.shard(model, "zero3")
        with pytest.raises(
            ValueError, match=r"this Around has parameters of a Net that is sharded already, and is no part"
        ):
            Sharding().shard(Around(model))
        assert Sharding().shard(model.blocks[0]) is handle
        assert Sharding().shard(torch.compile(model, backend="eager")) is handle

    run_ranks(check, 2)


def test_the_last_optimizer_has_the_parameters() -> None:
    """A second fit of a module, or another `prepare`, makes a new optimizer while the old one is still referenced."""

    def train(model: torch.nn.Module, take_over: Any, loss_of: Any) -> list[Any]:
        made = []
        for number, of_class in enumerate((torch.optim.AdamW, torch.optim.SGD)):
            made.append(take_over(of_class(model.parameters(), lr=1e-2)))
            for step in range(2):
                loss_of(2 * number + step).backward()
                made[-1].step()
                made[-1].zero_grad()
        return made

    def check(rank: int) -> None:
        for plan in ("zero3", "ddp"):
            plain, model = make(Net), make(Net)
            sharding = Sharding(plan, units=Block)
            handle = sharding.shard(model)
            train(
                plain,
                lambda one: one,
                lambda step, of=plain: (loss_of_tokens(of, 0, 0, step) + loss_of_tokens(of, 1, 0, step)) / 2,
            )
            first, second = train(model, sharding.take_over, lambda step, of=model: loss_of_tokens(of, rank, 0, step))
            assert largest_difference(handle.full_state_dict(), dict(plain.state_dict())) < 1e-5
            for call in (first.step, first.state_dict, lambda first=first: first.clip_grad_norm_(1.0)):
                with pytest.raises(
                    RuntimeError, match="this optimizer is out of use, as another one has got its param"
                ):
                    call()
            assert first.tensors() == {}
            assert sharding.take_over(second) is second
            with pytest.raises(ValueError, match="LBFGS cannot be sharded"):
                sharding.take_over(torch.optim.LBFGS(model.parameters()))
            with pytest.raises(ValueError, match=r"AdamW has no parameters to train: .* requires_grad_"):
                sharding.take_over(torch.optim.AdamW([{"params": []}]))
            loss_of_tokens(model, rank, 0, 0).backward()
            assert second.step().applied  # an error leaves it as it was
            assert not is_retired(second)
            plain = torch.optim.AdamW(model.parameters())
            assert sharding.take_over(plain) is sharding.take_over(plain)  # and its state stays
            with pytest.raises(ValueError, match="is a ShardedOptimizer already: pass skip_norm_above to it"):
                Sharding(plan, skip_norm_above=1.0).take_over(second)
            for scale in (64.0, "dynamic"):
                with pytest.raises(ValueError, match="is a ShardedOptimizer already: pass loss_scale to it"):
                    Sharding(plan, loss_scale=scale).take_over(second)
            assert Sharding(plan, loss_scale=1.0).take_over(second) is second  # which has no scale
            assert len(second.param_groups) == 1
            handle.close()

    run_ranks(check, 2)


@pytest.mark.filterwarnings("ignore")
def test_ranks_may_generate_until_they_are_done() -> None:
    """Sequences of different lengths, as loops of transformers and TRL generate them under DDP."""
    hf = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")

    def build(adapted: bool) -> Any:
        sizes = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4}
        torch.manual_seed(0)
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_attention_heads=4, eos_token_id=None)).eval()
        return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM")) if adapted else model

    def check(rank: int) -> None:
        prompt = torch.tensor([[3 + rank, 4, 5]])
        for adapted in (False, True):
            plain, model = build(adapted), build(adapted)
            handle = Sharding("zero3", units="LlamaDecoderLayer").shard(model)
            for length in (2 + 5 * rank, 9):

                def say(of: Any, length: int = length, **more: Any) -> Any:
                    return of.generate(input_ids=prompt, do_sample=False, max_new_tokens=length, **more).tolist()

                assert say(model) == say(plain)
                assert say(model, synced_gpus=True) == say(plain)
                with handle.unsharded():
                    assert rank or say(model) == say(plain)  # one rank alone
            handle.close()
            assert say(model) == say(copy.deepcopy(model)) == say(plain)

    run_ranks(check, 2, collective_timeout=HANG)


def test_tied_weights_are_one_tensor_in_what_is_saved() -> None:
    """Files of `save_pretrained` and `save_model` have them once. Main's values are cast to the dtype from before."""

    def check(rank: int) -> None:
        model = make(lambda: Net(tied=True)).to(torch.bfloat16)
        state = trained_state(Sharding("zero2", units=Block).shard(model), model)
        if rank == 0:
            assert state["embed.weight"] is state["head.weight"] and state["embed.weight"].dtype == torch.bfloat16

    run_ranks(check, 2)
