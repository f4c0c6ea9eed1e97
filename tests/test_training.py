"""Training of drafters: losses are those of the drafts that will be made, a run in two parts is the run in one."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specbench.protocols import SeededCoins
from specbench.reference.decoder import Decoder
from specbench.reference.drafters.growth import Static
from specbench.reference.drafters.heads import HeadsConfig, HeadsDrafter, MarkovHeads
from specbench.reference.drafters.layers import DraftLayers, LayersConfig, LayersDrafter, _LayersLaw
from specbench.reference.drafters.trained import load_drafter
from specbench.reference.model import LlamaConfig, tiny_llama
from specbench.training.fit import Recipe, accuracies, columns_of, fit, heads_laws, layers_laws, loss_of
from specbench.training.open_prompts import digest, open_prompts
from specbench.training.texts import Text, frequent_ids, read_texts, write_states, write_texts
from specbench.training.train import KINDS, accuracy_table, train
from specbench.types import GREEDY

CONFIG = LlamaConfig(
    vocab_size=13, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4
)
MODEL = tiny_llama(CONFIG, seed=0)
IDS = torch.tensor([0, 1, 2, 3, 5, 6, 7, 8, 9, 11, 12])
COLUMNS = columns_of(IDS, 13)
OUTPUT = MODEL.head[IDS]


def text(*tokens: int, start: int = 3) -> Text:
    states = MODEL.states(tokens)
    return Text(torch.tensor(tokens), states, (states @ MODEL.head.T).argmax(-1), start)


TEXTS = [text(3, 1, 4, 1, 5, 9, 2, 6, 5), text(2, 7, 1, 8, 2, 8, start=2)]


def heads(*, conditioned: bool = True) -> MarkovHeads:
    return MarkovHeads.untrained(MODEL, IDS, num_heads=3, conditioned=conditioned, gain=2.0).to(torch.float64)


def layers(*, reads_features: bool = True, num_layers: int = 1) -> DraftLayers:
    config = LayersConfig(16, 24, num_layers, 4, 2, 4, 13, len(IDS), reads_features)
    return DraftLayers.untrained(config, IDS).converted(torch.float64)


def chain_laws(drafter, context: list[int], path: list[int]) -> list[Tensor]:
    """Log-probabilities [V'] behind the root and behind each token of a chain, as a draft computes them."""
    drafter.draft(context, max_nodes=1, max_depth=1, sampling=GREEDY, coins=SeededCoins(0))
    law = _LayersLaw(drafter, drafter._rows, drafter._features[-1])
    tokens, parents, laws = [context[-1]], [-1], []
    for node in range(len(path) + 1):
        laws.append(law(tokens, parents, [node])[0])
        tokens, parents = [*tokens, *path[node : node + 1]], [*parents, node]
    return laws


@pytest.mark.parametrize(("reads_features", "num_layers"), [(True, 1), (True, 2), (False, 2)])
def test_layers_are_trained_on_the_laws_that_they_will_draft_by(reads_features, num_layers):
    """At every place of the answer, behind 0, 1 and 2 drafted tokens that are the text's."""
    one, depth = layers(reads_features=reads_features, num_layers=num_layers), 3
    drafter = LayersDrafter(MODEL, one, shape=Static.widths(1))
    found = layers_laws(one, [TEXTS[0]], MODEL.embedding, OUTPUT, depth=depth)
    tokens, start = TEXTS[0].tokens.tolist(), TEXTS[0].start
    assert len(found) == (depth if reads_features else 1)
    for idx, (logits, labels) in enumerate(found):
        rows = [row for row in range(start - 1, len(tokens) - 1) if row >= idx]
        assert labels.tolist() == [int(TEXTS[0].labels[row + 1]) for row in rows]
        for row, law in zip(rows, logits.log_softmax(-1), strict=True):
            if row - idx >= 1:  # a context has two tokens before a drafter is asked
                root = row + 1 - idx
                mine = chain_laws(drafter, tokens[: root + 1], tokens[root + 1 : row + 2])[idx]
                torch.testing.assert_close(law.float(), mine, rtol=0, atol=1e-5)


@pytest.mark.parametrize("conditioned", [False, True])
def test_heads_are_trained_on_the_laws_that_they_will_draft_by(conditioned):
    one = heads(conditioned=conditioned)
    found = heads_laws(one, [TEXTS[0]], MODEL.embedding, OUTPUT)
    tokens, start = TEXTS[0].tokens.tolist(), TEXTS[0].start
    for idx, (logits, labels) in enumerate(found):
        places = range(start - 1, len(tokens) - 1 - idx)
        assert labels.tolist() == [int(TEXTS[0].labels[place + 1 + idx]) for place in places]
        for place, law in zip(places, logits, strict=True):
            state = TEXTS[0].states[place]
            for step in range(idx + 1):
                state = one.next_state(step, TEXTS[0].states[place], state, MODEL.embedding[tokens[place + 1 + step]])
            torch.testing.assert_close(law, OUTPUT @ state, rtol=0, atol=1e-10)


def test_a_label_outside_the_reduced_vocabulary_is_left_out_of_the_loss_and_counts_as_missed():
    """Columns of tokens 0 and 2; labels 2, 1, 0. Loss: -log of 0.25 and of 0.75, over two."""
    columns = columns_of(torch.tensor([0, 2]), 3)
    logits = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.75, 0.25]]).log()
    laws = [(logits, torch.tensor([2, 1, 0]))]
    assert float(loss_of(laws, columns)) == pytest.approx((1.3862944 + 0.2876821) / 2)
    one = Text(torch.tensor([0]), torch.zeros(1, 1), torch.tensor([0]), 1)
    hits = accuracies(lambda texts, embedding, output: laws, [one], torch.empty(0), torch.empty(0), columns)
    assert hits[0][:3] == pytest.approx([1 / 3, 1 / 3, 0.0])


def test_deeper_levels_weigh_less():
    columns = columns_of(torch.tensor([0, 1]), 2)
    law = (torch.tensor([[0.5, 0.5]]).log(), torch.tensor([0]))
    assert float(loss_of([law, law], columns)) == pytest.approx(0.6931472 * 1.8)


def test_training_lowers_the_loss_and_raises_accuracy():
    one = heads().to(torch.float32)
    texts = [Text(one.tokens, one.states.float(), one.labels, one.start) for one in TEXTS]
    embedding, output = MODEL.embedding.float(), OUTPUT.float()
    laws = partial(heads_laws, one)
    labels = torch.cat([one.labels[one.start :] for one in texts])
    losses = fit(one.weights, laws, texts, embedding, output, COLUMNS, Recipe(num_steps=60, rate=1e-2, warm_up=5))
    assert losses[-1] < losses[0] / 5
    # All that the reduced vocabulary has.
    assert accuracies(laws, texts, embedding, output, COLUMNS)[0][0] == pytest.approx(
        float((COLUMNS[labels] >= 0).float().mean())
    )


def test_a_run_in_two_parts_is_the_run_in_one(tmp_path: Path):
    texts = [Text(one.tokens, one.states.float(), one.labels, one.start) for one in TEXTS]
    embedding, output = MODEL.embedding.float(), OUTPUT.float()

    class Stopped(Exception):
        pass

    def stop(what: str, done: int, total: int) -> None:
        if done == 5:
            raise Stopped

    def run(work: Path, progress=lambda *told: None) -> MarkovHeads:
        one = heads().to(torch.float32)
        recipe = Recipe(num_steps=9, checkpoint_every=4)
        fit(
            one.weights,
            partial(heads_laws, one),
            texts,
            embedding,
            output,
            COLUMNS,
            recipe,
            work=work,
            progress=progress,
        )
        return one

    whole = run(tmp_path / "whole")
    with pytest.raises(Stopped):
        run(tmp_path / "parts", stop)
    parts = run(tmp_path / "parts")
    for key, weight in whole.weights.items():
        assert torch.equal(weight, parts.weights[key])
    other = MarkovHeads(HeadsConfig(16, 13, 1, len(IDS)), MarkovHeads.untrained(MODEL, IDS, num_heads=1).weights)
    with pytest.raises(ValueError, match="is of another drafter than this one: take another folder, or delete it"):
        fit(
            other.weights,
            partial(heads_laws, other),
            texts,
            embedding,
            output,
            COLUMNS,
            Recipe(1),
            work=tmp_path / "parts",
        )


def test_a_loss_that_is_no_number_ends_the_run():
    one = heads().to(torch.float32)
    bad = [Text(TEXTS[0].tokens, TEXTS[0].states.float() * torch.nan, TEXTS[0].labels, 3)]
    with pytest.raises(ValueError, match=r"the loss of step 0 is nan: take a lower rate than 0.001"):
        fit(one.weights, partial(heads_laws, one), bad, MODEL.embedding.float(), OUTPUT.float(), COLUMNS, Recipe(2))


@pytest.fixture(scope="module")
def hf_model(tmp_path_factory: pytest.TempPathFactory):
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("target")
    MODEL.to(torch.float32).save(folder)
    return AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, trust_remote_code=False)


def test_texts_are_the_targets_own_and_come_in_shards(hf_model, tmp_path: Path):
    prompts = [[3, 1, 4], [2, 7], [1, 8, 2, 8], [5, 5, 5]]
    settings = {"num_new": 5, "eos_token_ids": [11], "pad_token_id": 0, "temperatures": (0.0,), "batch": 2}
    assert write_texts(hf_model, prompts, tmp_path, **settings) == 2
    before = (tmp_path / "texts-0000.safetensors").read_bytes()
    (tmp_path / "texts-0001.safetensors").unlink()
    assert write_texts(hf_model, prompts, tmp_path, **settings) == 2
    assert (tmp_path / "texts-0000.safetensors").read_bytes() == before
    write_states(MODEL, tmp_path)
    texts = list(read_texts(tmp_path))
    assert sorted(one.tokens[: one.start].tolist() for one in texts) == sorted(prompts)
    for one in texts:
        tokens = one.tokens.tolist()
        answer = tokens[one.start :]
        assert len(answer) == 5 or (answer[-1] == 11 and 11 not in answer[:-1])
        for idx in range(one.start, len(tokens)):
            assert tokens[idx] == int(MODEL.logits(tokens[:idx])[-1].argmax()) == int(one.labels[idx - 1])
        torch.testing.assert_close(one.states.double(), MODEL.states(tokens), rtol=2e-3, atol=2e-3)


def test_the_frequent_ids_are_those_the_target_chooses():
    one = Text(torch.tensor([0, 0, 0, 0]), torch.zeros(4, 1), torch.tensor([9, 4, 4, 7]), 2)
    assert frequent_ids([one], num_ids=3, vocab_size=12).tolist() == [0, 4, 7]
    assert frequent_ids([one], num_ids=99, vocab_size=3 + 9).tolist() == list(range(12))


def test_a_folder_without_states_is_told(tmp_path: Path):
    with pytest.raises(ValueError, match="holds no states-"):
        list(read_texts(tmp_path))


def test_a_trained_drafter_drafts_what_it_learnt():
    one = heads().to(torch.float32)
    texts = [Text(one.tokens, one.states.float(), one.labels, one.start) for one in TEXTS]
    laws = partial(heads_laws, one)
    fit(one.weights, laws, texts, MODEL.embedding.float(), OUTPUT.float(), COLUMNS, Recipe(80, rate=1e-2, warm_up=5))
    drafter = HeadsDrafter(MODEL, one, shape=Static.widths(1, 1, 1))
    tokens = TEXTS[0].tokens.tolist()
    tree = drafter.draft(tokens[:5], max_nodes=3, max_depth=3, sampling=GREEDY, coins=SeededCoins(0))
    assert tree.token_list[1] == int(TEXTS[0].labels[4])


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_is_trained_written_and_read(kind, hf_model, tmp_path: Path):
    """On a few texts of a tiny target, which it learns by heart; whatever it drafts, the output is plain decoding's."""
    prompts = [[3, 1, idx % 13] for idx in range(8)]
    write_texts(hf_model, prompts, tmp_path / "texts", num_new=8, eos_token_ids=[], pad_token_id=0, temperatures=(0.0,))
    write_states(MODEL, tmp_path / "texts")
    recipe = Recipe(num_steps=150, rate=1e-2, warm_up=5)
    told = train(MODEL, tmp_path / "texts", tmp_path / kind, kind=kind, recipe=recipe, num_ids=13, depth=3)
    assert (told["num_texts"], told["num_held_back"]) == (7, 1)
    assert sorted(one.name for one in (tmp_path / kind).iterdir()) == [
        "config.json",
        "model.safetensors",
        "training.json",
        "training.safetensors",
    ]
    drafter = load_drafter(tmp_path / kind, MODEL)
    rounds = []
    for prompt in prompts[1:]:
        answer = Decoder(MODEL, drafter).generate(prompt, max_new_tokens=8)
        assert list(answer.tokens) == plain(prompt, 8)
        rounds += answer.rounds
    assert sum(len(one.emitted) for one in rounds) / len(rounds) > 1.5


def plain(prompt: list[int], num: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num):
        tokens.append(int(MODEL.logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_the_table_adds_ranks_up():
    told = accuracy_table([[0.5, 0.2, 0.1] + [0.01] * 7, [0.25] + [0.0] * 9])
    assert told == "depth  first  of 3  of 10\n    1  0.500  0.800  0.870\n    2  0.250  0.250  0.250"


def test_open_prompts_are_many_different_and_seeded():
    assert len(set(open_prompts(3200))) == 3200
    assert open_prompts(5, seed=1) == open_prompts(5, seed=1) != open_prompts(5, seed=2)
    with pytest.raises(ValueError, match=r"num = 3201 must be between 1 and 3200 \(open prompts\)"):
        open_prompts(3201)


def test_a_question_of_spec_bench_is_refused(monkeypatch: pytest.MonkeyPatch):
    held_out = Path("specbench/training/held_out.txt").read_text("utf-8").split()
    assert len(held_out) == 560
    monkeypatch.setattr("specbench.training.open_prompts.digest", lambda text: held_out[7])
    with pytest.raises(ValueError, match="is a question of Spec-Bench: who learns it proves nothing"):
        open_prompts(1)


def test_a_digest_is_of_words_alone():
    """sha256(b"a b c")."""
    assert digest("A  b, C!") == "0e9f64031fcb2bc7"


def test_a_kind_and_texts_that_do_not_fit_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="kind = 'medusa' must be one of heads, heads-independent"):
        train(MODEL, tmp_path, tmp_path, kind="medusa", recipe=Recipe(1))
    with pytest.raises(
        ValueError, match=r"has no config\.json: it must be a folder that specbench train-drafter wrote"
    ):
        load_drafter(tmp_path, MODEL)
