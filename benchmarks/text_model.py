"""A model of 7M parameters that has learned to write code or JSON, for `benchmarks.speculation`.

    OMP_NUM_THREADS=2 python -m benchmarks.text_model code runs/code_model
    OMP_NUM_THREADS=2 python -m benchmarks.text_model json runs/json_model

code: the sources of Python's standard library.  json: made-up orders, indented.
Trains a tokenizer of 4096 tokens, and the model for a few minutes: its text has the repetitions of its kind, and little
sense. Prints the loss in nats a token.
"""

import argparse
import json
import random
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.overhead import SHAPES, llama

END = "<|end|>"
TOKENS = 256  # of a training sequence
CITIES = ("Rome", "Oslo", "Lima", "Cairo", "Quito", "Hanoi")
GOODS = ("lamp", "chair", "table", "clock", "shelf", "mirror", "carpet")


def texts_of(kind: str) -> Iterator[str]:
    """The documents that the model learns from."""
    if kind == "code":
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            yield path.read_text(encoding="utf-8", errors="ignore")
        return
    numbers = random.Random(0)
    for order in range(4000):
        items = [
            {"name": numbers.choice(GOODS), "price": numbers.randrange(5, 500), "count": numbers.randrange(1, 9)}
            for _ in range(numbers.randrange(1, 6))
        ]
        yield json.dumps({"order": order, "city": numbers.choice(CITIES), "paid": True, "items": items}, indent=2)


def trained_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of the texts."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=vocabulary, special_tokens=[END], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token=END, pad_token=END)


def train(model: LlamaForCausalLM, ids: torch.Tensor, minutes: float, rows: int) -> float:
    """Train on the ids, int64 [n], until the minutes are over; returns the mean loss of the last ten steps."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    generator, end = torch.Generator().manual_seed(0), time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        first = torch.randint(len(ids) - TOKENS, (rows, 1), generator=generator)
        batch = ids[first + torch.arange(TOKENS)]  # [rows, TOKENS]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


def main() -> None:
    """Train and save the model of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["code", "json"])
    parser.add_argument("directory")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--rows", type=int, default=8, help="sequences of a step")
    args = parser.parse_args()
    torch.manual_seed(0)
    texts = list(texts_of(args.kind))
    tokenizer = trained_tokenizer(texts, SHAPES["7M"][-1])
    ids = torch.tensor([token for own in tokenizer([text + END for text in texts]).input_ids for token in own])
    model = llama(*SHAPES["7M"])
    print(f"{args.kind}: {len(ids)} tokens, loss {train(model, ids, args.minutes, args.rows):.2f}", flush=True)
    model.save_pretrained(args.directory)
    tokenizer.save_pretrained(args.directory)


if __name__ == "__main__":
    main()
