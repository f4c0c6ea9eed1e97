"""specbench.redact: what stays readable in a redacted message, and that no token or word of the target does."""

# ruff: noqa: E501
from __future__ import annotations

import pytest

from specbench.redact import WITHHELD, Redactor

REDACTOR = Redactor(b"a key for tests")


def t(token: int) -> str:
    return REDACTOR.token(str(token))


MESSAGE = """\
GreedyMismatch: output differs from autoregressive decoding at token 1      [claim greedy.lossless, level 1]

  MUST      with temperature 0, emit exactly the tokens the target model emits one by one
  prompt    [4711, 1]   model 0, cache contiguous, layout tree_mask
  on        own, seed 3, device cuda
  expected  [9000, 4, 1]   reference.autoregressive
  actual    [9000, 3, 1]   mypkg.mod:Adapter2
            ^ expected 4, margin 1.7 (not a tie: bound 2e-12 (1e-9 of the scale, fp64))
  tree      4711          root
            ├─ 3
            └─ 9000       accepted, then 12
  narrower  greedy.walk FAILS: look at the verifier first
  reproduce specbench check mypkg.mod:Adapter2 --replay greedy.lossless@own@GenerationCase,prompt=4711.1"""


def test_a_message_keeps_its_shape_and_loses_its_tokens() -> None:
    assert REDACTOR.message(MESSAGE, target="mypkg.mod:Adapter2", reproduce="specbench check --replay c.json") == (
        "GreedyMismatch: output differs from autoregressive decoding at token 1      [claim greedy.lossless, level 1]\n"
        "\n"
        "  MUST      with temperature 0, emit exactly the tokens the target model emits one by one\n"
        f"  prompt    {REDACTOR.text('[4711, 1]')} (2 tokens)   model 0, cache contiguous, layout tree_mask\n"
        "  on        own, seed 3, device cuda\n"
        f"  expected  [{t(9000)}, {t(4)}, {t(1)}]   reference.autoregressive\n"
        f"  actual    [{t(9000)}, {t(3)}, {t(1)}]   mypkg.mod:Adapter2\n"
        f"            ^ expected {t(4)}, margin 1.7 (not a tie: bound 2e-12 (1e-9 of the scale, fp64))\n"
        f"  tree      {t(4711)}          root\n"
        f"            ├─ {t(3)}\n"
        f"            └─ {t(9000)}       accepted, then {t(12)}\n"
        "  narrower  greedy.walk FAILS: look at the verifier first\n"
        "  reproduce specbench check --replay c.json"
    )


MASKED = {
    "node 2 is let to see node 1 (not on its path)": "node 2 is let to see node 1 (not on its path)",
    "prefix 0..1 and nodes [0, 1]": "prefix 0..1 and nodes [0, 1]",
    "path [1, 2], bonus 7": f"path [1, 2], bonus {t(7)}",
    "off by 0.91, within 5.5e-09 (1e-9 of the scale, fp64)": "off by 0.91, within 5.5e-09 (1e-9 of the scale, fp64)",
    "output goes on after end token 20 at token 0": f"output goes on after end token {t(20)} at token 0",
    "stop sequence '13 14' goes on": f"stop sequence {REDACTOR.text('13 14')} goes on",
    "prompt=3.1.4": f"prompt={t(3)}.{t(1)}.{t(4)}",
    "its parent's row says 1: it's lost": f"its parent's row says {t(1)}: it's lost",
    "layer 0 k, row 2 is off by 5.7 after round 1": "layer 0 k, row 2 is off by 5.7 after round 1",
    "1 pages are in use after dropping the forward of round 1, must be 2": "1 pages are in use after dropping the forward of round 1, must be 2",
    "0 pages (0 rows, 4 a page)": "0 pages (0 rows, 4 a page)",
    "end token 20 is emitted at token 0, must not be among the first 4": f"end token {t(20)} is emitted at token 0, must not be among the first 4",
    "row 1 of 3, prompt [5, 6]: output has 5 tokens, must have 4": f"row 1 of 3, prompt [{t(5)}, {t(6)}]: output has 5 tokens, must have 4",
    "output stops after 3 tokens without end token 5 or stop sequence [6, 7]": f"output stops after 3 tokens without end token {t(5)} or stop sequence [{t(6)}, {t(7)}]",
    "generation ended after 3 of 8 tokens": "generation ended after 3 of 8 tokens",
    "7 rows were forwarded in 2 rounds, must be at most 6": "7 rows were forwarded in 2 rounds, must be at most 6",
    "at most 3 for the prompt and [2, 1] by round": "at most 3 for the prompt and [2, 1] by round",
    "the cache holds 3 rows after operation 2, cut (sequence 1), must hold 4": "the cache holds 3 rows after operation 2, cut (sequence 1), must hold 4",
    "the last 3 to 9 rows (window 4, 9 committed)": "the last 3 to 9 rows (window 4, 9 committed)",
    "            │     └─ 9000 committed": f"            │     └─ {t(9000)} committed",
    "tree 0 of 2 is decided otherwise than alone": "tree 0 of 2 is decided otherwise than alone",
    "answered differently from token 2 on, 3 requests later": "answered differently from token 2 on, 3 requests later",
    "draft() returned 5 nodes for max_nodes = 3, max_depth = 2": "draft() returned 5 nodes for max_nodes = 3, max_depth = 2",
    "after accepts 2, plain step, 0 the draft": "after accepts 2, plain step, 0 the draft",
    "behind 2 kept tokens and pieces of [1, 3]": "behind 2 kept tokens and pieces of [1, 3]",
    "round 2 emitted [5, 6], must emit [5, 7]": f"round 2 emitted [{t(5)}, {t(6)}], must emit [{t(5)}, {t(7)}]",
    "bonus token is 5, must be 7 (argmax of the row of node 1)": f"bonus token is {t(5)}, must be {t(7)} (argmax of the row of node 1)",
    "4 tokens later the bonus is wrong, must be 7 (argmax of node 1)": f"4 tokens later the bonus is wrong, must be {t(7)} (argmax of node 1)",
    "the draft depends on what was read before: [3] or [5, 6] behind": f"the draft depends on what was read before: [{t(3)}] or [{t(5)}, {t(6)}] behind",
    "nodes [1, 2, 3.5]": f"nodes [{t(1)}, {t(2)}, 3.5]",
}


@pytest.mark.parametrize("text", MASKED)
def test_places_counts_and_measures_stay_and_every_other_number_goes(text: str) -> None:
    assert REDACTOR.mask(text) == MASKED[text]


SENTENCES = {
    "generate() raised RuntimeError: no such user Alice": f"generate() raised RuntimeError ({WITHHELD})",
    "target 'x': build() raised OSError: Alice": f"build() raised OSError ({WITHHELD})",
    "forward_tree() must return numbers, got Alice": f"forward_tree() misbehaved ({WITHHELD})",
    "_D.generate() did not return within 2 s: give --specbench-timeout": f"_D.generate() did not return within 2 s ({WITHHELD})",
    "Alice": f"it fails ({WITHHELD})",
}  # fmt: skip


@pytest.mark.parametrize("text", SENTENCES)
def test_of_a_sentence_about_the_target_call_and_exception_stay(text: str) -> None:
    assert REDACTOR.sentence(text) == SENTENCES[text]


def test_a_misbehaviour_keeps_no_word_of_the_target() -> None:
    text = MESSAGE.replace(
        "GreedyMismatch: output differs from autoregressive decoding at token 1",
        "Misbehaviour: generate() raised RuntimeError: Alice",
    )
    text = text.replace("[9000, 3, 1]", "Alice says 5   Bob").replace("accepted, then 12", "Alice's, 'then 12'")
    text = text.replace("^ expected 4", "^ Alice").replace(
        "  narrower", "  Alice\n  MUST      Alice\n  on        Alice\n  narrower"
    )
    shown = REDACTOR.message(text, target="mypkg.mod:Adapter2", reproduce="x")
    assert ("Alice" in shown, "Bob" in shown, "4711" in shown) == (False, False, False)
    assert shown.splitlines()[0].startswith(
        f"Misbehaviour: generate() raised RuntimeError ({WITHHELD})      [claim greedy."
    )


def test_a_text_of_another_shape_is_withheld() -> None:
    assert REDACTOR.message("Alice\nsays 3", target="x", reproduce="y") == f"it fails ({WITHHELD})"


def test_equal_tokens_look_alike_within_a_run_and_not_in_another() -> None:
    one, other = Redactor(), Redactor()
    assert one.token("5") == one.token("5")
    assert {one.token(str(n)) for n in range(20)}.isdisjoint(other.token(str(n)) for n in range(20))
