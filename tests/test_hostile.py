"""Targets that misbehave, one by one: the verdict, the sentence, and that nothing of it reaches what is judged next.

Each decoder of `hostile/` is judged here in this process on one claim, and then a right decoder is. Those that take
their process down are judged in `test_isolation.py`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sessions import session_on

from specbench.ambient import forget_the_target
from specbench.cases import decode
from specbench.claims import CLAIMS
from specbench.judge import Failed, RunSession, Skipped
from specbench.loading import TargetError
from specbench.probe import MAX_TOKENS
from specbench.profiles import Profile
from specbench.record import BUG, EQUAL, ClaimRecord
from specbench.reference.target import ReferenceTarget
from specbench.sanitize import plain

FEW = Profile("few", 5, num_real=0, real_prompts=0, real_tokens=0, real_dtypes=())
TINY = "tiny-fp64"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"hostile_{name}", Path(__file__).parent / "hostile" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


raising, answers, stateful, speaking = map(_load, ("raising", "answers", "stateful", "speaking"))
RaisesIn, Answers, Does, Factory = raising.RaisesIn, answers.Answers, stateful.Does, stateful.Factory


# One case a claim, as a replay names it: nothing is drawn, nothing made smaller, which takes most of the time.
CASES = {
    "tree.logits": "TreeCase,prompt=3.1,tokens=1.5.9.4,parents=-1.0.0.1",
    "tree.sensitivity": "PerturbedCase,prompt=3.1,tokens=1.5.9.4,parents=-1.0.0.1,place=0,token=7",
    "kv.commit": "CommitCase,prompt=3.1,rounds=0.5.9:-1.0.0:1,next_roots=4",
    "kv.rollback": "CommitCase,prompt=3.1,rounds=0.5.9:-1.0.0:1,next_roots=4,cut=1",
    "greedy.walk": "WalkCase,tokens=0.1.1,parents=-1.0.1,winners=1/1/0,vocab_size=5",
    "greedy.lossless": "GenerationCase,prompt=3.1,max_new_tokens=6,rounds=0.5.4:-1.0.0:1",
    "stop.eos": "GenerationCase,prompt=3.1,max_new_tokens=6,rounds=0.5.4:-1.0.0:1,eos_idx=2",
}


def session_of(adapter: Any) -> RunSession:
    forget_the_target()
    return session_on(adapter, name="mine:Adapter", profile=FEW, seed=3)


def judged(session: RunSession, claim: str, subject: str = TINY, *, drawn: bool = False) -> tuple[ClaimRecord, str]:
    """The record, and the first line of the failure."""
    text = ""
    try:
        session.judge(claim, subject, only=None if drawn else decode(CASES[claim]))
    except (Failed, Skipped) as ended:
        text = str(ended)
    return session.run.claims[-1], text.partition("\n")[0]


@dataclass(frozen=True)
class Hostile:
    """make: the adapter. claim: what it is judged on. sentence: how that of the BUG begins, "" for EQUAL. kind: the
    violation that is named. drawn: on cases drawn by Hypothesis, not on one."""

    make: Callable[[], Any]
    claim: str
    sentence: str = ""
    kind: str = "Misbehaviour"
    subject: str = TINY
    drawn: bool = False


def raises_in(call: str, error: BaseException, claim: str) -> Hostile:
    text = str(error) or "no message"
    sentence = f"{call}() raised {type(error).__name__}: {text}"
    return Hostile(lambda: RaisesIn(call, raising.raises(error)), claim, sentence)


def generates(change: Callable[[Any], Any], sentence: str = "", **keywords: Any) -> Hostile:
    return Hostile(lambda: Answers("generate", change), "greedy.lossless", sentence, **keywords)


def generates_ids(ids: Any, sentence: str) -> Hostile:
    return generates(lambda out: ids, f"generate() must return {sentence}")


def forwards(change: Callable[[Any], Any], sentence: str = "", **keywords: Any) -> Hostile:
    return Hostile(lambda: Answers("forward_tree", change), "tree.logits", sentence, **keywords)


def verifies(change: Callable[[Any], Any], sentence: str) -> Hostile:
    return Hostile(lambda: Answers("verify", change), "greedy.walk", f"verify() must return {sentence}")


def keeps(change: Callable[[Any], Any], sentence: str) -> Hostile:
    return Hostile(lambda: Answers("kv", change), "kv.commit", f"kv() must return {sentence}")


def does(deed: Callable[[], object], sentence: str = "", **keywords: Any) -> Hostile:
    return Hostile(lambda: Does(deed), "greedy.lossless", sentence, **keywords)


BOOM = RuntimeError("boom")
HOSTILE: dict[str, Hostile] = {
    # raise
    "raises in generate": raises_in("generate", BOOM, "greedy.lossless"),
    "raises in verify": raises_in("verify", BOOM, "greedy.walk"),
    "raises in prefill": raises_in("prefill", BOOM, "tree.logits"),
    "raises in forward_tree": raises_in("forward_tree", BOOM, "tree.logits"),
    "raises in commit": raises_in("commit", BOOM, "kv.commit"),
    "raises in truncate": raises_in("truncate", BOOM, "kv.rollback"),
    "raises in kv": raises_in("kv", BOOM, "kv.commit"),
    "raises in cache_len": raises_in("cache_len", BOOM, "kv.commit"),
    "raises in later logits": Hostile(
        raising.RaisesAtLaterLogits,
        "greedy.lossless",
        "logits() raised IndexError: position 1 is out of range",
        subject="own",
    ),
    "raises in later builds": Hostile(
        raising.RaisesLaterInBuild,
        "greedy.lossless",
        "target 'mine:Adapter': build() raised RuntimeError: out of pages",
        kind="",
    ),
    "exits": raises_in("generate", SystemExit("usage: engine"), "greedy.lossless"),
    "exits without a word": raises_in("generate", SystemExit(), "greedy.lossless"),
    "base exception": raises_in("generate", raising.OutOfBand("out of band"), "greedy.lossless"),
    "generator exit": raises_in("generate", GeneratorExit(), "greedy.lossless"),
    "stop iteration": raises_in("forward_tree", StopIteration("done"), "tree.logits"),
    "recursion": Hostile(
        lambda: RaisesIn("generate", raising.recurses),
        "greedy.lossless",
        "generate() raised RecursionError: maximum recursion depth exceeded",
    ),
    "exception without text": Hostile(
        lambda: RaisesIn("commit", raising.raises(raising.NoText())),
        "kv.commit",
        "commit() raised NoText: (str() of it raises ValueError)",
    ),
    "text of another make": Hostile(
        lambda: RaisesIn("commit", raising.raises(raising.TextOfAnotherMake())),
        "kv.commit",
        "commit() raised TextOfAnotherMake: text of another make",
    ),
    "exception without context": Hostile(
        lambda: RaisesIn("generate", raising.raises(raising.NoContext("who knows"))),
        "greedy.lossless",
        "generate() raised NoContext: who knows",
        drawn=True,
    ),
    "message of megabytes": Hostile(
        lambda: RaisesIn("generate", raising.overflows),
        "greedy.lossless",
        f"generate() raised ValueError: {'x' * 157}...",
    ),
    "skips the test": Hostile(
        lambda: RaisesIn("generate", raising.skips_the_test),
        "greedy.lossless",
        "generate() raised Skipped: nothing to see here",
    ),
    "leaves pytest": Hostile(
        lambda: RaisesIn("generate", raising.leaves_pytest), "greedy.lossless", "generate() raised Exit: that will do"
    ),
    "claims to be not tested": Hostile(
        lambda: RaisesIn("generate", raising.claims_to_be_not_tested),
        "greedy.lossless",
        "generate() raised NotTested: trust me",
    ),
    "rejects the case": Hostile(
        lambda: RaisesIn("generate", raising.rejects_the_case),
        "greedy.lossless",
        "generate() raised UnsatisfiedAssumption: failed to satisfy assume() in rejects_the_case (line ",
        drawn=True,
    ),
    # logits
    "a batch of one": forwards(lambda out: out[None], "forward_tree() must return shape [4, 31], got shape [1, 4, 31]"),
    "ints": forwards(lambda out: out.long(), "forward_tree() must return a floating dtype, got torch.int64"),
    "complex": forwards(lambda out: out + 0j, "forward_tree() must return a floating dtype, got torch.complex128"),
    "bools": forwards(lambda out: out > 0, "forward_tree() must return a floating dtype, got torch.bool"),
    "quantised": forwards(answers.quantised, "forward_tree() must return a floating dtype, got torch.qint8"),
    "meta": forwards(
        lambda out: out.to("meta"),
        "forward_tree() must return a dense tensor with numbers in it, got one on the meta device",
    ),
    "sparse": forwards(
        lambda out: out.to_sparse(),
        "forward_tree() must return a dense tensor with numbers in it, got one of layout torch.sparse_coo",
    ),
    "with gradient": forwards(answers.with_gradient),
    "expanded view": forwards(answers.expanded_view),
    "inference tensor": forwards(answers.inferred),
    "nan": forwards(
        lambda out: out * float("nan"), "forward_tree() must return numbers, got nan at [0, 0] (124 such entries)"
    ),
    "infinite": forwards(
        answers.one_infinite, "forward_tree() must return numbers, got inf at [0, 2] (4 such entries)"
    ),
    "all impossible": forwards(answers.all_impossible, "logits of node 0 are off by inf", kind="LogitsMismatch"),
    "numpy": forwards(
        lambda out: out.numpy(), "forward_tree() must return a torch tensor of shape [4, 31], got ndarray array("
    ),
    "no logits": forwards(
        lambda out: None, "forward_tree() must return a torch tensor of shape [4, 31], got NoneType None"
    ),
    "biting tensor": forwards(
        answers.biting,
        "forward_tree() must return an answer that can be read, got one that raises RuntimeError: "
        "__get__ is not implemented for Biting",
    ),
    # token ids
    "numpy ints": generates(answers.numpy_ints),
    "negative": generates_ids([-1], "token ids >= 0 and < 31, got -1 at index 0"),
    "beyond": generates_ids([31], "token ids >= 0 and < 31, got 31 at index 0"),
    "astronomic": generates_ids([10**5000], "token ids >= 0 and < 31, got an int of 16610 bits at index 0"),
    "floats": generates_ids([1.0], "token ids as ints, got float 1.0 at index 0"),
    "truths": generates_ids([True], "token ids as ints, got bool True at index 0"),
    "a text": generates_ids("1 2 3", "a sequence of token ids or a Generation, got str '1 2 3'"),
    "nothing": generates_ids(None, "a sequence of token ids or a Generation, got NoneType None"),
    "empty": generates(lambda out: [], "output has 0 tokens, must have 6", kind="GreedyMismatch"),
    "endless generator": generates(
        answers.endless_generator,
        "generate() must return a sequence of token ids or a Generation, got generator <generator object endless_gen",
    ),
    "growing list": generates(
        lambda out: answers.GrowingList([0]),
        f"generate() must return a sequence that ends, got more than {MAX_TOKENS} tokens",
    ),
    "untouchable": generates(
        lambda out: answers.Untouchable(),
        "generate() must return an answer that can be read, got one that raises RuntimeError: do not touch __class__",
    ),
    "untouchable token": generates_ids([answers.NoIndex()], "an answer that can be read, got one that raises Runtime"),
    "unspeakable": generates_ids(
        answers.Unspeakable(),
        "a sequence of token ids or a Generation, got Unspeakable (repr() of it raises SystemExit)",
    ),
    "talkative": generates_ids(
        answers.Talkative(), f"a sequence of token ids or a Generation, got Talkative {('blah ' * 20)[:57]}..."
    ),
    "odd reason": generates(answers.odd_reason, "generate() must return an answer that can be read, got one that rai"),
    "endless rounds": generates(
        answers.endless_rounds, f"generate() must return rounds that end, got more than {MAX_TOKENS} of them"
    ),
    "texts for rounds": generates(
        answers.texts_for_rounds,
        "generate() must return a well-formed specbench.types.Round for each round, got round 1: "
        "'str' object has no attribute 'tokens'",
    ),
    "texts in a round": generates(
        answers.texts_in_a_round,
        "generate() must return a well-formed specbench.types.Round for each round, got round 1: "
        "str 'two' must be an int",
    ),
    # verify, kv
    "path of text": verifies(
        answers.path_of_text, "a VerifyResult with node numbers and a token id, got str 'one' must be an int"
    ),
    "fractional bonus": verifies(
        answers.fractional_bonus, "a VerifyResult with node numbers and a token id, got float 1.5 must be an int"
    ),
    "endless path": verifies(
        lambda out: answers.EndlessPath(),
        "a VerifyResult with node numbers and a token id, "
        f"got more than {MAX_TOKENS} numbers, which do not seem to end",
    ),
    "three tensors": keeps(lambda out: (*out, out[0]), "a pair (keys, values), got tuple (tensor("),
    "endless pair": keeps(lambda out: answers.EndlessPair(out), "an answer that can be read, got one that raises Val"),
    # inputs and state
    "empties the prompt": Hostile(lambda: Factory(stateful.EmptiesThePrompt), "greedy.lossless"),
    "rewrites the tree": Hostile(lambda: Factory(stateful.RewritesTheTree), "tree.logits"),
    "overwrites logits": Hostile(lambda: Factory(stateful.OverwritesLogits), "greedy.walk"),
    "rewrites the request": Hostile(lambda: Factory(stateful.RewritesTheRequest), "stop.eos"),
    "remembers the last request": Hostile(
        lambda: Factory(stateful.RemembersTheLastRequest),
        "greedy.lossless",
        "output differs from autoregressive decoding at token 2",
        kind="GreedyMismatch",
    ),
    "changes its mind": Hostile(
        stateful.ChangesItsMind,
        "greedy.lossless",
        "the target is not deterministic: one and the same case failed and then did not",
        drawn=True,
    ),
    "reuses one buffer": Hostile(lambda: Factory(stateful.ReusesOneBuffer), "tree.sensitivity"),
    "changes the weights": Hostile(
        lambda: Factory(stateful.ChangesTheWeights),
        "greedy.lossless",
        "the target changed the weights of the model that it was handed",
    ),
    "breaks in __del__": Hostile(lambda: Factory(stateful.BreaksInDel), "greedy.lossless"),
    # the process
    "doubles by default": does(stateful.single_precision_is_double),
    "halves by default": does(stateful.half_by_default),
    "no gradients": does(stateful.no_gradients),
    "nowhere by default": does(stateful.nowhere_by_default, "generate() raised "),
    "many threads": does(stateful.many_threads),
    "reseeds": does(stateful.reseeds),
    "demands determinism": does(stateful.demands_determinism),
    "recursion of almost nothing": does(stateful.recursion_of_almost_nothing),
    "leaves for a folder that goes": does(stateful.leaves_for_a_folder_that_goes),
    "empties the environment": does(stateful.empties_the_environment),
    "closes stdout": does(stateful.closes_stdout),
    "replaces stdout": does(stateful.replaces_stdout),
    "prints megabytes": does(stateful.prints_megabytes),
    "starts a thread that raises": does(stateful.starts_a_thread_that_raises),
    "forks": does(stateful.forks),
    "replaces argmax": does(
        stateful.replaces_argmax,
        "the target replaced torch.Tensor.argmax, which plain decoding is computed with",
    ),
    "replaces softmax": does(
        stateful.replaces_softmax,
        "the target replaced torch.softmax, torch.nn.functional.softmax, which plain decoding is computed with",
    ),
}


def test_there_are_at_least_forty_of_them() -> None:
    assert len(HOSTILE) >= 40


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore:.*quantize.*", "ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_decoder_gets_its_verdict_and_a_right_one_after_it_too(name: str) -> None:
    one = HOSTILE[name]
    record, line = judged(session_of(one.make()), one.claim, one.subject, drawn=one.drawn)
    frame = f"      [claim {one.claim}, level {CLAIMS[one.claim].level}]"
    if not one.sentence:
        assert (record.verdict, line) == (EQUAL, "")
    else:
        start = f"{one.kind}: {one.sentence}" if one.kind else one.sentence
        assert (record.verdict, line[: len(start)], line[-len(frame) :]) == (BUG, start, frame)
        assert line.isprintable() and len(line) < 700
    after, line = judged(session_of(ReferenceTarget()), "greedy.lossless")
    assert (after.verdict, line) == (EQUAL, "")


UNUSABLE = {
    "build": (raising.RaisesInBuild, "build() raised RuntimeError: no kernel image for this device"),
    "exit in build": (raising.LeavesInBuild, "build() raised SystemExit: usage: engine --gpus N"),
    "build_from": (raising.RaisesInBuildFrom, "build_from() raised OSError: shard 3 of 7 is missing"),
    "num_layers": (
        lambda: RaisesIn("num_layers", raising.raises(BOOM)),
        "reading its methods raised RuntimeError: boom",
    ),
    "untouchable": (
        lambda: Answers("__init__", lambda out: out) and Factory(lambda model, drafter: answers.Untouchable()),
        "reading its methods raised RuntimeError: do not touch logits",
    ),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_target_that_cannot_be_made_is_a_usage_error_in_one_sentence(name: str) -> None:
    make, sentence = UNUSABLE[name]
    with pytest.raises(TargetError) as error:
        session_of(make())
    assert str(error.value) == f"target 'mine:Adapter': {sentence}"


PLAIN = {
    "::error file=a::b": ": :error file=a::b",
    "ok\n  ::set-output name=a::b": "ok\n  : :set-output name=a::b",
    "ok\r::stop-commands::x": "ok\\x0d::stop-commands::x",
    "a ##[error]b ##vso[task]": "a # #[error]b # #vso[task]",
    "\x1b[31mred\x9b": "\\x1b[31mred\\x9b",
    "\ud800\u202e\ufffe\x00": "\\ud800\\u202e\\ufffe\\x00",
    "a\tb\u00e9\u4e2d": "a\tb\u00e9\u4e2d",
    "w" * 50: "w" * 37 + "...",
}


@pytest.mark.parametrize("text", PLAIN)
def test_plain_text_shows_what_it_defuses(text: str) -> None:
    assert plain(text, 40) == PLAIN[text]


def test_plain_text_of_one_line_has_one_line() -> None:
    assert plain("a\r\nb\n::c\td\u2028e", 40, one_line=True) == "a b ::c d e"
