"""`specbench server`: a running server, judged by the tokens that it says of a sentinel or of a real model."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from specbench import sampling_options
from specbench.record import BUG, EQUAL, NOT_TESTED

# Where the engine's own plain decoding cannot be asked for, ours stands in for it in these.
DTYPES = ("fp32", "bf16", "fp16")
BUG_CODE, NOT_ASKED = 1, 2  # exit codes


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
    one.add_argument("--dtype", metavar="DTYPE", help="that it computes a real model in, where there is no --plain-url")
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
    sampling_options.add(one, count, temperature="of a sentinel with a law (default 0)")
    one.add_argument("--max-new-tokens", type=count, default=200, metavar="N", help="of each request (default 200)")
    one.add_argument("--seed", type=int, default=0, metavar="SEED", help="of the prompts and the draws (default 0)")
    one.add_argument("--json", type=Path, metavar="FILE", help="the verdict as data")


def run(args: argparse.Namespace) -> int:
    """1 for BUG, 2 for what could not be asked (a wrong option, a server that fails), else 0."""
    from specbench.models import ModelError

    code = NOT_ASKED
    try:
        _write(args.json, _not_asked("the run has not come to its end"))  # in the place of an earlier run's verdict
        verdict, code = _judged(args)
    except (ModelError, ValueError, OSError) as error:
        sentence = _by_options(str(error))
        print(f"specbench server: {sentence}", file=sys.stderr)
        verdict = _not_asked(sentence)
    else:
        print(f"{verdict['verdict']:10}  {verdict['sentence']}")
        for line in verdict["remarks"]:
            print(f"            {line}")
    try:
        _write(args.json, verdict)
    except OSError as error:
        if code != NOT_ASKED:
            print(f"specbench server: {error}", file=sys.stderr)
        return BUG_CODE if verdict["verdict"] == BUG else NOT_ASKED
    return code


def _judged(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """The verdict's fields and the exit code."""
    from specbench.audit import Output, audit_outputs, no_tokens
    from specbench.engine_models import RealModel, ended
    from specbench.engines import Answer, Settings
    from specbench.engines.server import Server, ServerError
    from specbench.reference.sentinel import DTYPES as TORCH
    from specbench.reference.sentinel import SYMBOLS, is_sentinel
    from specbench.regret import Oracle, audit_ties, plain_in, plain_of

    sampling = sampling_options.sampling_of(args)
    given = {
        name: getattr(args, name) for name in ("api", "model", "concurrency", "timeout", "retries", "key_variable")
    }
    server = Server(args.url, **given, tokens=not args.text)
    by_integers = is_sentinel(args.checkpoint)
    _check_options(args, by_integers=by_integers)
    model = None if by_integers else RealModel(args.checkpoint)
    symbols = SYMBOLS if by_integers else ""
    requests = _sentinel_requests(args, sampling) if model is None else model.requests(args.max_new_tokens)
    settings = Settings("", "", sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, args.seed)
    version, failed = server.version(), ""
    print(f"{version} at {server.url} on {args.checkpoint}", flush=True)

    def outputs_of(one: Server) -> list[Output]:
        nonlocal failed
        asked = [(name, request) for name, request in requests.items() if request.text or one.takes_ids]
        answers: dict[int, Answer] = {}
        try:
            for number, answer in enumerate(one.generate([one for _, one in asked], settings, symbols=symbols)):
                answers[number] = answer
        except ServerError as error:
            failed = str(error)
            answers.update(error.later)
        found: list[Output] = []
        for number, answer in answers.items():
            name, request = asked[number]
            logprobs = () if sampling.temperature else answer.logprobs
            output = Output(request.prompt, answer.tokens, name, version, request.max_new_tokens, logprobs)
            found.append(output if model is None else ended(output, model.ends))
            drafts.append((answer.num_drafted, answer.num_kept))
        return found

    drafts: list[tuple[int | None, int | None]] = []
    before = server.drafts()
    outputs = outputs_of(server)
    after, told = server.drafts(), list(drafts)
    if model is None:
        from specbench.reference.sentinel import load_program

        program = load_program(args.checkpoint)
        orders = _temperature_last(args, version)
        audits = [one for last in orders for one in audit_outputs(program, outputs, sampling, temperature_last=last)]
        audit = next((one for one in audits if one.verdict != BUG), audits[0] if audits else no_tokens(version))
    else:
        dtype = TORCH.get(args.dtype)
        oracle = Oracle(model.folder, weights=dtype)
        reference = outputs_of(Server(args.plain_url, **given, tokens=not args.text)) if args.plain_url else []
        plain = plain_of(oracle, reference, dtype) if reference or dtype is None else plain_in(oracle, outputs, dtype)
        audit = audit_ties(oracle, plain, outputs, reference, weights=args.dtype or "")
    code = BUG_CODE if audit.verdict == BUG else NOT_ASKED if failed else 0
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
    if server.num_without_logprobs:
        remarks.append(f"{server.num_without_logprobs} places had logprobs that are none (NaN, above 0): left out")
    if server.num_retries:
        remarks.append(f"{server.num_retries} retries of requests that it had turned away unread")
    if failed and audit.verdict == BUG:
        remarks.append(failed)
    return {"server": version, "url": server.url, "remarks": remarks, **audit.as_fields()}, code


def _check_options(args: argparse.Namespace, *, by_integers: bool) -> None:
    """Each option must have a say in the verdict; ValueError where it would be left unheard."""
    from specbench.models import MODELS

    folder = Path(args.checkpoint).expanduser()
    if not folder.is_dir() and args.checkpoint not in MODELS:
        what = "is a file" if folder.is_file() else "there is no such folder"
        raise ValueError(f"--checkpoint {args.checkpoint}: {what}, must be the folder of a sentinel or of a real model")
    if args.dtype is not None and args.dtype not in DTYPES:
        raise ValueError(f"--dtype {args.dtype} must be one of {', '.join(DTYPES)}")
    filters = [name for name in ("top_k", "top_p", "min_p") if getattr(args, name) is not None]
    if filters and not args.temperature:
        raise ValueError(f"{filters[0]} = {getattr(args, filters[0])} filters draws: give a --temperature, too")
    if by_integers:
        for name, value in (("--plain-url", args.plain_url), ("--dtype", args.dtype)):
            if value:
                raise ValueError(f"{name} judges the ties of a real model, a sentinel has none: leave it out")
        return
    if args.temperature:
        raise ValueError("--temperature needs a sentinel with a law: a real model is judged by its greedy tokens")
    if not args.plain_url and not args.dtype:
        raise ValueError(
            "a real model's ties are judged by plain decoding: give --plain-url, the same server without drafts, or "
            "--dtype where it computes in fp32, bf16 or fp16"
        )


def _sentinel_requests(args: argparse.Namespace, sampling: Any) -> dict[str, Any]:
    from specbench.engine_models import sentinel_requests
    from specbench.reference.sentinel import has_law, load_program
    from specbench.reference.sentinel.export import MAX_POSITIONS

    if sampling.temperature and not has_law(args.checkpoint):
        raise ValueError(f"{args.checkpoint} has no law to draw from: export one with --law, or ask at temperature 0")
    found = sentinel_requests(load_program(args.checkpoint), max_new_tokens=args.max_new_tokens, seed=args.seed)
    most = MAX_POSITIONS - max(len(one.prompt) for one in found.values())
    if args.max_new_tokens > most:
        raise ValueError(
            f"--max-new-tokens {args.max_new_tokens} must be at most {most:,}: a sentinel is right in contexts of "
            f"up to {MAX_POSITIONS:,} tokens, its longest prompt with them"
        )
    return found


def _temperature_last(args: argparse.Namespace, version: str) -> tuple[bool, ...]:
    """llama.cpp filters at temperature 1 and changes it afterwards. A server that does not say what it is may do
    either, and is right by either law."""
    from specbench.engines.server import UNKNOWN

    if args.api == "llama.cpp" or version.startswith("llama.cpp"):
        return (True,)
    is_one_law = args.temperature in (0, 1) or args.top_k is args.top_p is args.min_p is None
    return (False, True) if args.api == "openai" and version.startswith(UNKNOWN) and not is_one_law else (False,)


def _drafts(told: Any, before: Any, after: Any) -> tuple[int | None, int | None]:
    """Verified and kept: by its answers, or else by its counters, which count for everybody who asks it."""
    if told and all(one is not None for pair in told for one in pair):
        return sum(one for one, _ in told), sum(one for _, one in told)
    if before is not None and after is not None:
        verified, kept = after[0] - before[0], after[1] - before[1]
        if 0 <= kept <= verified:  # else it has begun to count anew
            return verified, kept
    return None, None


def _not_asked(sentence: str) -> dict[str, Any]:
    from specbench.audit import Audit

    audit = Audit("", NOT_TESTED, 0, 0, 0, sentence)
    return {"server": "", "url": "", "remarks": [], **audit.as_fields()}


def _write(file: Path | None, verdict: Mapping[str, Any]) -> None:
    if file is not None:
        text = json.dumps(_finite({"schema": 1, **verdict}), indent=2, allow_nan=False)
        file.write_text(text + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    """JSON has no infinity, which is the regret of what is no token."""
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _by_options(sentence: str) -> str:
    """A sentence that begins with an argument's name, by the name of the option."""
    names = "api|model|concurrency|timeout|retries|key_variable|temperature|top_k|top_p|min_p"
    return re.sub(rf"^({names})\b", lambda found: f"--{found[0].replace('_', '-')}", sentence)
