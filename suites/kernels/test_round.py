"""The whole round over static buffers: the texts and cache rows of plain decoding, and nothing read on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specbench.kernels.launch import CannotRun
from specbench.kernels.round import Round
from specbench.suites.kernels import DEVICE
from specbench.suites.kernels.rounds import MODELS, PROMPTS, rounds_rightly
from specbench.tree import UNUSED

# What needs a value, or a shape that depends on values, and so waits for the device or cannot be recorded.
READS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique", "lift_fresh")


class NoReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in READS, f"a round calls {func}"
        return func(*args, **(kwargs or {}))


def a_round(**named: Any) -> Round:
    sizes = {"num_sequences": 2, "max_nodes": 4, "max_depth": 3, "capacity": 16} | named
    return Round(MODELS["grouped"].to(torch.float64, DEVICE), **sizes)


@pytest.mark.parametrize(("model", "page"), [("grouped", 4), ("windowed", 0)])
def test_rounds_are_plain_decoding(model: str, page: int) -> None:
    assert rounds_rightly(Round, model, page=page)


def test_rounds_at_a_temperature_are_the_rule_with_the_same_coins() -> None:
    assert rounds_rightly(Round, "grouped", page=0, sampled=True)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_round_reads_nothing_and_keeps_its_buffers(sampled: bool) -> None:
    one = a_round(page=4, sampled=sampled)
    one.prefill(PROMPTS[:2])
    before = [x.data_ptr() for x in (one.tokens, one.parents, one.prefix_lens, one.emitted, one.num_accepted)]
    one.parents[:, 1] = 0
    with NoReads():
        one.step()
    assert [x.data_ptr() for x in (one.tokens, one.parents, one.prefix_lens, one.emitted, one.num_accepted)] == before


def test_a_round_that_would_not_fit_is_refused_before_it_runs() -> None:
    one = a_round()
    one.prefill([[1] * 9, [2]])
    one.step()  # 8 cached; up to 12 afterwards
    one.step()
    with pytest.raises(ValueError, match=r"a prefix of up to 16 rows and a tree of 4 do not fit into capacity = 16"):
        one.step()
    one.read()
    assert one.prefix_lens.tolist() == [10, 2]
    one.step()


def test_nan_is_told_when_a_round_is_read() -> None:
    model = MODELS["grouped"].to(torch.float64, DEVICE)
    model._head = model._head * torch.nan
    one = Round(model, num_sequences=1, max_nodes=2, max_depth=1, capacity=8)
    one.prefill([[1, 2]])
    one.step()
    with pytest.raises(ValueError, match="sequence 0: no token follows: there was no round yet, its target"):
        one.read()


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"max_nodes": 16}, r"max_nodes = 16 must be at least 1 and below capacity = 16"),
        ({"page": 3}, r"capacity = 16 must be a multiple of page = 3"),
        ({"page": 8, "page_table": torch.zeros(2, 2)}, r"page_table must hold each of the pages 0 to 3 once"),
    ],
)
def test_what_does_not_fit_is_refused(named: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        a_round(**named)


@pytest.mark.skipif(DEVICE == "cuda", reason="a graph can be captured here")
def test_a_graph_without_a_gpu_is_refused() -> None:
    one = a_round()
    with pytest.raises(
        CannotRun, match="a CUDA graph cannot be captured on cpu: move the model to a GPU, or call step"
    ):
        one.capture()
    with pytest.raises(CannotRun, match=r"no CUDA graph of this round: call capture\(\) first"):
        one.replay()


@pytest.mark.skipif(DEVICE != "cuda", reason="CUDA graphs need a GPU: bash .ci/gpu runs this there")
@pytest.mark.parametrize("page", [0, 4])
def test_a_graphs_rounds_are_plain_decoding(page: int) -> None:
    assert rounds_rightly(Round, "grouped", page=page, captured=True)


def test_a_round_without_a_text_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a round has no text to go on: call prefill\(prompts\) first"):
        a_round().step()
    with pytest.raises(CannotRun, match=r"a round cannot run a object: give it rows"):
        Round(object(), num_sequences=1, max_nodes=1, max_depth=1, capacity=2)  # type: ignore[arg-type]


def test_unused_rows_of_all_but_the_root_decode_plainly() -> None:
    one = a_round()
    one.prefill(PROMPTS[:2])
    assert (one.parents[:, 1:] == UNUSED).all()
    one.step()
    assert one.num_accepted.tolist() == [0, 0]
