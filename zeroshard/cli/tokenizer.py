"""`zeroshard tokenizer`: makes a tokenizer for a text, for `zeroshard train --data.tokenizer`."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

import click

from zeroshard.checkpoint import files
from zeroshard.cli.terminal import Command, say
from zeroshard.io.whole import write_whole


@click.command(cls=Command)
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--data", default="", help="text, as for `zeroshard train`  [default: the Python standard library]")
@click.option("--column", default="text", show_default=True, help="column of a saved data set")
@click.option("--vocabulary", type=click.IntRange(257), default=4096, show_default=True, help="tokens at most")
@click.option("--force", is_flag=True, help="replace what is there")
def tokenizer(out: Path, data: str, column: str, vocabulary: int, force: bool) -> None:
    """Make a tokenizer for a text.

    Writes the file OUT (tokenizer.json), a byte-level BPE tokenizer as the library `tokenizers` reads it. Give it to
    `zeroshard train --data.tokenizer OUT`.
    """
    from zeroshard.train.config import DataConfig, UserError
    from zeroshard.train.text import texts_of
    from zeroshard.train.tokenizer import train_tokenizer

    if out.is_dir():
        out /= "tokenizer.json"
    if out.exists() and not force:
        raise click.ClickException(f"{out} exists already (--force replaces it)")
    try:
        texts = texts_of(DataConfig(path=data, column=column))
        found = train_tokenizer((document.content for document in texts()), vocabulary)
    except UserError as error:
        raise click.ClickException(str(error)) from error
    with files.made(out.parent):
        write_whole(out, found.to_str(pretty=True))
    say(f"{out}: {found.get_vocab_size():,} tokens; zeroshard train --data.tokenizer {quote(str(out))}")
