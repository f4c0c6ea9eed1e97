"""Peak memory of a setting: measured in a process of its own, with what it consists of by formula beside it.

On the CPU a process's peak never falls, so that each setting has a fresh process: `python -m specbench.bench.memory`,
one JSON object on stdin, one on stdout. VmHWM, the peak of its resident memory, is reset by the kernel once the model
is loaded and has said two tokens (5 written to /proc/self/clear_refs), where that is allowed. On CUDA torch's
allocator and the device tell.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from specbench.bench.lean import LeanLlama
from specbench.bench.rows import Setting
from specbench.protocols import LanguageModel
from specbench.reference.memory import verify_bytes
from specbench.reference.model import LlamaConfig, LlamaModel
from specbench.types import DTYPES


def measured(
    setting: Setting, *, folder: str, dtype: str, prompt: Sequence[int], num: int, threads: int, **options: Any
) -> dict[str, Any]:
    """The record of kind "memory". options: device, draft_model, trained. RuntimeError with the child's last line."""
    spec = {
        "setting": setting.as_fields(),
        "folder": folder,
        "dtype": dtype,
        "prompt": list(prompt),
        "num": num,
        "threads": threads,
        **options,
    }
    command = [sys.executable, "-m", "specbench.bench.memory"]
    run = subprocess.run(command, input=json.dumps(spec), capture_output=True, text=True, cwd=_root())
    if run.returncode != 0:
        last = (run.stderr.strip() or "no output").splitlines()[-1]
        raise RuntimeError(
            f"the process that measures the memory of {setting.name} ended with {run.returncode}: {last}"
        )
    return {"kind": "memory", "setting": setting.name, **json.loads(run.stdout.splitlines()[-1])}


def _root() -> Path:
    """From where `specbench` is found in a bare checkout too."""
    return Path(__file__).resolve().parents[2]


def predicted(model: LanguageModel, *, context: int, rows: int, prompt: int, batch: int = 1) -> dict[str, int] | None:
    """Bytes by formula of our own decoder: weights; cache, what `context` rows of each text fill; tree, a layer of a
    round of `rows` behind them; logits, of a round; working, the most that is made on the way at one time: tree,
    logits, or the same of the prompt, `prompt` rows that are encoded at once. None for a model without a formula. A
    preallocated cache is held before decoding begins, so that it is in `loaded` and not in `working`; those of a batch
    are made when it begins."""
    if not isinstance(model, LlamaModel):
        return None
    held = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in model._weights.values()}

    def form(rows: int, prefix: int) -> tuple[int, int]:
        if batch == 1 and not isinstance(model, LeanLlama):
            return _verify_parts(model.config, rows=rows, prefix=prefix, dtype=model.dtype)
        return forward_bytes(model.config, rows=rows, prefix=prefix, dtype=model.dtype, batch=batch)

    tree, logits = form(rows, context - rows)
    filling, reading = form(prompt, 0)
    if batch == 1 and isinstance(model, LeanLlama):
        reading = 0  # nobody reads a prompt's logits there
    cache = batch * context * model.cache_spec.row_nbytes
    return {
        "weights": sum(held.values()),
        "cache": cache,
        "tree": tree,
        "logits": logits,
        "working": max(tree, logits, filling, reading) + (cache if batch > 1 else 0),
    }


def lean_bytes(config: LlamaConfig, *, rows: int, prefix: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of one forward of M rows behind P in `LeanLlama`: inside a layer, and at the end. With e bytes a number, w
    of the wide dtype (fp32 at least) and G = Hq / Hkv, the largest moment of a layer is one of

    the mask as it is made, (1 + G) M (P + M) e, of which G parts stay (none where M = 1); turning,
    M (2 hidden + 2 inner + (Hq + 2 Hkv) D) e + M (Hq + Hkv) D (2 w, + w + e where w > e); mixing, M (2 hidden + 2 inner
    + (5 Hq + 3 Hkv) D) e; feed-forward, M (3 hidden + 4 inner + (4 Hq + 3 Hkv) D) e: what the part before has named is
    let go when the next one takes the name. The end: M (hidden + 2 V) e, the logits once as they come, once by node.
    """
    e, w = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
    heads, kv_heads, size, hidden = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size
    group, keys = heads // kv_heads, prefix + rows
    one_mask = rows * keys * e if rows > 1 else 0
    turned = rows * (heads + kv_heads) * size
    inner = config.intermediate_size
    turning = rows * (2 * (hidden + inner) + (heads + 2 * kv_heads) * size) * e
    turning += turned * (2 * w + (w + e if w > e else 0))
    mixing = rows * (2 * (hidden + inner) + (5 * heads + 3 * kv_heads) * size) * e
    feed_forward = rows * (3 * hidden + 4 * inner + (4 * heads + 3 * kv_heads) * size) * e
    layer = max((1 + group) * one_mask, group * one_mask + max(turning, mixing, feed_forward))
    return layer, rows * (hidden + 2 * config.vocab_size) * e


def forward_bytes(
    config: LlamaConfig, *, rows: int, prefix: int, dtype: torch.dtype, batch: int = 1
) -> tuple[int, int]:
    """Of a forward of M rows behind P for each of B texts, inside a layer and at the end. One text is `LeanLlama`'s
    where it has no windows. Several are `generate_batch`'s packed rows over the reference's forward: all B M rows in
    everything but attention, which goes text by text and whose weights of the text before are still held; at the end
    B M (hidden + 3 V) e, the logits as they come, by node, and joined."""
    if batch == 1:
        return (lean_bytes if not any(config.windows) else _verify_parts)(config, rows=rows, prefix=prefix, dtype=dtype)
    one = verify_bytes(config, num_nodes=rows, prefix_len=prefix, dtype=dtype)
    e, heads, kv_heads, size = dtype.itemsize, config.num_heads, config.num_kv_heads, config.head_dim
    hidden, inner = config.hidden_size * e, config.intermediate_size * e
    others = (batch - 1) * rows
    # The layer before has left its gates and outputs, but no attention weights.
    attention = one.attention + others * (4 * hidden + inner + size * (3 * heads + 3 * kv_heads) * e)
    # Queries are turned in the wide dtype: they, their turned half and the sum.
    w = torch.promote_types(dtype, torch.float32).itemsize
    turning = batch * rows * (4 * hidden + inner + size * ((2 * heads + 3 * kv_heads) * e + 3 * heads * w))
    feed_forward = batch * rows * (4 * hidden + 3 * inner)
    return max(attention, turning, feed_forward), batch * rows * (hidden + 3 * config.vocab_size * e)


def _verify_parts(config: LlamaConfig, *, rows: int, prefix: int, dtype: torch.dtype) -> tuple[int, int]:
    found = verify_bytes(config, num_nodes=rows, prefix_len=prefix, dtype=dtype)
    return max(found.attention, found.feed_forward), found.logits


def _child(spec: Mapping[str, Any]) -> dict[str, Any]:
    from specbench.bench.costs import CONTEXT, WIDTHS
    from specbench.bench.sides import ADAPTIVE, MAX_NODES, OwnSide, Sides, generated

    device = spec.get("device", "cpu")
    imported = _resident("VmRSS")
    torch.set_num_threads(spec["threads"])
    setting = Setting("measured", **spec["setting"])
    sides = Sides(
        spec["folder"],
        DTYPES[spec["dtype"]],
        # An adaptive drafter times forwards behind a text of its own before it decodes.
        longest=max(len(spec["prompt"]) + spec["num"], CONTEXT + max(WIDTHS) if setting.drafter in ADAPTIVE else 0),
        device=device,
        draft_model=spec.get("draft_model", ""),
        trained=spec.get("trained"),
    )
    side = sides.make(setting)
    prompts = [spec["prompt"]] * setting.batch
    # What operators compile and keep is made now, and is not the setting's.
    generated(side, setting.batch, [one[:2] for one in prompts], 2)
    gc.collect()
    on_cuda = device.startswith("cuda")
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
        loaded = torch.cuda.memory_allocated()
    else:
        was_reset = _reset_peak()
        loaded = _resident("VmRSS")
    answer = generated(side, setting.batch, prompts, spec["num"])
    most_rows = 1 + max((one.nodes or 0 for one in answer.rounds), default=0)
    prediction = None
    if isinstance(side, OwnSide):
        rows, prompt = min(most_rows, MAX_NODES + 1), max(1, len(spec["prompt"]) - 1)
        context = len(spec["prompt"]) + spec["num"] + rows
        prediction = predicted(sides.model, context=context, rows=rows, prompt=prompt, batch=setting.batch)
    if on_cuda:
        peak, (free, total) = torch.cuda.max_memory_allocated(), torch.cuda.mem_get_info()
        sizes = {"imported": 0, "loaded": loaded, "peak": peak, "working": peak - loaded, "device": total - free}
        sizes["total"] = total
        return {"where": "cuda: torch's allocator and the device", "bytes": sizes, "predicted": prediction}
    peak = _resident("VmHWM")
    sizes = {"imported": imported, "loaded": loaded, "peak": peak, "working": peak - loaded}
    sizes["total"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    where = "cpu: VmHWM" if was_reset else "cpu: VmHWM, with the peak of loading in it"
    return {"where": where, "bytes": sizes, "predicted": prediction}


def _reset_peak() -> bool:
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return True
    return False


def _resident(name: str) -> int:
    """Bytes that /proc/self/status tells. RuntimeError where there is no such file: memory is measured on Linux."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        raise RuntimeError("memory on the CPU is read from /proc/self/status, which only Linux has") from None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


if __name__ == "__main__":
    print(json.dumps(_child(json.loads(sys.stdin.read()))))
