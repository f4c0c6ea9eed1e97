"""bench.diagnosis: made-up rounds for each cause, with the quotients worked out by hand, and the command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specbench import cli
from specbench.bench.diagnosis import Diagnosis, diagnose, told
from specbench.bench.metrics import RoundCounts
from specbench.bench.rows import Gate, Row, Run, Setting

NUM_ROUNDS = 10  # behind the first, which emits one token
PROMPTS = ("a", "b", "c")


def row(setting: str, prompt: str, rounds: list[RoundCounts], draft: float, verify: float, host: float) -> Row:
    """Seconds a round; the first token comes at once. A round's host time is half commit."""
    num, decode = len(rounds), len(rounds) * (draft + verify + host)
    phases = {"draft": num * draft, "verify": num * verify, "commit": num * host / 2, "decode": decode}
    rounds = [RoundCounts(rounds[0].nodes, rounds[0].depth, 0, 1), *rounds]
    tokens = tuple(range(sum(one.emitted for one in rounds)))
    num_rows = sum(1 + (one.nodes or 0) for one in rounds)
    return Row("k", setting, prompt, "code", 0, 7, tokens, decode, 0.0, 1, tuple(rounds), phases, num_rows)


def made(
    setting: Setting,
    accepted: list[int],
    *,
    nodes: int = 4,
    depth: int = 4,
    draft: float = 0.0,
    verify: float = 1.5,
    host: float = 0.1,
    plain: float = 1.0,
    forward: Mapping[str, float] | None = None,
    bytes_: Mapping[str, int] | None = None,
) -> Run:
    """Plain decoding: a forward and 0.1 of the host. accepted: of the rounds, over and over."""
    rounds = [RoundCounts(nodes, depth, one, one + 1) for one in (accepted * NUM_ROUNDS)[:NUM_ROUNDS]]
    num_tokens = sum(one.emitted for one in rounds)
    rows = []
    for prompt in PROMPTS:
        rows.append(row("plain", prompt, [RoundCounts(0, 0, 0, 1)] * num_tokens, 0.0, plain, 0.1 * plain))
        rows.append(row(setting.name, prompt, rounds, draft, verify, host))
    settings = {"plain": Setting("plain", batch=setting.batch), setting.name: setting}
    others: dict[str, tuple[Mapping[str, Any], ...]] = {
        "cost": ({"kind": "cost", "model": "own", "seconds": forward or {"1": 1.0, "5": 1.5, "9": 2.0}},)
    }
    if bytes_ is not None:
        others["memory"] = ({"kind": "memory", "setting": setting.name, "bytes": bytes_},)
    header = {"definition": {"settings": {name: one.as_fields() for name, one in settings.items()}}}
    return Run(header, tuple(rows), {name: Gate(name, "EQUAL", "all the same") for name in settings}, others)


CHAIN = Setting("s", drafter="lookup", gamma=4)


def only(run: Run) -> Diagnosis:
    (found,) = diagnose(run)
    return found


def test_a_drafter_that_is_never_right() -> None:
    """R = 1.6 and T = 1.1: 1.45 tokens would pay, 1 comes. Gamma 1 takes 1.125 + 0.1 for one token, still above 1.1;
    with all four accepted it would be 5 x 1.1 / 1.6."""
    found = only(made(CHAIN, [0]))
    assert (found.cause, found.length, found.break_even) == ("drafter quality", 1.0, pytest.approx(1.6 / 1.1))
    assert found.full == pytest.approx(5 * 1.1 / 1.6)
    assert found.mended == {
        "draft cost": pytest.approx(1.1 / 1.6), "host overhead": pytest.approx(1.1 / 1.6),
        "gamma": pytest.approx(1.1 / 1.225),
    }  # fmt: skip
    assert found.sentence == "drafter quality: 1.00 tokens a round, 1.45 would break even"


def test_a_gamma_that_is_too_long() -> None:
    """Half of the rounds accept one of eight: 1.5 tokens in 2.1. Gamma 1 takes 1.125 + 0.1 for as many."""
    found = only(made(replace(CHAIN, gamma=8), [0, 1], nodes=8, depth=8, verify=2.0))
    assert (found.cause, found.best_gamma) == ("gamma", 1)
    assert found.pooled == pytest.approx(1.5 * 1.1 / 2.1)
    assert found.mended["gamma"] == pytest.approx(1.5 * 1.1 / 1.225)


def test_a_tree_that_is_too_wide() -> None:
    """9 rows take 2.0, a chain of its depth 3 rows and 1.25."""
    found = only(made(replace(CHAIN, gamma=2, width=4), [0, 1], nodes=8, depth=2, verify=2.0))
    assert found.cause == "tree too wide"
    assert found.mended["tree too wide"] == pytest.approx(1.5 * 1.1 / (2.1 - 0.75))
    assert (found.rows, found.cost_ratio) == (9.0, pytest.approx(2.0))


def test_a_host_that_takes_more_than_plain_decodings() -> None:
    """0.8 a round, where a plain one takes 0.1: 2 tokens in 2.3, without the 0.7 in 1.6. Gamma 1 would take 1.925."""
    found = only(made(CHAIN, [1], host=0.8))
    assert found.cause == "host overhead"
    assert found.mended["host overhead"] == pytest.approx(2 * 1.1 / 1.6)
    assert found.mended["gamma"] == pytest.approx(2 * 1.1 / (1.125 + 0.8))


def test_a_drafter_that_is_too_slow() -> None:
    """3 tokens in 2.0 + 1.5 + 0.1; drafts for nothing leave 1.6, gamma 2 takes 1.25 + 1.0 + 0.1."""
    found = only(made(CHAIN, [2], draft=2.0))
    assert (found.cause, found.mended["draft cost"]) == ("draft cost", pytest.approx(3 * 1.1 / 1.6))
    assert (found.best_gamma, found.mended["gamma"]) == (2, pytest.approx(3 * 1.1 / 2.35))


def test_a_batch_that_fills_the_machine() -> None:
    """Eight texts: 8 rows take 1.1 and 40 rows 3.3, 3 times as much, where alone 5 rows take 1 + 0.1 x 4 / 7."""
    forward = {"1": 1.0, "8": 1.1, "40": 3.3}
    run = made(replace(CHAIN, batch=8), [1], verify=3.3 / 8, host=0.01, plain=1.1 / 8, forward=forward)
    found = only(run)
    pooled = 2 * 1.1 * (1.1 / 8) / (3.3 / 8 + 0.01)
    assert (found.cause, found.pooled) == ("batch", pytest.approx(pooled))
    assert found.mended["batch"] == pytest.approx(pooled * 3 / (1 + 0.1 * 4 / 7))


def test_memory_that_is_nearly_all_there_is() -> None:
    found = only(made(CHAIN, [1], host=0.8, bytes_={"peak": 95, "total": 100}))
    assert (found.cause, found.peak_share) == ("memory", 0.95)
    assert found.sentence.startswith("memory: the peak is 95% of all there is, so that it pages; 2.00 tokens a round")


def test_a_device_on_which_verifying_costs_more_than_drafts_can_give() -> None:
    """5 rows take 6: even 5 tokens a round are 5 x 1.1 / 6.1, and gamma 1 takes 2.25 + 0.1 for 2."""
    found = only(made(CHAIN, [4], verify=6.0, forward={"1": 1.0, "5": 6.0}))
    assert (found.cause, found.full) == ("verify cost", pytest.approx(5 * 1.1 / 6.1))
    assert found.sentence.startswith("verify cost: with every draft accepted it would be 0.90x; ")


def test_one_that_is_faster_has_no_cause() -> None:
    found = only(made(CHAIN, [4]))
    assert (found.cause, found.all_accepted) == ("none", 1.0)
    assert "    100% of the rounds accepted all: a larger gamma may gain" in told([found])


def test_a_decoder_that_tells_its_tokens_alone_is_held_against_the_break_even() -> None:
    run = made(CHAIN, [0])
    blind = tuple(
        replace(
            one, phases=None, num_rows=None, rounds=tuple(replace(each, nodes=None, depth=None) for each in one.rounds)
        )
        for one in run.rows
    )
    found = only(replace(run, rows=blind))
    assert (found.cause, found.mended, found.full, found.shares) == ("drafter quality", {}, None, None)
    assert told([found]) == [
        "s: 0.69x [0.69, 0.69], drafter quality: 1.00 tokens a round, 1.45 would break even",
        "    pooled over all tokens 0.69x",
    ]


def test_what_did_not_pass_the_gate_is_not_diagnosed() -> None:
    run = made(CHAIN, [0])
    wrong = replace(run, gates={**run.gates, "s": Gate("s", "BUG", "wrong")})
    with pytest.raises(ValueError, match="no setting that drafts has passed the gate"):
        diagnose(wrong)
    with pytest.raises(ValueError, match="there is nothing to be faster than"):
        diagnose(replace(run, gates={}))


def test_the_command_tells_all_or_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import bench_file

    file = bench_file.write(tmp_path / "rows.jsonl")
    assert cli.main(["diagnose", str(file)]) == 0
    assert "\nngram-2: 1.25x " in "\n" + capsys.readouterr().out
    assert cli.main(["diagnose", str(tmp_path), "--setting", "slow"]) == 0
    assert capsys.readouterr().out.startswith("slow: 0.50x [0.50, 0.50], ")
    assert cli.main(["diagnose", str(tmp_path), "--setting", "slo"]) == 2
    assert capsys.readouterr().err.startswith("specbench: unknown setting 'slo': did you mean slow?")
