"""A small tokenizer for DeepSeek V4.1 checkpoints: byte-level BPE, trained on sentences made here.

The tokens of specification 8.1 stand at fixed ids: begin of sentence, end of sentence and padding first, the others in
one run that ends with the image token. The 256 bytes and as many merges as are left fill the ids between, so the
vocabulary has exactly the size of the model's.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BEGIN, END, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
IMAGE = "<｜deepseek_image｜>"
CONTROL = (
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜latest_reminder｜>",
    *(f"<｜{task}｜>" for task in ("action", "query", "authority", "domain", "title", "read_url")),
)
"""Written by the prompt encoder alone; left out where an answer is shown as text."""
MARKUP = ("<think>", "</think>", "｜DSML｜", "<tool_result>", "</tool_result>")
"""Part of an answer's text: a parser looks for them there."""
SPECIAL = (BEGIN, END, PAD, *CONTROL, *MARKUP, IMAGE)
"""In the order of their ids: three at the start of the vocabulary, then the run that ends with the image token."""
BYTES = 256

_WHO = ("the reader", "a small model", "every request", "the scheduler", "one block", "the cache", "this layer")
_DOES = ("reads", "writes", "keeps", "moves", "returns", "compares", "forgets")
_WHAT = ("the first token", "a long answer", "the last window", "two pages", "its neighbour", "nothing at all")
_WHERE = ("in the morning", "after the prefix", "on the same machine", "before the next step", "without a device")


def sentences() -> Iterator[str]:
    """The training text: what can be said about a cache with a few words."""
    for who, does, what, where in itertools.product(_WHO, _DOES, _WHAT, _WHERE):
        yield f"{who} {does} {what} {where}."


def special_ids(vocab_size: int, image_token_id: int) -> dict[str, int]:
    """Id of every special token. ValueError where they, the bytes and the image token's id do not fit together."""
    least = BYTES + len(SPECIAL)
    if vocab_size < least:
        raise ValueError(f"vocab_size is {vocab_size}, must be at least {least}: the bytes and the special tokens")
    if not len(SPECIAL) - 1 <= image_token_id < vocab_size:
        raise ValueError(f"image_token_id is {image_token_id}, must be {len(SPECIAL) - 1} … {vocab_size - 1}")
    first, run = SPECIAL[:3], SPECIAL[3:]
    places = [*range(3), *range(image_token_id + 1 - len(run), image_token_id + 1)]
    return dict(zip((*first, *run), places, strict=True))


def train(vocab_size: int, image_token_id: int) -> Tokenizer:
    """A tokenizer of exactly ``vocab_size`` tokens; the same arguments give the same one.

    ValueError: `special_ids`, and a ``vocab_size`` beyond what the training text has merges for.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    special = special_ids(vocab_size, image_token_id)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = byte_level
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(special), initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    learner.train_from_iterator(sentences(), trainer)
    learned = json.loads(learner.to_str())["model"]
    size = len(learned["vocab"]) + len(special)
    if size != vocab_size:
        raise ValueError(f"vocab_size is {vocab_size}, must be at most {size}: the training text has no more merges")

    taken = set(special.values())
    free = (index for index in range(vocab_size) if index not in taken)
    ordinary = dict(zip(sorted(learned["vocab"], key=learned["vocab"].get), free, strict=True))
    tokenizer = Tokenizer(models.BPE({**special, **ordinary}, [tuple(pair) for pair in learned["merges"]]))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    for token in sorted(special, key=special.__getitem__):
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=token not in MARKUP)])
    return tokenizer


def write(directory: Path, tokenizer: Tokenizer) -> None:
    """Write ``tokenizer.json`` and the ``tokenizer_config.json`` by which transformers and vLLM load it."""
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    text = json.dumps(described, indent=2, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
