"""The verdict from tokens alone: an engine nobody here wrote is EQUAL, one wrong token in many is a BUG."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specbench import cli
from specbench.audit import Audit, Output, Request, audit_greedy, audit_sampled, read_outputs, requests_for
from specbench.record import BUG, EQUAL, NOT_TESTED
from specbench.reference.sentinel import BOS, Program, Sentinel, export, load_program, random_symbols
from specbench.types import Sampling

SYMBOLS = "0123456789abcdef"
PROGRAM = Program.seeded(3, receptive_field=16)
REQUESTS = requests_for(PROGRAM, SYMBOLS, max_new_tokens=40, seed=0)
MODES: dict[str, dict[str, Any]] = {"plain": {}, "assistant": {}, "lookup": {"prompt_lookup_num_tokens": 3}}


def right(request: Request) -> Output:
    tokens = PROGRAM.continuation(request.prompt, request.max_new_tokens)
    return Output(request.prompt, tuple(tokens), request.name, "", request.max_new_tokens)


def changed(one: Output, place: int, token: int) -> Output:
    return replace(one, tokens=(*one.tokens[:place], token, *one.tokens[place + 1 :]))


def only(audits: list[Audit]) -> Audit:
    (one,) = audits
    return one


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Output]]:
    """What transformers says in bf16: plain, with an assistant that agrees on 60 % of contexts, by prompt lookup."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("sentinel")
    twin = Sentinel(PROGRAM.drafter(0.6, seed=1))
    target = AutoModelForCausalLM.from_pretrained(export(Sentinel(PROGRAM), folder / "target"), dtype="auto")
    drafter = AutoModelForCausalLM.from_pretrained(export(twin, folder / "drafter"), dtype="auto")
    said: dict[str, list[Output]] = {}
    for mode, options in MODES.items():
        more = options | ({"assistant_model": drafter} if mode == "assistant" else {})
        for request in REQUESTS:
            prompt = torch.tensor([request.prompt])
            mask, num = torch.ones_like(prompt), request.max_new_tokens
            ids = target.generate(prompt, attention_mask=mask, max_new_tokens=num, do_sample=False, **more)
            tokens = tuple(ids[0, prompt.shape[1] :].tolist())
            said.setdefault(mode, []).append(Output(request.prompt, tokens, request.name, mode, num))
    return said


@pytest.mark.parametrize("mode", MODES)
def test_assisted_generation_of_transformers_is_equal_in_half_precision(
    mode: str, generated: dict[str, list[Output]]
) -> None:
    audit = only(audit_greedy(PROGRAM, generated[mode]))
    assert (audit.verdict, audit.mode, audit.num_tokens) == (EQUAL, mode, 40 * len(REQUESTS))
    assert audit.sentence == f"all of {40 * len(REQUESTS)} tokens in {len(REQUESTS)} outputs are the program's"


def test_one_wrong_token_of_all_is_a_bug_and_is_named(generated: dict[str, list[Output]]) -> None:
    outputs = generated["assistant"]
    told = outputs[4].tokens[30]
    wrong = (told + 1) % 16
    outputs = [*outputs[:4], changed(outputs[4], 30, wrong), *outputs[5:]]
    audit = only(audit_greedy(PROGRAM, outputs))
    assert audit.verdict == BUG
    # Behind it the text is another one, whose next tokens the engine did not say: most of the last nine are wrong too.
    assert 1 <= audit.num_wrong <= 10
    assert f"first: {outputs[4].name}, token 30: {wrong}, must be {told}" in audit.sentence


def test_a_wrong_draft_that_is_kept_once_in_fifty_rounds_is_a_bug_within_two_thousand_tokens() -> None:
    """A decoder that goes on from its own wrong token: each is counted once."""
    drafter, num_tokens, num_kept = PROGRAM.drafter(0.6, seed=1), 0, 0
    outputs = []
    for request in REQUESTS:
        text, rounds = list(request.prompt), 0
        while len(text) - len(request.prompt) < 190:
            draft, token = drafter.next_token(text), PROGRAM.next_token(text)
            rounds += 1
            if draft != token and rounds % 50 == 0:
                token, num_kept = draft, num_kept + 1
            text.append(token)
        outputs.append(Output(request.prompt, tuple(text[len(request.prompt) :])))
        num_tokens += len(outputs[-1].tokens)
    audit = only(audit_greedy(PROGRAM, outputs))
    assert num_tokens <= 2_000
    assert num_kept > 3
    assert (audit.verdict, audit.num_wrong) == (BUG, num_kept)


def test_modes_have_verdicts_of_their_own() -> None:
    good = replace(right(REQUESTS[3]), mode="plain")
    bad = changed(replace(good, mode="lookup"), 7, BOS)
    audits = {one.mode: one for one in audit_greedy(PROGRAM, [good, bad, replace(good, tokens=(), mode="none")])}
    assert {mode: one.verdict for mode, one in audits.items()} == {"plain": EQUAL, "lookup": BUG, "none": BUG}
    assert audits["lookup"].num_tokens == 8  # behind a token that is no symbol nothing is known
    assert audits["none"].sentence.endswith("has 0 tokens, must have 40")


def test_what_says_nothing_is_not_tested() -> None:
    silent = Output((BOS, 3), ())
    assert only(audit_greedy(PROGRAM, [silent])).verdict == NOT_TESTED
    assert only(audit_sampled(PROGRAM, [silent], Sampling(temperature=1.0))).verdict == NOT_TESTED


def test_requests_stand_around_the_ends_of_the_field() -> None:
    lengths = [len(one.prompt) - 1 for one in REQUESTS if one.name.startswith("random")]
    assert lengths == [0, 1, 2, 8, 15, 16, 17, 35]
    assert [one.name for one in REQUESTS[-2:]] == ["repeat-0", "repeat-1"]
    assert all(one.prompt[1:] == tuple(SYMBOLS.index(symbol) for symbol in one.text) for one in REQUESTS)
    symbol = REQUESTS[1].prompt[1]
    line = {"id": "random-1", "prompt": [BOS, symbol], "text": SYMBOLS[symbol], "max_new_tokens": 40}
    assert json.loads(REQUESTS[1].as_line()) == line


def drawn(num: int, *, temperature: float, wrong: float = 0.0) -> Output:
    """Tokens drawn from the program's own laws; a share of them from the law behind another state."""
    generator = torch.Generator().manual_seed(5)
    text = [BOS, *random_symbols(9, 20)]
    for _ in range(num):
        state = PROGRAM.states([BOS, *text[-16:]])[-1][-1]  # the field: what is before it decides nothing
        if float(torch.rand(1, generator=generator)) < wrong:
            state = (state + 1) % 16
        row = torch.tensor(PROGRAM.law_logits[state], dtype=torch.float64) / 8 / temperature
        text.append(int(torch.multinomial(row.softmax(0), 1, generator=generator)))
    return Output(tuple(text[:21]), tuple(text[21:]), max_new_tokens=num)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_draws_from_the_law_are_equal_and_say_what_would_have_shown(temperature: float) -> None:
    audit = only(audit_sampled(PROGRAM, [drawn(1_500, temperature=temperature)], Sampling(temperature=temperature)))
    assert audit.verdict == EQUAL
    assert audit.sentence.startswith("1500 tokens follow the law, as far as they can tell: a total variation of 0.")


def test_draws_at_another_temperature_are_a_bug() -> None:
    audit = only(audit_sampled(PROGRAM, [drawn(1_500, temperature=0.6)], Sampling(temperature=1.0)))
    assert audit.verdict == BUG
    assert "tokens do not follow the law (e-value" in audit.sentence


def test_draws_of_which_some_come_from_another_law_are_a_bug() -> None:
    audit = only(audit_sampled(PROGRAM, [drawn(2_500, temperature=1.0, wrong=0.4)], Sampling(temperature=1.0)))
    assert audit.verdict == BUG


def test_a_token_behind_the_cut_is_a_bug_at_once() -> None:
    one = replace(drawn(10, temperature=1.0), max_new_tokens=None)
    state = PROGRAM.states(one.prompt)[-1][-1]
    worst = min(range(16), key=PROGRAM.law_logits[state].__getitem__)
    audit = only(audit_sampled(PROGRAM, [changed(one, 0, worst)], Sampling(temperature=1.0, top_k=2)))
    assert audit.sentence == f"output 1, token 0: {worst}, which has no probability there"


def test_lines_are_read_as_ids_or_as_text(tmp_path: Path) -> None:
    file = tmp_path / "said.jsonl"
    file.write_text(
        '{"prompt": [16, 3], "output": [7, 0], "mode": "a", "max_new_tokens": 2}\n\n'
        '{"text": "3", "output_text": "70?", "id": "x"}\n'
    )
    assert read_outputs(file, SYMBOLS) == [
        Output((16, 3), (7, 0), "", "a", 2),
        Output((16, 3), (7, 0, -1), "x"),
    ]


WRONG = {
    "": "holds no line: write one a request",
    "[]": 'line 1: must be an object such as {"prompt": [16, 3], "output": [7, 0]}',
    "{": "line 1: Expecting property name",
    '{"prompt": [16]}': "line 1: must have prompt and output (token ids), or text and output_text (symbols)",
    '{"prompt": [16], "output": [0.5]}': "line 1: output must be a list of token ids",
    '{"prompt": [3], "output": [1]}': "line 1: prompt must begin with BOS, token 16",
    '{"text": "zz", "output_text": ""}': "line 1: prompt must begin with BOS, token 16, and hold symbols",
    '{"text": 3, "output_text": ""}': "line 1: text must be a string of the symbols 0123456789abcdef",
    '{"prompt": [16], "output": [1], "max_new_tokens": 0}': "line 1: max_new_tokens = 0 must be an int of at least 1",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_line_that_is_none_gets_one_sentence(line: str, tmp_path: Path) -> None:
    file = tmp_path / "said.jsonl"
    file.write_text(line)
    with pytest.raises(ValueError) as refused:
        read_outputs(file, SYMBOLS)
    assert WRONG[line] in str(refused.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("exported") / "sentinel"
    assert cli.main(["sentinel", "export", str(where), "--receptive-field", "4", "--seed", "3"]) == 0
    return where


def said(folder: Path, file: Path, *, wrong: bool) -> Path:
    """The program's own answers to the prompts that the command prints, the last token of the last one wrong."""
    program, lines = load_program(folder), []
    for line in file.read_text().splitlines():
        asked = json.loads(line)
        lines.append(asked | {"output": program.continuation(asked["prompt"], asked["max_new_tokens"]), "mode": "mine"})
    lines[-1]["output"][-1] = (lines[-1]["output"][-1] + wrong) % 16
    answers = file.with_suffix(".said")
    answers.write_text("\n".join(map(json.dumps, lines)))
    return answers


@pytest.mark.parametrize("wrong", [False, True])
def test_the_command_judges_what_was_said(
    wrong: bool, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sentinel", "prompts", str(folder), "--max-new-tokens", "20"]) == 0
    asked = tmp_path / "prompts.jsonl"
    asked.write_text(capsys.readouterr().out)
    words = [str(folder), str(said(folder, asked, wrong=wrong)), "--json", str(tmp_path / "a.json")]
    assert cli.main(["sentinel", "audit", *words]) == int(wrong)
    num = 20 * len(asked.read_text().splitlines())
    verdict = json.loads((tmp_path / "a.json").read_text())["audits"][0]["verdict"]
    line = capsys.readouterr().out
    assert verdict == (BUG if wrong else EQUAL)
    assert line.startswith(f"mine  {verdict}")
    assert (f"1 mistake in {num} tokens" if wrong else f"all of {num} tokens") in line


REFUSED = {
    "audit nowhere said": "nowhere holds no sentinel.json: give a folder that `specbench sentinel export` has written",
    "prompts nowhere": "nowhere holds no sentinel.json: give a folder that `specbench sentinel export` has written",
    "audit {folder} nowhere": "nowhere cannot be read: No such file or directory",
    "audit {folder} {said} --temperature 1": "has no law to draw from: export one with --law, or audit at temperature",
    "audit {folder} {said} --temperature -1": "temperature = -1.0",
    "prompts {folder} --seed -1": "--seed -1 must be between 0 and 2^63 - 1",
}


@pytest.mark.parametrize("words", REFUSED)
def test_wrong_words_get_one_sentence(
    words: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "said.jsonl"
    file.write_text('{"prompt": [16], "output": [1]}')
    code = cli.main(["sentinel", *words.format(folder=folder, said=file).split()])
    assert code == 2
    assert REFUSED[words] in capsys.readouterr().err


def test_a_token_that_leads_by_too_little_is_wrong_however_right_it_is() -> None:
    prompt = (BOS, 3, 1, 4)
    tokens = tuple(PROGRAM.continuation(prompt, 3))
    shown = [((token, -0.1), ((token + 1) % 16, -10.1)) for token in tokens]
    assert audit_greedy(PROGRAM, [Output(prompt, tokens, logprobs=tuple(shown))])[0].verdict == EQUAL
    shown[1] = ((tokens[1], -0.1), (5, -4.1))
    (audit,) = audit_greedy(PROGRAM, [Output(prompt, tokens, "mixed", logprobs=tuple(shown))])
    assert audit.verdict == BUG
    assert f"mixed, token 1: {tokens[1]} leads by 4.00, must lead by 10" in audit.sentence


def test_a_bos_in_the_middle_is_wrong_although_its_probability_is_not_zero() -> None:
    """vLLM's CPU build gave it once it drew from memory that nobody had written."""
    prompt = (BOS, 3, 1, 4)
    (audit,) = audit_sampled(PROGRAM, [Output(prompt, (BOS,), "lost")], Sampling(1.0))
    assert audit.verdict == BUG
    assert "lost, token 0: 16, which has no probability there" in audit.sentence


def test_either_of_two_tokens_that_tie_at_a_filters_edge_may_be_drawn() -> None:
    """Logits 8, 4, 4, 0 ... in eighths and top_k 2: the second place is that of either."""
    rows = [[0] * 17 for _ in range(17)]
    for state, row in enumerate(rows):
        row[state % 16], row[(state + 1) % 16], row[(state + 2) % 16], row[BOS] = 8, 4, 4, -512
    program = replace(PROGRAM, law_logits=tuple(tuple(row) for row in rows))
    context, tokens = [BOS, 3, 1, 4], []
    for at in range(300):
        state = program.states(context)[-1][-1]
        tokens.append((state + at % 3) % 16)
        context.append(tokens[-1])
    outputs = [Output((BOS, 3, 1, 4), tuple(tokens))]
    (audit,) = audit_sampled(program, outputs, Sampling(1.0, top_k=2))
    assert (audit.verdict, audit.num_tokens) == (EQUAL, 100)  # those above the edge
    assert audit.sentence.endswith("; not judged: 200 at a filter's edge, among equals")
    assert audit_sampled(program, outputs, Sampling(1.0, top_k=1))[0].verdict == BUG
    below = (program.states([BOS, 3, 1, 4])[-1][-1] + 3) % 16
    (audit,) = audit_sampled(program, [Output((BOS, 3, 1, 4), (below,), "low")], Sampling(1.0, top_k=2))
    assert (audit.verdict, audit.sentence) == (BUG, f"low, token 0: {below}, which has no probability there")


def test_what_a_low_temperature_leaves_no_mass_is_not_a_filters_work() -> None:
    """Everything is judged, and what has underflowed has no probability."""
    tokens = tuple(PROGRAM.continuation([BOS, 3, 1, 4], 200))
    (audit,) = audit_sampled(PROGRAM, [Output((BOS, 3, 1, 4), tokens)], Sampling(0.01))
    assert (audit.verdict, audit.num_tokens) == (EQUAL, 200)
    row = PROGRAM.law_logits[PROGRAM.states([BOS, 3, 1, 4])[-1][-1]]
    (audit,) = audit_sampled(PROGRAM, [Output((BOS, 3, 1, 4), (row.index(min(row[:16])),))], Sampling(0.01))
    assert audit.verdict == BUG


def test_tokens_behind_a_bos_are_said_not_to_be_judged() -> None:
    """At a high temperature a BOS may be drawn."""
    tokens = (*PROGRAM.continuation([BOS, 3, 1, 4], 20), BOS, 3, 3)
    (audit,) = audit_sampled(PROGRAM, [Output((BOS, 3, 1, 4), tokens)], Sampling(100.0))
    assert audit.sentence.endswith("; not judged: 2 behind a BOS, where a sentinel has no state")


SHOWN: dict[str, tuple[list[tuple[int, float]], str]] = {
    "another one leads, named first": ([(5, -0.1), (1, -10.1)], "is 10.00 behind another one"),
    "another one leads, named last": ([(1, -10.1), (5, -0.1)], "is 10.00 behind another one"),
    "it leads too little, named last": ([(5, -1.1), (1, -0.9)], "leads by 0.20"),
    "others alone": ([(5, -0.1), (6, -10.1)], "is not among its likeliest"),
    "its own alone, too small": ([(1, -2.83)], "leads by 0.00"),
}


@pytest.mark.parametrize("name", SHOWN)
def test_logprobs_must_have_the_token_in_the_lead_in_whatever_order(name: str) -> None:
    prompt = next(
        (BOS, one, other) for one in range(16) for other in range(16) if PROGRAM.next_token([BOS, one, other]) == 1
    )
    told, sentence = SHOWN[name]
    (audit,) = audit_greedy(PROGRAM, [Output(prompt, (1,), "it", logprobs=(tuple(told),))])
    assert (audit.verdict, audit.num_wrong) == (BUG, 1)
    assert f"it, token 0: 1 {sentence}" in audit.sentence
    for good in ([(5, -9.5), (1, -0.1)], [(1, -0.001)], [(1, 0.0)], []):
        assert audit_greedy(PROGRAM, [Output(prompt, (1,), logprobs=(tuple(good),))])[0].verdict == EQUAL


def test_a_line_is_what_json_calls_one(tmp_path: Path) -> None:
    """U+2028 may stand in a string; a file in another encoding is told by its name."""
    file = tmp_path / "said.jsonl"
    file.write_text('{"prompt": [16, 3], "output": [7], "id": "a\u2028b"}\n', "utf-8")
    assert read_outputs(file, "abc")[0].name == "a\u2028b"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"said.jsonl is no text in UTF-8"):
        read_outputs(file, "abc")


def test_a_cut_law_leaves_a_residual_that_shows() -> None:
    """Half of p's mass, so that min(p, q) and what a refusal draws differ as far as they can."""
    cut = PROGRAM.with_cut_laws()
    assert cut.tables == PROGRAM.tables
    overlaps = []
    for state in range(17):
        p, q = (torch.tensor(one.law_logits[state], dtype=torch.float64).div(8).softmax(0) for one in (PROGRAM, cut))
        overlap = float(torch.minimum(p, q).sum())
        unmended = torch.minimum(p, q) + (1 - overlap) * p  # after a refusal a token is drawn from p itself
        assert float((unmended - p).abs().sum()) / 2 == pytest.approx(overlap * (1 - overlap), abs=1e-9)
        overlaps.append(overlap)
    assert sum(one * (1 - one) for one in overlaps) / 17 > 0.2


DRAFTS, TEXTS, LENGTH = 4, 18, 100


def sampled_texts(fault: str, *, seed: int = 0) -> list[Output]:
    """Speculative sampling along chains of DRAFTS, over the laws of PROGRAM and of the drafter that engines get."""
    coins, drafter = random.Random(seed), PROGRAM.with_cut_laws()

    def draw(law: list[float]) -> int:
        return coins.choices(range(17), weights=law)[0]

    outputs = []
    for number in range(TEXTS):
        prompt = (BOS, *random_symbols(number, 20))
        text = list(prompt)
        while len(text) < len(prompt) + LENGTH:
            path: list[int] = []
            laws = []
            for _ in range(DRAFTS):
                laws.append(drafter.law([*text, *path]))
                path.append(draw(laws[-1]))
            for at, (token, q) in enumerate(zip(path, laws, strict=True)):
                p = PROGRAM.law([*text, *path[:at]])
                likely = p[token] / q[token] if fault != "the draft's argmax for q" else p[token] / max(q)
                if coins.random() < (p[token] if fault == "p alone accepts" else likely):
                    continue
                left = [max(0.0, one - other) for one, other in zip(p, q, strict=True)]
                if fault == "p for the residual":
                    left = p
                elif fault == "the residual's argmax":
                    left = [float(one == max(left)) for one in left]
                text += [*path[:at], draw(left)]
                break
            else:
                text += [*path, draw(PROGRAM.law([*text, *path]))]
        outputs.append(Output(prompt, tuple(text[len(prompt) : len(prompt) + LENGTH]), max_new_tokens=LENGTH))
    return outputs


@pytest.mark.parametrize("seed", range(3))
def test_speculative_sampling_is_within_the_law(seed: int) -> None:
    assert audit_sampled(PROGRAM, sampled_texts("none", seed=seed), Sampling(1.0))[0].verdict == EQUAL


@pytest.mark.parametrize(
    "fault", ["p for the residual", "the residual's argmax", "p alone accepts", "the draft's argmax for q"]
)
def test_usual_faults_of_acceptance_show_within_what_a_run_asks_for(fault: str) -> None:
    """1,800 tokens, as `specbench engines --temperature 1` asks for."""
    assert audit_sampled(PROGRAM, sampled_texts(fault), Sampling(1.0))[0].verdict == BUG
