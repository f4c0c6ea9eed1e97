"""Level 4: how a foreign tree-attention kernel is loaded, judged and named. The kernels stand in targets/kernels.py."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, find, given, settings
from sessions import session_on
from targets import kernels
from test_plugin import forked

from specbench import judge
from specbench.cases import AttentionCase, decode, encode
from specbench.checks.attention import arguments, difference
from specbench.claims import CLAIMS, KERNEL_CLAIMS
from specbench.fixed import KERNEL_CASES, kernel_cases
from specbench.judge import Failed, RunSession, Skipped, parse_replay
from specbench.kernel_bank import Limits
from specbench.loading import EXPOSE, Kernel, Target, TargetError, load_target
from specbench.naming.kernels import FAULTS, answer
from specbench.profiles import PROFILES
from specbench.record import BUG, EQUAL, NOISE, NOT_TESTED, RunRecord, read
from specbench.reduce import reduce_case, smaller_cases
from specbench.reference.attention import tree_attention
from specbench.strategies import case_kind, strategy_for
from specbench.watchdog import Watchdog

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "tests" / "targets" / "kernels.py"
EXAMPLES = ROOT / "examples" / "kernels"
IDS = list(KERNEL_CLAIMS)
QUICK = PROFILES["quick"]


def on(name: str, *, naming: bool = False) -> RunSession:
    """A session over an attribute of targets/kernels.py, or over a whole target name."""
    target = load_target(name if ":" in name else f"{HERE}:{name}")
    return judge.quiet_session(target, profile=QUICK, seed=7, naming=naming)


def text_of(session: RunSession, claim: str, subject: str = "kernel-fp64") -> str:
    """The text of Failed or Skipped; "" where the claim holds."""
    try:
        session.judge(claim, subject)
    except (Failed, Skipped) as ended:
        return str(ended)
    return ""


def verdicts(session: RunSession, subject: str = "kernel-fp64") -> dict[str, str]:
    for claim in IDS:
        text_of(session, claim, subject)
    return {one.claim.removeprefix("attention."): one.verdict for one in session.run.claims}


# Loading


@pytest.mark.parametrize("name", ["good_by_hand", "make", "Holder"])
def test_a_kernel_is_a_function_a_factory_or_an_object_with_attention(name: str) -> None:
    assert list(on(name).subjects) == ["kernel-fp64", "kernel-fp32", "kernel-bf16", "kernel-fp16"]


def test_a_function_of_other_arguments_is_told_what_a_kernel_takes() -> None:
    name = f"{HERE}:other_signature"
    with pytest.raises(TargetError) as told:
        load_target(name)
    assert str(told.value) == (
        f"target '{name}': other_signature must be callable without arguments, but it is not (missing a required "
        "argument: 'q'): name a zero-argument factory, an object, or a kernel (q, k, v, parents, prefix_lens, scale)"
    )


def test_an_attention_of_other_arguments_is_told_the_call() -> None:
    class Wrong:
        def attention(self, q, k, v, mask): ...  # type: ignore[no-untyped-def]

    with pytest.raises(TargetError, match=r"attention cannot be called as attention\(q, k, v, parents, prefix_lens, "):
        judge.quiet_session(Target("it", Wrong()), profile=QUICK, seed=0)


def test_a_decoders_own_part_of_that_name_is_left_alone() -> None:
    class Decoder:
        attention = torch.nn.Linear(2, 2)

        def logits(self, tokens: list[int]) -> torch.Tensor:
            return torch.zeros(len(tokens), 3)

    assert list(judge.quiet_session(Target("it", Decoder()), profile=QUICK, seed=0).subjects) == ["own"]


def test_options_are_what_the_signature_names_and_features_what_is_said() -> None:
    has = on("Holder").subjects["kernel-fp64"].has  # type: ignore[union-attr]
    assert has == {"attention", "window", "any_order", "dead_rows"}


def test_a_column_that_the_kernel_does_not_declare_says_so() -> None:
    session = on("fp32_alone")
    assert text_of(session, "attention.out") == "the kernel says dtypes = (fp32): add fp64 where it can"
    assert text_of(session, "attention.out", "kernel-fp32") == ""


@pytest.mark.parametrize(
    ("word", "option"),
    [
        ("window_size", "window"), ("sliding_window", "window"), ("softcap", "soft_cap"), ("k_scales", "k_scale"),
        ("alibi", "alibi_slopes"), ("slopes", "alibi_slopes"), ("page_tables", "page_table"),
    ],
)  # fmt: skip
def test_an_option_that_is_nearly_one_of_ours_is_refused(word: str, option: str) -> None:
    made = {}
    exec(f"def attention(q, k, v, parents, prefix_lens, scale, *, {word}=None): ...", made)
    with pytest.raises(TargetError) as told:
        judge.quiet_session(Target("it", Kernel(made["attention"])), profile=QUICK, seed=0)
    assert str(told.value) == (
        f"target 'it': attention takes {word!r}, which is never given: did you mean {option!r}? It must be one of "
        "cu_nodes, max_nodes, page_table, window, soft_cap, alibi_slopes, k_scale, v_scale, num_splits, or a name "
        "unlike all of them"
    )


def test_options_unlike_ours_are_left_alone() -> None:
    def attention(q, k, v, parents, prefix_lens, scale, sm_scale=1.0, block_size=64, out=None, **others): ...  # type: ignore[no-untyped-def]

    assert "kernel-fp64" in judge.quiet_session(Target("it", Kernel(attention)), profile=QUICK, seed=0).subjects


WRONG_WORDS = {
    "dtypes": (("fp8",), "dtypes = 'fp8' must be of fp64, fp32, bf16, fp16"),
    "codes": ("int8", "codes = 'int8' must be a tuple of int8, fp8"),
    "head_dims": ((0,), "head_dims = (0,) must be a tuple of ints from 1 to 512"),
    "groups": ((), "groups = () must be a tuple of ints from 1 to 64"),
    "page_sizes": (16, "page_sizes = 16 must be a tuple of ints from 1 to 1024"),
}


@pytest.mark.parametrize("name", WRONG_WORDS)
def test_a_declaration_that_is_none_is_told(name: str) -> None:
    class Declares(kernels.Holder):
        pass

    given, sentence = WRONG_WORDS[name]
    setattr(Declares, name, given)
    with pytest.raises(TargetError) as told:
        Limits.of(Target("it", Declares()))
    assert str(told.value) == f"target 'it': {sentence}"


# Verdicts


def test_a_minimal_kernel_is_equal_on_what_it_can_do_and_the_rest_is_not_tested() -> None:
    session = on("out_alone")
    found = verdicts(session)
    assert {name for name, verdict in found.items() if verdict != NOT_TESTED} == {"out", "dead_memory"}
    assert found["out"] == found["dead_memory"] == EQUAL
    reasons = {one.claim.removeprefix("attention."): one.reason for one in session.run.claims}
    assert (reasons["batch"], reasons["lse"]) == (EXPOSE["cu_nodes"], EXPOSE["lse"])


def test_a_kernel_with_every_option_is_equal_on_every_claim() -> None:
    assert set(verdicts(on("with_all")).values()) == {EQUAL}


def test_rounding_in_half_precision_is_noise() -> None:
    session = on("with_all")
    text_of(session, "attention.out", "kernel-fp16")
    assert session.run.claims[0].verdict == NOISE and 0 < session.run.claims[0].worst <= 1


def test_masked_garbage_is_a_bug_unless_the_kernel_says_that_it_multiplies_it_by_zero() -> None:
    assert verdicts(on("times_zero"))["dead_memory"] == BUG
    assert verdicts(on("times_zero"))["out"] == EQUAL
    session = on("times_zero_and_says_so")
    assert text_of(session, "attention.dead_memory") == EXPOSE["dead_rows"]


# What a bad adapter is told

ONE_SENTENCE = {
    "raises": "attention() raised RuntimeError: no kernel image is available",
    "returns_none": "attention() must return out of a torch tensor of shape [1, 1, 8], got NoneType None",
    "returns_three": "attention() must return out, or a pair (out, lse), got tuple (tensor([[[",
    "wrong_shape": "attention() must return out of shape [1, 1, 8], got shape [1, 1, 7]",
    "wrong_dtype": "attention() must return out in q's torch.float64 on cpu, got torch.float32 on cpu",
    "on_meta": "attention() must return out of a dense tensor with numbers in it, got one on the meta device",
    "lse_upside_down": "attention() must return lse of shape [2, 1], got shape [1, 2]",
    "half_lse": "attention() must return lse in torch.float32 or wider, got torch.float16",
    "writes_to_k": "attention() must return an answer and leave its inputs as they are, got k changed in place",
}


@pytest.mark.parametrize("name", ONE_SENTENCE)
def test_a_bad_adapter_gets_one_sentence(name: str) -> None:
    first = text_of(on(name), "attention.out").splitlines()[0]
    assert first.startswith(f"Misbehaviour: {ONE_SENTENCE[name]}")


def test_a_kernel_that_refuses_a_precision_is_told_how_to_say_so() -> None:
    class Undeclared:
        attention = staticmethod(kernels.fp32_alone)

    session = judge.quiet_session(Target("it", Undeclared()), profile=QUICK, seed=7)
    lines = text_of(session, "attention.out").splitlines()
    assert lines[0] == (
        "Misbehaviour: attention() raised TypeError: torch.float64 is not supported      [claim attention.out, level 4]"
    )
    assert lines[6] == "  expected  an answer   specbench.protocols.TreeAttention"
    assert lines[8] == "            ^ what a kernel cannot do it says by dtypes, head_dims, groups, page_sizes or codes"


def test_nan_is_a_wrong_answer_of_the_claim() -> None:
    first = text_of(on("is_nan"), "attention.out").splitlines()[0]
    assert first == "AttentionMismatch: out of row 0 in query head 0 is NaN      [claim attention.out, level 4]"


def test_a_kernel_that_hangs_is_told_by_the_watchdog() -> None:
    told: list[str] = []

    class Hung(Exception):
        pass

    class Stop(Watchdog):
        def guard(self, what: str):  # type: ignore[no-untyped-def]
            told.append(what)
            raise Hung

    session = judge.quiet_session(load_target(f"{HERE}:hangs"), profile=QUICK, seed=7, watchdog=Stop(0, print))
    with pytest.raises(Hung):
        session.judge("attention.out", "kernel-fp64")
    assert told == ["Kernel.attention()"]


def test_a_wrong_row_is_shown_with_its_tree_and_its_replay() -> None:
    text = text_of(on("causal", naming=True), "attention.out")
    expected = """\
AttentionMismatch: out of row 2 in query head 0 is off by NUMBER      [claim attention.out, level 4]

  MUST      give every row the softmax average over its prefix, its ancestors and itself, in every head
  inputs    prefix 0, 1 query heads, 1 key heads of 8, fp64
  parents   [-1, 0, 0]
  on        kernel-fp64, seed 7, device cpu
  expected  NUMBERS   specbench.reference.attention in fp64
  actual    NUMBERS   FILE:causal
            ^ over the case NUMBER, must be within NUMBER (1e-9 of the scale, fp64)
  tree      0
            ├─ 1
            └─ 2          this row
  narrower  no lower claim was tested: look at the mask, the group of heads, the scale, or the last block of a stretch \
of keys
  likely    causal: a row sees every row before its own, right for chains alone: the mask is a lower triangle: gives \
the kernel's own numbers on 8 cases, 6 of them wrong
  reproduce specbench check FILE:causal --replay \
attention.out@kernel-fp64@AttentionCase,trees=-1.0.0"""
    assert unnumbered(text) == expected


def unnumbered(text: str) -> str:
    number = r"-?[0-9.]+(e-?[0-9]+)?"
    text = text.replace(str(HERE), "FILE")
    text = re.sub(rf"((expected|actual)  +){number}(, {number})*(, \.\.\.)?", r"\1NUMBERS", text)
    return re.sub(rf"(off by|over the case|within) {number}", r"\1 NUMBER", text)


def test_a_replay_fails_with_the_same_text() -> None:
    text = text_of(on("interleaved", naming=True), "attention.out")
    replay = text.rpartition("--replay ")[2]
    with pytest.raises(Failed) as failure:
        on("interleaved", naming=True).judge("attention.out", "kernel-fp64", only=parse_replay(replay)[2])
    assert str(failure.value) == text


NAMED = {
    "causal": ("attention.out", "causal"),
    "unmasked": ("attention.out", "mask_ignored"),
    "interleaved": ("attention.out", "group_interleaved"),
    "unscaled": ("attention.out", "scale_ignored"),
    "whole_blocks_of_64": ("attention.out", "last_block_64:"),
    "base_2": ("attention.lse", "lse_base_2"),
    "lse_of_the_tree": ("attention.lse", "lse_without_prefix"),
    "first_of_the_batch": ("attention.batch", "prefix_shared"),
    "descendants_seen": ("attention.out", "mask_transposed"),
    "sibling_before_seen": ("attention.out", "earlier_sibling:"),
    "siblings_before_seen": ("attention.out", "earlier_siblings:"),
    "masked_after_softmax": ("attention.out", "softmax_before_mask"),
    "prefix_without_its_last_row": ("attention.out", "prefix_one_less"),
    "no_maximum": ("attention.out", "softmax_without_maximum"),
    "times_zero": ("attention.dead_memory", "rows behind the last one are read"),
}


@pytest.mark.parametrize("subject", ["kernel-fp64", "kernel-fp32"])
@pytest.mark.parametrize("name", NAMED)
def test_a_fault_written_by_hand_is_named(name: str, subject: str) -> None:
    claim, fault = NAMED[name]
    session = on(name, naming=True)
    text_of(session, claim, subject)
    assert session.run.claims[0].likely.startswith(fault)


@pytest.mark.parametrize("subject", ["kernel-bf16", "kernel-fp16"])
def test_large_scores_are_asked_for_in_half_precision_too(subject: str) -> None:
    session = on("no_maximum", naming=True)
    text_of(session, "attention.out", subject)
    assert session.run.claims[0].likely.startswith("softmax_without_maximum")


def test_a_wrong_lse_is_told_where_rows_hold_nodes_and_an_unused_row_where_they_do_not() -> None:
    found = {name: verdicts(on(name)) for name in ("base_2_of_all", "unused_lse_is_zero")}
    assert {name: (one["unused_rows"], one["lse"]) for name, one in found.items()} == {
        "base_2_of_all": (EQUAL, BUG),
        "unused_lse_is_zero": (BUG, BUG),
    }
    told = text_of(on("unused_lse_is_zero"), "attention.unused_rows")
    assert re.match(r"UnusedRow\w*: lse of row \d+, which holds no node, in query head 0 is off by inf", told)


def test_where_nothing_fits_the_name_is_unknown() -> None:
    class Odd(kernels.Holder):
        def attention(self, q, k, v, parents, prefix_lens, scale):  # type: ignore[no-untyped-def]
            return kernels.out_alone(q, k, v, parents, prefix_lens, scale) * 1.01

    session = judge.quiet_session(Target("it", Odd()), profile=QUICK, seed=7, naming=True)
    text_of(session, "attention.out")
    assert session.run.claims[0].likely == "unknown"


@pytest.mark.parametrize("case", KERNEL_CASES, ids=encode)
def test_the_formula_without_a_fault_is_the_reference(case: AttentionCase) -> None:
    """By another way: what is named must not be an error of ours."""
    inputs, options = arguments(case)
    right, mine = tree_attention(*inputs, **options), answer(case)
    found = [difference(case, what, mine[idx], right[idx], None) for idx, what in enumerate(("out", "lse"))]
    assert [str(one) for one in found if not one.error <= one.bound.value] == []


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_of_the_formula_shows_on_a_fixed_case(fault: str) -> None:
    more = [AttentionCase(trees=(KERNEL_CASES[2].trees[0],), prefix_lens=(150,), page=0)]
    for case in (*KERNEL_CASES, *more):
        inputs, options = arguments(case)
        right, mine = tree_attention(*inputs, **options), answer(case, fault=fault)
        for idx, what in enumerate(("out", "lse")):
            found = difference(case, what, mine[idx], right[idx], None)
            if not found.error <= found.bound.value:
                return
    pytest.fail(f"{fault} changes nothing")


# Cases


def test_there_are_twenty_fixed_shapes() -> None:
    assert len(set(KERNEL_CASES)) == len(KERNEL_CASES) == 20


@cache
def everything() -> RunSession:
    return on("with_all")


@pytest.mark.parametrize("claim", IDS)
def test_every_claim_has_fixed_cases_and_draws_its_own_kind(claim: str) -> None:
    subject = everything().subjects["kernel-fp64"]
    quiet = settings(max_examples=1, phases=[Phase.generate], database=None, deadline=None)
    drawn = find(strategy_for(claim, subject), lambda case: True, settings=quiet)  # type: ignore[arg-type]
    assert type(drawn) is case_kind(claim) is AttentionCase
    assert kernel_cases(claim, subject) != []  # type: ignore[arg-type]


@pytest.mark.parametrize("claim", IDS)
def test_a_case_says_the_same_after_its_journey_as_a_word(claim: str) -> None:
    subject = everything().subjects["kernel-fp16"]

    @settings(max_examples=30, phases=[Phase.generate], database=None, deadline=None, derandomize=True)
    @given(strategy_for(claim, subject))  # type: ignore[arg-type]
    def journey(case: AttentionCase) -> None:
        assert decode(encode(case)) == case
        assert [one for one in smaller_cases(case) if decode(encode(one)) != one] == []

    journey()


def test_a_failure_that_needs_two_siblings_is_cut_down_to_them() -> None:
    large = KERNEL_CASES[8]

    def has_siblings(case: object) -> bool:
        return isinstance(case, AttentionCase) and any(one.count(0) > 1 for one in case.trees)

    found = reduce_case(large, has_siblings, max_checks=400)
    assert found == AttentionCase(trees=((-1, 0, 0),))


BAD_WORDS = {
    "trees=0": "trees holds [0], must begin with -1 (the root)",
    "trees=-1.5": "trees = 5 must be >= 0 and < 2 (a parent, or -2 for a row without a node)",
    "trees=-1.2.1": "trees holds [-1, 2, 1], a circle from node 1",
    "trees=-1.-2.1": "trees holds [-1, -2, 1], where node 2 hangs on an unused row",
    "prefix_lens=1.2": "1 trees and 2 prefix_lens must be as many",
    "dtype=fp8": "dtype = 'fp8' must be one of fp64, fp32, bf16, fp16",
    "strided=2": "strided = 2 must have bf16 or fp16, one tree, no pages and at most 80 rows",
    "head_dim=0": "head_dim = 0 must be >= 1 and < 513 (see specbench.cases.AttentionCase)",
}


@pytest.mark.parametrize("word", BAD_WORDS)
def test_a_bad_word_is_refused_in_one_sentence(word: str) -> None:
    with pytest.raises(ValueError) as told:
        decode(f"AttentionCase,{word}")
    assert str(told.value) == f"replay string: {BAD_WORDS[word]}"


MISFITS = {
    "AttentionCase,dtype=fp32": "dtype = fp32 must be fp64 on kernel-fp64",
    "AttentionCase,head_dim=7": "head_dim = 7 is none that the kernel declares; the nearest is 8",
}


@pytest.mark.parametrize("word", MISFITS)
def test_a_replay_that_does_not_fit_the_column_is_told(word: str) -> None:
    with pytest.raises(Failed) as told:
        everything().judge("attention.out", "kernel-fp64", only=decode(word))
    assert str(told.value) == f"replay string: {MISFITS[word]}"


def test_a_decoders_column_is_no_kernels() -> None:
    session = session_on(load_target("specbench.reference.target:ReferenceTarget").adapter, name="it", seed=7)
    assert [name for name in session.subjects if name.startswith("kernel")] == []


# The adapters in examples/


@pytest.mark.parametrize("name", ["sdpa.py:attention", "sdpa.py:with_options", "flex.py:eager"])
def test_an_example_holds_on_what_it_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    session = on(f"{EXAMPLES}/{name}")
    for claim in IDS:
        subject = session.subjects["kernel-fp32"]
        if subject.missing(CLAIMS[claim].needs):  # type: ignore[union-attr]
            continue
        for case in kernel_cases(claim, subject)[:3]:  # type: ignore[arg-type]
            with suppress(Skipped):
                session.judge(claim, "kernel-fp32", only=case)
    wrong = [
        one.claim for one in session.run.claims if one.verdict not in (EQUAL, NOISE) and one.reason != EXPOSE["lse"]
    ]
    assert wrong == []


def test_compiled_flex_attention_asks_for_the_fixed_shapes_alone() -> None:
    """One of them here, since each takes seconds."""
    session = on(f"{EXAMPLES}/flex.py:compiled")
    subject = session.subjects["kernel-fp32"]
    assert subject.bank.limits.only_fixed_shapes  # type: ignore[union-attr]
    assert session.judge("attention.out", "kernel-fp32", only=KERNEL32).verdict in (EQUAL, NOISE)


KERNEL32 = AttentionCase(trees=KERNEL_CASES[2].trees, prefix_lens=(7,), num_key_heads=2, group=2, dtype="fp32")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: run the adapter with --specbench-device cuda")
def test_flash_infer_says_what_is_missing_where_there_is_no_gpu() -> None:
    session = on(f"{EXAMPLES}/flash_infer.py:attention")
    first = text_of(session, "attention.out", "kernel-fp16").splitlines()[0]
    assert first.startswith(
        "Misbehaviour: attention() raised RuntimeError: FlashInfer runs on a GPU, the inputs lie on cpu: give "
        "--specbench-device cuda"
    )


# The whole way through pytest


def ran(folder: Path, *arguments: str) -> tuple[int, str, RunRecord | None]:
    """pytest in a child of this process: exit code, output, record."""
    record, out = folder / "run.json", folder / "out.txt"
    usual = ["-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    usual += [f"--specbench-json={record}", "--specbench-model=none", "--hypothesis-profile=quick"]
    code = forked([*arguments, *usual], out, {})
    return code, out.read_text("utf-8"), read(record) if record.exists() else None


def test_the_suite_of_kernels_judges_a_target_by_the_claims_about_kernels_alone(tmp_path: Path) -> None:
    code, text, run = ran(tmp_path, "suites/kernels", "--target", f"{HERE}:out_alone")
    assert run is not None, text
    assert (code, {one.claim for one in run.claims}) == (0, set(IDS))
    assert (run.verdict_of("attention.out"), run.verdict_of("attention.lse")) == (NOISE, NOT_TESTED)
    assert "NOT TESTED attention.lse (kernel-fp64), attention.lse (kernel-fp32)" in text


def test_a_fault_fails_the_run_with_its_message(tmp_path: Path) -> None:
    code, text, run = ran(tmp_path, "suites/kernels", "--target", f"{HERE}:base_2", "-k", "lse and fp64")
    assert (code, "likely    lse_base_2: the lse is a logarithm to base 2" in text) == (1, True)
    assert run is not None and run.find("attention.lse", "kernel-fp64").likely.startswith("lse_base_2")  # type: ignore[union-attr]


NOTHING_TO_JUDGE = {
    "suites/kernels": (
        "specbench.reference.target:ReferenceTarget",
        "is no kernel, which these claims are about: give it attention(q, k, v, parents, prefix_lens, scale) -> out, "
        "or (out, lse) (level 4)",
    ),
    "suites/consistency": (
        f"{HERE}:out_alone",
        "is a kernel, of which these claims know nothing: run pytest suites/kernels",
    ),
}


@pytest.mark.parametrize("suite", NOTHING_TO_JUDGE)
def test_a_target_that_a_suite_knows_nothing_of_is_told(suite: str, tmp_path: Path) -> None:
    target, sentence = NOTHING_TO_JUDGE[suite]
    code, text, _ = ran(tmp_path, suite, "--target", target)
    assert (code, f"ERROR: target '{target}' {sentence}" in text.splitlines()) == (4, True)


def test_without_a_target_the_suite_of_kernels_is_that_of_our_own(tmp_path: Path) -> None:
    code, text, _ = ran(tmp_path, "suites/kernels", "--collect-only", "-q")
    assert (code, "test_target.py" in text, "test_tree_attention.py" in text) == (0, False, True)
