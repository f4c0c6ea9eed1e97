"""HTTP servers: a real llama.cpp server is EQUAL, wrong tokens are a BUG in every schema, what fails is one sentence.

The fakes answer as vLLM, SGLang, TGI and LightLLM do, by the schemas that `specbench.engines.server_apis` names.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from specbench.audit import Audit, Output, audit_greedy, requests_for
from specbench.engines.engine import Answer, Request, Settings
from specbench.engines.server import APIS, LARGEST_BODY, Server, ServerError
from specbench.record import BUG, EQUAL
from specbench.reference.sentinel import BOS, SYMBOLS, Program, Sentinel, export_gguf

PROGRAM = Program.seeded(0)
GREEDY = Settings(mode="", weights="")
ONE = Request((BOS, 3, 7), "37", 2)
KEY = "sk-Quite5ecret/and+long"


def asked(num: int = 8, *, with_text: bool = False) -> list[Request]:
    found = requests_for(PROGRAM, SYMBOLS, max_new_tokens=num, seed=0)
    return [Request(one.prompt, one.text, num) for one in found if one.text or not with_text]


def audited(requests: Sequence[Request], answers: Sequence[Answer]) -> Audit:
    pairs = zip(requests, answers, strict=True)
    (found,) = audit_greedy(
        PROGRAM, [Output(one.prompt, said.tokens, max_new_tokens=one.max_new_tokens) for one, said in pairs]
    )
    return found


# A real server


def start_llama_cpp(folder: Path, target: Program, drafter: Program | None = None) -> Any:
    """llama.cpp's server with four slots, in this process; it ends with what is returned."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="to run this engine: pip install -e '.[dev]'")
    params = xllamacpp.CommonParams()
    params.model.path = str(export_gguf(Sentinel(target), folder / "target.gguf"))
    params.n_ctx, params.n_parallel = 4 * 2_048, 4
    params.cpuparams.n_threads, params.warmup, params.endpoint_metrics = 1, False, True
    if drafter is not None:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        params.speculative.draft.mparams.path = str(export_gguf(Sentinel(drafter), folder / "drafter.gguf"))
    return xllamacpp.Server(params)


@pytest.fixture(scope="module")
def llama_cpp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server whose drafter is right in three contexts of five."""
    server = start_llama_cpp(tmp_path_factory.mktemp("gguf"), PROGRAM, PROGRAM.drafter(0.6, seed=0))
    yield server.listening_address
    del server


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("api", ["openai", "llama.cpp"])
def test_a_real_server_that_drafts_is_equal(llama_cpp: str, api: str, concurrency: int) -> None:
    server, requests = Server(llama_cpp, api=api, concurrency=concurrency), asked(16)
    before = server.drafts()
    answers = list(server.generate(requests, GREEDY))
    found, after = audited(requests, answers), server.drafts()
    assert (found.verdict, found.num_tokens) == (EQUAL, 160)
    assert before is not None and after is not None
    verified, kept = (sum(getattr(one, name) or 0 for one in answers) for name in ("num_drafted", "num_kept"))
    assert 0 < kept < verified
    assert (after[0] - before[0], after[1] - before[1]) == (verified, kept)
    assert server.num_retries == 0


@pytest.mark.parametrize("api", ["openai", "llama.cpp"])
def test_a_real_server_with_another_checkpoint_is_a_bug(tmp_path: Path, api: str) -> None:
    """It says the drafter's tokens, two of five of which are wrong behind whatever came before."""
    other, requests = PROGRAM.drafter(0.6, seed=0), asked(12)
    server = start_llama_cpp(tmp_path, other)
    answers = list(Server(server.listening_address, api=api, concurrency=4).generate(requests, GREEDY))
    assert [one.tokens for one in answers] == [tuple(other.continuation(one.prompt, 12)) for one in requests]
    assert {(one.num_drafted, one.num_kept) for one in answers} == {(0, 0)}
    found = audited(requests, answers)
    assert found.verdict == BUG
    assert 24 <= found.num_wrong <= 72  # of 120


@pytest.mark.parametrize("api", ["openai", "llama.cpp"])
def test_what_a_real_server_pads_is_no_logprob(llama_cpp: str, api: str) -> None:
    """It says 0 for a draft that it kept. Every other place must be 10 ahead of 15 others, and of BOS."""
    answers = list(Server(llama_cpp, api=api).generate(asked(8), GREEDY))
    places = [(token, dict(place)) for one in answers for token, place in zip(one.tokens, one.logprobs, strict=True)]
    told = [(token, place) for token, place in places if place]
    assert 0 < len(told) < len(places)
    for token, place in told:
        assert len(place) == 5
        assert place[token] == pytest.approx(-16 * 2.718281828**-10, rel=0.01)
        assert all(value == pytest.approx(-10, abs=0.01) for other, value in place.items() if other != token)


def test_a_real_server_can_be_asked_by_text(llama_cpp: str) -> None:
    """Without logprobs its OpenAI API has no ids: the text of a sentinel is one symbol a token."""
    server, requests = Server(llama_cpp, tokens=False, num_logprobs=0), asked(with_text=True)
    assert audited(requests, list(server.generate(requests, GREEDY, symbols=SYMBOLS))).verdict == EQUAL
    with pytest.raises(ServerError, match="no token ids, must have them for a real model to be judged: use "):
        list(server.generate(requests, GREEDY))


def test_a_real_server_says_who_it_is_and_what_it_dislikes(llama_cpp: str) -> None:
    assert Server(llama_cpp).version().startswith("llama.cpp b")
    with pytest.raises(ServerError, match=r"/completion, request 0: HTTP 400, must be 200: .*context"):
        list(Server(llama_cpp, api="llama.cpp").generate([Request((BOS,) + (1,) * 3_000, "", 1)], GREEDY))


def test_the_page_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """docs/servers.md: the Python that starts a server, in an empty folder."""
    pytest.importorskip("xllamacpp", reason="to run this engine: pip install -e '.[dev]'")
    page = (Path(__file__).resolve().parents[1] / "docs" / "servers.md").read_text("utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "docs/servers.md", "exec"), {"__name__": "__main__"})
    said = capsys.readouterr().out
    assert re.search(
        r"^llama\.cpp \S+ \(llama\.cpp\) EQUAL all of 100 tokens in 10 outputs are the program's$", said, re.M
    )
    assert re.search(r"^\d+ of \d+ drafts kept$", said, re.M)


# Fakes


class Fake:
    """A server whose `reply(path, body, number of the request)` is a dict (status 200), (status, text or dict),
    (status, text, headers), or a function that writes to the handler itself."""

    def __init__(self, reply: Callable[[str, Any, int], Any]) -> None:
        self.asked: list[tuple[str, Any, dict[str, str]]] = []
        fake, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                size = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(size)) if size else None
                with lock:
                    number = len(fake.asked)
                    fake.asked.append((self.path, body, dict(self.headers)))
                found = reply(self.path, body, number)
                if callable(found):
                    found(self)
                    return
                status, text, *more = found if isinstance(found, tuple) else (200, found)
                data = (
                    text if isinstance(text, bytes) else (text if isinstance(text, str) else json.dumps(text)).encode()
                )
                self.send_response(status)
                for name, value in {"Content-Length": str(len(data)), **(more[0] if more else {})}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST

            def log_message(self, *words: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads, self._http.block_on_close = True, False
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def num_posts(self) -> int:
        return sum(body is not None for _, body, _ in self.asked)

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Fake]]:
    fakes: list[Fake] = []

    def start(reply: Any) -> Fake:
        fakes.append(Fake(reply if callable(reply) else lambda path, body, number: reply))
        return fakes[-1]

    yield start
    for one in fakes:
        one.close()


def text_of(ids: Sequence[int]) -> str:
    return "".join(SYMBOLS[one] if 0 <= one < BOS else "?" for one in ids)


def vllm(ids: list[int], prompt: list[int]) -> dict[str, Any]:
    """Field for field what vLLM 0.32.0 answered, started with --per-request-spec-decode-metrics summary."""
    logprobs = {
        "text_offset": [10 * i for i in range(len(ids))],
        "token_logprobs": [-0.25] * len(ids),
        "tokens": [f"token_id:{one}" for one in ids],
        "top_logprobs": [{f"token_id:{one}": -0.25, f"token_id:{(one + 1) % 16}": -1.5} for one in ids],
    }
    choice = {
        "index": 0,
        "text": text_of(ids),
        "logprobs": logprobs,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": ids,
        "prompt_logprobs": None,
        "prompt_token_ids": prompt,
        "routed_experts": None,
    }
    usage = {
        "prompt_tokens": len(prompt),
        "total_tokens": len(prompt) + len(ids),
        "completion_tokens": len(ids),
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }
    speculative_decoding = {
        "mean_acceptance_length": 5 / 3,
        "draft_acceptance_rate": 2 / 9,
        "acceptance_histogram": [1, 2, 0, 0],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 2,
        "num_draft_tokens": 9,
        "num_spec_tokens": 3,
        "per_step_accepted": None,
        "per_step_drafted": None,
    }
    return {
        "id": "cmpl-99c631b745ec7558",
        "object": "text_completion",
        "created": 1796048350,
        "model": "sentinel",
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": "vllm-0.32.0-e081ec53",
        "usage": usage,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": {"time_to_first_token_ms": None, "speculative_decoding": speculative_decoding},
    }


def old_vllm(ids: list[int], prompt: list[int]) -> dict[str, Any]:
    """It does not know return_token_ids, but names tokens by id."""
    found = vllm(ids, prompt)
    del found["choices"][0]["token_ids"], found["choices"][0]["prompt_token_ids"], found["metrics"]
    return found


def sglang_openai(ids: list[int], prompt: list[int]) -> dict[str, Any]:
    """Ids, and logprobs by text."""
    found = vllm(ids, prompt)
    logprobs = found["choices"][0]["logprobs"]
    logprobs["tokens"] = [text_of([one]) for one in ids]
    logprobs["top_logprobs"] = [{text_of([one]): -0.25, "x": -1.5} for one in ids]
    return found


def text_alone(ids: list[int], prompt: list[int]) -> dict[str, Any]:
    choice = {"index": 0, "text": text_of(ids), "logprobs": None, "finish_reason": "length"}
    return {"id": "1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}


def sglang(ids: list[int], prompt: list[int]) -> dict[str, Any]:
    meta = {
        "id": "a",
        "finish_reason": {"type": "length", "length": len(ids)},
        "prompt_tokens": len(prompt),
        "completion_tokens": len(ids),
        "cached_tokens": 0,
        "e2e_latency": 0.1,
        "input_token_logprobs": [],
        "output_token_logprobs": [[-0.25, one, None] for one in ids],
        "input_top_logprobs": [],
        "output_top_logprobs": [[[-0.25, one, None], [-1.5, (one + 1) % 16, None]] for one in ids],
        "spec_verify_ct": 3,
        "spec_accept_token_num": 2,
        "spec_draft_token_num": 9,
    }
    return {"text": text_of(ids), "output_ids": ids, "meta_info": meta}


def old_sglang(ids: list[int], prompt: list[int]) -> dict[str, Any]:
    found = sglang(ids, prompt)
    del found["output_ids"]
    return found


def tgi(ids: list[int], prompt: list[int]) -> dict[str, Any]:
    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        return {"id": token, "text": "?", "logprob": logprob, "special": False}

    details = {
        "finish_reason": "length",
        "generated_tokens": len(ids),
        "seed": None,
        "prefill": [{"id": one, "text": "?", "logprob": None if not i else -1.0} for i, one in enumerate(prompt)],
        "tokens": [entry(one, -0.25) for one in ids],
        "top_tokens": [[entry(one, -0.25), entry((one + 1) % 16, -1.5)] for one in ids],
    }
    return {"generated_text": text_of(ids), "details": details}


def lightllm(ids: list[int], prompt: list[int]) -> dict[str, Any]:
    tokens = [
        {
            "id": one,
            "logprob": -0.25,
            "cumlogprob": -0.25,
            "special": False,
            "count_output_tokens": i + 1,
            "prompt_cache_len": 0,
            "mtp_accepted_token_num": 2,
            "text": text_of([one]),
        }
        for i, one in enumerate(ids)
    ]
    return {
        "generated_text": [text_of(ids)],
        "count_output_tokens": len(ids),
        "finish_reason": "length",
        "prompt_tokens": len(prompt),
        "tokens": tokens,
    }


# By the name of a fake: its API, its answers, and what it tells of a place whose token is 5 (BOTH, EMITTED, nothing).
BOTH, EMITTED = ((5, -0.25), (6, -1.5)), ((5, -0.25),)
SCHEMAS: dict[str, tuple[str, Callable[[list[int], list[int]], dict[str, Any]], Any]] = {
    "vllm": ("openai", vllm, BOTH),
    "old vllm": ("openai", old_vllm, BOTH),
    "sglang's openai": ("openai", sglang_openai, EMITTED),
    "text alone": ("openai", text_alone, None),
    "sglang": ("sglang", sglang, BOTH),
    "old sglang": ("sglang", old_sglang, BOTH),
    "tgi": ("tgi", tgi, BOTH),
    "lightllm": ("lightllm", lightllm, EMITTED),
}
# What a server of each API takes; SGLang refuses sampling parameters that it does not know.
SAMPLING = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}
NAMES = {
    "sglang": {"max_new_tokens", "sampling_seed", *SAMPLING},
    "tgi": {
        *("max_new_tokens", "do_sample", "details", "decoder_input_details", "seed", "top_n_tokens"),
        *("temperature", "top_k", "top_p"),
    },
    "lightllm": {"max_new_tokens", "do_sample", "return_details", *(SAMPLING - {"min_p"})},
}


def prompt_and_num(api: str, body: dict[str, Any]) -> tuple[list[int], int]:
    """What a fake reads of a request: text gets a BOS, as a tokenizer gives it one."""
    if api == "openai":
        assert body["n"] == 1 if "n" in body else True
        prompt, num = body["prompt"], body["max_tokens"]
    elif api == "sglang":
        prompt, num = body.get("input_ids", body.get("text")), body["sampling_params"]["max_new_tokens"]
        assert set(body["sampling_params"]) <= NAMES[api]
    else:
        prompt, num = body["inputs"], body["parameters"]["max_new_tokens"]
        assert set(body["parameters"]) <= NAMES[api]
        assert api != "tgi" or (isinstance(prompt, str) and prompt)
    return ([BOS, *map(SYMBOLS.index, prompt)] if isinstance(prompt, str) else prompt), num


def speaks(name: str, spoil: Callable[[list[int], int], list[int]] = lambda ids, number: ids) -> Any:
    api, schema, _ = SCHEMAS[name]

    def reply(path: str, body: Any, number: int) -> Any:
        if body is None:
            return (404, {"detail": "Not Found"})
        assert path == APIS[api].path
        prompt, num = prompt_and_num(api, body)
        return schema(spoil(PROGRAM.continuation(prompt, num), number), prompt)

    return reply


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("name", SCHEMAS)
def test_right_tokens_are_equal_in_every_schema(serve: Any, name: str, concurrency: int) -> None:
    server = Server(serve(speaks(name)).url, api=SCHEMAS[name][0], concurrency=concurrency)
    requests = asked(with_text=not server.takes_ids)
    found = audited(requests, list(server.generate(requests, GREEDY, symbols=SYMBOLS)))
    assert (found.verdict, found.num_tokens) == (EQUAL, 8 * len(requests))


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_wrong_token_is_a_bug_in_every_schema(serve: Any, name: str) -> None:
    """One token of each answer is another one, and the text goes on behind it."""

    def spoil(ids: list[int], number: int) -> list[int]:
        return [*ids[:7], (ids[7] + 1) % 16]

    server = Server(serve(speaks(name, spoil)).url, api=SCHEMAS[name][0])
    requests = asked(with_text=True)
    found = audited(requests, list(server.generate(requests, GREEDY, symbols=SYMBOLS)))
    assert (found.verdict, found.num_wrong) == (BUG, len(requests))


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_answer_that_ends_early_is_a_bug(serve: Any, name: str) -> None:
    server = Server(serve(speaks(name, lambda ids, number: ids[:5])).url, api=SCHEMAS[name][0])
    found = audited([ONE], list(server.generate([Request(ONE.prompt, ONE.text, 8)], GREEDY, symbols=SYMBOLS)))
    assert (found.verdict, found.num_tokens) == (BUG, 5)


@pytest.mark.parametrize("name", SCHEMAS)
def test_logprobs_are_by_id_and_as_the_server_says(serve: Any, name: str) -> None:
    api, _, place = SCHEMAS[name]
    server = Server(serve(speaks(name, lambda ids, number: [5, 5])).url, api=api)
    (answer,) = server.generate([ONE], GREEDY, symbols=SYMBOLS)
    assert answer.logprobs == (() if place is None else (place, place))


@pytest.mark.parametrize(
    ("name", "counts"),
    [("vllm", (None, 9, 2)), ("sglang", (4, 9, 2)), ("lightllm", (None, None, 2)), ("tgi", (None, None, None))],
)
def test_drafts_of_a_request_are_told_where_the_server_tells_them(serve: Any, name: str, counts: Any) -> None:
    (answer,) = Server(serve(speaks(name)).url, api=SCHEMAS[name][0]).generate([ONE], GREEDY)
    assert (answer.num_forwards, answer.num_drafted, answer.num_kept) == counts


def test_a_character_that_is_no_symbol_is_no_token(serve: Any) -> None:
    fake = serve({"choices": [{"text": "3 <s>7g"}]})
    (answer,) = Server(fake.url, model="m").generate([ONE], GREEDY, symbols=SYMBOLS)
    assert answer.tokens == (3, -1, -1, -1, -1, 7, -1)


DRAWN = Settings("", "", temperature=0.7, top_k=5, top_p=0.9, seed=3)
OFF = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
BODIES: dict[str, Any] = {
    "openai": {
        "prompt": [16, 3, 7],
        "max_tokens": 2,
        "seed": 4,
        "stream": False,
        **OFF,
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.0,
        "return_token_ids": True,
        "logprobs": 5,
        "return_tokens_as_token_ids": True,
        "model": "m",
    },
    "llama.cpp": {
        "prompt": [16, 3, 7],
        "n_predict": 2,
        "seed": 4,
        "stream": False,
        "repeat_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "dry_multiplier": 0.0,
        "xtc_probability": 0.0,
        "typical_p": 1.0,
        "mirostat": 0,
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.0,
        "return_tokens": True,
        "n_probs": 5,
    },
    "sglang": {
        "input_ids": [16, 3, 7],
        "sampling_params": {
            "max_new_tokens": 2,
            "sampling_seed": 4,
            **OFF,
            "temperature": 0.7,
            "top_k": 5,
            "top_p": 0.9,
            "min_p": 0.0,
        },
        "return_logprob": True,
        "top_logprobs_num": 5,
        "logprob_start_len": -1,
        "stream": False,
    },
    "tgi": {
        "inputs": "37",
        "parameters": {
            "max_new_tokens": 2,
            "do_sample": True,
            "temperature": 0.7,
            "top_k": 5,
            "top_p": 0.9,
            "seed": 4,
            "details": True,
            "decoder_input_details": True,
            "top_n_tokens": 5,
        },
    },
    "lightllm": {
        "inputs": [16, 3, 7],
        "parameters": {
            "max_new_tokens": 2,
            "do_sample": True,
            "return_details": True,
            **OFF,
            "temperature": 0.7,
            "top_k": 5,
            "top_p": 0.9,
        },
    },
}


@pytest.mark.parametrize("api", APIS)
def test_settings_go_by_the_names_of_the_api(serve: Any, api: str) -> None:
    """The second of two requests is drawn with a seed that is one higher."""
    answer = {"tgi": tgi, "sglang": sglang, "lightllm": lightllm, "openai": vllm}.get(api)
    reply = {"tokens": [1, 1], "content": "11"} if answer is None else answer([1, 1], [16, 3, 7])
    fake = serve(reply)
    list(Server(fake.url, api=api, model="m").generate([ONE, ONE], DRAWN))
    assert fake.asked[1][1] == BODIES[api]


@pytest.mark.parametrize("api", APIS)
def test_filters_that_are_off_are_off_by_name(serve: Any, api: str) -> None:
    """A server's own defaults need not be; TGI's are, and it refuses these values."""
    fake = serve({})
    with pytest.raises(ServerError):
        list(Server(fake.url, api=api, model="m").generate([ONE], Settings("", "", temperature=1.0)))
    body = fake.asked[0][1]
    sampling = body.get("sampling_params", body.get("parameters", body))
    filters = {name: sampling[name] for name in ("top_k", "top_p", "min_p") if name in sampling}
    off = {"top_k": -1, "top_p": 1.0, "min_p": 0.0}
    assert filters == {"tgi": {}, "lightllm": {"top_k": -1, "top_p": 1.0}}.get(api, off)
    assert sampling["temperature"] == 1


@pytest.mark.parametrize("api", APIS)
def test_greedy_is_greedy_in_every_api(serve: Any, api: str) -> None:
    fake = serve({})
    with pytest.raises(ServerError):
        list(Server(fake.url, api=api, model="m").generate([ONE], GREEDY))
    body = fake.asked[0][1]
    sampling = body.get("sampling_params", body.get("parameters", body))
    assert not {"top_k", "top_p", "min_p"} & set(sampling)
    assert sampling["do_sample"] is False if api in ("tgi", "lightllm") else sampling["temperature"] == 0


def test_logprobs_behind_a_temperature_are_not_those_at_1(serve: Any) -> None:
    (answer,) = Server(serve(speaks("sglang")).url, api="sglang").generate([ONE], DRAWN)
    assert answer.logprobs == ()


@pytest.mark.parametrize("api", ["tgi", "lightllm"])
def test_what_an_api_has_no_name_for_is_not_asked(serve: Any, api: str) -> None:
    fake = serve({})
    with pytest.raises(ValueError, match=f"^min_p = 0.1 cannot be asked of {api}: leave it out$"):
        list(Server(fake.url, api=api).generate([ONE], Settings("", "", temperature=1.0, min_p=0.1)))
    with pytest.raises(ValueError, match=r"^request 0 has an empty text, which tgi cannot be asked: leave it out$"):
        list(Server(fake.url, api="tgi").generate([Request((BOS,), "", 2)], GREEDY))
    assert fake.asked == []


# What fails


def edited(edit: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """vLLM's answer with one thing changed."""
    found = vllm([1, 2], [16, 3, 7])
    edit(found)
    return found


def choice_with(**fields: Any) -> dict[str, Any]:
    return edited(lambda answer: answer["choices"][0].update(fields))


def logprobs_with(**fields: Any) -> dict[str, Any]:
    return edited(lambda answer: answer["choices"][0]["logprobs"].update(fields))


def cut_off(handler: Any) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')


def cut_off_in_a_chunk(handler: Any) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n40\r\n{")


def closed(handler: Any) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)


def no_http(handler: Any) -> None:
    handler.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n")


def endless(handler: Any) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _ in range(LARGEST_BODY // 2**20 + 1):
        handler.wfile.write(b" " * 2**20)


IDS = "must be a token id, an int"
WRONG: dict[str, tuple[Any, str]] = {
    "no JSON": (
        (200, '{"choices": ['),
        "the body is not JSON, must be a JSON object: it begins '{\"choices\": ['; is the API right (",
    ),
    "no UTF-8": ((200, b"\xff\xfe"), "the body is not JSON, must be a JSON object: it begins '\ufffd\ufffd'"),
    "nested too deep": ((200, "[" * 100_000), "the body is not JSON, must be a JSON object: it begins '[[["),
    "nothing": ((200, ""), "the body is not JSON, must be a JSON object: it is empty"),
    "HTML": ((200, "<!doctype html>\n<p>Hi"), "the body is an HTML page, must be a JSON object: it begins '<!doctype"),
    "a list": ((200, "[]"), "the answer = [] must be an object; is the API right (openai, llama.cpp, sglang, tgi,"),
    "cut off": (lambda *_: cut_off, "the answer was cut off after 13 bytes, 987 are missing: see the server's log"),
    "cut off in a chunk": (lambda *_: cut_off_in_a_chunk, "the answer was cut off: see the server's log"),
    "closed": (lambda *_: closed, "the server closed the connection without an answer: see its log"),
    "no HTTP": (lambda *_: no_http, "what it answers is not HTTP (BadStatusLine: SSH-2.0-OpenSSH_9.6"),
    "endless": (lambda *_: endless, "the answer has more than 67,108,864 bytes, which no list of tokens needs"),
    "no choices": ({}, "the answer has no choices, must have a list there; is the API right ("),
    "choices of another type": ({"choices": {}}, "choices of the answer = {} must be a list"),
    "empty choices": ({"choices": []}, "choices has 0 entries, must have 1"),
    "two choices": (edited(lambda one: one["choices"].append({})), "choices has 2 entries, must have 1"),
    "a choice of another type": ({"choices": ["a"]}, 'choices[0] = "a" must be an object'),
    "ids of another type": (choice_with(token_ids="12"), 'token_ids of choices[0] = "12" must be a list'),
    "a float as id": (choice_with(token_ids=[1, 2.0]), f"choices[0].token_ids[1] = 2.0 {IDS}"),
    "a bool as id": (choice_with(token_ids=[True, 2]), f"choices[0].token_ids[0] = true {IDS}"),
    "a string as id": (choice_with(token_ids=["1", 2]), f'choices[0].token_ids[0] = "1" {IDS}'),
    "two tokens at a place": (
        choice_with(token_ids=[1, 3]),
        "choices[0].logprobs.tokens names token 2 at place 1, must name 3 as the list of token ids does",
    ),
    "logprobs of another type": (choice_with(logprobs=[1]), "logprobs of choices[0] = [1] must be an object"),
    "text of another type": ({"choices": [{"text": 7}]}, "text of choices[0] = 7 must be a string"),
    "neither text nor ids": ({"choices": [{}]}, "it has no token ids, must have them for a real model"),
    "given up": (choice_with(finish_reason="abort"), 'the server gave up, finish_reason "abort", must be length or st'),
    "an error with status 200": (
        {"object": "error", "message": "out of\nmemory"},
        "it answers 200 with an error: out of memory",
    ),
    "BOS twice": (
        choice_with(prompt_token_ids=[16, 16, 3, 7]),
        "it read the prompt as 4 tokens 16, 16, 3, 7, must be 3 tokens 16, 3, 7: see which special tokens it adds",
    ),
    "no BOS": (
        edited(lambda one: (one["choices"][0].pop("prompt_token_ids"), one["usage"].update(prompt_tokens=2))),
        "it read 2 prompt tokens, must be 3: see which special tokens it adds (BOS once)",
    ),
    "refused": ((400, {"error": {"message": "logprobs:\n too many", "code": 400}}), "HTTP 400, must be 200: logprobs:"),
    "refused, in TGI's words": ((422, {"error": "bad", "error_type": "x"}), "HTTP 422, must be 200: bad"),
    "refused, in FastAPI's words": ((422, {"detail": [{"loc": 1}]}), 'HTTP 422, must be 200: [{"loc": 1}]'),
    "refused with escapes": ((400, "\x1b[31m::error::" + "x" * 9_999), "HTTP 400, must be 200: \\x1b[31m::error::xxx"),
    "refused without a word": ((500, ""), "HTTP 500, must be 200: no message"),
    "no such path": ((404, {"detail": "Not Found"}), "HTTP 404, must be 200: Not Found; is it a server of another API"),
    "text only": (
        (400, {"error": {"message": "prompt must be a string"}}),
        "HTTP 400, must be 200: prompt must be a string; if it takes text only, ask with --text",
    ),
    "no key": ((401, {"error": "who?"}), "HTTP 401, must be 200: who?; name the environment variable that holds"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_bad_answer_is_one_sentence_and_is_not_asked_again(serve: Any, case: str) -> None:
    reply, sentence = WRONG[case]
    fake = serve(reply)
    with pytest.raises(ServerError) as caught:
        list(Server(fake.url, model="m", wait=0.001, key_variable="").generate([ONE], GREEDY))
    said = str(caught.value)
    assert said.startswith(f"{fake.url}/v1/completions, request 0: {sentence}")
    assert len(said) < 500 and said.isprintable()
    assert fake.num_posts == 1


OTHERS: dict[str, tuple[str, Any, str]] = {
    "sglang without meta_info": ("sglang", {"text": "a"}, "the answer has no meta_info, must have an object there"),
    "sglang's pair": (
        "sglang",
        {"meta_info": {"output_token_logprobs": [[-1.0]]}},
        "meta_info.output_token_logprobs[0] = [-1.0] must be [logprob, token id, text]",
    ),
    "sglang aborts": (
        "sglang",
        {"meta_info": {"finish_reason": {"type": "abort", "message": "no memory"}}},
        'the server gave up, finish_reason {"type": "abort", "message": "no memory"}, must be length or stop',
    ),
    "tgi without text": ("tgi", {"details": {}}, "the answer has no generated_text, must have a string there"),
    "tgi without details": ("tgi", {"generated_text": "a"}, "it has no token ids, must have them for a real"),
    "tgi's null": (
        "tgi",
        {"generated_text": "a", "details": {"tokens": [{"id": None}]}},
        f"details.tokens.id[0] = null {IDS}",
    ),
    "lightllm as tgi": (
        "lightllm",
        {"generated_text": "a", "details": {}},
        'generated_text = "a" must be a list of 1 string',
    ),
    "lightllm without details": (
        "lightllm",
        {"generated_text": ["a"]},
        "it has no token ids, must have them for a real model to be judged: use a LightLLM that heeds",
    ),
    "an old llama.cpp": (
        "llama.cpp",
        {"content": "ab", "tokens": []},
        "it has no token ids, must have them for a real model to be judged: use a llama-server that knows",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_bad_answer_of_another_api_is_one_sentence(serve: Any, case: str) -> None:
    api, reply, sentence = OTHERS[case]
    fake = serve(reply)
    with pytest.raises(ServerError, match=re.escape(f"{APIS[api].path}, request 0: {sentence}")):
        list(Server(fake.url, api=api).generate([ONE], GREEDY))


WITHOUT: dict[str, tuple[str, Any]] = {
    "NaN": ("openai", logprobs_with(token_logprobs=[-0.5, float("nan")], top_logprobs=[None, None])),
    "a probability": ("openai", logprobs_with(top_logprobs=[None, {"token_id:1": 0.7}])),
    "a logprob as text": ("openai", logprobs_with(token_logprobs=[-1, "-1"])),
    "a list of another type": ("openai", logprobs_with(top_logprobs=[None, "none"])),
    "more ids than logprobs": ("openai", choice_with(token_ids=[1, 2, 3])),
    "NaN beside the only ids": (
        "openai",
        edited(
            lambda one: (
                one["choices"][0].pop("token_ids"),
                one["choices"][0]["logprobs"].update(token_logprobs=[-0.5, float("nan")]),
            )
        ),
    ),
    "sglang's counts": ("sglang", {"output_ids": [1, 2], "meta_info": {"output_token_logprobs": [[-1.0, 1, None]]}}),
    "sglang's NaN": ("sglang", {"meta_info": {"output_token_logprobs": [[-1.0, 1, None], [float("nan"), 2, None]]}}),
    "lightllm's NaN": (
        "lightllm",
        {"generated_text": ["a"], "tokens": [{"id": 1, "logprob": -1.0}, {"id": 2, "logprob": float("nan")}]},
    ),
    "llama.cpp's counts": (
        "llama.cpp",
        {"content": "ab", "tokens": [1, 2], "completion_probabilities": [{"id": 1, "logprob": -1.0}]},
    ),
    "tgi's lists": (
        "tgi",
        {"generated_text": "a", "details": {"tokens": [{"id": 1}, {"id": 2}], "top_tokens": [[]]}},
    ),
}


@pytest.mark.parametrize("case", WITHOUT)
def test_logprobs_that_are_none_are_left_out_and_the_tokens_are_read(serve: Any, case: str) -> None:
    api, reply = WITHOUT[case]
    server = Server(serve(reply).url, api=api, model="m")
    (answer,) = server.generate([ONE], GREEDY)
    assert answer.tokens[:2] == (1, 2)
    assert not any(answer.logprobs[1:])
    assert server.num_without_logprobs == (1 if answer.logprobs or "NaN" in case else len(answer.tokens))


@pytest.mark.parametrize("token", [-1, -100, 31_999, 2**31, 10**400])
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_token_outside_the_vocabulary_is_a_bug(serve: Any, name: str, token: int) -> None:
    """-1 is what leaks where a placeholder for a draft is never filled."""
    fake = serve(speaks(name, lambda ids, number: [*ids[:-1], token]))
    server = Server(fake.url, api=SCHEMAS[name][0])
    requests = asked(with_text=True)
    found = audited(requests, list(server.generate(requests, GREEDY, symbols=SYMBOLS)))
    assert found.verdict == BUG and found.num_wrong >= len(requests)


FINE: dict[str, tuple[str, Any]] = {
    "an empty error": ("openai", edited(lambda one: one.update(error=""))),
    "an error that is an empty object": ("openai", edited(lambda one: one.update(error={}))),
    "an error that is null": ("openai", edited(lambda one: one.update(error=None))),
    "a count as a float": ("openai", edited(lambda one: one["usage"].update(prompt_tokens=3.0))),
    "a count of another type": ("openai", edited(lambda one: one["usage"].update(prompt_tokens="three"))),
    "usage of another type": ("openai", edited(lambda one: one.update(usage=[3]))),
    "the prompt's ids of another type": ("openai", choice_with(prompt_token_ids="37")),
    "a byte order mark": ("openai", (200, b"\xef\xbb\xbf" + json.dumps(vllm([1, 2], [16, 3, 7])).encode())),
    "sglang's text of another type": ("sglang", {"text": 7, "output_ids": [1, 2], "meta_info": {}}),
    "llama.cpp's count as a float": ("llama.cpp", {"content": "ab", "tokens": [1, 2], "tokens_evaluated": 3.0}),
}


@pytest.mark.parametrize("case", FINE)
def test_what_no_verdict_needs_may_be_anything(serve: Any, case: str) -> None:
    api, reply = FINE[case]
    (answer,) = Server(serve(reply).url, api=api, model="m").generate([ONE], GREEDY)
    assert answer.tokens == (1, 2)


def test_a_count_of_the_prompt_is_believed_as_a_float_too(serve: Any) -> None:
    reply = vllm([1, 2], [16, 3, 7])
    reply["choices"][0]["prompt_token_ids"], reply["usage"]["prompt_tokens"] = None, 4.0
    fake = serve(reply)
    with pytest.raises(ServerError, match="it read 4 prompt tokens, must be 3"):
        list(Server(fake.url, model="m").generate([ONE], GREEDY))


def test_a_server_that_hangs_is_late(serve: Any) -> None:
    hangs = threading.Event()
    fake = serve(lambda path, body, number: (hangs.wait(10), {})[1])
    started = time.monotonic()
    with pytest.raises(ServerError, match=r"request 0: no whole answer within 0\.2 s: allow more "):
        list(Server(fake.url, model="m", timeout=0.2).generate([ONE], GREEDY))
    hangs.set()
    assert time.monotonic() - started < 5
    assert fake.num_posts == 1


def test_a_server_that_drips_is_late(serve: Any) -> None:
    def drips(handler: Any) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            for _ in range(60):
                handler.wfile.write(b" ")
                time.sleep(0.05)
        except OSError:
            pass

    fake = serve(lambda *_: drips)
    with pytest.raises(ServerError, match=r"no whole answer within 0\.3 s"):
        list(Server(fake.url, model="m", timeout=0.3).generate([ONE], GREEDY))


def test_a_chunked_answer_is_read(serve: Any) -> None:
    def chunked(handler: Any) -> None:
        data = json.dumps(vllm([1, 2], [16, 3, 7])).encode()
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in (data[:100], data[100:], b""):
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))

    (answer,) = Server(serve(lambda *_: chunked).url, model="m").generate([ONE], GREEDY)
    assert answer.tokens == (1, 2)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_answers_before_a_failure_are_given_first(serve: Any, concurrency: int) -> None:
    """The failure comes sooner than the two answers before it, and no request is begun behind it."""

    def reply(path: str, body: Any, number: int) -> Any:
        if body["prompt"][-1] == 2:
            return (400, "no")
        time.sleep(0.3 if body["prompt"][-1] < 2 else 0.01)
        return vllm([body["prompt"][-1]], body["prompt"])

    fake, got = serve(reply), []
    requests = [Request((BOS, one), SYMBOLS[one], 1) for one in range(16)]
    with pytest.raises(ServerError, match=r"request 2: HTTP 400, must be 200: no$"):
        got.extend(Server(fake.url, model="m", concurrency=concurrency).generate(requests, GREEDY))
    assert [one.tokens for one in got] == [(0,), (1,)]
    assert fake.num_posts < 16


def test_answers_to_requests_behind_the_one_that_failed_are_not_lost(serve: Any) -> None:
    """The first request fails after the others have been answered."""
    others = threading.Semaphore(0)

    def reply(path: str, body: Any, number: int) -> Any:
        if body["prompt"][-1] == 0:
            for _ in range(3):
                others.acquire(timeout=10)
            time.sleep(0.3)
            return (500, "dead")
        others.release()
        return vllm([body["prompt"][-1]], body["prompt"])

    requests = [Request((BOS, one), SYMBOLS[one], 1) for one in range(4)]
    with pytest.raises(ServerError, match="request 0: HTTP 500") as caught:
        list(Server(serve(reply).url, model="m", concurrency=2).generate(requests, GREEDY))
    assert [(number, one.tokens) for number, one in caught.value.later] == [(1, (1,)), (2, (2,)), (3, (3,))]


def test_answers_come_in_the_order_of_the_requests(serve: Any) -> None:
    def reply(path: str, body: Any, number: int) -> Any:
        time.sleep(0.002 * (15 - body["prompt"][-1]))
        return vllm([body["prompt"][-1]], body["prompt"])

    requests = [Request((BOS, one), SYMBOLS[one], 1) for one in range(16)]
    found = Server(serve(reply).url, model="m", concurrency=8).generate(requests, GREEDY)
    assert [one.tokens for one in found] == [(one,) for one in range(16)]


def test_as_many_are_asked_at_a_time_as_was_said(serve: Any) -> None:
    barrier = threading.Barrier(4)

    def reply(path: str, body: Any, number: int) -> Any:
        barrier.wait(10)  # passes only with four at a time
        return vllm([1], [16])

    requests = [Request((BOS,), "", 1)] * 8
    assert len(list(Server(serve(reply).url, model="m", concurrency=4).generate(requests, GREEDY))) == 8


# What a fuzzer puts in the place of any value.
VALUES: list[Any] = [None, True, 0, -1, 2**31, 10**400, -(10**400), 0.5, float("nan"), -float("inf"), "", "token_id:5"]
VALUES += [[], {}, [[]], [None], {"a": 1}, {"message": []}, "\ud800"]


def values_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values, that of the whole first."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(one for key, item in inner for one in values_in(item, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return copy


@pytest.mark.parametrize("name", [*SCHEMAS, "llama.cpp"])
def test_one_value_of_any_kind_anywhere_is_an_answer_or_a_sentence(serve: Any, name: str) -> None:
    """Never another exception, and never a token that is no int. Each place gets three of the values."""
    entry = {"id": 5, "token": "5", "bytes": [53], "logprob": -0.25}
    whole: Any = {
        "content": "55",
        "tokens": [5, 5],
        "tokens_evaluated": 3,
        "timings": {"predicted_n": 2, "draft_n": 1, "draft_n_accepted": 1},
        "completion_probabilities": [{**entry, "top_logprobs": [entry]}, {**entry, "top_logprobs": []}],
    }
    api, schema, _ = SCHEMAS.get(name, ("llama.cpp", lambda ids, prompt: whole, None))
    found = schema([5, 5], [16, 3, 7])
    paths = values_in(found)
    answers = [
        replaced(found, path, VALUES[(3 * i + j) % len(VALUES)]) for i, path in enumerate(paths) for j in range(3)
    ]
    fake = serve(lambda path, body, number: answers[number])
    server, sentences = Server(fake.url, api=api, model="m"), []
    for _ in answers:
        try:
            (answer,) = server.generate([ONE], GREEDY, symbols=SYMBOLS)
        except ServerError as error:
            sentences.append(str(error))
        else:
            assert all(type(token) is int for token in answer.tokens)
            assert len(answer.logprobs) in (0, len(answer.tokens))
            assert all(value <= 1e-3 for place in answer.logprobs for _, value in place)
    start = f"{fake.url}{APIS[api].path}, request 0: "
    assert [one for one in sentences if not one.startswith(start) or not one.isprintable()] == []


# Retries


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_request_that_was_refused_is_asked_again_and_counted(serve: Any, status: int) -> None:
    fake = serve(lambda path, body, number: (status, "busy") if number < 2 else vllm([1, 2], [16, 3, 7]))
    server = Server(fake.url, model="m", wait=0.001)
    assert [one.tokens for one in server.generate([ONE], GREEDY)] == [(1, 2)]
    assert (server.num_retries, fake.num_posts) == (2, 3)


@pytest.mark.parametrize("seconds", ["1", "date"])
def test_a_server_is_asked_again_as_late_as_it_says(serve: Any, seconds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("specbench.engines.server.time.sleep", slept.append)
    late = formatdate(time.time() + 30, usegmt=True) if seconds == "date" else "30"
    busy = (429, "busy", {"Retry-After": late})
    fake = serve(lambda path, body, number: busy if number < 1 else vllm([1, 2], [16, 3, 7]))
    assert len(list(Server(fake.url, model="m", wait=0.001).generate([ONE], GREEDY))) == 1
    assert slept == [pytest.approx(30, abs=5)]


def test_no_longer_than_the_timeout_is_waited_for_a_server_that_is_busy(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("specbench.engines.server.time.sleep", slept.append)
    fake = serve((503, "busy", {"Retry-After": "3600"}))
    with pytest.raises(ServerError, match="HTTP 503"):
        list(Server(fake.url, model="m", timeout=7, retries=1).generate([ONE], GREEDY))
    assert slept == [7]


@pytest.mark.parametrize("told", ["", "soon", "-3", "1e9", "Wed, 99 Nov 2026 99:99:99 GMT"])
def test_a_wait_that_is_none_is_not_heeded(serve: Any, told: str) -> None:
    busy = (429, "busy", {"Retry-After": told})
    fake = serve(lambda path, body, number: busy if number < 1 else vllm([1, 2], [16, 3, 7]))
    started = time.monotonic()
    assert len(list(Server(fake.url, model="m", wait=0.001).generate([ONE], GREEDY))) == 1
    assert time.monotonic() - started < 5


def test_retries_end(serve: Any) -> None:
    fake = serve((503, {"error": {"message": "Loading model"}}))
    server = Server(fake.url, model="m", wait=0.001, retries=2)
    with pytest.raises(ServerError, match=r"request 0: HTTP 503, must be 200: Loading model$"):
        list(server.generate([ONE], GREEDY))
    assert (server.num_retries, fake.num_posts) == (2, 3)


@pytest.mark.parametrize("status", [400, 404, 408, 500, 501])
def test_other_statuses_are_final(serve: Any, status: int) -> None:
    fake = serve((status, "no"))
    server = Server(fake.url, model="m", wait=0.001)
    with pytest.raises(ServerError, match=f"HTTP {status}"):
        list(server.generate([ONE], GREEDY))
    assert (server.num_retries, fake.num_posts) == (0, 1)


def test_a_wrong_token_is_never_asked_again(serve: Any) -> None:
    fake = serve(speaks("vllm", lambda ids, number: [0] * len(ids)))
    server, requests = Server(fake.url, model="m"), asked()
    assert audited(requests, list(server.generate(requests, GREEDY))).verdict == BUG
    assert (server.num_retries, fake.num_posts) == (0, len(requests))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_where_nothing_listens_is_told_after_the_retries() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    server = Server(url, model="m", wait=0.001, retries=2)
    sentence = (
        f"^{url}/v1/completions, request 0: nothing listens there \\(3 tries\\): start the server, or check the URL$"
    )
    with pytest.raises(ServerError, match=sentence):
        list(server.generate([ONE], GREEDY))
    assert server.num_retries == 2
    with pytest.raises(ServerError, match="/version: nothing listens there: start"):
        Server(url, retries=0).version()


def test_a_host_that_does_not_exist_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*where: Any, **more: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ServerError, match=r"request 0: no such host: check the URL$"):
        list(Server("http://localhost:1", model="m").generate([ONE], GREEDY))


def test_a_server_that_comes_up_late_is_met(serve: Any) -> None:
    """The port refuses connections at first, as it does while a model is being loaded."""
    port, fakes = free_port(), []

    def come_up() -> None:
        time.sleep(0.2)
        late = ThreadingHTTPServer(("127.0.0.1", port), BaseHTTPRequestHandler)
        fakes.append(late)
        late.handle_request()

    threading.Thread(target=come_up, daemon=True).start()
    server = Server(f"http://127.0.0.1:{port}", model="m", wait=0.1, retries=8)
    with pytest.raises(ServerError, match="HTTP 501"):
        list(server.generate([ONE], GREEDY))
    assert server.num_retries >= 1
    fakes[0].server_close()


# The key


def test_the_key_is_sent_and_never_told(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server repeats its headers: whole, in capitals of JSON, and cut."""
    monkeypatch.setenv("MY_KEY", KEY)

    def reply(path: str, body: Any, number: int) -> Any:
        echoes = [f"Bearer {KEY}", json.dumps(KEY), KEY[:12], KEY[5:], KEY.replace("/", "%2F").replace("+", "%2B")]
        answers: list[Any] = [
            (401, {"error": {"message": f"invalid: {echoes}"}}),
            (200, f"<html>{KEY}</html>"),
            {"object": "error", "message": KEY},
            {"choices": [{"token_ids": KEY}]},
            choice_with(finish_reason="abort", token_ids=[KEY]),
            {"choices": [{"logprobs": {"tokens": KEY}}]},
            (302, "", {"Location": f"http://example.com/{KEY}"}),
            lambda handler: handler.wfile.write(f"{KEY}\r\n".encode()),
            (429, KEY),
        ]
        return answers[number % len(answers)]

    fake = serve(reply)
    server = Server(fake.url, model="m", key_variable="MY_KEY", retries=0)
    said = [repr(server), str(server)]
    for _ in range(9):
        with pytest.raises(ServerError) as caught:
            list(server.generate([ONE], GREEDY))
        said += [repr(caught.value), "".join(traceback.format_exception(caught.value))]
    assert {headers["Authorization"] for _, _, headers in fake.asked} == {f"Bearer {KEY}"}
    windows = {KEY[start : start + 8] for start in range(len(KEY) - 7)}
    assert [one for one in said if any(window in one for window in windows)] == []
    assert sum("***" in one for one in said) >= 4


def test_a_model_or_a_version_that_is_the_key_is_not_told(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    fake = serve({"version": KEY, "data": [{"id": KEY}, {"id": "other"}]})
    assert Server(fake.url).version() == "vLLM *** (openai)"
    with pytest.raises(ServerError, match=r"it has 2 models, must be told which \(--model\): \*\*\*, other$"):
        list(Server(fake.url).generate([ONE], GREEDY))


def test_no_key_is_needed(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    fake = serve(speaks("vllm"))
    list(Server(fake.url).generate([ONE], GREEDY))
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    list(Server(fake.url, key_variable="").generate([ONE], GREEDY))
    assert not [1 for _, _, headers in fake.asked if "Authorization" in headers]


@pytest.mark.parametrize("value", ["", "two words", "line\nbreak", "schlüssel"])
def test_a_key_that_no_header_can_hold_is_refused_unseen(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", value)
    with pytest.raises(ValueError, match=r"^the environment variable MY_KEY must hold ") as caught:
        Server("http://127.0.0.1:1", key_variable="MY_KEY")
    assert not value or value not in str(caught.value)


def test_a_redirect_is_not_followed(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    other = serve(speaks("vllm"))
    fake = serve((307, "moved", {"Location": f"{other.url}/v1/completions"}))
    with pytest.raises(ServerError, match="HTTP 307, must be 200: moved; redirects are not followed: give the URL"):
        list(Server(fake.url, model="m").generate([ONE], GREEDY))
    assert other.asked == []


def test_a_proxy_of_the_environment_is_not_used_for_this_machine(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = serve(speaks("vllm"))
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert len(list(Server(fake.url).generate([ONE], GREEDY))) == 1
    assert len(list(Server(fake.url.replace("127.0.0.1", "localhost")).generate([ONE], GREEDY))) == 1


def test_a_proxy_of_the_environment_is_used_for_others(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = serve(lambda path, body, number: vllm([1, 2], [16, 3, 7]))
    monkeypatch.setenv("http_proxy", proxy.url)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert len(list(Server("http://server.invalid:8000", model="m").generate([ONE], GREEDY))) == 1
    assert proxy.asked[0][0] == "http://server.invalid:8000/v1/completions"


# Names and arguments


@pytest.mark.parametrize(
    ("path", "fields", "version"),
    [
        ("/version", {"version": "0.11.0"}, "vLLM 0.11.0 (openai)"),
        ("/props", {"build_info": "b6900-abc"}, "llama.cpp b6900-abc (openai)"),
        ("/get_server_info", {"version": "0.5.3", "api_key": "x"}, "SGLang 0.5.3 (openai)"),
        ("/info", {"version": "3.3.6"}, "TGI 3.3.6 (openai)"),
        ("/get_model_name", {"model_name": "sentinel"}, "LightLLM with sentinel (openai)"),
        ("/else", {}, "a server of unknown version (openai)"),
    ],
)
def test_a_server_is_known_by_what_it_tells(serve: Any, path: str, fields: Any, version: str) -> None:
    fake = serve(lambda asked, body, number: fields if asked == path else (404, "<p>no"))
    assert Server(fake.url).version() == version


def test_counters_of_drafts_are_read(serve: Any) -> None:
    lines = [
        "# TYPE vllm:spec_decode_num_draft_tokens_total counter",
        'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a b"} 1.2e+03',
        'vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="a b"} 34.0',
        'vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a b"} 7.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 5.0',
        'vllm:spec_decode_num_draft_tokens_created{engine="0"} 1.7e+09',
    ]
    assert Server(serve((200, "\n".join(lines))).url).drafts() == (1_234, 7)
    assert Server(serve((404, "")).url).drafts() is None
    assert Server(serve((200, "vllm:num_requests 3")).url).drafts() is None


COUNTER = "vllm:spec_decode_num_{}_tokens_total {}"


def hanging(handler: Any) -> None:
    time.sleep(1)


ASIDE: dict[str, Any] = {
    "closes": lambda *_: closed,
    "is cut off": lambda *_: cut_off,
    "is no HTTP": lambda *_: no_http,
    "hangs": lambda *_: hanging,
    "is busy": lambda *_: (503, "busy"),
    "wants a key": lambda *_: (401, "who?"),
    "forbids": lambda *_: (403, "no"),
    "fails": lambda *_: (500, "boom"),
    "is of an unknown status": lambda *_: (299, "?"),
    "is no UTF-8": lambda *_: (200, b"\xff\xfe"),
    "has bad numbers": lambda *_: (200, COUNTER.format("draft", "1.2.3e") + "\n" + COUNTER.format("accepted", "4e")),
    "has no numbers": lambda *_: (200, COUNTER.format("draft", "NaN") + "\n" + COUNTER.format("accepted", "+Inf")),
    "has huge numbers": lambda *_: (200, COUNTER.format("draft", "1e400") + "\n" + COUNTER.format("accepted", "1")),
}


@pytest.mark.parametrize("case", ASIDE)
def test_what_no_verdict_needs_may_fail_in_any_way(serve: Any, case: str) -> None:
    """/metrics, /version, /props and the others, and the list of models."""

    def reply(path: str, body: Any, number: int) -> Any:
        return ASIDE[case]() if body is None else vllm([1, 2], [16, 3, 7])

    server = Server(serve(reply).url, timeout=0.3, wait=0.001)
    assert server.version() == "a server of unknown version (openai)"
    assert server.drafts() is None
    assert [one.tokens for one in server.generate([ONE], GREEDY)] == [(1, 2)]


def test_counters_with_a_time_behind_them_are_read(serve: Any) -> None:
    lines = [COUNTER.format("draft", "12 1796048350000"), COUNTER.format("accepted", "7.0 1796048350000")]
    assert Server(serve((200, "\n".join(lines))).url).drafts() == (12, 7)


def test_the_only_model_of_a_server_need_not_be_named(serve: Any) -> None:
    def reply(path: str, body: Any, number: int) -> Any:
        return {"data": [{"id": "sentinel"}]} if path == "/v1/models" else vllm([1, 2], [16, 3, 7])

    fake = serve(reply)
    list(Server(fake.url).generate([ONE, ONE], GREEDY))
    assert [path for path, _, _ in fake.asked] == ["/v1/models", "/v1/completions", "/v1/completions"]
    assert fake.asked[1][1]["model"] == "sentinel"


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_a_url_may_be_that_of_the_server_or_of_its_v1(url: str) -> None:
    assert Server(url).url == "http://h:1"


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"url": "127.0.0.1:8000"}, "url = '127.0.0.1:8000' must be http://HOST:PORT or https://HOST:PORT"),
        ({"url": "file:///etc/passwd"}, "url = 'file:///etc/passwd' must be http://HOST:PORT or https://HOST:PORT"),
        ({"url": "http://[::1"}, "url must be http://HOST:PORT or https://HOST:PORT"),
        ({"url": "http://h:port"}, "url must be http://HOST:PORT or https://HOST:PORT"),
        ({"url": "http://h:1\r\nX: y"}, "url"),
        (
            {"url": "http://me:secret@h:1"},
            "url must have no user, password, query or fragment: a key goes into an environment variable",
        ),
        ({"url": "http://h:1/?key=secret"}, "url must have no user, password, query or fragment: a key goes into an"),
        ({"api": "vllm"}, "api = 'vllm' must be one of openai, llama.cpp, sglang, tgi, lightllm"),
        ({"concurrency": 0}, "concurrency = 0 must be an int of at least 1"),
        ({"retries": -1}, "retries = -1 must be an int of at least 0"),
        ({"num_logprobs": True}, "num_logprobs = True must be an int of at least 0"),
        ({"timeout": 0}, "timeout = 0 must be seconds above 0"),
        ({"timeout": float("nan")}, "timeout = nan must be seconds above 0"),
        (
            {"key_variable": "sk-secret"},
            "key_variable must be the name of an environment variable, in capitals, and not",
        ),
        (
            {"key_variable": "NO_SUCH_KEY"},
            "the environment variable NO_SUCH_KEY must hold the key: it is not set, or em",
        ),
    ],
)
def test_a_wrong_argument_is_named(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        Server(**{"url": "http://h:1", **changed})
    assert str(caught.value).startswith(sentence)
    assert "secret" not in str(caught.value)
