"""Writes the trained model of a run as files that `from_pretrained` of transformers reads."""

from pathlib import Path
from typing import Any

from zeroshard.exchange import export
from zeroshard.train.language import Language
from zeroshard.train.tokenizer import FromFile, Tokenizer

FOLDER = "model"


def keep_config(run_folder: Path, source: Path) -> None:
    """Copy the model's `config.json` into the run's folder, so that the run can be resumed without the original."""
    source = source / "config.json" if source.is_dir() else source
    target = run_folder / FOLDER / "config.json"
    target.parent.mkdir(exist_ok=True)
    if source.resolve() != target.resolve():
        target.write_bytes(source.read_bytes())


def release(step_folder: Path, run_folder: Path, language: Language, tokenizer: Tokenizer) -> Path:
    """Write weights, configuration and tokenizer into `<run>/model`. Not collective: the weights come from the files of
    a saved step, block by block.

    Returns:
        The folder.
    """
    out = run_folder / FOLDER
    export(step_folder, out, force=True)
    config = language.hf_config
    config.dtype = "float32"  # what the step holds, and so what `from_pretrained` loads
    config.architectures = [type(language.model).__name__]
    config.save_pretrained(out)
    if isinstance(tokenizer, FromFile):
        from transformers import PreTrainedTokenizerFast

        fast: Any = PreTrainedTokenizerFast
        fast(tokenizer_file=str(tokenizer.path), eos_token=tokenizer.end_of_text).save_pretrained(out)
    return out
