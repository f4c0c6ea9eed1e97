"""reference.sentinel: a constructed checkpoint gives the token that integers say, in every dtype, layer by layer.

What is expected comes from `naive`, a second recursion written here, never from the weights.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specbench import cli
from specbench.reference.decoder import Decoder
from specbench.reference.drafters.model import ModelDrafter
from specbench.reference.drafters.ngram import NGramDrafter
from specbench.reference.model import LlamaModel
from specbench.reference.sentinel import (
    BOS,
    VARIANTS,
    Layout,
    Program,
    Sentinel,
    accepted_lengths,
    export,
    export_gguf,
    load_program,
    quantised,
    random_symbols,
    repeating_prompt,
)
from specbench.reference.sentinel.program import _Draws
from specbench.reference.sentinel.weights import _embedding

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = Program.seeded(7)
WIDE = Program.seeded(7, receptive_field=256)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LEAST_MARGIN = {"fp32": 9.999, "fp16": 10.0, "bf16": 10.0}


def naive(program: Program, context: Sequence[int], *, layer: int | None = None, position: int | None = None) -> int:
    """State behind `layer` layers at a position, by the recursion of the design, from the top down."""

    @cache
    def state(layer: int, position: int) -> int:
        if position <= 0:
            return BOS
        if layer == 0:
            return context[position]
        return program.tables[layer - 1][state(layer - 1, position)][state(layer - 1, position - 2 ** (layer - 1))]

    found = state(program.num_layers if layer is None else layer, len(context) - 1 if position is None else position)
    return program.first if found == BOS and layer is None else found


def batch_of(num: int, length: int, *, seed: int = 100) -> list[list[int]]:
    """Contexts of random symbols, BOS counted in their length."""
    return [[BOS, *random_symbols(seed + idx, length - 1)] for idx in range(num)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Exported folders, each written once."""
    root = tmp_path_factory.mktemp("sentinels")

    def get(
        *, field: int = 64, variant: str = "llama", dtype: str = "bf16", law: bool = False, bits: int | None = None
    ) -> Path:
        where = root / f"{field}-{variant}-{dtype}-{law}-{bits}"
        program = PROGRAM if field == 64 else Program.seeded(7, receptive_field=field)
        return where if where.exists() else export(Sentinel(program, variant, law), where, dtype=dtype, bits=bits)

    return get


def transformers_model(folder: Path, *, attention: str = "sdpa", **others: object) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation=attention, **others).eval()


@torch.no_grad()
def logits_of(model: torch.nn.Module, contexts: list[list[int]]) -> Tensor:
    return model(input_ids=torch.tensor(contexts)).logits


def wrong_tokens(logits: Tensor, contexts: list[list[int]], program: Program = PROGRAM) -> int:
    """logits: [B, S, V]. How many positions of the batch give another token than the program."""
    expected = torch.tensor([program.next_tokens(context) for context in contexts])
    return int((logits.argmax(dim=-1) != expected).sum())


def least_margin(logits: Tensor) -> float:
    best = logits.double().topk(2, dim=-1).values
    return float((best[..., 0] - best[..., 1]).min())


# The program


def test_the_generator_is_splitmix64() -> None:
    """Its published first outputs for the seed 1234567; the high word of a product by 2^64 is the number itself."""
    draws = _Draws(1234567)
    assert [draws.below(2**64) for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_a_seed_means_one_program_for_good() -> None:
    """A checkpoint exported long ago and a program made today must agree: PINNED is never to change."""
    assert "".join(f"{token:x}" for token in PROGRAM.continuation([BOS], 48)) == PINNED


PINNED = "c95c953481711362d871f2bb7862a0f825a37887eb00b1f2"


@pytest.mark.parametrize("field", [2, 8, 64, 256])
def test_the_program_is_the_recursion(field: int) -> None:
    program = Program.seeded(3, receptive_field=field)
    context = batch_of(1, 600)[0]
    assert program.next_tokens(context) == [naive(program, context[: num + 1]) for num in range(len(context))]
    assert program.next_token(context) == naive(program, context)
    layers = range(program.num_layers + 1)
    expected = [[naive(program, context, layer=layer, position=at) for at in range(len(context))] for layer in layers]
    assert program.states(context) == expected


def test_a_continuation_is_one_token_after_another() -> None:
    context = batch_of(1, 20)[0]
    grown = list(context)
    for _ in range(150):
        grown.append(naive(PROGRAM, grown))
    assert PROGRAM.continuation(context, 150) == grown[20:]


def test_rows_and_columns_of_every_table_are_permutations() -> None:
    for table in WIDE.tables:
        assert all(sorted(row[:16]) == list(range(16)) for row in table)
        assert all(sorted(row[column] for row in table) == list(range(16)) for column in range(17))


@pytest.mark.parametrize("length", [30, 65, 200])
def test_changing_any_one_token_of_the_field_changes_the_next(length: int) -> None:
    """Every place, every other symbol; the token just outside the field changes nothing."""
    for seed in range(3):
        context = [BOS, *random_symbols(seed, length - 1)]
        kept = naive(PROGRAM, context)
        for back, symbol in product(range(1, min(64, length - 1) + 1), range(16)):
            changed = [*context[: length - back], symbol, *context[length - back + 1 :]]
            assert (naive(PROGRAM, changed) == kept) == (changed == context)
        if length > 65:
            outside = [*context[: length - 65], (context[length - 65] + 1) % 16, *context[length - 64 :]]
            assert naive(PROGRAM, outside) == kept


def test_a_dropped_token_leaves_the_next_by_chance_only() -> None:
    """1 of 16 times: 4,000 trials, five standard deviations."""
    num_same = 0
    for seed in range(400):
        context = [BOS, *random_symbols(seed, 100)]
        kept = PROGRAM.next_token(context)
        num_same += sum(PROGRAM.next_token(context[:at] + context[at + 1 :]) == kept for at in range(45, 95, 5))
    assert abs(num_same / 4_000 - 1 / 16) < 5 * (1 / 16 * 15 / 16 / 4_000) ** 0.5


def test_law_is_the_softmax_of_its_row() -> None:
    context = batch_of(1, 90)[0]
    row = torch.tensor(PROGRAM.law_logits[naive(PROGRAM, context)], dtype=torch.float64) / 8
    assert PROGRAM.law(context) == pytest.approx(row.softmax(0).tolist(), abs=1e-15)
    assert max(range(17), key=PROGRAM.law(context).__getitem__) == naive(PROGRAM, context)


# The checkpoint


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_transformers_gives_the_programs_token_at_2000_positions(
    dtype: str, attention: str, folder: Callable[..., Path]
) -> None:
    contexts = batch_of(2, 1000)
    logits = logits_of(transformers_model(folder(dtype=dtype), attention=attention), contexts)
    assert logits.dtype == DTYPES[dtype]
    assert wrong_tokens(logits, contexts) == 0
    assert least_margin(logits) >= LEAST_MARGIN[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_field_of_256(dtype: str, folder: Callable[..., Path]) -> None:
    contexts = batch_of(1, 800)
    logits = logits_of(transformers_model(folder(field=256, dtype=dtype)), contexts)
    assert wrong_tokens(logits, contexts, WIDE) == 0
    assert least_margin(logits) >= LEAST_MARGIN[dtype]


@pytest.mark.parametrize("dtype", [*DTYPES.values(), torch.float64])
def test_reference_model_loads_it_and_gives_the_programs_token(dtype: torch.dtype, folder: Callable[..., Path]) -> None:
    contexts = batch_of(1, 400)
    logits = LlamaModel.load(folder(dtype="fp32"), dtype=dtype).causal(torch.tensor(contexts))
    assert wrong_tokens(logits, contexts) == 0
    assert least_margin(logits) >= 9.999


def test_the_model_in_memory_is_the_exported_one(folder: Callable[..., Path]) -> None:
    contexts = torch.tensor(batch_of(1, 100))
    loaded = LlamaModel.load(folder(dtype="bf16"), dtype=torch.bfloat16)
    assert torch.equal(Sentinel(PROGRAM).model(torch.bfloat16).causal(contexts), loaded.causal(contexts))


def test_each_changed_token_flips_the_models_answer(folder: Callable[..., Path]) -> None:
    (context,) = batch_of(1, 90)
    changed = [[*context[:-back], (context[-back] + 5) % 16, *context[90 - back + 1 :]] for back in range(1, 66)]
    given = logits_of(transformers_model(folder()), [context, *changed])[:, -1].argmax(dim=-1).tolist()
    kept, inside, outside = given[0], given[1:65], given[65]
    assert kept not in inside
    assert outside == kept


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_layers_state_is_read_from_its_hidden_state(variant: str, folder: Callable[..., Path]) -> None:
    contexts = batch_of(2, 100)
    model = transformers_model(folder(variant=variant))
    hidden: list[Tensor] = []
    for one in [model.model.embed_tokens, *model.model.layers]:
        one.register_forward_hook(lambda _, __, out: hidden.append(out[0] if isinstance(out, tuple) else out))
    logits_of(model, contexts)
    assert len(hidden) == 7
    layout = Sentinel(PROGRAM, variant).layout
    for layer, one in enumerate(hidden):
        expected = [[naive(PROGRAM, context, layer=layer, position=at) for at in range(100)] for context in contexts]
        assert layout.read(one, layer).tolist() == expected


def test_layers_of_any_number_have_room_in_group_0() -> None:
    for num_layers, is_tied, has_square_width in product(range(1, 11), (False, True), (False, True)):
        layout = Layout(num_layers, is_tied, has_square_width)
        squares = _embedding(layout).pow(2).sum(dim=1)
        assert max(channel for channel, _ in layout.fillers) < layout.state(0).start
        assert squares.tolist() == [layout.hidden_size / 16] * 17


@pytest.mark.parametrize("dtype", DTYPES)
def test_law_head_gives_the_table_exactly(dtype: str, folder: Callable[..., Path]) -> None:
    contexts = batch_of(2, 150)
    probs = logits_of(transformers_model(folder(dtype=dtype, law=True)), contexts).double().softmax(dim=-1)
    states = [[naive(PROGRAM, context[: at + 1]) for at in range(150)] for context in contexts]
    rows = torch.tensor(PROGRAM.law_logits, dtype=torch.float64)[torch.tensor(states)] / 8
    rows[:, 0] = torch.tensor(PROGRAM.law_logits[BOS], dtype=torch.float64) / 8
    total_variation = (probs - rows.softmax(dim=-1)).abs().sum(dim=-1).max() / 2
    assert total_variation < (2e-6 if dtype == "fp32" else 1e-12)
    assert PROGRAM.law(contexts[0]) == pytest.approx(probs[0, -1].tolist(), abs=2e-6)


@pytest.mark.parametrize("variant", ["llama", "gqa", "tied", "window"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rounded_weights_give_the_same_tokens(variant: str, bits: int, dtype: str) -> None:
    contexts = batch_of(1, 300)
    logits = Sentinel(PROGRAM, variant).model(DTYPES[dtype], bits=bits).causal(torch.tensor(contexts))
    assert wrong_tokens(logits, contexts) == 0
    assert least_margin(logits) > 9.9


@pytest.mark.parametrize(("bits", "least", "most"), [(8, 0.001, 0.006), (4, 0.03, 0.1)])
def test_a_law_of_rounded_weights_is_another_one(bits: int, least: float, most: float) -> None:
    """The page says so: entries of a row share a scale. The largest entry stays the largest."""
    (context,) = batch_of(1, 200)
    logits = Sentinel(PROGRAM, has_law=True).model(torch.float32, bits=bits).logits(context)
    assert wrong_tokens(logits[None], [context]) == 0
    laws = torch.tensor([PROGRAM.law(context[: at + 1]) for at in range(200)])
    assert least < float((logits.double().softmax(dim=-1) - laws).abs().sum(dim=-1).max() / 2) < most


def test_rounding_takes_at_most_so_many_levels() -> None:
    """What `quantised` gives is 8 and 4 bits wide: rows, and groups of 32 inputs, of 255 and 15 levels."""
    weight = torch.randn(3, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (eight,), (four,) = (quantised({"x_proj.weight": weight}, bits).values() for bits in (8, 4))
    assert (eight - weight).abs().max() <= weight.abs().amax(dim=1).max() / 254
    for group in four.unflatten(1, (-1, 32)).flatten(0, 1):
        levels = group / group.abs().max() * 7
        assert torch.allclose(levels, levels.round())
    assert not torch.equal(four, weight)


# Variants, and the mistakes that they show


def wrong_share(model: torch.nn.Module, program: Program = PROGRAM) -> float:
    contexts = batch_of(2, 150)
    return wrong_tokens(logits_of(model, contexts), contexts, program) / 300


@pytest.mark.parametrize("field", [64, 256])
@pytest.mark.parametrize("variant", ["gqa", "tied", "window", "qwen2", "gemma"])
def test_variants_give_the_programs_token(variant: str, field: int, folder: Callable[..., Path]) -> None:
    contexts = batch_of(1, 500)
    logits = logits_of(transformers_model(folder(variant=variant, field=field)), contexts)
    assert wrong_tokens(logits, contexts, PROGRAM if field == 64 else WIDE) == 0
    assert least_margin(logits) >= 9.9


@pytest.mark.parametrize("variant", ["gqa", "tied", "window"])
def test_reference_model_loads_variants(variant: str, folder: Callable[..., Path]) -> None:
    contexts = batch_of(1, 150)
    logits = LlamaModel.load(folder(variant=variant), dtype=torch.bfloat16).causal(torch.tensor(contexts))
    assert wrong_tokens(logits, contexts) == 0


@pytest.mark.parametrize("field", [64, 256])
def test_a_wrong_head_mapping_breaks_gqa(
    field: int, folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Query head h must read key head h // group; here it reads h % num_kv_heads."""
    from transformers.models.llama import modeling_llama

    model = transformers_model(folder(variant="gqa", field=field), attention="eager")
    program = PROGRAM if field == 64 else WIDE
    assert wrong_share(model, program) == 0
    monkeypatch.setattr(modeling_llama, "repeat_kv", lambda states, num: states.repeat(1, num, 1, 1))
    assert wrong_share(model, program) > 0.5


@pytest.mark.parametrize("part", ["k_proj", "v_proj"])
def test_exchanged_key_heads_or_value_heads_break_gqa(part: str, folder: Callable[..., Path]) -> None:
    """A cache that mixes up heads of one kind only: their phases differ, and so do the states that they carry."""
    model = transformers_model(folder(variant="gqa"))
    for layer in model.model.layers:
        weight = getattr(layer.self_attn, part).weight.data
        weight.copy_(weight.roll(64, dims=0))
    assert wrong_share(model) > 0.5


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj"])
def test_dropped_biases_break_qwen2(part: str, folder: Callable[..., Path]) -> None:
    model = transformers_model(folder(variant="qwen2"))
    assert wrong_share(model) == 0
    for layer in model.model.layers:
        torch.nn.init.zeros_(getattr(layer.self_attn, part).bias)
    assert wrong_share(model) > 0.5


def test_a_head_of_its_own_breaks_tied(folder: Callable[..., Path]) -> None:
    """A loader that does not heed tie_word_embeddings leaves the head as it was initialised."""
    assert wrong_share(transformers_model(folder(variant="tied"))) == 0
    assert wrong_share(transformers_model(folder(variant="tied"), tie_word_embeddings=False)) > 0.5


def test_norms_of_w_instead_of_1_plus_w_break_gemma(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    model = transformers_model(folder(variant="gemma"))
    assert wrong_share(model) == 0
    monkeypatch.setattr(GemmaRMSNorm, "forward", lambda self, x: self._norm(x) * self.weight)
    assert wrong_share(model) > 0.5


def test_an_embedding_that_is_not_scaled_breaks_gemma(folder: Callable[..., Path]) -> None:
    model = transformers_model(folder(variant="gemma"))
    contexts = batch_of(2, 150)
    assert least_margin(logits_of(model, contexts)) >= 9.9
    model.model.embed_tokens.embed_scale.fill_(1.0)
    assert least_margin(logits_of(model, contexts)) < 9


@pytest.mark.parametrize("window", [None, 34, 32], ids=["ignored", "one more", "one fewer"])
def test_another_window_breaks_window(window: int | None, folder: Callable[..., Path]) -> None:
    contexts = batch_of(2, 150)
    model = transformers_model(folder(variant="window"))
    assert model.config.sliding_window == 33
    model.config.sliding_window = window
    given, program = logits_of(model, contexts).argmax(dim=-1), PROGRAM
    wrong = given != torch.tensor([program.next_tokens(context) for context in contexts])
    assert wrong[:, :32].sum() == 0  # nothing has left any of these windows yet
    assert wrong[:, 34:].double().mean() > 0.5


# Drafters and text that repeats


@pytest.mark.parametrize("agreement", [0.0, 0.25, 0.7, 1.0])
def test_drafter_agrees_as_often_as_its_dial_says(agreement: float) -> None:
    """Over all pairs of states exactly; over 20,000 random contexts within five standard deviations."""
    drafter = PROGRAM.drafter(agreement, seed=1)
    exact = drafter.agreement_with(PROGRAM)
    assert abs(exact - agreement) <= 1 / 512
    (context,) = batch_of(1, 20_064)
    same = [mine == its for mine, its in zip(drafter.next_tokens(context), PROGRAM.next_tokens(context), strict=True)]
    allowed = 5 * (float(exact * (1 - exact)) / 20_000) ** 0.5
    assert abs(sum(same[64:]) / 20_000 - exact) <= allowed
    assert same[0]


def test_agreement_counts_pairs_of_states() -> None:
    other = PROGRAM.tables[-1]
    changed = ((other[0][1], *other[0][1:]), *other[1:])
    drafter = Program((*PROGRAM.tables[:-1], changed), PROGRAM.first, PROGRAM.law_logits)
    assert (drafter.agreement_with(PROGRAM).numerator, drafter.agreement_with(PROGRAM).denominator) == (255, 256)


def test_decoder_accepts_what_the_programs_say() -> None:
    """Reported rounds against integers alone: the reference decoder with the drafter's checkpoint in fp32."""
    drafting = PROGRAM.drafter(0.75, seed=1)
    target, drafter = (Sentinel(one).model(torch.float32) for one in (PROGRAM, drafting))
    (prompt,) = batch_of(1, 70)
    expected = accepted_lengths(PROGRAM, drafting, prompt, num_rounds=12, gamma=4)
    assert min(expected) < 4 and max(expected) == 4
    decoder = Decoder(target, ModelDrafter(drafter, widths=(1, 1, 1, 1)))
    generated = decoder.generate(prompt, max_new_tokens=sum(expected) + len(expected) + 20)
    assert [len(one.path) for one in generated.rounds[:12]] == expected
    assert list(generated.tokens) == PROGRAM.continuation(prompt, len(generated.tokens))


def test_accepted_lengths_by_hand() -> None:
    """A drafter that agrees nowhere gets nothing, one that always agrees gets all."""
    (prompt,) = batch_of(1, 70)
    assert accepted_lengths(PROGRAM, PROGRAM.drafter(0.0), prompt, num_rounds=3, gamma=4) == [0, 0, 0]
    assert accepted_lengths(PROGRAM, PROGRAM, prompt, num_rounds=3, gamma=4) == [4, 4, 4]


def test_repeating_prompt_continues_as_it_did_before() -> None:
    x = random_symbols(5, 64)
    prompt = repeating_prompt(PROGRAM, x, 40, corrupted=(6, 20))
    continued = [BOS, *x]
    for _ in range(40):
        continued.append(naive(PROGRAM, continued))
    c = continued[65:]
    assert prompt[:65] == [BOS, *x] and prompt[-64:] == x and len(prompt) == 1 + 64 + 40 + 64
    assert [at for at in range(40) if prompt[65 + at] != c[at]] == [6, 20]
    assert PROGRAM.continuation(prompt, 40) == c


def test_prompt_lookup_accepts_and_is_refused_at_the_scripted_places() -> None:
    """Four drafts a round: five tokens, then the draft at place 6 is refused behind one that is accepted."""
    prompt = repeating_prompt(PROGRAM, random_symbols(5, 64), 40, corrupted=(6, 20))
    decoder = Decoder(Sentinel(PROGRAM).model(torch.float32), NGramDrafter(gamma=4))
    generated = decoder.generate(prompt, max_new_tokens=40)
    assert list(generated.tokens) == PROGRAM.continuation(prompt, 40)
    accepted = [len(one.path) for one in generated.rounds]
    assert accepted[:2] == [4, 1]
    assert 0 < accepted.count(4) < len(accepted)


def test_random_text_is_hardly_ever_looked_up() -> None:
    """Why the prompts have to repeat: without that, prompt lookup drafts and is refused."""
    decoder = Decoder(Sentinel(PROGRAM).model(torch.float32), NGramDrafter(gamma=4))
    generated = decoder.generate([BOS, *random_symbols(5, 168)], max_new_tokens=40)
    assert sum(len(one.path) for one in generated.rounds) < 15


# Files


def test_tokenizer_is_one_symbol_a_token_and_back(folder: Callable[..., Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder(), trust_remote_code=False)
    text = "".join(f"{symbol:x}" for symbol in random_symbols(9, 200))
    ids = tokenizer.encode(text)
    assert ids == [BOS, *(int(symbol, 16) for symbol in text)]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.decode(ids) == "<s>" + text
    assert (tokenizer.bos_token_id, len(tokenizer)) == (16, 17)


def test_tokenizer_refuses_other_characters(folder: Callable[..., Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder(), trust_remote_code=False)
    with pytest.raises(Exception, match="WordLevel"):
        tokenizer.encode("01x")


def test_transformers_generates_the_programs_text(folder: Callable[..., Path]) -> None:
    prompt = repeating_prompt(PROGRAM, random_symbols(5, 64), 20, corrupted=(6,))
    generated = transformers_model(folder()).generate(
        input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=20
    )
    assert generated[0, len(prompt) :].tolist() == PROGRAM.continuation(prompt, 20)


def test_rows_of_a_padded_batch_do_not_touch_each_other(folder: Callable[..., Path]) -> None:
    """Left padding with a symbol, which a mask hides, as servers batch."""
    prompts = [[BOS, *random_symbols(length, length)] for length in (1, 30, 64, 90)]
    padded = torch.tensor([[7] * (91 - len(one)) + one for one in prompts])
    mask = torch.tensor([[0] * (91 - len(one)) + [1] * len(one) for one in prompts])
    generated = transformers_model(folder()).generate(
        input_ids=padded, attention_mask=mask, max_new_tokens=20, pad_token_id=7
    )
    assert generated[:, 91:].tolist() == [PROGRAM.continuation(one, 20) for one in prompts]


def test_folder_says_its_program_and_any_language_can_run_it(folder: Callable[..., Path]) -> None:
    assert load_program(folder()) == PROGRAM
    read = json.loads((folder() / "sentinel.json").read_text("utf-8"))
    tables = read["program"]["tables"]
    (context,) = batch_of(1, 80)
    states = context
    for layer, table in enumerate(tables):  # the sentence in `what`, literally
        old = states
        states = [BOS] + [table[old[at]][old[max(0, at - 2**layer)]] for at in range(1, 80)]
    assert states[-1] == PROGRAM.next_token(context)
    assert "tables[l][s_l[t]][s_l[max(0, t - 2^l)]]" in read["what"]


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q4_0"])
@pytest.mark.parametrize("variant", ["llama", "gqa", "tied"])
def test_gguf_gives_the_programs_token(variant: str, kind: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="reading GGUF needs gguf: pip install 'specbench-decoding[smollm2]'")
    pytest.importorskip("accelerate", reason="transformers reads GGUF with accelerate: pip install accelerate")
    file = export_gguf(Sentinel(PROGRAM, variant), tmp_path / "sentinel.gguf", kind=kind)
    stored = {one.name: one for one in gguf.GGUFReader(file).tensors}
    assert stored["blk.5.ffn_gate.weight"].tensor_type.name == kind.upper()
    contexts = batch_of(1, 300)
    logits = logits_of(transformers_model(tmp_path, gguf_file=file.name), contexts)
    assert wrong_tokens(logits, contexts) == 0
    assert least_margin(logits) > 9.9


def test_no_symbol_ends_a_text_in_a_gguf_file(tmp_path: Path) -> None:
    """llama.cpp takes 2 for the end where a file of SentencePiece kind names none: text then ended at the first 2."""
    gguf = pytest.importorskip("gguf", reason="reading GGUF needs gguf: pip install 'specbench-decoding[smollm2]'")
    reader = gguf.GGUFReader(export_gguf(Sentinel(PROGRAM), tmp_path / "sentinel.gguf"))
    kinds = ("bos", "eos", "unknown")
    assert [int(reader.fields[f"tokenizer.ggml.{kind}_token_id"].contents()) for kind in kinds] == [BOS] * 3


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("variant", ["llama", "gqa", "tied"])
def test_llama_cpp_gives_the_programs_text(variant: str, kind: str, tmp_path: Path) -> None:
    """Text in, text out: its tokenizer, its kernels, its cache."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="to run llama.cpp on the file: pip install xllamacpp gguf")
    params = xllamacpp.CommonParams()
    params.model.path = str(export_gguf(Sentinel(PROGRAM, variant), tmp_path / "sentinel.gguf", kind=kind))
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads, params.warmup = 1024, 1, 1, False
    symbols = random_symbols(5, 100)
    request = {"prompt": "".join(f"{one:x}" for one in symbols), "max_tokens": 200, "temperature": 0.0}
    text = xllamacpp.Server(params).handle_completions(request)["choices"][0]["text"]
    assert text == "".join(f"{one:x}" for one in PROGRAM.continuation([BOS, *symbols], 200))


def test_gguf_tokenizer_is_one_symbol_a_token(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="reading GGUF needs gguf: pip install 'specbench-decoding[smollm2]'")
    from transformers import AutoTokenizer

    file = export_gguf(Sentinel(PROGRAM), tmp_path / "sentinel.gguf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    assert tokenizer.encode("3fa0", add_special_tokens=False) == [3, 15, 10, 0]


# Words that are wrong


REFUSED = {
    "field": (
        lambda: Program.seeded(0, receptive_field=48),
        "receptive_field = 48 must be a power of two from 2 to 1024",
    ),
    "agreement": (
        lambda: PROGRAM.drafter(1.5),
        "agreement = 1.5 must be between 0 and 1, the share of contexts that agree",
    ),
    "no layers": (lambda: Program((), 0, PROGRAM.law_logits), "tables has 0 layers, must have 1 to 10"),
    "small table": (
        lambda: Program(((),), 0, PROGRAM.law_logits),
        "tables[0] must have 16 rows of 17 states",
    ),
    "large state": (
        lambda: Program((((16,) * 17,) * 16,), 0, PROGRAM.law_logits),
        "tables[0] must hold states between 0 and 15",
    ),
    "first": (lambda: Program(PROGRAM.tables, 16, PROGRAM.law_logits), "first = 16 must be a symbol, 0 to 15"),
    "law": (lambda: Program(PROGRAM.tables, 0, ()), "law_logits must have 17 rows of 17 numbers"),
    "half a program": (
        lambda: Program.from_json({"tables": [], "first": 0}),
        "a program has the fields tables, first and law_logits; law_logits is missing",
    ),
    "no BOS": (lambda: PROGRAM.next_token([3]), "context must begin with BOS, token 16: [3] does not"),
    "no context": (lambda: PROGRAM.next_token([]), "context must begin with BOS, token 16: [] does not"),
    "symbol": (lambda: PROGRAM.next_token([BOS, 3, BOS]), "context[2] = 16 must be a symbol, 0 to 15"),
    "variant": (
        lambda: Sentinel(PROGRAM, "gemmma"),
        "variant = 'gemmma' must be one of llama, gqa, tied, window, qwen2, gemma",
    ),
    "small gqa": (
        lambda: Sentinel(Program.seeded(0, receptive_field=4), "gqa"),
        "variant = 'gqa' needs a receptive field of at least 8: a shorter one has two heads",
    ),
    "tied law": (
        lambda: Sentinel(PROGRAM, "tied", has_law=True),
        "variant = 'tied' has its embedding as head and no room for a law: use 'llama'",
    ),
    "gemma in memory": (
        lambda: Sentinel(PROGRAM, "gemma").model(torch.float32),
        "variant = 'gemma' is no LlamaModel: export it and load the folder with transformers",
    ),
    "other target": (
        lambda: WIDE.agreement_with(PROGRAM),
        "target must share all tables but the last, as a program and its drafter() do",
    ),
    "short x": (
        lambda: repeating_prompt(PROGRAM, [1, 2], 4),
        "x has 2 symbols, must have 64, the program's receptive field",
    ),
    "place": (
        lambda: repeating_prompt(PROGRAM, random_symbols(0, 64), 4, corrupted=(4,)),
        "corrupted place 4 must be between 0 and 3, a place in the continuation",
    ),
    "bits": (
        lambda: quantised({}, 3),
        "bits = 3 must be 8 (a scale for each row) or 4 (one for 32 inputs of it)",
    ),
    "dtype": (lambda: export(Sentinel(PROGRAM), "x", dtype="fp8"), "dtype = 'fp8' must be one of bf16, fp16, fp32"),
    "gguf kind": (
        lambda: export_gguf(Sentinel(PROGRAM), "x", kind="q2"),
        "kind = 'q2' must be one of f32, f16, bf16, q8_0, q4_0",
    ),
    "gguf variant": (
        lambda: export_gguf(Sentinel(PROGRAM, "window"), "x"),
        "variant = 'window' must be llama, gqa or tied to be written as GGUF",
    ),
    "no program": (
        lambda: load_program("/nowhere"),
        "/nowhere holds no sentinel.json: give a folder that `specbench sentinel export` has written",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_words_get_one_sentence(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == message


# The command and the page


def test_command_writes_target_and_drafter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = tmp_path / "sentinel"
    options = ["--dtype", "fp32", "--variant", "gqa", "--seed", "7", "--drafter-agreement", "0.75", "--law"]
    assert cli.main(["sentinel", "export", str(where), *options]) == 0
    assert capsys.readouterr().out == (
        f"{where}: gqa sentinel with a law, 6 layers, 64 tokens decide the next, fp32\n"
        f"{where / 'drafter'}: its drafter, the same next token after 3/4 of contexts\n"
    )
    assert load_program(where) == PROGRAM
    assert load_program(where / "drafter").agreement_with(PROGRAM) == 0.75
    assert json.loads((where / "config.json").read_text("utf-8"))["num_key_value_heads"] == 2


def test_command_writes_a_gguf_file_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gguf", reason="writing GGUF needs gguf: pip install 'specbench-decoding[smollm2]'")
    assert cli.main(["sentinel", "export", str(tmp_path / "s"), "--gguf", "q8_0"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == str(tmp_path / "s" / "sentinel.gguf")
    assert (tmp_path / "s" / "sentinel.gguf").read_bytes()[:4] == b"GGUF"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--variant mamba", "variant = 'mamba' must be one of llama, gqa, tied, window, qwen2, gemma"),
        ("--receptive-field 100", "receptive_field = 100 must be a power of two from 2 to 1024"),
        ("--variant window --gguf f16", "variant = 'window' must be llama, gqa or tied to be written as GGUF"),
    ],
)
def test_command_refuses_in_one_sentence_and_writes_nothing(
    options: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sentinel", "export", str(tmp_path / "s"), *options.split()]) == 2
    assert capsys.readouterr() == ("", f"specbench: {message}\n")
    assert not (tmp_path / "s").exists()


def test_command_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("kept")
    assert cli.main(["sentinel", "export", str(tmp_path)]) == 2
    message = f"specbench: {tmp_path} is there and not an empty folder: name a new one, nothing is overwritten\n"
    assert capsys.readouterr().err == message
    assert [one.name for one in tmp_path.iterdir()] == ["mine"]


def test_code_on_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/sentinel.md: commands through the command line's main, then the Python, in one empty folder."""
    page = (ROOT / "docs" / "sentinel.md").read_text("utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    assert {language for language, _ in blocks} == {"bash", "python"}
    monkeypatch.chdir(tmp_path)
    for language, text in blocks:
        if language == "python":
            exec(compile(text, "docs/sentinel.md", "exec"), {"__name__": "__main__"})
            continue
        for line in text.replace("\\\n", "").splitlines():
            program, *words = shlex.split(line)
            assert (program, cli.main(words)) == ("specbench", 0)
