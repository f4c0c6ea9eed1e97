"""Right decoders that do unusual things are never accused, by any claim; and the command that shows it can fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sessions import session_on

from specbench import cli, control_run
from specbench.claims import CLAIMS
from specbench.control_run import NUM_PARTS, Outcome, Task, judge_all
from specbench.judge import Failed, RunSession, Skipped
from specbench.loading import load_target
from specbench.profiles import Profile
from specbench.record import EQUAL, NOISE
from specbench.reference.controls.registry import CONTROLS
from specbench.reference.decoder import Decoder
from specbench.reference.model import LlamaConfig, LlamaModel, tiny_llama
from specbench.reference.target import ReferenceTarget
from specbench.tree import DraftTree
from specbench.types import Round

ONE_CASE = Profile("one case", 1, num_real=1, real_prompts=1, real_tokens=8, real_dtypes=())
FAULT = "specbench.reference.faults.bank:sibling_leak"
# 0 - 1 - 3, 4; 0 - 2 - 5: drafted level by level, the last node last.
TREE = DraftTree.of((7, 1, 2, 3, 4, 5), (-1, 0, 0, 1, 1, 2))
# What the issue asks for, by name, so that losing one is seen.
ASKED_FOR = {
    "path_batch",
    "depth_first_rows",
    "breadth_first_rows",
    "index_positions",
    "recompute_at_commit",
    "recompute_in_next_round",
    "sampler_match",
    "nan_beyond_the_length",
    "ring_longer_than_its_window",
    "duplicate_siblings",
    "split_sums",
}


def accusations(session: RunSession, subject: str = "tiny-fp64") -> list[str]:
    """By the claims about greedy decoding: those about laws take a minute a control, `specbench controls` has them."""
    found = []
    for claim in CLAIMS:
        if claim.startswith("law."):
            continue
        try:
            session.judge(claim, subject)
        except Skipped:
            continue
        except Failed as failure:
            found.append(str(failure))
    return found


def model(windows: tuple[int, ...] = ()) -> LlamaModel:
    return tiny_llama(
        LlamaConfig(31, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, windows=windows), seed=0
    )


def behind(control: str, tree: DraftTree = TREE, **keywords: Any) -> Decoder:
    """A control with a tree forwarded behind three tokens."""
    decoder: Decoder = CONTROLS[control].make().build(model(), None, **keywords)
    decoder.prefill([4, 5, 6])
    decoder.forward_tree(tree)
    return decoder


def test_the_controls_that_were_asked_for_are_there() -> None:
    assert set(CONTROLS) >= ASKED_FOR


@pytest.mark.parametrize("control", CONTROLS)
def test_a_control_is_accused_by_no_claim(control: str) -> None:
    assert accusations(session_on(CONTROLS[control].make(), profile=ONE_CASE, seed=3)) == []


@pytest.mark.parametrize("control", ["index_positions", "recompute_in_next_round", "split_sums"])
@pytest.mark.parametrize("subject", ["tiny-bf16", "hf-tolerant"])
def test_a_control_is_accused_by_no_claim_in_low_precision_or_over_transformers(control: str, subject: str) -> None:
    assert accusations(session_on(CONTROLS[control].make(), profile=ONE_CASE, seed=3), subject) == []


@pytest.mark.parametrize("claim", ["law.exact", "law.params", "law.support", "law.acceptance_bound"])
def test_other_lossless_rules_keep_the_law(claim: str) -> None:
    record = session_on(CONTROLS["other_rules"].make(), profile=ONE_CASE, seed=3).judge(claim, "tiny-fp64")
    assert (record.verdict, record.num_cases > 0) == (EQUAL, True)


@pytest.mark.parametrize("control", CONTROLS)
def test_a_control_is_a_target_by_its_name(control: str) -> None:
    assert load_target(control_run.NAMES[control]).has_build


ORDERS = {
    "depth_first_rows": [0, 1, 3, 4, 2, 5],
    "breadth_first_rows": [0, 1, 2, 3, 4, 5],
    "last_sibling_first": [0, 2, 5, 1, 4, 3],
    "path_batch": [0, 1, 3, 0, 1, 4, 0, 2, 5],
}


@pytest.mark.parametrize("control", ORDERS)
def test_rows_lie_as_the_control_says(control: str) -> None:
    flat = behind(control).last_flat
    assert flat is not None and flat.node_of_row.tolist() == ORDERS[control]


def test_breadth_first_rows_are_no_longer_in_node_order_where_nodes_are_not() -> None:
    flat = behind("breadth_first_rows", DraftTree.of((7, 1, 2, 3), (-1, 0, 1, 0))).last_flat
    assert flat is not None and flat.node_of_row.tolist() == [0, 1, 3, 2]


@pytest.mark.parametrize(("control", "home"), [("index_positions", 5), ("keys_turned_when_read", 0)])
def test_a_drafted_key_lies_in_the_cache_turned_to_its_home_and_is_read_where_its_token_stands(
    control: str, home: int
) -> None:
    """Node 2 has index 2 behind three rows, and stands at position 3 + 1."""
    decoder, right = behind(control), behind("depth_first_rows")
    cache: Any = decoder._cache
    read, held = cache.rows(0)[0][:, 5], cache._held.rows(0)[0][:, 5]
    own = right._cache.rows(0)[0][:, 3 + 4]  # type: ignore[attr-defined]
    turned = cache._turned(0, held[:, None], [4 - home])[:, 0]
    assert torch.allclose(read, own) and torch.allclose(turned, own) and not torch.allclose(held, own)


def test_a_row_is_owed_until_the_next_forward_computes_it_again() -> None:
    decoder = behind("recompute_in_next_round")
    decoder.commit([2, 5])
    in_cache = decoder._cache.length
    decoder.forward_tree(DraftTree.of((9,), (-1,)))
    flat = decoder.last_flat
    assert flat is not None and (in_cache, decoder.cache_len, flat.tokens.tolist()) == (3, 6, [7, 2, 5, 9])


@pytest.mark.parametrize("control", ["path_batch", "recompute_at_commit", "recompute_in_next_round"])
def test_rows_that_are_computed_again_are_remarked_and_no_bug(control: str) -> None:
    record = session_on(CONTROLS[control].make(), seed=1).judge("cost.rows", "tiny-fp64")
    assert record.verdict == EQUAL and any("lost speed, not a bug" in one for one in record.remarks)


class _PrefixAgain(Decoder):
    def round(self, context: list[int], **keywords: Any) -> tuple[Round, str | None]:
        self.prefill(context[:-1])
        return super().round(context, **keywords)


class _RecomputingTwice(CONTROLS["recompute_at_commit"].make()._decoder):  # type: ignore[misc]
    def commit(self, path: list[int]) -> None:
        length = self.cache_len
        super().commit(path)
        tokens = self._tokens[length:]
        self.truncate(length)
        self.extend(tokens)


@pytest.mark.parametrize("decoder", [_PrefixAgain, _RecomputingTwice])
@pytest.mark.parametrize("seed", range(3))
def test_a_prefix_encoded_again_and_accepted_rows_computed_thrice_are_bugs(decoder: type[Decoder], seed: int) -> None:
    session = session_on(ReferenceTarget(decoder=decoder), seed=seed)
    with pytest.raises(Failed, match="rows were forwarded"):
        session.judge("cost.rows", "tiny-fp64")


def test_a_difference_below_rounding_is_noise() -> None:
    assert session_on(CONTROLS["split_sums"].make()).judge("tree.logits", "tiny-bf16").verdict == NOISE


def test_the_command_gives_a_right_decoder_a_line_and_exits_with_zero(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_run, "NAMES", {"path_batch": control_run.NAMES["path_batch"]})
    code = cli.main(["controls", "--cases", "20", "--seed", "1", "--workers", "1"])
    first, line, total = capsys.readouterr().out.splitlines()
    assert (code, first) == (0, "right decoders: 1, cases: 20, seed: 1, processes: 1")
    assert line.startswith("path_batch  ") and line.endswith("; 0 accusations") and total.startswith("total  ")


def test_the_command_prints_accusations_in_full_and_exits_with_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "controls.json"
    code = cli.main(["controls", FAULT, "--cases", "60", "--seed", "1", "--workers", "1", "--json", str(file)])
    found = json.loads(file.read_text("utf-8"))["targets"][FAULT]["accusations"]
    printed = capsys.readouterr().out
    assert code == 1 and found
    assert all(one["message"] in printed and f"--replay {one['replay']}" in one["message"] for one in found)


def test_the_command_answers_an_unknown_target_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["controls", "specbench.reference.controls.registry:path_bach", "--workers", "1"])
    assert (code, "did you mean path_batch?" in capsys.readouterr().err) == (2, True)


def test_two_processes_come_to_what_one_comes_to() -> None:
    names = {one: control_run.NAMES[one] for one in ("sampler_match", "path_batch")}
    one, two = (
        {name: str(outcome) for name, outcome in judge_all(names, num_cases=4, num_workers=num, seed=5).items()}
        for num in (1, 2)
    )
    assert one == two and all("cases" in line for line in one.values())


def test_every_control_gets_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_run, "judge", lambda task: Outcome(num_cases=min(7, task.max_cases)))
    outcomes = judge_all({"a": "a", "b": "b", "c": "c"}, num_cases=100, num_workers=1, seed=0)
    assert [one.num_cases for one in outcomes.values()] == [34, 34, 34]


def test_a_target_on_which_nothing_can_be_judged_ends_after_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: list[Task] = []
    monkeypatch.setattr(control_run, "judge", lambda task: (tasks.append(task), Outcome())[1])
    judge_all({"a": "a"}, num_cases=100, num_workers=1, seed=0)
    assert len(tasks) == NUM_PARTS


@pytest.mark.parametrize("drafter", ["self_tree", "caching"])
def test_drafts_have_copies_and_a_drafter_is_told_of_its_own_nodes(drafter: str) -> None:
    """Once the caching drafter was told numbers of nodes that it had not drafted."""
    target = CONTROLS["duplicate_siblings"].make()
    decoder = target.build(model(), target.build_drafter(model(), name=drafter))
    generation = decoder.generate([4, 5, 6], max_new_tokens=12)
    first = generation.rounds[0]
    assert first.tokens[1] == first.tokens[2] and first.parents[1:3] == (0, 0)
    assert all(len(one.path) == 3 for one in generation.rounds[:-1])


@pytest.mark.parametrize("control", CONTROLS)
def test_a_target_that_drafts_for_itself_accepts_all_in_every_control(control: str) -> None:
    """A claim in which one case of twelve shows what a control does to a drafter that is told what was accepted."""
    record = session_on(CONTROLS[control].make(), seed=11).judge("drafter.self_draft", "tiny-fp64")
    assert record.verdict == EQUAL


def test_the_page_of_controls_names_each_of_them() -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "controls.md").read_text("utf-8")
    assert [one for one in CONTROLS if f"`{one}`" not in page] == []
