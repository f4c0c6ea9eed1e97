"""Two ways to lay a tree out as the rows of one forward, behind one signature: `(tree, prefix_len) -> FlatTree`.

`tree_mask`: one row a node and an ancestor mask. `path_batch`: every root-to-leaf path written out whole, with a
block-diagonal mask, so shared ancestors are computed once per path. Both give each node the same logits; they differ
in memory. Faulty layouts live in `faults/`.
"""

from __future__ import annotations

import torch

from specbench.steps import FlattenStep, FlatTree
from specbench.tree import DraftTree


def flatten_tree_mask(tree: DraftTree, prefix_len: int) -> FlatTree:
    """M = N rows in node order; a row sees its ancestors and itself."""
    nodes = torch.arange(tree.num_nodes)
    return FlatTree(
        tokens=tree.tokens,
        position_ids=tree.position_ids(prefix_len),
        mask=tree.ancestor_mask,
        node_of_row=nodes,
        row_of_node=nodes,
    )


def flatten_path_batch(tree: DraftTree, prefix_len: int) -> FlatTree:
    """M = total length of all root-to-leaf paths; a row sees the rows before it in its own block.

    A node on several paths has a row in each; the first one stands for it. Their values are equal, since each block
    holds the node's whole path.
    """
    nodes: list[int] = []
    row_of_node: dict[int, int] = {}
    blocks: list[torch.Tensor] = []
    for path in tree.paths():
        for node in path:
            row_of_node.setdefault(node, len(nodes))
            nodes.append(node)
        blocks.append(torch.ones(len(path), len(path), dtype=torch.bool).tril())
    node_of_row = torch.tensor(nodes)
    return FlatTree(
        tokens=tree.tokens[node_of_row],
        position_ids=tree.position_ids(prefix_len)[node_of_row],
        mask=torch.block_diag(*blocks).bool(),
        node_of_row=node_of_row,
        row_of_node=torch.tensor([row_of_node[node] for node in range(tree.num_nodes)]),
    )


LAYOUTS: dict[str, FlattenStep] = {"tree_mask": flatten_tree_mask, "path_batch": flatten_path_batch}


def flatten_causal(tokens: list[int], prefix_len: int) -> FlatTree:
    """A run of known tokens behind the cache (prefill, catch-up): plain causal rows."""
    rows = torch.arange(len(tokens))
    return FlatTree(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        position_ids=rows + prefix_len,
        mask=rows[:, None] >= rows[None, :],
        node_of_row=rows,
        row_of_node=rows,
    )
