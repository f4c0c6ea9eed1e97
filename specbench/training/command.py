"""`specbench train-drafter`: arguments, progress and the table at the end."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specbench.models import fetched
from specbench.prompts import encode_messages
from specbench.training import KINDS

READ_AGAIN = 4  # one prompt in so many is about a text that the target has written before


def add_options(one: argparse.ArgumentParser, count: Callable[[str], int]) -> None:
    one.add_argument("target", metavar="TARGET", help="a folder, or the name of a fetched model")
    one.add_argument("--kind", choices=KINDS, default="heads", help="of the drafter (default heads)")
    one.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the drafter goes")
    one.add_argument("--texts", type=Path, metavar="DIR", help="shards of texts and states (default: OUT/texts)")
    one.add_argument("--num-texts", type=count, default=1200, metavar="N", help="answers (default 1200)")
    one.add_argument("--num-tokens", type=count, default=192, metavar="N", help="of an answer, at most (default 192)")
    one.add_argument("--steps", type=count, default=3000, metavar="N", help="over 4 texts each (default 3000)")
    one.add_argument("--num-ids", type=count, default=8192, metavar="N", help="tokens to draft from (default 8192)")
    one.add_argument("--depth", type=count, default=4, metavar="N", help="tokens that are drafted ahead (default 4)")
    one.add_argument("--intermediate-size", type=count, metavar="N", help="of its layers (default: the target's)")
    one.add_argument("--seed", type=int, default=0, metavar="SEED", help="of everything (default 0)")


def run(args: argparse.Namespace, command: str) -> int:
    """Goes on where an earlier run with the same folders was stopped."""
    import torch

    from specbench.reference.model import LlamaModel
    from specbench.training.fit import Recipe
    from specbench.training.texts import write_states
    from specbench.training.train import accuracy_table, train

    folder = fetched(args.target).path
    texts = args.texts or args.out / "texts"
    _write_texts(args, folder, texts)
    target = LlamaModel.load(folder, dtype=torch.float32)
    write_states(target, texts, progress=_Bar())
    told = train(
        target,
        texts,
        args.out,
        kind=args.kind,
        recipe=Recipe(args.steps, seed=args.seed),
        num_ids=args.num_ids,
        depth=args.depth,
        intermediate_size=args.intermediate_size,
        about={"target": target.name, "command": command},
        progress=_Bar(),
    )
    print(accuracy_table(told["accuracies"]))
    print(f"written to {args.out}: {sum(one.stat().st_size for one in args.out.glob('model.*')) / 1e6:.1f} MB")
    return 0


def _write_texts(args: argparse.Namespace, folder: str, texts: Path) -> None:
    """Answers to open prompts, and behind them to prompts about the longest of these answers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from specbench.training.open_prompts import open_prompts, readings
    from specbench.training.texts import answers, write_texts

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, use_safetensors=True, trust_remote_code=False
    )
    ends = model.generation_config.eos_token_id

    def ask(prompts: list[str], first_shard: int) -> int:
        return write_texts(
            model.eval(),
            [encode_messages([("user", one)], tokenizer) for one in prompts],
            texts,
            num_new=args.num_tokens,
            eos_token_ids=ends if isinstance(ends, list) else [] if ends is None else [ends],
            pad_token_id=tokenizer.pad_token_id or 0,
            seed=args.seed + first_shard,
            first_shard=first_shard,
            progress=_Bar(),
        )

    num_readings = args.num_texts // READ_AGAIN
    num_shards = ask(open_prompts(args.num_texts - num_readings, seed=args.seed), 0)
    written = [tokenizer.decode(one, skip_special_tokens=True) for one in answers(texts, num_shards)]
    longest = sorted(written, key=len, reverse=True)[:num_readings]
    if longest:
        ask(readings(longest, seed=args.seed), num_shards)


class _Bar:
    """How far it is and how long it will take, on one line of a terminal, or every tenth part of a log."""

    def __init__(self) -> None:
        self._began, self._first = time.monotonic(), 0

    def __call__(self, what: str, done: int, total: int) -> None:
        if not self._first:
            self._began, self._first = time.monotonic(), done
        left = (time.monotonic() - self._began) / max(1, done - self._first) * (total - done)
        line = f"{what} {done}/{total}, {left / 60:.1f} min left"
        if sys.stderr.isatty():
            print(f"\r{line:<60}", end="\n" if done == total else "", file=sys.stderr, flush=True)
        elif done == total or done % max(1, total // 10) == 0:
            print(line, file=sys.stderr, flush=True)
