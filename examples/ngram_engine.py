"""A decoder without torch, to be run behind JSON lines: prompt lookup over a toy model whose next token is a rule.

    specbench check ./examples/ngram_engine.py:Engine --specbench-python python3

The interpreter needs nothing installed: specbench puts its shim between the two (docs/wire.md).
"""

from types import SimpleNamespace

VOCAB_SIZE = 16
DRAFT_LENGTH = 4


class Engine:
    """Levels 0 and 1. The model is the engine's own: no build factory, no checkpoint."""

    vocab_size = VOCAB_SIZE
    checkpoint = None
    dtype = "fp64"

    def logits(self, tokens):
        """Row i predicts token i + 1."""
        return [row_after(tokens[: end + 1]) for end in range(len(tokens))]

    def generate(self, prompt, *, max_new_tokens, sampling, stop, seed):
        if sampling.temperature != 0.0:
            raise ValueError("this engine decodes greedily only: temperature must be 0.0")
        text, rounds = list(prompt), []
        while len(text) - len(prompt) < max_new_tokens:
            draft = looked_up(text)
            accepted = []
            for token in draft:
                if token != best(row_after(text + accepted)):
                    break
                accepted.append(token)
            bonus = best(row_after(text + accepted))
            emitted = (accepted + [bonus])[: max_new_tokens - (len(text) - len(prompt))]
            ends = [idx for idx, token in enumerate(emitted) if token in stop.eos_token_ids]
            emitted = emitted[: ends[0] + 1] if ends else emitted
            rounds.append(
                {
                    "tokens": [text[-1], *draft],
                    "parents": list(range(-1, len(draft))),
                    "path": list(range(1, len(accepted) + 1)),
                    "bonus_token": bonus,
                    "emitted": emitted,
                    "prefix_len": len(text) - 1,
                    "num_rows": len(draft) + 1,
                }
            )
            text += emitted
            if ends:
                return SimpleNamespace(tokens=text[len(prompt) :], finish_reason="eos", rounds=rounds)
        return SimpleNamespace(tokens=text[len(prompt) :], finish_reason="length", rounds=rounds)


def row_after(text):
    """One logit a token, all different: 7 has an inverse modulo 17."""
    before = text[-2] if len(text) > 1 else 0
    return [float((7 * token + 3 * text[-1] + 5 * before) % 17) for token in range(VOCAB_SIZE)]


def best(row):
    return row.index(max(row))


def looked_up(text):
    """What followed the last two tokens when they stood together before."""
    for start in range(len(text) - 3, -1, -1):
        if text[start : start + 2] == text[-2:]:
            return text[start + 2 : start + 2 + DRAFT_LENGTH]
    return []
