"""The typed configuration of a run: from TOML files and command-line overrides; unknown keys are refused.

A field, its default, its range and its help text are defined only in the records below. The command line
(`zeroshard.cli.main`) and the file that is saved with a run are generated from them.
"""

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from zeroshard.errors import Error, InvalidValue
from zeroshard.io.whole import write_whole
from zeroshard.placement import as_plan
from zeroshard.precision import NAMED, as_precision


class UserError(Error):
    """An error that the user of the command line can correct. The message is one line."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        """A name from the command line may contain other bytes, and the run's own configuration is a file of UTF-8."""
        if isinstance(value, str) and not value.isascii() and value.encode(errors="ignore").decode() != value:
            raise InvalidValue(f"expected text in UTF-8, found {os.fsencode(value)!r}: choose another name")
        return value


def named_as_here(value: Any, choices: Sequence[str]) -> Any:
    """The choice that other libraries call `value` ("fsdp", 3, "bf16-mixed"); `value` itself if there is none."""
    with suppress(InvalidValue):
        if (plan := as_plan(value).name) in choices:
            return plan
    with suppress(InvalidValue):
        precision = as_precision(value)
        return next((name for name, named in NAMED.items() if named == precision and name in choices), value)
    return value


class ModelConfig(_Section):
    config: str = Field("", description="config.json of transformers, or its folder: that model, not the small GPT")
    layers: int = Field(6, ge=1, description="transformer blocks")
    width: int = Field(256, ge=2, description="features per token")
    heads: int = Field(4, ge=1, description="attention heads; divides width into even parts")
    context: int = Field(256, ge=1, description="tokens per sequence")
    dropout: float = Field(0.0, ge=0, lt=1, description="share of activations dropped after each half of a block")
    tied: bool = Field(False, description="use the embedding matrix as output head too")

    @model_validator(mode="after")
    def _heads_divide_width(self) -> "ModelConfig":
        if self.width % (2 * self.heads):
            raise InvalidValue(
                f"width {self.width} does not split into {self.heads} heads of even size: expected a multiple of "
                f"{2 * self.heads}"
            )
        return self

    @model_validator(mode="after")
    def _one_model(self) -> "ModelConfig":
        """The fields of the small GPT have no meaning for another model."""
        given = [name for name in ("layers", "width", "heads", "dropout", "tied") if name in self._changed()]
        if self.config and given:
            raise InvalidValue(f"{given[0]} is that of the small GPT: with config, set it in {self.config}")
        return self

    def _changed(self) -> set[str]:
        return {name for name, info in type(self).model_fields.items() if getattr(self, name) != info.default}


class DataConfig(_Section):
    path: str = Field(
        "",
        description="UTF-8 file, folder, or saved data set of `datasets`; empty: the Python standard library's source",
    )
    column: str = Field("text", description="column of a saved data set")
    tokenizer: str = Field("", description="tokenizer.json (`zeroshard tokenizer` makes one); empty: bytes")
    end_of_text: str = Field("", description="token after each document; empty: <|endoftext|>, </s> or the like")
    validation_share: float = Field(0.05, gt=0, lt=1, description="part of the files kept for validation")
    cache: str = Field("", description="folder for token files; empty: the user's cache folder")

    @model_validator(mode="after")
    def _ends_with_a_token(self) -> "DataConfig":
        if self.end_of_text and not self.tokenizer:
            raise InvalidValue("end_of_text is a token of the tokenizer, and the tokens are bytes: name a tokenizer")
        return self


class BatchConfig(_Section):
    sequences: int = Field(24, ge=1, description="sequences per step, over all ranks and micro-batches")
    micro_batches: int = Field(1, ge=1, description="forward/backward passes per step on each rank")
    reduce_every_micro_batch: bool = Field(False, description="reduce gradients in each pass, not once per step")


class OptimizerConfig(_Section):
    lr: float = Field(1e-3, gt=0, description="AdamW's learning rate after warm-up")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="decay of the second moment")
    weight_decay: float = Field(0.1, ge=0, description="decoupled decay of the matrices; vectors have none")
    clip: float = Field(1.0, ge=0, description="largest global gradient norm; 0: do not clip")
    fused: bool = Field(True, description="torch's fused AdamW kernel")
    loss_scale: float | None = Field(
        None, gt=0, description="first dynamic loss scale; default: 65536 in fp16, or none"
    )
    loss_scale_growth: int = Field(2000, ge=1, description="steps without overflow until the loss scale doubles")


class ScheduleConfig(_Section):
    steps: int = Field(400, ge=1, description="optimizer steps in all")
    warmup: int = Field(20, ge=0, description="steps of linear warm-up")
    final_share: float = Field(0.1, ge=0, le=1, description="learning rate at the end, as part of its maximum")


class ParallelConfig(_Section):
    plan: Literal["ddp", "zero1", "zero2", "zero3"] = Field("zero3", description="what is sharded over the ranks")
    nproc: int | None = Field(None, ge=1, description="ranks; default: one per GPU, one on CPU")
    precision: Literal["fp32", "bf16", "fp16", "bf16-remainder"] = Field("fp32", description="of the weights")
    recompute: bool = Field(False, description="run each block's forward again in backward: less memory, more time")
    compile: bool = Field(False, description="compile each block (torch.compile)")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one")
    max_transient_bytes: int | None = Field(None, ge=1, description="cap on gather and reduce buffers per rank")
    timeout: float = Field(120.0, ge=1, description="seconds without an answer until a peer counts as lost")
    max_restarts: int = Field(0, ge=0, description="times to start all ranks again after one has failed (with --nproc)")

    @field_validator("plan", "precision", mode="before")
    @classmethod
    def _named_as_here(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        return named_as_here(value, get_args(cls.model_fields[info.field_name].annotation))


class EvaluationConfig(_Section):
    every: int = Field(100, ge=1, description="steps between evaluations")
    windows: int = Field(96, ge=1, description="validation sequences per evaluation")
    sample_tokens: int = Field(200, ge=0, description="length of the text generated at the end; 0: none")
    prompt: str = Field("def ", min_length=1, description="text that the sample continues")
    temperature: float = Field(0.8, ge=0, description="0: always the most likely token")
    top_k: int = Field(40, ge=1, description="sample among the k most likely tokens")


class RunConfig(_Section):
    seed: int = Field(0, ge=0, lt=2**63, description="of the weights, the order of the data and the sample")
    out: str = Field("", description="run folder; default: runs/<date>-<time>")
    report: bool = Field(True, description="write report.html at the end")
    log_every: int = Field(10, ge=1, description="steps between lines when the output is not a terminal")
    log_seconds: float = Field(15.0, gt=0, description="seconds between lines that stay, on a terminal")
    timeline: int = Field(0, ge=0, description="the step of which each rank writes a timeline for Perfetto; 0: none")
    save_every: int = Field(0, ge=0, description="steps between saves; 0: at the end and on request (SIGUSR1)")
    keep_last: int = Field(2, ge=1, description="how many of the newest saved steps are kept")
    keep_every: int | None = Field(None, ge=1, description="saved steps that are multiples of it are kept, too")
    observers: str = Field("", description="trackers, separated by commas: wandb, mlflow, others, or module:factory")
    peak_tflops: float | None = Field(
        None, gt=0, description="what one device can do at most, for the MFU; default: known for some GPUs"
    )


class Config(_Section):
    """The configuration of a run. Frozen, and checked at construction; every field is `section.name`."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def _has_effect(self) -> "Config":
        """A field that has no effect beside the others is a mistake."""
        settings = self.optimizer
        growth, is_scaled = settings.loss_scale_growth, settings.loss_scale or self.parallel.precision == "fp16"
        if growth != OptimizerConfig().loss_scale_growth and not is_scaled:
            raise InvalidValue(
                f"optimizer.loss_scale_growth = {growth}: there is no loss scale in {self.parallel.precision}, unless "
                f"optimizer.loss_scale is given; leave it out, or set {OptimizerConfig().loss_scale_growth}"
            )
        if self.run.keep_every is not None and not self.run.save_every:
            raise InvalidValue(
                f"run.keep_every = {self.run.keep_every}: it keeps what is saved, and run.save_every = 0 saves at the "
                f"end only; set run.save_every, for example to {self.run.keep_every}"
            )
        return self

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks together."""
        return self.batch.sequences * self.model.context


def fields() -> Iterator[tuple[str, FieldInfo]]:
    """Every field as ("section.name", its declaration), in the order of this file."""
    for section, record in Config.model_fields.items():
        assert isinstance(record.annotation, type) and issubclass(record.annotation, BaseModel)
        for name, info in record.annotation.model_fields.items():
            yield f"{section}.{name}", info


def value_of(config: Config, key: str) -> Any:
    """The value of a field of that name, "section.name"."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def resolve(files: list[Path], overrides: Mapping[str, Any]) -> Config:
    """The defaults, then each TOML file in turn, then `overrides` ("section.name" -> typed value).

    Raises `UserError` naming the file, the key, the value and what was expected; for an unknown key, the nearest known
    one.
    """
    return _checked(*_merged(files, overrides))


def out_of(files: list[Path], overrides: Mapping[str, Any]) -> str:
    """`run.out` as `resolve` would find it. Nothing else is checked: beside the configuration of a saved run, which is
    not known before, other fields may well go together."""
    values, origins = _merged(files, overrides)
    section = values.get("run")
    given = {key: value for key, value in section.items() if key == "out"} if isinstance(section, dict) else {}
    return _checked({"run": given}, origins).run.out


def _merged(files: list[Path], overrides: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    """The values of all sources, not yet checked; and the files of those that come from files."""
    values: dict[str, Any] = {}
    origins: dict[str, Path] = {}  # "section" and "section.name" -> the file that it comes from
    for path in files:
        for section, content in _read_toml(path).items():
            origins[section] = path
            if isinstance(content, dict) and isinstance(values.setdefault(section, {}), dict):
                values[section].update(content)
                origins |= {f"{section}.{name}": path for name in content}
            else:
                values[section] = content
    for key, value in overrides.items():
        section, _, name = key.partition(".")
        if not isinstance(values.setdefault(section, {}), dict):
            continue  # a file has something else in its place, which is refused
        values[section][name] = value
        for one in (key, section):  # a section as a whole is then the command line's, too
            origins.pop(one, None)
    return values, origins


def with_values(config: Config, **sections: Mapping[str, Any]) -> Config:
    """`config` with some fields replaced: `with_values(config, parallel={"nproc": 2})`. Checked as by `resolve`."""
    return _checked({name: {**dict(section), **sections.get(name, {})} for name, section in config})


def _checked(values: Mapping[str, Any], origins: Mapping[str, Path] | None = None) -> Config:
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        text = _explain(key, first)
        file = (origins or {}).get(key or text.partition(" ")[0])  # an error of all sections begins with a key
        raise UserError(f"{'' if file is None else f'{file}: '}{text}") from None


def check_divides(config: Config) -> None:
    """Check that every rank and micro-batch gets the same number of sequences; else `UserError`, which names the
    nearest sizes that work."""
    parts = config.batch.micro_batches * (config.parallel.nproc or 1)
    if config.batch.sequences % parts:
        below = config.batch.sequences // parts * parts
        nearest = f"{below} or {below + parts}" if below else f"{parts}"
        raise UserError(
            f"batch.sequences = {config.batch.sequences} does not divide over {config.parallel.nproc} ranks x "
            f"{config.batch.micro_batches} micro-batches: expected a multiple of {parts}, for example {nearest}"
        )


def write(config: Config, path: Path) -> None:
    """Save the resolved configuration, so that `resolve([path], {})` returns it again."""
    write_whole(path, _text_of(config))


def is_written(path: Path) -> bool:
    """Whether a file is one that `write` has written, so that another one in its place loses nothing of a user."""
    try:
        return path.read_text(encoding="utf-8") == _text_of(resolve([path], {}))
    except (OSError, UnicodeDecodeError, UserError):
        return False


def _text_of(config: Config) -> str:
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not TOML: {error}") from None


def _explain(key: str, error: ErrorDetails) -> str:
    """An error as one line."""
    match error["type"]:
        case "extra_forbidden":
            return f"unknown configuration key '{key}'{_did_you_mean(key)}"
        case "model_type":
            return f"{key} = {error['input']!r}: expected a section, [{key}]"
        case "value_error":
            return f"{key}{': ' if key else ''}{error['msg'].removeprefix('Value error, ')}"
    return f"{key} = {error['input']!r}: {error['msg'].replace('Input should be', 'expected')}"


def _did_you_mean(key: str) -> str:
    """The nearest full name; failing that, the nearest section or the nearest field of any section."""
    full_names = [name for name, _ in fields()]
    by_leaf = {name.partition(".")[2]: name for name in reversed(full_names)}
    leaf = key.rpartition(".")[2]
    if leaf in by_leaf:
        return f"; did you mean '{by_leaf[leaf]}'?"
    if nearest := difflib.get_close_matches(key, [*full_names, *Config.model_fields], n=1):
        return f"; did you mean '{nearest[0]}'?"
    if nearest := difflib.get_close_matches(leaf, list(by_leaf), n=1):
        return f"; did you mean '{by_leaf[nearest[0]]}'?"
    return f"; the sections are {', '.join(Config.model_fields)}"
