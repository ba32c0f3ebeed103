"""`--model config.json`: a model of transformers is trained, resumed, planned and written for `from_pretrained`."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.late import once
from tests.train.test_loop import equal_states, losses, rows, tiny, train_in_turn
from zeroshard.cli.models import describe
from zeroshard.integrations.causal_lm import read_config
from zeroshard.testing import run_ranks
from zeroshard.train.config import Config, ModelConfig, UserError, resolve
from zeroshard.train.data import open_corpus, prepare
from zeroshard.train.language import build_language
from zeroshard.train.tokenizer import tokenizer_of, train_tokenizer

_once = once("tests.real_models.real")  # imports the models of transformers

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@pytest.fixture(scope="module")
def sources(shared_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `config.json` and `tokenizer.json`."""
    folder = tmp_path_factory.mktemp("sources")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    train_tokenizer([path.read_bytes() for path in shared_text.iterdir()], 300).save(str(folder / "tokenizer.json"))
    return folder


def config_of(sources: Path, text: Path, out: Path, **overrides: object) -> Config:
    small = {"model.layers": 6, "model.width": 256, "model.heads": 4}  # as in the defaults: they are the GPT's
    values = {name.replace(".", "__"): value for name, value in small.items()}
    of_model = {"model__config": str(sources), "data__tokenizer": str(sources)}
    return tiny(text, out, **{**values, **of_model, "evaluation__prompt": "def f", **overrides})


def run_in_turn(rank: int, runs: Sequence[tuple[Any, ...]]) -> None:
    train_in_turn(rank, runs)


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_transformers_is_trained_resumed_and_released(
    sources: Path, shared_text: Path, tmp_path: Path
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    build_language(ModelConfig(config=str(sources), context=32), 300)  # what ranks need is imported before they fork
    assert transformers.PreTrainedTokenizerFast is not None
    whole = config_of(sources, shared_text, tmp_path / "whole")
    parts = config_of(sources, shared_text, tmp_path / "parts", parallel__plan="zero1")
    run_ranks(run_in_turn, 2, [(whole,), (parts, None, 3), (parts, tmp_path / "parts")])
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert equal_states(tmp_path / "parts", tmp_path / "whole")
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0] - 0.5

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "whole" / "model")
    assert (model.dtype, model.config.architectures) == (torch.float32, ["LlamaForCausalLM"])
    text = next(shared_text.iterdir()).read_text()
    ours = tokenizer_of(whole.data)
    assert tokenizer(text)["input_ids"] == ours.encode(text.encode()).tolist()
    (last,) = (row for row in rows(tmp_path / "whole", "validation") if row["step"] == 6)
    corpus = open_corpus(prepare(whole.data), ours)
    found = loss_of_windows(model, torch.from_numpy(corpus.validation.astype("int64")))
    assert found == pytest.approx(last["loss"], abs=0.05)
    untrained = build_language(whole.model, 300).model
    assert loss_of_windows(untrained, torch.from_numpy(corpus.validation.astype("int64"))) > last["loss"] + 0.5
    assert last["bits_per_byte"] < last["loss"] / 0.6931 / 2  # a token has more than two bytes


@pytest.mark.filterwarnings("ignore")
def test_a_sample_has_only_tokens_of_the_tokenizer(sources: Path) -> None:
    """A model may have more, for example padded to a multiple of 64. They were sampled, and no text stands for them."""
    pytest.importorskip("transformers")
    language = build_language(ModelConfig(config=str(sources), context=32), 256)
    output = language.model.get_output_embeddings()  # type: ignore[operator]
    with torch.no_grad():
        output.weight[299] = 100 * torch.ones(32)
    assert language.model(input_ids=torch.zeros(1, 2, dtype=torch.int64)).logits.shape[-1] == 300
    assert language.logits(torch.zeros(1, 2, dtype=torch.int64)).shape == (1, 2, 256)


def loss_of_windows(model: nn.Module, tokens: torch.Tensor) -> float:
    inputs = tokens[: (len(tokens) - 1) // 32 * 32].view(-1, 32)
    targets = tokens[1 : inputs.numel() + 1].view(-1, 32)
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model.eval()(inputs).logits.flatten(0, 1), targets.flatten()))


@pytest.mark.filterwarnings("ignore")
def test_it_is_planned_and_refused_before_anything_runs(sources: Path, shared_text: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = config_of(sources, shared_text, tmp_path / "run")
    toml = tmp_path / "config.toml"
    toml.write_text(f'[model]\nconfig = "{sources}"\ncontext = 32\n[data]\ntokenizer = "{sources}"\n')
    described = describe(str(toml))
    assert {one.__name__ for one in described.units} == {"LlamaDecoderLayer"}  # type: ignore[union-attr]
    assert all(parameter.is_meta for parameter in described.model.parameters())

    with pytest.raises(UserError, match="model: layers is that of the small GPT: with config, set it in"):
        resolve([toml], {"model.layers": 2})
    with pytest.raises(UserError, match=r"model.context = 64: .* has room for 32 positions"):
        build_language(config.model.model_copy(update={"context": 64}), 300)
    with pytest.raises(UserError, match="has 300 tokens, the tokenizer has 301"):
        build_language(config.model, 301)
    for content, message in (("{", "is not a config that transformers reads"), ('{"model_type": "vit"}', "")):
        other = tmp_path / "other"
        shutil.rmtree(other, ignore_errors=True)
        other.mkdir()
        (other / "config.json").write_text(content)
        with pytest.raises(UserError, match=message or "is no causal language model"):
            build_language(config.model.model_copy(update={"config": str(other), "context": 8}), 1)


def test_a_package_that_cannot_be_imported_is_no_fault_of_the_config(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a torchvision that does not fit torch, transformers reads no configuration. It said "not a config"."""
    transformers = pytest.importorskip("transformers")

    def fail(*args: object, **kwargs: object) -> None:
        raise ModuleNotFoundError("Could not import module 'LlamaConfig'")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", fail)
    with pytest.raises(ValueError, match=r"transformers cannot import what .*config\.json needs: ModuleNotFoundError"):
        read_config(sources)


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_sees_the_tokens_that_it_is_to_predict_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers builds a BERT as a causal language model. It trained, and its loss meant nothing."""
    transformers: Any = pytest.importorskip("transformers")
    path, before = tmp_path / "config.json", torch.get_rng_state()
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 64}
    for is_decoder in (False, True):
        path.write_text(json.dumps({"model_type": "bert", "vocab_size": 300, **sizes, "is_decoder": is_decoder}))
        if is_decoder:
            assert build_language(ModelConfig(config=str(path), context=32), 300).model.training
        else:
            with pytest.raises(UserError, match=r"a BertLMHeadModel of .* sees the tokens that it is to predict: set "):
                build_language(ModelConfig(config=str(path), context=32), 300)

    def on_gpus_alone(*_: object, **__: object) -> None:
        raise RuntimeError("FlashAttention only supports CUDA")

    monkeypatch.setattr(transformers.BertLMHeadModel, "forward", on_gpus_alone)
    assert build_language(ModelConfig(config=str(path), context=32), 300).model.training, "it cannot be checked"
    torch.set_rng_state(before)
