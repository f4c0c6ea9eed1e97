"""Servers that somebody else started: asked over HTTP, in the API that they speak, for the ids of the tokens they say.

Nothing is started here, no text is tokenised again, no answer is judged, and an answer that was read is never asked for
a second time. Standard library only; the APIs are in `server_apis.py`.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import math
import os
import queue
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from specbench.engines.engine import Answer, Request, Settings
from specbench.engines.server_apis import (
    APIS,
    MESSAGE_LIMIT,
    Asked,
    Wrong,
    answer_of,
    check_prompt,
    message_in,
    object_in,
    parsed,
    parsed_or_none,
)
from specbench.sanitize import plain

KEY_VARIABLE = "OPENAI_API_KEY"
RETRIED = (429, 502, 503, 504)
LONGEST_WAIT = 8.0  # seconds, where the server does not say how long
ASIDE_WAIT = 10.0  # seconds, for what no verdict needs
UNKNOWN = "a server of unknown version"
LARGEST_BODY = 64 * 2**20

T = TypeVar("T")


class ServerError(ValueError):
    """One sentence: what is wrong, where, what it must be, what to do. later: answers of requests behind the one that
    failed which had come by then, each with its number."""

    later: Sequence[tuple[int, Any]] = ()


@dataclass
class Server:
    """url: http://HOST:PORT, of the server or of its /v1. api: one of APIS. model: as the server names it, "" for the
    only one it has. concurrency: requests at a time. timeout: seconds for one request. retries: of a request that was
    refused (connection, 429, 502, 503, 504) before an answer; wait: seconds before the first, doubled each time, or as
    long as the server's Retry-After says, `timeout` at most.
    key_variable: name of the environment variable that may hold a key, "" for none. tokens: prompts go as ids where the
    API takes them, or else as text. num_logprobs: most likely tokens asked for at each place, 0 for no logprobs.
    num_retries: how many there have been; num_without_logprobs: places whose logprobs were none, such as NaN.
    """

    url: str
    api: str = "openai"
    model: str = ""
    concurrency: int = 1
    timeout: float = 120.0
    retries: int = 3
    key_variable: str = KEY_VARIABLE
    tokens: bool = True
    num_logprobs: int = 5
    wait: float = 0.5
    num_retries: int = field(default=0, init=False)
    num_without_logprobs: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.url = _checked_url(self.url)
        if self.api not in APIS:
            raise ValueError(f"api = {self.api!r} must be one of {', '.join(APIS)}")
        for name, least in (("concurrency", 1), ("retries", 0), ("num_logprobs", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} = {value!r} must be an int of at least {least}")
        for name in ("timeout", "wait"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} = {value!r} must be seconds above 0")
        _key(self.key_variable)  # a key that no header can hold is told before anything is sent
        self._lock = threading.Lock()
        self._opener = urllib.request.build_opener(
            _AnyStatus, *([urllib.request.ProxyHandler({})] if _is_loopback(self.url) else [])
        )

    @property
    def takes_ids(self) -> bool:
        """Whether prompts go as token ids. A server that is asked by text cannot be asked for an empty one."""
        return self.tokens and APIS[self.api].takes_ids

    def version(self) -> str:
        """Name and version as the server tells them; `ServerError` where nothing listens."""
        for path, name, entry in _VERSIONS:
            status, raw = self._send(path, None)
            if not status or status in RETRIED:
                break  # the other paths would cost as long
            told = parsed_or_none(raw) if status == 200 else None
            if isinstance(told, dict) and isinstance(told.get(entry), str):
                return f"{name} {plain(self._masked(told[entry]), 60, one_line=True)} ({self.api})"
        return f"{UNKNOWN} ({self.api})"

    def drafts(self) -> tuple[int, int] | None:
        """Drafts that the server has verified and kept so far, for whomever asked; None where /metrics has no such
        counters (vLLM has them, llama-server with --metrics), whatever it is that it has or does instead."""
        try:
            status, raw = self._send("/metrics", None, retries=0)
        except ServerError:
            return None
        text = raw.decode("utf-8", "replace") if status == 200 else ""
        verified, kept = _counter("draft", text), _counter("accepted", text)
        return None if verified is None or kept is None else (verified, kept)

    def generate(self, requests: Sequence[Request], settings: Settings, *, symbols: str = "") -> Iterator[Answer]:
        """Answers in the order of the requests, each as soon as it and those before it are there.

        symbols: one character a token of a sentinel, for servers that give text alone; "" for a real model, which
        cannot be judged by text. `ServerError` ends it behind the answers to the requests before, and holds those that
        have come of the requests behind.
        """
        api = APIS[self.api]
        for name in ("top_k", "top_p", "min_p"):
            if settings.temperature and getattr(settings, name) is not None and name in api.lacks:
                raise ValueError(f"{name} = {getattr(settings, name)!r} cannot be asked of {self.api}: leave it out")
        for i, one in enumerate(requests):
            if not self.takes_ids and not one.text:
                raise ValueError(f"request {i} has an empty text, which {self.api} cannot be asked: leave it out")
        model = self.model or (self._only_model() if self.api == "openai" and requests else "")

        def ask(i: int) -> Answer:
            one = requests[i]
            prompt: Any = list(one.prompt) if self.takes_ids else one.text
            body = api.body(Asked(prompt, one.max_new_tokens, settings, settings.seed + i, model, self.num_logprobs))
            where = f"{self.url}{api.path}, request {i}"
            status, raw = self._send(api.path, body, where)
            if status != 200:
                raise self._refused(f"{api.path}, request {i}", status, raw)
            try:
                said = api.read(object_in(parsed(raw), "the answer"), settings)
                check_prompt(said, one)
                with self._lock:
                    self.num_without_logprobs += said.num_without_logprobs
                return answer_of(said, symbols, api)
            except Wrong as wrong:
                raise ServerError(self._masked(f"{where}: {wrong}")) from None

        yield from _in_order(ask, len(requests), self.concurrency)

    def _only_model(self) -> str:
        """Empty where the server lists none: it needs no name then."""
        status, raw = self._send("/v1/models", None)
        told = parsed_or_none(raw) if status == 200 else None
        listed = told.get("data") if isinstance(told, dict) else None
        names = [one["id"] for one in listed or () if isinstance(one, dict) and isinstance(one.get("id"), str)]
        if len(names) > 1:
            shown = plain(self._masked(", ".join(names)), MESSAGE_LIMIT, one_line=True)
            raise ServerError(
                f"{self.url}/v1/models: it has {len(names)} models, must be told which (--model): {shown}"
            )
        return names[0] if names else ""

    def _send(
        self, path: str, body: Mapping[str, Any] | None, where: str = "", *, retries: int | None = None
    ) -> tuple[int, bytes]:
        """Status and body. Retried are a refused connection and RETRIED alone, which leave the request undone.

        Without a body it is something that no verdict needs: waited for ASIDE_WAIT at most, and status 0 stands for an
        answer that does not come, or not whole.
        """
        where, retries = where or f"{self.url}{path}", self.retries if retries is None else retries
        for attempt in range(retries + 1):
            asked_to_wait = 0.0
            try:
                status, raw, asked_to_wait = self._exchange(path, body, where)
            except _ConnectionRefused:
                if attempt == retries:
                    tries = f" ({attempt + 1} tries)" if attempt else ""
                    raise ServerError(
                        f"{where}: nothing listens there{tries}: start the server, or check the URL"
                    ) from None
            except ServerError:
                if body is None:
                    return 0, b""
                raise
            else:
                if status not in RETRIED or attempt == retries:
                    return status, raw
            with self._lock:
                self.num_retries += 1
            wait = max(asked_to_wait, min(self.wait * 2**attempt, LONGEST_WAIT))
            time.sleep(min(wait, self._timeout_of(body)))
        raise AssertionError("unreachable")

    def _exchange(self, path: str, body: Mapping[str, Any] | None, where: str) -> tuple[int, bytes, float]:
        """Status, body, and the seconds that the server asks for before it is asked again."""
        headers = {"Accept": "application/json", "Content-Type": "application/json", "User-Agent": "specbench"}
        if key := _key(self.key_variable):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode("ascii")
        request = urllib.request.Request(f"{self.url}{path}", data, headers)
        timeout = self._timeout_of(body)
        deadline, problem = time.monotonic() + timeout, ""
        try:
            with self._opener.open(request, timeout=timeout) as response:
                return response.status, _body_of(response, deadline), _retry_after(response.headers)
        except Wrong as wrong:
            problem = str(wrong)
        except (OSError, http.client.HTTPException, ValueError) as error:
            problem = _told(error)
        if problem == _REFUSED:
            raise _ConnectionRefused
        if problem == _LATE:
            problem = (
                f"no whole answer within {self.timeout:g} s: allow more (--timeout), or ask for less (--concurrency)"
            )
        raise ServerError(self._masked(f"{where}: {problem}"))

    def _timeout_of(self, body: Mapping[str, Any] | None) -> float:
        return min(self.timeout, ASIDE_WAIT) if body is None else self.timeout

    def _refused(self, where: str, status: int, raw: bytes) -> ServerError:
        """A status other than 200 in one sentence, with the server's own words."""
        words = plain(self._masked(message_in(raw)[:10_000]), MESSAGE_LIMIT, one_line=True)
        hint = ""
        if status in (401, 403):
            hint = "; name the environment variable that holds its key (--key-variable)"
        elif status in (400, 422) and self.takes_ids and re.search(r"\b(string|str|text)s?\b", words, re.IGNORECASE):
            hint = "; if it takes text only, ask with --text"
        elif status in (404, 405):
            hint = f"; is it a server of another API ({', '.join(APIS)}), or the model's name another?"
        elif 300 <= status < 400:
            hint = "; redirects are not followed: give the URL that it names"
        return ServerError(
            self._masked(f"{self.url}{where}: HTTP {status}, must be 200: {words or 'no message'}{hint}")
        )

    def _masked(self, text: str) -> str:
        """Without the key, whole or in parts of 8 characters or more, as it is or as a URL or JSON spells it."""
        key, hidden = _key(self.key_variable), [False] * len(text)
        for form in (key, quote(key, safe=""), json.dumps(key)[1:-1]) if key else ():
            width = min(8, len(form))
            parts = {form[start : start + width] for start in range(len(form) - width + 1)}
            for start in range(len(text) - width + 1):
                if text[start : start + width] in parts:
                    hidden[start : start + width] = [True] * width
        shown = "".join("\0" if hide else one for hide, one in zip(hidden, text, strict=True))
        return re.sub("\0+", "***", shown)


# Where servers tell who they are: path, name, and the entry that holds the version.
_VERSIONS = (
    ("/version", "vLLM", "version"),
    ("/props", "llama.cpp", "build_info"),
    ("/server_info", "SGLang", "version"),
    ("/get_server_info", "SGLang", "version"),
    ("/info", "TGI", "version"),
    ("/get_model_name", "LightLLM with", "model_name"),
)
_REFUSED, _LATE = "refused", "late"


class _ConnectionRefused(Exception):
    pass


class _AnyStatus(urllib.request.HTTPErrorProcessor):
    """Every status is an answer: no exception, no redirect."""

    def http_response(self, request: urllib.request.Request, response: Any) -> Any:
        return response

    https_response = http_response


def _checked_url(url: str) -> str:
    """Without the slash and the /v1 at its end. It is quoted in no message before it is known to hold no password."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise ValueError("url must be http://HOST:PORT or https://HOST:PORT") from None
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError("url must have no user, password, query or fragment: a key goes into an environment variable")
    if parts.scheme not in ("http", "https") or not host or not url.isascii() or re.search(r"[\s\x00-\x1f\x7f]", url):
        raise ValueError(f"url = {plain(url, 100, one_line=True)!r} must be http://HOST:PORT or https://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _is_loopback(url: str) -> bool:
    """Of such a host a proxy from the environment would mean another machine."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _key(variable: str) -> str:
    """The variable's value; "" where there is none, which only the default variable may be. Who gives the key for the
    name does not see it repeated."""
    if variable and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", variable):
        raise ValueError(
            "key_variable must be the name of an environment variable, in capitals, and not the key itself"
        )
    key = os.environ.get(variable, "").strip() if variable else ""
    if not key and variable not in ("", KEY_VARIABLE):
        raise ValueError(f"the environment variable {variable} must hold the key: it is not set, or empty")
    if not re.fullmatch(r"[!-~]*", key):
        raise ValueError(f"the environment variable {variable} must hold a key of printable ASCII without spaces")
    return key


def _body_of(response: Any, deadline: float) -> bytes:
    """The whole body, or `Wrong`. Read in pieces: a server that drips is late, too."""
    pieces, size = [], 0
    while piece := response.read1(2**16):
        pieces.append(piece)
        size += len(piece)
        if size > LARGEST_BODY:
            raise Wrong(f"the answer has more than {LARGEST_BODY:,} bytes, which no list of tokens needs")
        if time.monotonic() > deadline:
            raise Wrong(_LATE)
    if response.length:
        raise Wrong(
            f"the answer was cut off after {size:,} bytes, {response.length:,} are missing: see the server's log"
        )
    return b"".join(pieces)


def _told(error: Exception) -> str:
    """An exception of the network as the end of a sentence, or _REFUSED, or _LATE."""
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, Exception):
        error = error.reason
    if isinstance(error, ConnectionRefusedError):
        return _REFUSED
    if isinstance(error, TimeoutError):
        return _LATE
    if isinstance(error, http.client.IncompleteRead):
        return "the answer was cut off: see the server's log"
    if isinstance(error, ConnectionError):  # RemoteDisconnected is one
        return "the server closed the connection without an answer: see its log"
    if isinstance(error, socket.gaierror):
        return "no such host: check the URL"
    words = plain(str(error), MESSAGE_LIMIT, one_line=True)
    if isinstance(error, http.client.HTTPException):
        return f"what it answers is not HTTP ({type(error).__name__}: {words}): check the URL, its port and scheme"
    return f"{type(error).__name__}: {words}"


def _retry_after(headers: Any) -> float:
    """Seconds from now, of a number or a date; 0 where it says neither."""
    told = (headers.get("Retry-After") or "").strip()
    if re.fullmatch(r"\d{1,9}", told):
        return float(told)
    try:
        then = parsedate_to_datetime(told)
    except (TypeError, ValueError):
        return 0.0
    now = datetime.now(timezone.utc)
    return max(0.0, ((then if then.tzinfo else then.replace(tzinfo=timezone.utc)) - now).total_seconds())


def _counter(word: str, text: str) -> int | None:
    """One of Prometheus's lines, summed over its labels; None where one of them is no number."""
    found = re.findall(rf"^\w+:spec_decode_num_{word}_tokens_total(?:\{{.*\}})? (\S+)(?: \d+)?$", text, re.MULTILINE)
    try:
        return int(sum(map(float, found))) if found else None
    except (ValueError, OverflowError):
        return None


def _in_order(call: Callable[[int], T], num: int, num_threads: int) -> Iterator[T]:
    """call(0), call(1), ..., several at a time. The first that fails is raised in its place, and no other is begun."""
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: list[Future[T]] = [Future() for _ in range(num)]
    ends = threading.Event()
    for i in range(num):
        todo.put(i)

    def work() -> None:
        while not ends.is_set():
            try:
                i = todo.get_nowait()
            except queue.Empty:
                return
            try:
                done[i].set_result(call(i))
            except BaseException as error:
                ends.set()  # those before it have all been begun
                done[i].set_exception(error)

    for _ in range(min(num_threads, num)):
        threading.Thread(target=work, daemon=True).start()  # daemon: ^C need not wait for a server that hangs
    try:
        for i, one in enumerate(done):
            try:
                found = one.result()
            except ServerError as error:
                came = [j for j in range(i + 1, num) if done[j].done() and not done[j].exception()]
                error.later = [(j, done[j].result()) for j in came]
                raise
            yield found
    finally:
        ends.set()
