"""A Medusa-style object as drafter: its tree by hand, where its heads look from, bad choices refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specbench import cli
from specbench.drafters.medusa import MedusaDrafter, ToyMedusa
from specbench.drafters.toys import tiny_model
from specbench.protocols import SeededCoins
from specbench.tree import DraftTree
from specbench.types import GREEDY

BUDGET: dict[str, Any] = {"max_depth": 9, "sampling": GREEDY, "coins": SeededCoins(0)}


class Scripted:
    """Head h ranks the tokens t, t + 1, ... with t = 10 (h + 1) + the last token it reads."""

    def __call__(self, input_ids: torch.Tensor, *, output_orig: bool = False) -> Any:
        rows = torch.zeros(2, 1, input_ids.shape[1], 64)
        for head in range(2):
            for at, token in enumerate(input_ids[0].tolist()):
                for rank in range(10):
                    rows[head, 0, at, (10 * (head + 1) + token + rank) % 64] = 10 - rank
        return rows, None, rows[0]


def tree(choices: list[tuple[int, ...]], context: list[int], *, max_nodes: int = 9) -> DraftTree:
    return MedusaDrafter(Scripted(), choices).draft(context, max_nodes=max_nodes, **BUDGET)


def test_heads_look_from_the_token_before_the_root() -> None:
    """Context 7 3: the heads stand at 7, the root is 3, head 0 gives 17 and 18 below it, head 1 27, 28 below those."""
    found = tree([(0, 1), (0,), (1,), (0, 0), (1, 0)], [7, 3])
    assert found.token_list == [3, 17, 18, 27, 28, 27]
    assert found.parents.tolist() == [-1, 0, 0, 1, 1, 2]


def test_a_budget_cuts_the_deepest_off_first() -> None:
    choices = [(0,), (1,), (0, 0), (1, 0)]
    assert tree(choices, [7, 3], max_nodes=3).token_list == [3, 17, 18, 27]
    shallow = MedusaDrafter(Scripted(), choices).draft([7, 3], max_nodes=9, **(BUDGET | {"max_depth": 1}))
    assert shallow.token_list == [3, 17, 18]
    assert tree(choices, [7, 3], max_nodes=0).num_nodes == 1


def test_a_text_of_one_token_has_nothing_to_look_from() -> None:
    assert tree([(0,)], [3]).num_nodes == 1


@pytest.mark.parametrize(
    ("choices", "sentence"),
    [
        ([(0, 1)], r"choices holds \[0, 1\] without its parent \[0\]"),
        ([()], r"choices holds \[\], must be ranks"),
        ([(-1,)], r"choices holds \[-1\], must be ranks"),
        ([(0,), (0, 0), (0, 0, 0)], r"choices go 3 deep and 1 wide, the model has 2 heads of 64 tokens"),
    ],
)
def test_choices_that_make_no_tree_are_refused(choices: list[tuple[int, ...]], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        tree(choices, [7, 3])


def test_a_real_forward_drafts_what_its_heads_rank_first() -> None:
    """By a second way: the hidden state of the whole forward, the blocks and matrices written out."""
    base = tiny_model(19)
    model = ToyMedusa(base, num_heads=3)
    context = [3, 1, 4, 1, 5]
    found = MedusaDrafter(model, [(0,), (0, 0), (0, 0, 0)]).draft(context, max_nodes=3, **BUDGET)
    hidden = base(torch.tensor([context]), output_hidden_states=True).hidden_states[-1][0, -2]
    ranked = []
    for head in range(3):
        inner = model._blocks[head] @ hidden
        ranked.append(int((model._matrices[head] @ (hidden + inner / (1 + (-inner).exp()))).argmax()))
    assert found.token_list == [5, *ranked]


def test_the_claims_about_drafters_hold(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "check",
        "specbench.drafters.medusa:Medusa",
        "--hypothesis-profile=quick",
        "-k",
        "drafter and tiny-fp64",
        "-q",
    ]
    assert cli.main([*words, "-p", "no:cacheprovider"]) == 0
    out = capsys.readouterr().out
    assert "drafter.tree" in out
    assert "BUG" not in out
