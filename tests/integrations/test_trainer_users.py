"""What users of a Trainer do besides training: stop a run by a signal, go on from a plain Trainer's checkpoint."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.common import HALF, STEPS, as_launched
from tests.integrations.test_with_transformers import Texts, arguments, logged, reset_accelerate, trainer
from tests.integrations.versions import is_older
from tests.kit import make, same_bits
from tests.late import once
from zeroshard.testing import run_ranks

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.by_gloo]

_once = once("transformers.trainer", "accelerate", "tests.real_models.real", "zeroshard.integrations.transformers")


def test_a_signal_that_one_rank_gets_makes_all_save_and_stop(tmp_path: Path) -> None:
    """`enable_jit_checkpoint`: the Trainer's own callback saves on that rank alone, and before an update, which
    raised."""
    pytest.importorskip("accelerate")
    if is_older():
        pytest.skip("transformers 4 has no such option")
    import transformers as hf

    class Told(hf.TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == HALF - 1:
                manager = signal.getsignal(signal.SIGTERM).__self__  # type: ignore[union-attr]
                manager.kill_wait = 0
                os.kill(os.getpid(), signal.SIGTERM)
                while not manager.is_checkpoint_requested:
                    time.sleep(0.001)

    def check(rank: int) -> None:
        as_launched(rank, 2)
        whole = trainer(tmp_path / "whole", "zero2", save_strategy="no")
        whole.train()
        before = signal.getsignal(signal.SIGTERM)
        run = trainer(tmp_path / "a", "zero3", enable_jit_checkpoint=True, save_strategy="no")
        if rank == 1:
            run.add_callback(Told())
        run.train()
        assert run.state.global_step == HALF
        assert signal.getsignal(signal.SIGTERM) == before
        assert [path.name for path in (tmp_path / "a").glob("checkpoint*")] == [f"checkpoint-{HALF}"]
        resumed = trainer(tmp_path / "a", "zero1", save_strategy="no")
        resumed.train(resume_from_checkpoint=True)
        assert logged(resumed)[HALF:] == logged(whole)[HALF:]
        assert same_bits(resumed.handle.full_state_dict(), whole.handle.full_state_dict())

    run_ranks(check, 2)


def test_the_loss_scale_of_a_plain_trainer_goes_on(tmp_path: Path) -> None:
    """It is in a file of its own. Accelerate's GradScaler, which loads it in a plain Trainer, is not there."""
    pytest.importorskip("accelerate")
    import transformers as hf

    from tests.real_models.real import llama

    def check(rank: int) -> None:
        as_launched(rank, 1)
        plain = hf.Trainer(make(llama), arguments(tmp_path, fp16=True), train_dataset=Texts())
        plain.train()
        saved = tmp_path / f"checkpoint-{HALF}"
        scaled = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
        for written in ({}, {**scaled, "_growth_tracker": 7}):
            torch.save(written, saved / "scaler.pt")
            reset_accelerate()
            run = trainer(tmp_path, "zero3", fp16=True, max_steps=HALF + 1, save_strategy="no")
            run.train(resume_from_checkpoint=str(saved))
            state = run.optimizer.optimizer.scaling.state_dict()
            assert (state["scale"], state["growth_tracker"]) == ((1024.0, 8) if written else (2.0**16, 1))

    run_ranks(check, 1)


def test_an_evaluation_before_leaves_the_training_as_it_is(tmp_path: Path) -> None:
    """(The plain Trainer then trains each rank alone: it does not wrap a model in DDP that it has evaluated.)"""
    pytest.importorskip("accelerate")

    def check(rank: int) -> None:
        as_launched(rank, 2)
        runs = [trainer(tmp_path, "zero3", save_strategy="no", eval_dataset=Texts()) for _ in range(2)]
        losses = [run.evaluate()["eval_loss"] for run in runs[1:]]
        for run in runs:
            run.train()
        assert logged(runs[0]) == logged(runs[1])
        assert same_bits(runs[0].handle.full_state_dict(), runs[1].handle.full_state_dict())
        assert runs[1].evaluate()["eval_loss"] != losses[0]

    run_ranks(check, 2)


def absent() -> Any:
    """Its parameters are on the meta device, its buffers not."""
    import accelerate

    from tests.real_models.real import llama

    with accelerate.init_empty_weights(include_buffers=False):
        return llama()


def test_after_a_refused_trainer_the_next_one_trains(tmp_path: Path) -> None:
    """The Trainer's own Accelerator had set itself up for FSDP before the refusal, for the rest of the process. Another
    one begins with a model without values."""
    pytest.importorskip("accelerate")
    if is_older():
        pytest.skip("transformers 4 sets the variable in TrainingArguments")

    def check(rank: int) -> None:
        as_launched(rank, 2)
        with pytest.raises(ValueError, match="accelerate is set up for FSDP: leave out its plugin"):
            trainer(tmp_path, "zero3", fsdp=True)
        assert "ACCELERATE_USE_FSDP" not in os.environ
        run = trainer(tmp_path, "zero3", save_strategy="no")
        run.train()
        assert run.state.global_step == STEPS
        run.save_model(tmp_path / "saved")
        torch.distributed.barrier()
        again = trainer(tmp_path, "zero3", absent, {"materialize": tmp_path / "saved"}, save_strategy="no")
        assert again.evaluate(Texts())["eval_loss"] == run.evaluate(Texts())["eval_loss"]
        assert same_bits(again.handle.full_state_dict(), run.handle.full_state_dict())

    run_ranks(check, 2)
