"""What servers are sent and what they answer, API by API: a body of JSON, and the token ids, logprobs and counts in it.

Where each schema is stated:

    openai     vllm-project/vllm: vllm/entrypoints/openai/completion/protocol.py;
               sgl-project/sglang: python/sglang/srt/entrypoints/openai/protocol.py
    llama.cpp  ggml-org/llama.cpp: tools/server/README.md
    sglang     sgl-project/sglang: docs/basic_usage/sampling_params.md, python/sglang/srt/managers/tokenizer_manager.py
    tgi        huggingface/text-generation-inference: docs/openapi.json, router/src/validation.rs
    lightllm   ModelTC/lightllm: lightllm/server/api_lightllm.py, lightllm/server/httpserver/manager.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from specbench.engines.engine import Answer, Request, Settings
from specbench.sanitize import plain

MESSAGE_LIMIT = 200  # characters of a server's own words
LARGEST_ID = 2**63 - 1

T = TypeVar("T")
Place: TypeAlias = "dict[int, float] | None"


class Wrong(Exception):
    """What is wrong with an answer; where it came from is added by whoever asked."""


@dataclass(frozen=True)
class Asked:
    """prompt: token ids or text."""

    prompt: Any
    max_new_tokens: int
    settings: Settings
    seed: int
    model: str
    num_logprobs: int


@dataclass(frozen=True)
class Said:
    """What an answer holds; None where it does not say. places: for each token the log probabilities of some ids, none
    where the server only pads, None where what it gives is no log probability. prompt, num_prompt: what the server
    read."""

    ids: list[int] | None
    text: str | None = None
    places: list[Place] | None = None
    prompt: list[int] | None = None
    num_prompt: int | None = None
    num_forwards: int | None = None
    num_drafted: int | None = None
    num_kept: int | None = None

    @property
    def num_without_logprobs(self) -> int:
        """Places whose logprobs are none."""
        return sum(place is None for place in self.places or ())


@dataclass(frozen=True)
class Api:
    """lacks: settings that it has no name for. advice: what gives token ids where an answer has none."""

    path: str
    takes_ids: bool
    body: Callable[[Asked], dict[str, Any]]
    read: Callable[[dict[str, Any], Settings], Said]
    advice: str
    lacks: tuple[str, ...] = ()


def answer_of(said: Said, symbols: str, api: Api) -> Answer:
    """The ids where there are any; else a sentinel's text, one symbol a token, -1 for what is no symbol."""
    logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    if said.ids is not None:
        tokens = tuple(said.ids)
        if said.places is not None and any(said.places):
            logprobs = tuple(tuple((place or {}).items()) for place in said.places)
    elif not symbols:
        raise Wrong(f"it has no token ids, must have them for a real model to be judged: {api.advice}")
    elif said.text is None:
        raise Wrong(f"it has neither token ids nor text, must have one: {api.advice}")
    else:
        tokens = tuple(symbols.find(one) for one in said.text)
    return Answer(tokens, said.num_forwards, said.num_drafted, said.num_kept, logprobs)


def check_prompt(said: Said, request: Request) -> None:
    """A prompt that was read otherwise (BOS twice, or not at all) would make right tokens look wrong."""
    asked = list(request.prompt)
    advice = "see which special tokens it adds (BOS once), and that it serves this checkpoint"
    if said.prompt:
        if said.prompt != asked:
            raise Wrong(f"it read the prompt as {_few(said.prompt)}, must be {_few(asked)}: {advice}")
    elif said.num_prompt is not None and said.num_prompt != len(asked):
        raise Wrong(f"it read {said.num_prompt} prompt tokens, must be {len(asked)}: {advice}")


def _few(ids: Sequence[int]) -> str:
    return f"{len(ids)} tokens {', '.join(map(str, ids[:4]))}{', ...' if len(ids) > 4 else ''}"


def _openai_body(asked: Asked) -> dict[str, Any]:
    """top_k -1 and min_p 0 are off in vLLM, SGLang and llama.cpp. They are named since a server's defaults need not be
    off; penalties too, which vLLM takes from a model's generation_config.json."""
    body: dict[str, Any] = {
        "prompt": asked.prompt,
        "max_tokens": asked.max_new_tokens,
        "seed": asked.seed,
        "stream": False,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "return_token_ids": True,
        **_sampling(asked.settings),
    }
    if asked.model:
        body["model"] = asked.model
    if asked.num_logprobs:
        body |= {"logprobs": asked.num_logprobs, "return_tokens_as_token_ids": True}
    return body


def _sampling(settings: Settings) -> dict[str, Any]:
    if not settings.temperature:
        return {"temperature": 0.0}
    return {
        "temperature": settings.temperature,
        "top_k": -1 if settings.top_k is None else settings.top_k,
        "top_p": 1.0 if settings.top_p is None else settings.top_p,
        "min_p": 0.0 if settings.min_p is None else settings.min_p,
    }


def _read_openai(answer: dict[str, Any], settings: Settings) -> Said:
    """Ids: `token_ids` (vLLM, SGLang), else the ids of `logprobs.content` (llama.cpp), else "token_id:7" as the tokens
    of `logprobs` (vLLM)."""
    _check_error(answer)
    choices = _get(answer, "choices", list, "the answer")
    if len(choices) != 1:
        raise Wrong(f"choices has {len(choices)} entries, must have 1")
    choice = object_in(choices[0], "choices[0]")
    _check_finish(choice.get("finish_reason"))
    told = _may(choice, "token_ids", list, "choices[0]")
    ids = None if told is None else _ids(told, "choices[0].token_ids")
    logprobs = _may(choice, "logprobs", dict, "choices[0]")
    places = None
    if logprobs:
        ids, places = _openai_places(logprobs, ids)
    metrics = answer.get("metrics")  # vLLM, --per-request-spec-decode-metrics
    spec = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    num_drafted, num_kept = _timed_drafts(answer)
    if num_drafted is None:
        num_drafted, num_kept = _count(spec, "num_draft_tokens"), _count(spec, "num_accepted_draft_tokens")
    return Said(
        ids,
        text=None if ids is not None else _may(choice, "text", str, "choices[0]"),
        places=places,
        prompt=_prompt(choice.get("prompt_token_ids")),
        num_prompt=_count(answer.get("usage"), "prompt_tokens"),
        num_drafted=num_drafted,
        num_kept=num_kept,
    )


def _openai_places(logprobs: dict[str, Any], ids: list[int] | None) -> tuple[list[int] | None, list[Place] | None]:
    """Ids, where they were not known and the tokens here are named by id, and the places."""
    name = "choices[0].logprobs"
    if _may(logprobs, "content", list, name) is not None:
        return _listed_places(logprobs["content"], f"{name}.content", ids)
    tokens = _get(logprobs, "tokens", list, name)
    found = [_id_of_text(one) for one in tokens]
    ids = _same(ids, None if None in found else [one for one in found if one is not None], f"{name}.tokens")
    if ids is None:
        return None, None
    values = logprobs.get("token_logprobs") or [None] * len(tokens)
    tops = logprobs.get("top_logprobs") or [None] * len(tokens)
    if not isinstance(values, list) or not isinstance(tops, list):
        return ids, [None] * len(ids)
    if not len(ids) == len(tokens) == len(values) == len(tops):
        return ids, [None] * len(ids)
    places: list[Place] = []
    for token, value, top in zip(ids, values, tops, strict=True):
        if top is None or isinstance(top, dict):
            likely = [(_id_of_text(text), one) for text, one in (top or {}).items()]
            places.append(_place([*likely, (token, value)]))
        else:
            places.append(None)
    return ids, places


def _id_of_text(token: Any) -> int | None:
    found = re.fullmatch(r"token_id:(-?\d{1,10})", token) if isinstance(token, str) else None
    return int(found[1]) if found else None


def _listed_places(
    entries: list[Any], name: str, ids: list[int] | None, *, tops: str = "top_logprobs"
) -> tuple[list[int] | None, list[Place] | None]:
    """Objects with id, logprob and a list of the most likely. llama.cpp pads a kept draft with a logprob of 0 and an
    empty list: such a place says nothing."""
    objects = [object_in(one, f"{name}[{i}]") for i, one in enumerate(entries)]
    found = [one.get("id", _id_of_text(one.get("token"))) for one in objects]
    ids = _same(ids, None if None in found else _ids(found, f"{name}.id"), name)
    if ids is None:
        return None, None
    if len(ids) != len(objects):
        return ids, [None] * len(ids)
    places: list[Place] = []
    for token, one in zip(ids, objects, strict=True):
        likely = one.get(tops) or []
        if not isinstance(likely, list) or not all(isinstance(entry, dict) for entry in likely):
            places.append(None)
            continue
        place = _place([(entry.get("id", _id_of_text(entry.get("token"))), entry.get("logprob")) for entry in likely])
        places.append(_place([*place.items(), (token, one.get("logprob"))]) if place else place)
    return ids, places


def _llama_cpp_body(asked: Asked) -> dict[str, Any]:
    """Samplers that the server has been started with, or has by default, are put out of action."""
    return {
        "prompt": asked.prompt,
        "n_predict": asked.max_new_tokens,
        "seed": asked.seed,
        "stream": False,
        "return_tokens": True,
        "n_probs": asked.num_logprobs,
        "repeat_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "dry_multiplier": 0.0,
        "xtc_probability": 0.0,
        "typical_p": 1.0,
        "mirostat": 0,
        **_sampling(asked.settings),
    }


def _read_llama_cpp(answer: dict[str, Any], settings: Settings) -> Said:
    _check_error(answer)
    told = _may(answer, "tokens", list, "the answer")
    text = _get(answer, "content", str, "the answer")
    ids = _ids(told or [], "tokens") if told or not text else None  # without return_tokens the list is there, and empty
    places = None
    entries = _may(answer, "completion_probabilities", list, "the answer")
    if entries is not None:
        ids, places = _listed_places(entries, "completion_probabilities", ids)
    num_drafted, num_kept = _timed_drafts(answer)
    return Said(
        ids,
        text=text,
        places=places,
        num_prompt=_count(answer, "tokens_evaluated"),
        num_drafted=num_drafted,
        num_kept=num_kept,
    )


def _timed_drafts(answer: dict[str, Any]) -> tuple[int | None, int | None]:
    """Of llama.cpp's timings, which have no word for drafts where there were none."""
    timings = answer.get("timings")
    if _count(timings, "predicted_n") is None:
        return None, None
    return _count(timings, "draft_n") or 0, _count(timings, "draft_n_accepted") or 0


def _sglang_body(asked: Asked) -> dict[str, Any]:
    """sampling_seed is unknown to older ones, which refuse it: it is only sent where something is drawn."""
    sampling = {
        "max_new_tokens": asked.max_new_tokens,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        **_sampling(asked.settings),
    }
    if asked.settings.temperature:
        sampling["sampling_seed"] = asked.seed
    prompt = "text" if isinstance(asked.prompt, str) else "input_ids"
    body: dict[str, Any] = {prompt: asked.prompt, "sampling_params": sampling, "stream": False}
    if asked.num_logprobs:
        body |= {"return_logprob": True, "top_logprobs_num": asked.num_logprobs, "logprob_start_len": -1}
    return body


def _read_sglang(answer: dict[str, Any], settings: Settings) -> Said:
    """Ids: `output_ids`, else the ids of `output_token_logprobs`, whose entries are [logprob, id, text]."""
    _check_error(answer)
    meta = _get(answer, "meta_info", dict, "the answer")
    finish = meta.get("finish_reason")
    _check_finish(finish.get("type") if isinstance(finish, dict) else finish, finish)
    told = _may(answer, "output_ids", list, "the answer")
    ids = None if told is None else _ids(told, "output_ids")
    emitted = _may(meta, "output_token_logprobs", list, "meta_info")
    places = None
    if emitted is not None:
        pairs = [_pair(one, f"meta_info.output_token_logprobs[{i}]") for i, one in enumerate(emitted)]
        ids = _same(ids, [token for token, _ in pairs], "meta_info.output_token_logprobs") or []
        places = _sglang_places(pairs, meta.get("output_top_logprobs") or [None] * len(pairs), len(ids))
    verified = _count(meta, "spec_verify_ct")
    return Said(
        ids,
        text=None if ids is not None else _may(answer, "text", str, "the answer"),
        places=places if _is_plain(settings) else None,
        num_prompt=_count(meta, "prompt_tokens"),
        num_forwards=None if verified is None else verified + 1,  # the prompt's is not counted
        num_drafted=_count(meta, "spec_draft_token_num", "spec_num_proposed_drafts"),
        num_kept=_count(meta, "spec_accept_token_num", "spec_num_correct_drafts"),
    )


def _sglang_places(pairs: list[tuple[int, Any]], tops: Any, num: int) -> list[Place]:
    if not isinstance(tops, list) or not len(pairs) == len(tops) == num:
        return [None] * num
    places: list[Place] = []
    for one, top in zip(pairs, tops, strict=True):
        likely = [] if top is None else top
        is_read = isinstance(likely, list) and all(isinstance(two, list) and len(two) > 1 for two in likely)
        places.append(_place([*((two[1], two[0]) for two in likely), one]) if is_read else None)
    return places


def _pair(entry: Any, name: str) -> tuple[int, Any]:
    if not isinstance(entry, list) or len(entry) < 2:
        raise Wrong(f"{name} = {_shown(entry)} must be [logprob, token id, text]")
    return _ids([entry[1]], name)[0], entry[0]


def _tgi_body(asked: Asked) -> dict[str, Any]:
    """It takes text alone, calls greedy what has no sampling parameter, and refuses top_p = 1."""
    own = asked.settings
    parameters: dict[str, Any] = {
        "max_new_tokens": asked.max_new_tokens,
        "do_sample": bool(own.temperature),
        "details": True,
        "decoder_input_details": True,
        "seed": asked.seed,
    }
    if own.temperature:
        parameters["temperature"] = own.temperature
        parameters |= {} if own.top_k is None else {"top_k": own.top_k}
        parameters |= {} if own.top_p is None or own.top_p == 1 else {"top_p": own.top_p}
    if asked.num_logprobs:
        parameters["top_n_tokens"] = asked.num_logprobs
    return {"inputs": asked.prompt, "parameters": parameters}


def _read_tgi(answer: dict[str, Any], settings: Settings) -> Said:
    _check_error(answer)
    text = _get(answer, "generated_text", str, "the answer")
    details = _may(answer, "details", dict, "the answer")
    if details is None:
        return Said(None, text=text)
    tokens = _get(details, "tokens", list, "details")
    ids = _ids([object_in(one, f"details.tokens[{i}]").get("id") for i, one in enumerate(tokens)], "details.tokens.id")
    places: list[Place] | None = [None] * len(ids)
    tops = details.get("top_tokens") or [None] * len(ids)
    if isinstance(tops, list) and len(tops) == len(ids):
        entries = [{**one, "top_tokens": top or [one]} for one, top in zip(tokens, tops, strict=True)]
        _, places = _listed_places(entries, "details.tokens", ids, tops="top_tokens")
    prefill = details.get("prefill")
    prompt = [one.get("id") if isinstance(one, dict) else None for one in prefill] if isinstance(prefill, list) else []
    return Said(ids, places=places if _is_plain(settings) else None, prompt=_prompt(prompt))


def _lightllm_body(asked: Asked) -> dict[str, Any]:
    """It has no seed. top_k -1 is off."""
    own = asked.settings
    parameters: dict[str, Any] = {
        "max_new_tokens": asked.max_new_tokens,
        "do_sample": bool(own.temperature),
        "return_details": True,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    if own.temperature:
        parameters |= {name: value for name, value in _sampling(own).items() if name != "min_p"}
    return {"inputs": asked.prompt, "parameters": parameters}


def _read_lightllm(answer: dict[str, Any], settings: Settings) -> Said:
    """tokens: an object for each, with id and logprob of the emitted token alone."""
    _check_error(answer)
    texts = answer.get("generated_text")
    if not isinstance(texts, list) or len(texts) != 1 or not isinstance(texts[0], str):
        raise Wrong(f"generated_text = {_shown(texts)} must be a list of 1 string")
    tokens = _may(answer, "tokens", list, "the answer")
    num_prompt = _count(answer, "prompt_tokens")
    if tokens is None:
        return Said(None, text=texts[0], num_prompt=num_prompt)
    entries = [{**object_in(one, f"tokens[{i}]"), "top_logprobs": [one]} for i, one in enumerate(tokens)]
    ids = _ids([one.get("id") for one in entries], "tokens.id")
    _, places = _listed_places(entries, "tokens", ids)
    return Said(
        ids,
        places=places if _is_plain(settings) else None,
        num_prompt=num_prompt,
        num_kept=_count(entries[-1], "mtp_accepted_token_num") if entries else None,
    )


def _is_plain(settings: Settings) -> bool:
    """Whether logprobs that are taken behind temperature and filters are those at temperature 1."""
    return not settings.temperature or (
        settings.temperature == 1 and settings.top_k is None and settings.top_p is None and settings.min_p is None
    )


def _check_error(answer: dict[str, Any]) -> None:
    """An error that comes with status 200; an empty one says nothing."""
    if answer.get("error") or answer.get("object") == "error":
        words = plain(message_in(_dumped(answer).encode()), MESSAGE_LIMIT, one_line=True)
        raise Wrong(f"it answers 200 with an error: {words}")


def _check_finish(reason: Any, told: Any = None) -> None:
    if reason in ("abort", "error", "content_filter"):
        raise Wrong(f"the server gave up, finish_reason {_shown(told or reason)}, must be length or stop: see its log")


def object_in(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Wrong(f"{name} = {_shown(value)} must be an object; is the API right ({', '.join(APIS)})?")
    return value


_KINDS = {dict: "an object", list: "a list", str: "a string", int: "an int"}


def _get(fields: dict[str, Any], name: str, kind: type[T], where: str) -> T:
    found = _may(fields, name, kind, where)
    if found is None:
        raise Wrong(f"{where} has no {name}, must have {_KINDS[kind]} there; is the API right ({', '.join(APIS)})?")
    return found


def _may(fields: dict[str, Any], name: str, kind: type[T], where: str) -> T | None:
    """None where it is absent or null."""
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, kind):
        raise Wrong(f"{name} of {where} = {_shown(value)} must be {_KINDS[kind]}")
    return value


def _count(fields: Any, *names: str) -> int | None:
    """Under the first of the names that has a number, as 12 or 12.0: no verdict rests on a server's own counts."""
    for name in names if isinstance(fields, dict) else ():
        value = fields.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return None


def _prompt(value: Any) -> list[int] | None:
    """None where it is no list of ids."""
    is_read = isinstance(value, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in value)
    return value if is_read else None


def _ids(values: Sequence[Any], name: str) -> list[int]:
    """Ints of any size: one outside the vocabulary, such as a placeholder that leaked, is a wrong token. -1 for what
    is larger than any id."""
    for i, one in enumerate(values):
        if isinstance(one, bool) or not isinstance(one, int):
            raise Wrong(f"{name}[{i}] = {_shown(one)} must be a token id, an int")
    return [one if abs(one) <= LARGEST_ID else -1 for one in values]


def _same(ids: list[int] | None, told: list[int] | None, name: str) -> list[int] | None:
    """Whichever is known. A server that names two different tokens for one place cannot be judged by either, unless one
    is no token."""
    if ids is None or told is None or len(ids) != len(told):
        return told if ids is None else ids
    for i, (one, other) in enumerate(zip(ids, told, strict=True)):
        if one != other and min(one, other) >= 0:
            raise Wrong(f"{name} names token {other} at place {i}, must name {one} as the list of token ids does")
    return ids


def _place(pairs: Sequence[tuple[Any, Any]]) -> Place:
    """What is known: a token without an id, or a value that is null, is not. None where a value is no log probability,
    NaN or above 0: the others cannot be trusted to be the first two then."""
    place: dict[int, float] = {}
    for token, value in pairs:
        if value is None or token is None:
            continue
        if any(isinstance(one, bool) for one in (token, value)) or not isinstance(token, int):
            return None
        is_number = isinstance(value, (int, float)) and value <= 1e-3  # not of NaN
        if not is_number or (isinstance(value, int) and value < -(2**53)):
            return None
        place.setdefault(token, float(value))
    return place


def _shown(value: Any) -> str:
    return plain(_dumped(value), 60, one_line=True)


def _dumped(value: Any) -> str:
    try:
        return json.dumps(value)
    except RecursionError:  # it was read with less depth to spare
        return "[[["


def parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        start = plain(raw[:200].decode("utf-8", "replace").strip(), 60, one_line=True)
        kind = "an HTML page" if start.startswith("<") else "not JSON"
        shown = f"begins {start!r}" if start else "is empty"
        raise Wrong(
            f"the body is {kind}, must be a JSON object: it {shown}; is the API right ({', '.join(APIS)})?"
        ) from None


def parsed_or_none(raw: bytes) -> Any:
    try:
        return parsed(raw)
    except Wrong:
        return None


def message_in(raw: bytes) -> str:
    """A server's own words in the body of an error, wherever it puts them."""
    told = parsed_or_none(raw)
    for name in ("error", "message", "detail"):
        while isinstance(told, dict) and name in told:
            told = told[name]
    if told is None:
        return raw[:2_000].decode("utf-8", "replace")
    return told if isinstance(told, str) else _dumped(told)


APIS: Mapping[str, Api] = {
    "openai": Api(
        "/v1/completions",
        True,
        _openai_body,
        _read_openai,
        "use a vLLM or SGLang that knows return_token_ids, or the API llama.cpp, sglang, tgi or lightllm",
    ),
    "llama.cpp": Api(
        "/completion", True, _llama_cpp_body, _read_llama_cpp, "use a llama-server that knows return_tokens"
    ),
    "sglang": Api(
        "/generate", True, _sglang_body, _read_sglang, "use an SGLang that gives output_ids, or ask for logprobs"
    ),
    "tgi": Api("/generate", False, _tgi_body, _read_tgi, "use a server that heeds parameters.details", ("min_p",)),
    "lightllm": Api(
        "/generate",
        True,
        _lightllm_body,
        _read_lightllm,
        "use a LightLLM that heeds return_details, started without --use_tgi_api (or use the API tgi)",
        ("min_p",),
    ),
}
