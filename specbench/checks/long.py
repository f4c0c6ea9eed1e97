"""The claim about long prefixes and large trees: what holds for small ones holds there. Cases are never written out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specbench import claims
from specbench.cases import Case, LongCase
from specbench.checks.noise import logits_bound
from specbench.checks.tree import raise_if_logits_differ
from specbench.probe import Probe
from specbench.record import ClaimRecord
from specbench.reference.model import LlamaModel
from specbench.reference.streaming import StreamedOracle, Trunk
from specbench.subjects import NotTested, Subject
from specbench.tree import DraftTree

ON = "judged on tiny-fp64 and tiny-fp32, the models whose oracle can afford thousands of tokens"


def check_long(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """Every node's logits against plain decoding of its own path, the prefix having come in chunks.

    A target without `extend` is given the prefix at once.
    """
    assert isinstance(case, LongCase)
    if subject.bank.real or subject.noise_dtype not in (torch.float64, torch.float32):
        raise NotTested(ON)
    oracle = subject.oracle(case)
    if type(oracle) is not LlamaModel:
        raise NotTested(ON)
    vocab_size = subject.vocab_size(case.model)
    prefix, tree = case.prefix(vocab_size), case.tree(vocab_size)
    chunk = case.chunk if "extend" in subject.has else 0
    probe = subject.open(case)
    _prefill(probe, prefix, chunk)
    actual = probe.forward_tree(tree)
    expected = _expected(subject, case, StreamedOracle(oracle), prefix, tree)
    bound = logits_bound(subject, case, prefix, tree, expected)
    when = f" in a tree of {tree.num_nodes} behind {len(prefix)} tokens" + (f", {chunk} at a time" if chunk else "")
    raise_if_logits_differ(claims.LongContextMismatch, tree, actual, expected, bound, record, when=when)


def _prefill(probe: Probe, prefix: Sequence[int], chunk: int) -> None:
    """chunk: 0 for all at once."""
    first = chunk or len(prefix)
    probe.prefill(prefix[:first])
    for start in range(first, len(prefix), max(chunk, 1)):
        probe.extend(prefix[start : start + chunk])


def _expected(
    subject: Subject, case: LongCase, oracle: StreamedOracle, prefix: Sequence[int], tree: DraftTree
) -> Tensor:
    """float64 [N, V]. The longest prefix of a seed is kept: shorter ones, asked for while a case is made smaller, are
    its beginnings."""
    with subject.clock.count("oracle"):
        trunks: dict[tuple[int, int, str], Trunk] = subject.remember(("trunks",), dict, always=True)
        key = (case.model, case.seed, oracle.codec)
        if key not in trunks or trunks[key].length < len(prefix):
            trunks[key] = oracle.trunk(prefix)
        return oracle.score_behind(trunks[key].first(len(prefix)), tree).logits
