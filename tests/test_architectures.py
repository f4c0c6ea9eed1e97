"""The table of architectures: what it measures, what it catches, how it reads; and the banks that hold every type."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specbench import architectures
from specbench.architectures import Finding, examine, survey, table
from specbench.banks import HFBank
from specbench.cli import main
from specbench.protocols import Cache
from specbench.reference.hf import HFModel
from specbench.reference.hf_tiny import TINY_NAMES
from specbench.reference.hf_types import MODEL_TYPES
from specbench.reference.kv_cache import ContiguousCache
from specbench.steps import FlatTree

REFUSED = ["falcon-alibi", "llama-dynamic"]


def test_every_known_type_holds_and_every_refusal_has_its_reason():
    findings = {one.name: one for one in survey()}
    assert list(findings) == list(TINY_NAMES)
    assert set(findings) == {*MODEL_TYPES, *REFUSED}
    assert {name: one.verdict for name, one in findings.items()} == {
        name: "refused" if name in REFUSED else "holds" for name in findings
    }
    for name in REFUSED:
        assert findings[name].error is findings[name].bound is None
        assert "is refused: " in findings[name].reason


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "phi", "falcon"])
def test_types_without_a_cast_are_held_to_fp64(name):
    found = examine(name)
    assert (found.verdict, found.bound) == ("holds", 1e-9)
    assert found.error < 1e-12


def windowless(model: HFModel, mask: Tensor, position_ids: Tensor, window: int | None) -> Tensor:
    return mask


@pytest.mark.parametrize("name", ["mistral", "qwen2", "gemma2", "gemma3_text"])
def test_a_window_left_out_of_the_mask_is_wrong(name, monkeypatch):
    monkeypatch.setattr(HFModel, "_within", windowless)
    found = examine(name)
    assert found.verdict == "wrong"
    assert found.error > 1e-2


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "phi", "falcon", "mixtral", "deepseek_v2", "deepseek_v3"])
def test_positions_by_row_are_wrong(name, monkeypatch):
    """In types with partial rotary too, where only some dimensions turn."""
    right = HFModel._run

    def by_row(model: HFModel, flat: FlatTree, mask: Tensor, cache: Cache) -> Tensor:
        rows = torch.arange(mask.shape[1])[-flat.num_rows :]
        return right(model, FlatTree(flat.tokens, rows, flat.mask, flat.node_of_row, flat.row_of_node), mask, cache)

    monkeypatch.setattr(HFModel, "_run", by_row)
    found = examine(name)
    assert found.verdict == "wrong"
    assert found.error > 1e-2


def test_alibi_by_row_is_wrong(monkeypatch):
    monkeypatch.setattr(HFModel, "_alibi_mask", lambda model, mask, position_ids: model._additive(mask))
    found = examine("bloom")
    assert found.verdict == "wrong"
    assert found.error > 1e-2


def test_a_commit_that_keeps_the_wrong_rows_is_wrong(monkeypatch):
    """The root and the first three nodes instead of the side path."""
    right = ContiguousCache.commit
    monkeypatch.setattr(
        ContiguousCache, "commit", lambda cache, prefix_len, rows: right(cache, prefix_len, range(len(rows)))
    )
    found = examine("gpt2")
    assert (found.verdict, found.bound) == ("wrong", 1e-9)
    assert "after a commit" in found.reason


def test_a_type_that_transformers_lacks_is_missing_not_wrong(monkeypatch):
    monkeypatch.setattr(architectures, "tiny_config", lambda name: None)
    found = examine("gpt2")
    assert (found.verdict, found.error) == ("missing", None)
    assert found.reason.startswith("not in this transformers (5.")


def test_an_unknown_name_is_refused_with_the_list():
    with pytest.raises(ValueError) as refusal:
        examine("t5")
    assert str(refusal.value) == f"name = 't5' must be one of {', '.join(TINY_NAMES)}"


FINDINGS = [
    Finding("gpt2", "learned positions", "holds", 1.4e-15, 1e-9, "fp64 all through"),
    Finding("falcon-alibi", "ALiBi", "refused", None, None, "a | b"),
]


def test_the_table_as_text():
    assert table(FINDINGS) == (
        "type          special            verdict  error  bound  reason\n"
        "gpt2          learned positions  holds    1e-15  1e-09  fp64 all through\n"
        "falcon-alibi  ALiBi              refused  -      -      a | b"
    )


def test_the_table_as_markdown_escapes_its_separator():
    assert table(FINDINGS, markdown=True) == (
        "| type | special | verdict | error | bound | reason |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        "| gpt2 | learned positions | holds | 1e-15 | 1e-09 | fp64 all through |\n"
        "| falcon-alibi | ALiBi | refused | - | - | a \\| b |"
    )


@pytest.mark.parametrize(("verdict", "code"), [("holds", 0), ("refused", 0), ("missing", 0), ("wrong", 1)])
def test_the_command_prints_the_table_and_fails_only_when_one_is_wrong(verdict, code, monkeypatch, capsys):
    findings = [Finding("gpt2", "learned positions", verdict, None, None, "why")]
    monkeypatch.setattr(architectures, "survey", lambda: findings)
    assert main(["architectures", "--markdown"]) == code
    assert capsys.readouterr().out == table(findings, markdown=True) + "\n"


def test_every_driven_type_is_in_a_bank_and_only_exact_ones_in_the_exact_bank():
    banks = {name: HFBank(name) for name in HFBank.TYPES}
    assert {one for names in HFBank.TYPES.values() for one in names} == set(MODEL_TYPES)
    for bank in banks.values():
        for idx in range(bank.num_models):
            assert bank.model(idx).is_exact or not bank.exact
            assert bank.model(idx).model.config.model_type == HFBank.TYPES[bank.name][idx]


def test_the_oracle_of_an_eager_bank_has_its_softmax_in_fp64_where_there_is_one():
    bank = HFBank("hf-eager")
    attentions = [bank.wide(idx).model.config._attn_implementation for idx in range(bank.num_models)]
    assert attentions == ["sdpa", "sdpa", "sdpa", "specbench_tap", "eager"]
