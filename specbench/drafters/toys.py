"""What the claims are judged with: a tiny draft model for any vocabulary, and tokenizers that spell it in two ways.

The models are random: what they draft is of no use, and every part of it is known. Nothing here is downloaded.
"""

from __future__ import annotations

from functools import cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specbench.reference.hf_tiny import randomise

NUM_LAYERS = 3
_FIRST_SYMBOL = 0x20000  # a plane of 65,536 ideographs: none is a space, none is changed by cleaning up


@cache
def tiny_model(vocab_size: int, *, seed: int = 0, num_layers: int = NUM_LAYERS) -> LlamaForCausalLM:
    """A random Llama in fp64, which transformers computes in fp64 but for its norms. Shared: nobody may change it."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4_096,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    # transformers initialises from the global generator, whose state belongs to the caller.
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config).double()
    randomise(model, torch.Generator().manual_seed(seed))
    return model.eval()


def symbols(vocab_size: int) -> list[str]:
    """What the tokens of a toy vocabulary spell: a character each."""
    return [chr(_FIRST_SYMBOL + token) for token in range(vocab_size)]


def other_symbols(vocab_size: int) -> list[str]:
    """Most of the same in the opposite order but for the first, and some that the first has not: another vocabulary."""
    first, *rest = (one for idx, one in enumerate(symbols(vocab_size)) if vocab_size < 5 or idx % 5 != 3)
    extra = [chr(_FIRST_SYMBOL - 1 - idx) for idx in range(3)]
    return [first, extra[0], *rest[::-1], *extra[1:]]


@cache
def tokenizer(spelt: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """A token a character, ids in the order given. The first token stands for every other character too."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({one: idx for idx, one in enumerate(spelt)}, unk_token=spelt[0]))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner)
