"""The Trainer of transformers over a sharded model has the bits of the plain zeroshard loop. It is saved, resumed and
evaluated, and ends soon after a failure."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.examples import run_example
from tests.grids import EVERYTHING
from tests.integrations.common import HALF, MICRO_BATCHES, STEPS, Fault, as_launched, expect_faults_to_end_all
from tests.integrations.versions import as_logged, in_order, is_older
from tests.kit import State, make, same_bits
from tests.late import once
from zeroshard.testing import run_ranks

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.by_gloo]


_once = once("transformers.trainer", "accelerate", "tests.real_models.real", "zeroshard.integrations.transformers")


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences with some ignored labels, so that ranks have different numbers of counted tokens."""

    def __len__(self) -> int:
        return STEPS * MICRO_BATCHES * 2 * 2

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        from tests.real_models.real import generator, tokens

        ids = tokens(generator(0, 0, index))[0]
        return {"input_ids": ids, "labels": ids.clone().index_fill_(0, torch.arange(index % 3), -100)}


def arguments(folder: Path, **changes: Any) -> Any:
    import transformers as hf

    plain = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "max_steps": STEPS,
        **in_order(),
        "logging_steps": 1,
        "save_steps": HALF,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return hf.TrainingArguments(str(folder), **{**plain, **changes})


def plain_loop(rank: int, precision: Any = None, max_norm: float = 0.5) -> tuple[list[tuple[float, float]], State]:
    """The logged losses and norms, and the weights, of the loop in plain zeroshard, which the Trainer must equal."""
    import transformers as hf

    from tests.real_models.real import llama

    model = make(llama)
    decayed = hf.Trainer.get_decay_parameter_names(None, model)
    handle = zeroshard.shard(model, "zero1", units=_block(), precision=precision)
    groups = [
        {"params": [p for name, p in model.named_parameters() if name in decayed], "weight_decay": 0.1},
        {"params": [p for name, p in model.named_parameters() if name not in decayed], "weight_decay": 0.0},
    ]
    optimizer = zeroshard.ShardedOptimizer(groups, torch.optim.AdamW, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, fused=True)
    scheduler = hf.get_scheduler("linear", optimizer, 0, STEPS)
    data, logged = Texts(), []
    for step in range(STEPS):
        first = step * MICRO_BATCHES * 2 * 2
        of_step = [data[first + index] for index in range(MICRO_BATCHES * 2 * 2)]
        num_items = torch.tensor(sum(int((one["labels"][0 if is_older() else 1 :] != -100).sum()) for one in of_step))
        total = torch.tensor(0.0)
        for micro_batch in range(MICRO_BATCHES):
            mine = of_step[2 * (2 * micro_batch + rank) :][:2]
            batch = {name: torch.stack([one[name] for one in mine]) for name in mine[0]}
            with handle.no_sync() if micro_batch + 1 < MICRO_BATCHES else torch.enable_grad():
                loss = model(**batch, num_items_in_batch=num_items).loss * 2
                optimizer.backward(loss)
            total += loss.detach()
        norm = optimizer.clip_grad_norm_(max_norm).item()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        of_ranks = [torch.zeros(()), torch.zeros(())]
        torch.distributed.all_gather(of_ranks, total)
        logged.append((as_logged(torch.stack(of_ranks).mean().item()), norm))
    return logged, handle.full_state_dict(main=True)


def _block() -> type[nn.Module]:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    return LlamaDecoderLayer


def trainer(folder: Path, plan: str, build: Any = None, sharding: dict[str, Any] | None = None, **changes: Any) -> Any:
    from tests.real_models.real import llama
    from zeroshard.integrations import Sharding
    from zeroshard.integrations.transformers import ShardedTrainer

    more = {name: changes.pop(name) for name in ("optimizers", "eval_dataset", "train_dataset") if name in changes}
    how = Sharding(plan, **{"units": _block(), **(sharding or {})})
    more.setdefault("train_dataset", Texts())
    return ShardedTrainer(make(build or llama), arguments(folder, **changes), sharding=how, **more)


def logged(trainer: Any) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "loss" in line]


def test_the_trainer_has_the_bits_of_the_plain_loop(tmp_path: Path) -> None:
    """A run that is resumed under another plan has the bits of one without interruption, and so has one whose blocks
    are recomputed. Saved models load."""
    pytest.importorskip("accelerate")
    import transformers as hf

    def check(rank: int) -> None:
        as_launched(rank, 2)
        lines, weights = plain_loop(rank)
        run = trainer(tmp_path / "a", "zero3")
        run.train()
        assert logged(run) == lines
        assert same_bits(run.handle.full_state_dict(), weights)
        assert run.model_wrapped is run.model
        resumed = trainer(tmp_path / "a", "zero1", save_strategy="no")
        resumed.train(resume_from_checkpoint=str(tmp_path / "a" / f"checkpoint-{HALF}"))
        assert logged(resumed)[HALF:] == lines[HALF:]
        assert same_bits(resumed.handle.full_state_dict(), weights)
        assert not same_bits(plain_loop(rank, max_norm=100.0)[1], weights)
        for step, same in ((STEPS, True), (HALF, False)):
            saved = hf.LlamaForCausalLM.from_pretrained(tmp_path / "a" / f"checkpoint-{step}").state_dict()
            assert same_bits(dict(saved), weights) is same
        read_by_the_ranks(tmp_path / "a" / f"checkpoint-{STEPS}", weights)
        if is_older():  # its recomputed gradients differ in rounding also without zeroshard
            return
        recomputed = trainer(tmp_path / "b", "zero3", save_strategy="no", gradient_checkpointing=True)
        recomputed.train()
        assert recomputed.model.is_gradient_checkpointing
        assert logged(recomputed) == lines
        assert same_bits(recomputed.handle.full_state_dict(), weights)

    run_ranks(check, 2)


@pytest.mark.skipif(not EVERYTHING, reason="takes half a minute: make test-everything")
def test_a_compiled_model(tmp_path: Path) -> None:
    """Last bits differ, as in plain torch."""
    pytest.importorskip("accelerate")

    def check(rank: int) -> None:
        as_launched(rank, 2)
        lines, _ = plain_loop(rank)
        run = trainer(tmp_path, "zero3", save_strategy="no", torch_compile=True, torch_compile_backend="eager")
        run.train()
        assert torch._dynamo.utils.counters["frames"]["ok"]
        for found, expected in zip(logged(run), lines, strict=True):
            assert found == pytest.approx(expected, rel=1e-5)

    run_ranks(check, 2)


def read_by_the_ranks(saved: Path, weights: State) -> None:
    """A model without values reads what `save_pretrained` has written, but its buffers must be there: the rotary
    frequencies are not in the file."""
    import accelerate
    import transformers as hf

    config = hf.AutoConfig.from_pretrained(saved)
    with torch.device("meta"):
        without_buffers = hf.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"has no values for the buffers .*inv_freq"):
        zeroshard.shard(without_buffers, "zero3", units=_block(), materialize=saved)
    with accelerate.init_empty_weights(include_buffers=False):
        model = hf.AutoModelForCausalLM.from_config(config)
    handle = zeroshard.shard(model, "zero3", units=_block(), materialize=saved)
    assert same_bits(handle.full_state_dict(), weights)
    assert torch.equal(model.model.rotary_emb.inv_freq, make(_llama()).model.rotary_emb.inv_freq)


def _llama() -> Any:
    from tests.real_models.real import llama

    return llama


def test_the_example_learns() -> None:
    """`examples/with_trainer.py`"""
    pytest.importorskip("accelerate")

    def check(rank: int) -> tuple[list[float], str]:
        as_launched(rank, 2)
        found = run_example("with_trainer")
        return found["losses"], str(found["trainer"].handle.engine.plan)

    first, second = run_ranks(check, 2)
    assert first == second and len(first[0]) == 3
    assert first[0][0] > 2.0 > first[0][-1] + 0.5


def own_optimizer(model: nn.Module) -> tuple[Any, Any]:
    """The optimizer and scheduler that the Trainer would create itself, created by the user."""
    import transformers as hf

    decayed = hf.Trainer.get_decay_parameter_names(None, model)
    groups = [
        {"params": [p for name, p in model.named_parameters() if name in decayed], "weight_decay": 0.1},
        {"params": [p for name, p in model.named_parameters() if name not in decayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    return optimizer, hf.get_scheduler("linear", optimizer, 0, STEPS)


def test_evaluation_best_models_and_an_optimizer_of_the_user(tmp_path: Path) -> None:
    """In bf16 with fp32 main. The saved model contains main, in fp32."""
    pytest.importorskip("accelerate")
    import transformers as hf

    from tests.real_models.real import llama

    def check(rank: int) -> None:
        as_launched(rank, 2)
        lines, weights = plain_loop(rank, "bf16")
        reset_accelerate()
        model = make(llama)
        options = {"eval_strategy": "steps", "eval_steps": HALF, "load_best_model_at_end": True, "bf16": True}
        options |= {"eval_dataset": Texts(), "metric_for_best_model": "eval_loss", "greater_is_better": True}
        run = trainer(tmp_path / "a", "zero3", lambda: model, optimizers=own_optimizer(model), **options)
        untrained = run.evaluate()["eval_loss"]
        run.train()
        assert logged(run) == lines
        by_step = {line["step"]: line["eval_loss"] for line in run.state.log_history if "eval_loss" in line}
        assert untrained > by_step[HALF] > by_step[STEPS]  # so the "best" model is the first that is saved
        assert run.state.best_model_checkpoint.endswith(f"checkpoint-{HALF}")
        best, last = (
            hf.LlamaForCausalLM.from_pretrained(tmp_path / "a" / f"checkpoint-{step}").state_dict()
            for step in (HALF, STEPS)
        )
        assert same_bits(dict(last), weights)
        assert same_bits(dict(best), run.handle.full_state_dict(main=True))
        assert run.evaluate()["eval_loss"] == by_step[HALF]
        run.save_model(str(tmp_path / "best"))
        torch.distributed.barrier()
        assert same_bits(dict(hf.LlamaForCausalLM.from_pretrained(tmp_path / "best").state_dict()), dict(best))

    run_ranks(check, 2)


def test_outputs_in_bf16_have_the_dtype_of_the_plain_trainer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    import transformers as hf

    def check(rank: int) -> None:
        as_launched(rank, 1)
        found = []
        for build in (
            lambda: hf.Trainer(make(_llama()), arguments(tmp_path, bf16=True)),
            lambda: trainer(tmp_path, "zero3", bf16=True),
            lambda: trainer(tmp_path, "zero3", sharding={"precision": "bf16"}),
        ):
            reset_accelerate()
            os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # older versions leave it behind
            run = build()
            run.evaluate(Texts())
            loss, logits, _ = run.prediction_step(run.model, {n: x[None] for n, x in Texts()[0].items()}, False)
            found.append((loss.dtype, logits[0].dtype if isinstance(logits, tuple) else logits.dtype, loss.item()))
        plain, mixed, of_the_user = found
        assert mixed[:2] == plain[:2] == (torch.float32, torch.float32)
        assert mixed[2] == pytest.approx(plain[2], rel=1e-3)
        assert of_the_user[1] == torch.bfloat16  # a control

    run_ranks(check, 1)


def test_the_mixin_comes_first() -> None:
    """Behind the Trainer it did nothing, and the model was trained under torch DDP."""
    import transformers as hf

    from zeroshard.integrations.transformers import ShardedTrainer, ShardedTrainerMixin

    with pytest.raises(TypeError, match=r"Last: .* write class Last\(ShardedTrainerMixin, Trainer\)"):
        type("Last", (hf.Trainer, ShardedTrainerMixin), {})
    type("First", (ShardedTrainerMixin, type("Own", (hf.Trainer,), {})), {})
    type("Further", (ShardedTrainer,), {})


def reset_accelerate() -> None:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()


def adapted() -> nn.Module:
    import peft

    from tests.real_models.real import llama

    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(llama(), config)


def prompted() -> nn.Module:
    import peft

    from tests.real_models.real import llama

    return peft.get_peft_model(llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def test_adapters_and_generating(tmp_path: Path) -> None:
    """PEFT reads weights when it saves: the names of `modules_to_save`, and prompts by a forward of their encoder."""
    pytest.importorskip("accelerate")
    peft = pytest.importorskip("peft")

    from tests.real_models.real import llama

    def check(rank: int) -> None:
        as_launched(rank, 2)
        run = trainer(tmp_path / "a", "zero3", adapted)
        run.train()
        trained = run.handle.full_state_dict()
        resumed = trainer(tmp_path / "a", "zero2", adapted, save_strategy="no")
        resumed.train(resume_from_checkpoint=True)
        assert same_bits(resumed.handle.full_state_dict(), trained)
        saved = tmp_path / "a" / f"checkpoint-{STEPS}"
        assert not list(saved.glob("model*"))
        loaded = peft.PeftModel.from_pretrained(make(llama), saved).state_dict()
        assert same_bits(dict(loaded), trained)
        assert not same_bits(dict(adapted().state_dict()), trained)
        run = trainer(tmp_path / "p", "zero3", prompted)
        run.train()
        saved = tmp_path / "p" / f"checkpoint-{STEPS}"
        loaded = peft.PeftModel.from_pretrained(make(llama), saved).state_dict()
        assert same_bits(dict(loaded), run.handle.full_state_dict())
        assert not same_bits(dict(make(prompted).state_dict()), dict(loaded))
        generate(rank, tmp_path / "b")

    run_ranks(check, 2)


def test_a_second_trainer_has_the_same_model(tmp_path: Path) -> None:
    """It once moved the sharded model to its device, which raised. A new adapter is named, not the units."""
    pytest.importorskip("accelerate")
    peft = pytest.importorskip("peft")

    def check(rank: int) -> None:
        as_launched(rank, 2)
        for plan in ("zero2", "zero3"):
            first = trainer(tmp_path / plan, plan, adapted, save_strategy="no")
            first.train()
            second = trainer(tmp_path / plan, plan, lambda model=first.model: model, save_strategy="no")
            second.train()
            assert len(logged(second)) == STEPS and logged(second) != logged(first)
            with second.handle.unsharded():  # an adapter is made in the dtype of the weights
                second.model.add_adapter("b", peft.LoraConfig(r=4, target_modules=["k_proj"]))
            with pytest.raises(
                RuntimeError, match=r"k_proj\.lora_A\.b\.weight has come into the model after shard\(\)"
            ):
                trainer(tmp_path / plan, plan, lambda model=first.model: model, save_strategy="no").train()

    run_ranks(check, 2)


def generate(rank: int, folder: Path) -> None:
    """Generation in an evaluation under ZERO3 gives the tokens of the plain model, although ranks stop at different
    lengths."""
    import transformers as hf

    from tests.real_models.real import t5, text_to_text
    from zeroshard.integrations.transformers import ShardedSeq2SeqTrainer

    data = [{name: value[0] for name, value in text_to_text(0, 0, index).items()} for index in range(4)]
    plain = make(t5).eval()
    expected = [plain.generate(one["input_ids"][None], max_new_tokens=6, do_sample=False)[0] for one in data]
    args = hf.Seq2SeqTrainingArguments(
        str(folder), predict_with_generate=True, per_device_eval_batch_size=1, use_cpu=True, report_to=[]
    )
    run = ShardedSeq2SeqTrainer(make(t5), args, sharding="zero3")
    found = run.predict(data, max_new_tokens=6, do_sample=False).predictions
    for row, tokens in zip(found, expected, strict=True):
        assert row[: len(tokens)].tolist() == tokens.tolist()


def test_options_of_a_command_line_and_what_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    import transformers as hf

    from zeroshard.integrations import Sharding
    from zeroshard.integrations.transformers import ShardedTrainer, ZeroshardArguments, expect_supported

    parser = hf.HfArgumentParser((hf.TrainingArguments, ZeroshardArguments))
    line = ["--output_dir", str(tmp_path), "--use_cpu", "--plan", "zero2", "--units", "LlamaDecoderLayer", "Linear"]
    args, ours = parser.parse_args_into_dataclasses(line)
    assert ours.sharding() == Sharding("zero2", units=["LlamaDecoderLayer", "Linear"])
    expect_supported(args)
    for name in ("auto_find_batch_size", "bf16_full_eval", "save_on_each_node"):
        with pytest.raises(ValueError, match=rf"{name}=True\) is not supported under zeroshard"):
            expect_supported(arguments(tmp_path, **{name: True}))
    with pytest.raises(ValueError, match=r"optim='lomo'\) is not supported under zeroshard: in backward it would step"):
        expect_supported(arguments(tmp_path, optim="lomo"))
    assert issubclass(ShardedTrainer, hf.Trainer)


def train_with_a_fault(rank: int, fault: Fault, folder: Path) -> None:
    as_launched(rank, 2)
    run = trainer(folder, "zero3", save_strategy="no", train_dataset=fault.within(Texts()))
    run.model.register_forward_pre_hook(fault.in_step)
    run.train()


def test_one_rank_of_a_trainer_fails_and_all_leave_in_seconds(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    expect_faults_to_end_all(train_with_a_fault, tmp_path)
