"""What a launcher is given that cannot be right is refused: a kernel would read somewhere else, and say nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from specbench.kernels.commit_kv import commit_kv
from specbench.kernels.draft_topk import draft_topk
from specbench.kernels.tree_attention import tree_attention
from specbench.kernels.tree_mask import tree_mask
from specbench.kernels.verify_greedy import verify_greedy
from specbench.kernels.verify_sample import verify_sample
from specbench.suites.kernels import DEVICE

COLUMN = torch.tensor([[5, 9], [5, 9]], dtype=torch.int32, device=DEVICE)[:, 0]
PARENTS = torch.tensor([-1, 0, -1, 0], dtype=torch.int32, device=DEVICE)
CU_NODES = torch.tensor([0, 2, 4], dtype=torch.int32, device=DEVICE)
LENS = torch.tensor([5, 5], dtype=torch.int32, device=DEVICE)
STRIDE = "has stride 2 in its last dimension, must be 1"


def attend(**named: Any) -> None:
    q, k = torch.zeros(4, 1, 8, device=DEVICE), torch.zeros(2, 9, 1, 8, device=DEVICE)
    given = {"lens": LENS, "cu_nodes": CU_NODES, "max_nodes": 2} | named
    tree_attention(q, k, k, given.pop("parents", PARENTS), given.pop("lens"), 1.0, **given)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"lens": COLUMN}, f"tree_attention: prefix_lens {STRIDE}"),
        ({"cu_nodes": torch.tensor([0, 9, 2, 9, 4, 9], dtype=torch.int32, device=DEVICE)[::2]}, f"cu_nodes {STRIDE}"),
        ({"max_nodes": 1}, "tree_attention: 4 rows of 2 trees are more than max_nodes = 1 each"),
        ({"window": 0}, "tree_attention: window = 0 must be None or a whole number >= 1"),
        ({"window": 2.5}, "window = 2.5 must be None or a whole number"),
        ({"num_splits": -1}, "num_splits = -1 must be None or a whole number >= 0"),
        ({"soft_cap": 0.0}, "soft_cap = 0.0 must be None or > 0"),
    ],
)
def test_attention_refuses(named: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend(**named)


def test_what_is_no_tensor_is_told_in_one_sentence() -> None:
    rows, path = torch.zeros(2, 9, 1, 4, device=DEVICE), torch.ones(2, 1, dtype=torch.int32, device=DEVICE)
    numbers = torch.zeros(4, 3, device=DEVICE)
    asked: dict[str, Callable[[], Any]] = {
        "tree_attention: prefix_lens is a list": lambda: attend(lens=[5, 5]),
        "tree_attention: cu_nodes is a numpy.ndarray": lambda: attend(cu_nodes=np.array([0, 2, 4])),
        "tree_attention: parents is a list": lambda: attend(parents=[-1, 0, -1, 0]),
        "tree_mask: parents is a list": lambda: tree_mask([-1, 0], LENS, cu_nodes=CU_NODES, max_nodes=2),  # type: ignore[arg-type]
        "verify_greedy: logits is a numpy.ndarray": lambda: verify_greedy(
            numbers.cpu().numpy(), PARENTS, PARENTS, cu_nodes=CU_NODES, max_depth=1
        ),
        "verify_sample: uniforms is a list": lambda: verify_sample(
            numbers,
            PARENTS,
            PARENTS,
            [[0.5]],
            LENS,
            cu_nodes=CU_NODES,
            max_nodes=2,
            max_depth=1,  # type: ignore[arg-type]
        ),
        "commit_kv: num_accepted is a list": lambda: commit_kv([rows], LENS, path, [1, 1]),  # type: ignore[arg-type]
        "draft_topk: logits is a list": lambda: draft_topk([[0.0, 1.0]], 1),  # type: ignore[arg-type]
    }
    told = {}
    for sentence, ask in asked.items():
        with pytest.raises(ValueError) as refused:
            ask()
        told[sentence] = str(refused.value)
    assert told == {one: f"{one}, must be a torch.Tensor: see torch.as_tensor" for one in asked}


def test_an_interpreter_that_is_asked_for_too_late_is_told() -> None:
    """What Triton's own functions are is decided when it is imported: kernels called some that could not run."""
    lines = (
        "import os, torch, triton",
        "os.environ['TRITON_INTERPRET'] = '1'",
        "from specbench.kernels.draft_topk import draft_topk",
        "draft_topk(torch.zeros(1, 3), 1)",
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", "\n".join(lines)]
    told = subprocess.run(command, env=environment, capture_output=True, text=True).stderr.splitlines()[-1]
    assert told.endswith(
        "CannotRun: draft_topk cannot run: TRITON_INTERPRET was set after Triton was imported, not before"
    )


def test_slopes_that_are_one_number_spread_out_are_refused() -> None:
    q, k = torch.zeros(4, 2, 8, device=DEVICE), torch.zeros(2, 9, 2, 8, device=DEVICE)
    slopes = torch.tensor(0.5, device=DEVICE).expand(2)
    with pytest.raises(ValueError, match="alibi_slopes has stride 0 in its last dimension, must be 1"):
        tree_attention(q, k, k, PARENTS, LENS, 1.0, cu_nodes=CU_NODES, max_nodes=2, alibi_slopes=slopes)


def test_masks_walks_and_commits_refuse_columns() -> None:
    with pytest.raises(ValueError, match=f"tree_mask: prefix_lens {STRIDE}"):
        tree_mask(PARENTS, COLUMN, cu_nodes=CU_NODES, max_nodes=2)
    with pytest.raises(ValueError, match="tree_mask: 4 rows of 2 trees are more than max_nodes = 1 each"):
        tree_mask(PARENTS, LENS, cu_nodes=CU_NODES, max_nodes=1)
    wide = torch.tensor([0, 9, 2, 9, 4, 9], dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=f"verify_greedy: cu_nodes {STRIDE}"):
        verify_greedy(torch.zeros(4, 3, device=DEVICE), PARENTS, PARENTS, cu_nodes=wide[::2], max_depth=1)
    buffers, path = [torch.zeros(2, 9, 1, 4, device=DEVICE)], torch.ones(2, 1, dtype=torch.int32, device=DEVICE)
    for lens, accepted in ((COLUMN, LENS), (LENS, COLUMN)):
        with pytest.raises(ValueError, match=STRIDE):
            commit_kv(buffers, lens, path, accepted)


def test_sampling_refuses_trees_that_are_larger_than_said() -> None:
    numbers = torch.zeros(4, 3, device=DEVICE)
    with pytest.raises(ValueError, match="verify_sample: 4 rows of 2 trees are more than max_nodes = 1 each"):
        verify_sample(
            numbers, PARENTS, PARENTS, numbers[:2], numbers[:2, 0], cu_nodes=CU_NODES, max_nodes=1, max_depth=1
        )


def test_no_more_rows_are_moved_than_a_path_is_long() -> None:
    """9 of a path of 2: the rows beyond the path were moved too."""
    rows = torch.arange(12, dtype=torch.float32, device=DEVICE).view(1, 12, 1, 1)
    lens, accepted = (torch.tensor([one], dtype=torch.int32, device=DEVICE) for one in (1, 9))
    commit_kv([rows], lens, torch.tensor([[2, 4]], dtype=torch.int32, device=DEVICE), accepted)
    assert rows.flatten().tolist() == [0, 1, 3, 5, 4, 5, 6, 7, 8, 9, 10, 11]
