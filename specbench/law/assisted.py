"""Which law has transformers' assisted generation, as installed? Its exact joint law, and the sequential test on it.

`python -m specbench.law.assisted` runs tiny random Llama models with an assistant model, prompt lookup and early exit,
beside plain sampling. docs/law-black-boxes.md holds what came out. Not part of any claim.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from typing import Any

import torch

from specbench.law.foreign import law_of_torch
from specbench.law.sequential import LawTest, joint_cells

NUM_TOKENS = 3
PROMPT = (1, 2, 1, 2)  # its end has stood there before, so that prompt lookup has something to propose
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "assistant model": {"assistant_model": "assistant"},
    "prompt lookup": {"prompt_lookup_num_tokens": 2, "max_matching_ngram_size": 2},
    "early exit": {"assistant_early_exit": 1},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 1": {},
    "temperature 0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "top-k 2": {"top_k": 2},
    "repetition penalty 2": {"repetition_penalty": 2.0},
    "end token 0": {"eos_token_id": 0},
}

Tokens = tuple[int, ...]


def tiny_llama(seed: int, vocab_size: int, num_layers: int) -> Any:
    """Random weights, and a head large enough that laws differ between contexts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def sampler(model: Any, assistant: Any, mode: str, setting: str) -> Callable[[], Tokens]:
    """One generation of NUM_TOKENS tokens, sampled; behind an end token come copies of it."""
    options = {**MODES[mode], **SETTINGS[setting]}
    if options.get("assistant_model"):
        options["assistant_model"] = assistant
    prompt = torch.tensor([PROMPT])
    mask = torch.ones_like(prompt)

    def generate() -> Tokens:
        with torch.no_grad():
            tokens = model.generate(prompt, attention_mask=mask, do_sample=True, max_new_tokens=NUM_TOKENS, **options)
        new = tokens[0, len(PROMPT) :].tolist()
        return (*new, *[options.get("eos_token_id", -1)] * (NUM_TOKENS - len(new)))

    return generate


def target_law(model: Any, vocab_size: int, setting: str) -> dict[Tokens, float]:
    """The product of the target's own rows, each from a forward of the whole text, processed by hand."""
    options = dict(SETTINGS[setting])
    end = options.pop("eos_token_id", None)
    law: dict[Tokens, float] = {}
    rows: dict[Tokens, list[float]] = {}
    for tokens in itertools.product(range(vocab_size), repeat=NUM_TOKENS):
        probability = 1.0
        for depth, token in enumerate(tokens):
            text = (*PROMPT, *tokens[:depth])
            if text not in rows:
                with torch.no_grad():
                    logits = model(torch.tensor([text])).logits[0, -1]
                rows[text] = processed(logits.tolist(), text, **options)
            has_ended = end in tokens[:depth]
            probability *= float(token == end) if has_ended else rows[text][token]
        law[tokens] = probability
    return law


def processed(
    logits: list[float],
    text: Tokens,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
) -> list[float]:
    """Penalty on what the text holds, temperature, the top_k largest, the fewest likeliest with top_p of their mass."""
    seen = [one / repetition_penalty if one > 0 else one * repetition_penalty for one in logits]
    scores = [seen[token] if token in text else one for token, one in enumerate(logits)]
    weights = torch.tensor(scores, dtype=torch.float64).div(temperature).softmax(-1).tolist()
    order = sorted(range(len(weights)), key=lambda token: -weights[token])[:top_k]
    total = sum(weights[token] for token in order)
    kept, mass = [], 0.0
    for token in order:
        if mass >= top_p * total:
            break
        kept.append(token)
        mass += weights[token]
    return [weights[token] / mass if token in kept else 0.0 for token in range(len(weights))]


def total_variation(law: dict[Any, float], other: dict[Tokens, float]) -> float:
    return sum(abs(law.get(one, 0.0) - other.get(one, 0.0)) for one in law.keys() | other.keys()) / 2


def drawn(generate: Callable[[], Tokens], law: dict[Tokens, float], vocab_size: int, num: int) -> LawTest:
    test = LawTest([list(law.values())])
    torch.manual_seed(0)
    for _ in range(num):
        test.note(0, joint_cells(generate(), [vocab_size] * NUM_TOKENS))
    return test


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=3)
    parser.add_argument("--draws", type=int, default=0, help="sampled generations a mode for the sequential test")
    parser.add_argument("--no-exact", action="store_true", help="the sequential test alone")
    parser.add_argument("--mode", choices=list(MODES), action="append")
    parser.add_argument("--setting", choices=list(SETTINGS), action="append")
    args = parser.parse_args()
    import transformers

    transformers.logging.set_verbosity_error()
    print(json.dumps({"transformers": transformers.__version__, "torch": torch.__version__, "vocab": args.vocab}))
    for setting in args.setting or SETTINGS:
        for mode in args.mode or MODES:
            model, assistant = tiny_llama(0, args.vocab, 3), tiny_llama(1, args.vocab, 1)
            generate, target = sampler(model, assistant, mode, setting), target_law(model, args.vocab, setting)
            line: dict[str, Any] = {"mode": mode, "setting": setting}
            if not args.no_exact:
                law = law_of_torch(generate)
                line |= {"exact_tv": total_variation(law, target), "mass": sum(law.values())}
            if args.draws:
                test = drawn(generate, target, args.vocab, args.draws)
                line |= {"draws": test.num_draws, "e_value": test.e_value, "rejected": test.is_rejected}
                line |= {"detectable_tv": test.detectable_tv(0.5), "detectable_tv_99": test.detectable_tv(0.99)}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
