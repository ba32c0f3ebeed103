"""Adapters of `peft`. Where it is not installed the tests are skipped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.examples import run_example
from tests.kit import PLANS, Job, make, plans_of, same_bits, train, train_reference
from tests.late import late
from zeroshard.testing import run_ranks

if TYPE_CHECKING:
    import transformers as hf
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    from tests.real_models.real import ROWS, llama, text

pytestmark = pytest.mark.filterwarnings("ignore")


_late = late(
    globals(),
    {
        "tests.real_models.real": "hf ROWS llama text",
        "transformers.models.llama.modeling_llama": "LlamaDecoderLayer",
    },
)


# Adapters -------------------------------------------------------------------------------------------------------------


def adapted() -> nn.Module:
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(llama(), config)


def loss_of_text(model: nn.Module, rank: int, micro_batch: int, step: int, micro_batches: int = 1) -> Tensor:
    return model(**text(rank, micro_batch, step)).loss / micro_batches


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_adapters_train_and_the_model_under_them_stays(precision: str | None, tmp_path: Path) -> None:
    """Bit-equal to one process. Saved adapters load into a plain model and give the same loss, and can be merged."""
    peft = pytest.importorskip("peft")
    jobs = [
        Job(model=adapted, loss_of=loss_of_text, precision=precision, units=units, micro_batches=2, steps=2)
        for units in (LlamaDecoderLayer, None)
    ]
    expected = run_ranks(lambda rank: train_reference(jobs[0], 2), 1)[0]

    def check(rank: int) -> None:
        before = {name: value.clone() for name, value in make(adapted).state_dict().items()}
        for number, plan in enumerate(PLANS):
            if plan not in plans_of(precision is None):
                continue
            job = jobs[number // 2]
            found = train(job, plan, rank)
            assert found.losses == expected[rank].losses, plan
            assert same_bits(found.weights, expected[rank].weights), plan
            cast = {name: value.to(found.weights[name].dtype) for name, value in before.items()}
            changed = {name for name in cast if not torch.equal(cast[name], found.weights[name])}
            assert changed == {name for name in cast if "lora" in name}
            model = make(adapted)
            handle = zeroshard.shard(model, plan, units=LlamaDecoderLayer, precision=precision)
            handle.load_full_state_dict(found.weights)
            folder = tmp_path / f"{plan}-{rank}"
            with handle.unsharded(), torch.no_grad():
                model.save_pretrained(folder)
                loss = loss_of_text(model, rank, 0, 9)
                plain = peft.PeftModel.from_pretrained(make(llama), folder)
                for parameter in plain.parameters():  # not the buffers: the frequencies of positions stay fp32
                    parameter.data = parameter.data.to(next(model.parameters()).dtype)
                assert torch.equal(loss_of_text(plain, rank, 0, 9), loss)
            handle.close()
            merged = model.merge_and_unload()
            assert isinstance(merged, hf.LlamaForCausalLM)
            assert abs(float(loss_of_text(merged, rank, 0, 9) - loss)) < 1e-2

    run_ranks(check, 2)
    other = run_ranks(lambda rank: train_reference(ROWS["Llama"].job(precision=precision, steps=2), 2), 1)[0]
    assert other[0].losses[-1] != expected[0].losses[-1]  # training all parameters gives another result


def test_the_example_learns_to_count() -> None:
    """`examples/lora.py`. The model itself does not change, so the adapters have learned it."""
    pytest.importorskip("peft")

    def check(rank: int) -> tuple[list[int], float, bool]:
        found = run_example("lora")
        state = found["handle"].full_state_dict()
        torch.manual_seed(0)
        base = hf.LlamaForCausalLM(found["config"]).state_dict()["model.layers.1.self_attn.q_proj.weight"]
        kept = state["base_model.model.model.layers.1.self_attn.q_proj.base_layer.weight"]
        return found["written"], found["loss"].item(), torch.equal(kept, base)

    for written, loss, is_unchanged in run_ranks(check, 2):
        assert written[-6:] == [7, 8, 9, 10, 11, 12] and loss < 1.0 and is_unchanged
