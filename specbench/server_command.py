"""`specbench server`: a running server, judged by the tokens that it says of a sentinel or of a real model."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from specbench.record import BUG, EQUAL, NOT_TESTED

# Where the engine's own plain decoding cannot be asked for, ours stands in for it in these.
DTYPES = ("fp32", "bf16", "fp16")


def add_options(one: argparse.ArgumentParser, count: Any) -> None:
    """count: reads a number of at least 1."""
    one.add_argument("url", metavar="URL", help="http://HOST:PORT of the server")
    one.add_argument(
        "--checkpoint", required=True, metavar="DIR", help="what it serves: a sentinel's folder, or a real model's"
    )
    one.add_argument(
        "--api", default="openai", metavar="API", help="openai (default), llama.cpp, sglang, tgi, lightllm"
    )
    one.add_argument("--model", default="", metavar="NAME", help="as the server calls it, where it serves several")
    one.add_argument(
        "--plain-url", metavar="URL", help="the same server without drafts: what a real model's ties are judged by"
    )
    one.add_argument("--dtype", choices=DTYPES, help="that it computes a real model in, where there is no --plain-url")
    one.add_argument("--concurrency", type=count, default=4, metavar="N", help="requests at a time (default 4)")
    one.add_argument("--timeout", type=count, default=120, metavar="S", help="seconds for one request (default 120)")
    one.add_argument(
        "--retries", type=int, default=3, metavar="N", help="of a request that was turned away unread (default 3)"
    )
    one.add_argument(
        "--key-variable",
        default="OPENAI_API_KEY",
        metavar="NAME",
        help="environment variable that holds the key, if any",
    )
    one.add_argument("--text", action="store_true", help="prompts as text, where ids would be taken")
    one.add_argument("--temperature", type=float, default=0.0, metavar="T", help="of a sentinel with a law (default 0)")
    one.add_argument("--top-k", type=count, metavar="K", help="at a temperature")
    one.add_argument("--top-p", type=float, metavar="P", help="at a temperature")
    one.add_argument("--min-p", type=float, metavar="P", help="at a temperature")
    one.add_argument("--max-new-tokens", type=count, default=200, metavar="N", help="of each request (default 200)")
    one.add_argument("--seed", type=int, default=0, metavar="SEED", help="of the prompts and the draws (default 0)")
    one.add_argument("--json", type=Path, metavar="FILE", help="the verdict as data")


def run(args: argparse.Namespace) -> int:
    from specbench.models import ModelError

    try:
        if args.json is not None:
            args.json.open("a").close()
        verdict = _judged(args)
    except (ModelError, ValueError, OSError) as error:
        print(f"specbench server: {error}", file=sys.stderr)
        return 2
    if args.json is not None:
        args.json.write_text(json.dumps({"schema": 1, **verdict}, indent=2) + "\n", encoding="utf-8")
    print(f"{verdict['verdict']:10}  {verdict['sentence']}")
    for line in verdict["remarks"]:
        print(f"            {line}")
    return int(verdict["verdict"] == BUG)


def _judged(args: argparse.Namespace) -> dict[str, Any]:
    from specbench.audit import Output, audit_outputs, no_tokens
    from specbench.engine_models import RealModel, ended
    from specbench.engines import Settings
    from specbench.engines.server import Server, ServerError
    from specbench.reference.sentinel import DTYPES as TORCH
    from specbench.reference.sentinel import SYMBOLS, is_sentinel
    from specbench.regret import Oracle, audit_ties, plain_in, plain_of
    from specbench.types import Sampling

    sampling = Sampling(args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p)
    given = {
        name: getattr(args, name) for name in ("api", "model", "concurrency", "timeout", "retries", "key_variable")
    }
    server = Server(args.url, **given, tokens=not args.text)
    by_integers = is_sentinel(args.checkpoint)
    if not by_integers and not args.plain_url and not args.dtype:
        raise ValueError(
            "a real model's ties are judged by plain decoding: give --plain-url, the same server without drafts, or "
            "--dtype where it computes in fp32, bf16 or fp16"
        )
    model = None if by_integers else RealModel(args.checkpoint)
    symbols = SYMBOLS if by_integers else ""
    requests = _sentinel_requests(args, sampling) if model is None else model.requests(args.max_new_tokens)
    settings = Settings("", "", sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, args.seed)
    version, failed = server.version(), ""
    print(f"{version} at {server.url} on {args.checkpoint}", flush=True)

    def outputs_of(one: Server) -> list[Output]:
        nonlocal failed
        asked = {name: request for name, request in requests.items() if request.text or one.takes_ids}
        found: list[Output] = []
        answers = one.generate([*asked.values()], settings, symbols=symbols)
        try:
            for (name, request), answer in zip(asked.items(), answers, strict=True):
                logprobs = () if sampling.temperature else answer.logprobs
                output = Output(request.prompt, answer.tokens, name, version, request.max_new_tokens, logprobs)
                found.append(output if model is None else ended(output, model.ends))
                drafts.append((answer.num_drafted, answer.num_kept))
        except ServerError as error:
            failed = str(error)
        return found

    drafts: list[tuple[int | None, int | None]] = []
    before = server.drafts()
    outputs = outputs_of(server)
    after, told = server.drafts(), list(drafts)
    if model is None:
        from specbench.reference.sentinel import load_program

        program = load_program(args.checkpoint)
        audits = audit_outputs(program, outputs, sampling, temperature_last=version.startswith("llama.cpp"))
        audit = audits[0] if audits else no_tokens(version)
    else:
        dtype = TORCH.get(args.dtype)
        oracle = Oracle(model.folder, weights=dtype)
        reference = outputs_of(Server(args.plain_url, **given, tokens=not args.text)) if args.plain_url else []
        plain = plain_of(oracle, reference, dtype) if reference or dtype is None else plain_in(oracle, outputs, dtype)
        audit = audit_ties(oracle, plain, outputs, reference, weights=args.dtype or "")
    if failed and audit.verdict != BUG:
        audit = replace(audit, verdict=NOT_TESTED, sentence=f"after {len(outputs)} answers: {failed}")
    verified, kept = _drafts(told, before, after)
    if verified == 0 and audit.verdict == EQUAL:
        audit = replace(audit, verdict=NOT_TESTED, sentence=f"no draft was verified; {audit.sentence}")
    remarks = []
    if verified is None:
        remarks.append("it does not say how many drafts it verified: see that drafting is on")
    elif verified:
        remarks.append(f"{kept} of {verified} drafts kept")
    if server.num_retries:
        remarks.append(f"{server.num_retries} retries of requests that it had turned away unread")
    if failed:
        remarks.append(failed)
    return {"server": version, "url": server.url, "remarks": remarks, **audit.as_fields()}


def _sentinel_requests(args: argparse.Namespace, sampling: Any) -> dict[str, Any]:
    from specbench.engine_models import sentinel_requests
    from specbench.reference.sentinel import has_law, load_program

    if sampling.temperature and not has_law(args.checkpoint):
        raise ValueError(f"{args.checkpoint} has no law to draw from: export one with --law, or ask at temperature 0")
    return sentinel_requests(load_program(args.checkpoint), max_new_tokens=args.max_new_tokens, seed=args.seed)


def _drafts(told: Any, before: Any, after: Any) -> tuple[int | None, int | None]:
    """Verified and kept: by its answers, or else by its counters, which count for everybody who asks it."""
    if told and all(one is not None for pair in told for one in pair):
        return sum(one for one, _ in told), sum(one for _, one in told)
    if before is not None and after is not None:
        return after[0] - before[0], after[1] - before[1]
    return None, None
