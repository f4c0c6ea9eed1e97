"""`specbench plan`: what a model, a dtype, a context, a batch and a tree will take, before anything is loaded."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specbench import models

DTYPES = ("bf16", "fp16", "fp32")


def add_options(one: argparse.ArgumentParser, count: Callable[[str], int]) -> None:
    one.add_argument("model", metavar="MODEL", help="a name, a folder, a hub id, or a config.json")
    one.add_argument("--dtype", choices=DTYPES, default="bf16", help="of weights and cache (default bf16)")
    one.add_argument("--cache", choices=("same", "int8", "fp8"), default="same", help="of cached rows (default: same)")
    one.add_argument(
        "--context", type=count, default=2048, metavar="N", help="tokens, prompt and answer (default 2048)"
    )
    one.add_argument("--prompt", type=count, metavar="N", help="tokens of it that are the prompt (default: all but 1)")
    one.add_argument("--chunk", type=count, metavar="N", help="the prompt is encoded in pieces of N (default: at once)")
    one.add_argument("--batch", type=count, default=1, metavar="N", help="texts at once (default 1)")
    one.add_argument("--gamma", type=count, default=4, metavar="N", help="drafts in depth (default 4)")
    one.add_argument("--k", type=count, default=1, metavar="N", help="candidates at every node (default 1: a chain)")
    one.add_argument("--nodes", type=count, metavar="N", help="of the tree, in place of --gamma and --k")
    one.add_argument("--draft-model", metavar="MODEL", help="a small model that drafts: its weights and cache too")
    one.add_argument("--device", default="cpu", metavar="DEVICE", help="whose free memory is asked (default cpu)")
    one.add_argument("--memory", type=_gib, metavar="GIB", help="what there is (default: what is free here)")


def _gib(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 < found < 2**30:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of GiB > 0")
    return found


def plan(args: argparse.Namespace) -> int:
    """0: it fits. 1: it does not. 2: it cannot be said."""
    try:
        return _plan(args)
    except (ValueError, OSError) as error:
        print(f"specbench: {error}", file=sys.stderr)
        return 2


def _plan(args: argparse.Namespace) -> int:
    from specbench.bench import planner
    from specbench.types import DTYPES as TORCH

    config = _config(args.model)
    nodes = args.nodes or planner.tree_nodes(args.gamma, args.k)
    load = planner.Load(
        context=args.context,
        prompt=args.prompt or max(1, args.context - 1),
        nodes=nodes,
        batch=args.batch,
        chunk=args.chunk or 0,
        dtype=TORCH[args.dtype],
        cache="" if args.cache == "same" else args.cache,
    )
    memory = int(args.memory * 2**30) if args.memory else _free(args.device)
    drafter = 0
    if args.draft_model:
        found = planner.needs(_config(args.draft_model), load)
        drafter = found.weights + found.cache
    named = {} if args.nodes else {"gamma": args.gamma, "width": args.k}
    tree = f"a tree of {nodes} nodes" if args.nodes else f"gamma {args.gamma}, k {args.k}"
    print(f"{args.model}, {args.dtype}, by formula; Python and its libraries come on top\n")
    print("\n".join(planner.table(config, load, memory, tree=tree, drafter=drafter, **named)))
    return int(planner.needs(config, load).peak + drafter > memory)


def _config(name: str) -> Any:
    """ValueError where it is no model, or one whose layers are not a Llama's."""
    from transformers import AutoConfig

    from specbench.bench.planner import LIKE_LLAMA, config_of

    path = Path(name).expanduser()
    if path.is_file():
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{name} is not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise ValueError(f"{name} must hold an object, as a model's config.json does")
        if fields.get("model_type") in LIKE_LLAMA:  # transformers knows what the file leaves out
            fields = AutoConfig.from_pretrained(str(path), trust_remote_code=False).to_dict()
    elif path.is_dir():
        return _config(str(path / "config.json"))
    else:
        fields = AutoConfig.from_pretrained(models.fetched(name).path, trust_remote_code=False).to_dict()
    try:
        return config_of(fields, name=name)
    except KeyError as error:
        raise ValueError(f"{name} lacks {error}, which a model's config.json has") from None


def _free(device: str) -> int:
    """Bytes. ValueError where the system does not tell."""
    if device.startswith("cuda"):
        import torch

        if not torch.cuda.is_available():
            raise ValueError(f"--device {device}: there is no CUDA device here; say --memory GIB")
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        raise ValueError("free memory is read from /proc/meminfo, which only Linux has: say --memory GIB") from None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
