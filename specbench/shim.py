"""The engine's side of the wire for Python: one file, standard library only, to be copied next to an engine.

    python shim.py pkg.mod:attr          python shim.py ./file.py:attr          or serve(adapter) in code of your own

It answers JSON lines on stdin/stdout (docs/wire.md) with an object that has the methods of the adapter levels, needs
neither specbench nor torch, and keeps stdout for the answers: whatever the adapter prints goes to stderr. Python 3.8+.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    # Run as a script from specbench's own folder, `types.py` beside this file would stand in for Python's.
    sys.path[0] = ""

import base64
import difflib
import importlib
import importlib.util
import inspect
import json
import math
import os
import struct
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, BinaryIO

VERSION = 1
# What a request may ask, and the names of its parameters. `hello`, `reset` and `shutdown` have none.
METHODS = {
    "hello": (),
    "build_from": ("checkpoint", "drafter_checkpoint"),
    "logits": ("tokens",),
    "generate": ("prompt", "max_new_tokens", "sampling", "stop", "seed"),
    "generate_batch": ("requests",),
    "verify": ("tree", "target_logits", "sampling", "uniforms"),
    "draft": ("context", "max_nodes", "max_depth", "sampling", "uniforms"),
    "observe": ("path", "bonus_token"),
    "reset": (),
    "shutdown": (),
}
# The methods that an adapter may have; the other two are the shim's own.
ADAPTER_METHODS = tuple(name for name in METHODS if name not in ("hello", "shutdown"))
SPECIAL_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
PROPOSALS = ("deterministic", "iid", "without_replacement")


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if len(words) != 1 or words[0].startswith("-"):
        print("usage: shim.py package.module:attribute or ./file.py:attribute", file=sys.stderr)
        return 2
    # Loaded when hello asks for it, with stdout already safe: a failure is then told in the answer.
    _Server(lambda: find(words[0])).run(*_take_stdio())
    return 0


def serve(adapter: Any) -> None:
    """Answers requests with `adapter`, an object, class or factory, until stdin ends or shutdown is asked.

    stdin and stdout belong to the wire.
    """
    _Server(lambda: adapter).run(*_take_stdio())


def find(name: str) -> Any:
    """The object, class or factory behind `package.module:attribute` or `./file.py:attribute`."""
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ValueError(f"{name!r} must be package.module:attribute or ./file.py:attribute")
    if place.endswith(".py"):
        if not os.path.isfile(place):
            raise FileNotFoundError(f"there is no file {place}")
        sys.path.insert(0, os.path.dirname(os.path.abspath(place)))
        module_name = "specbench_target_" + os.path.basename(place)[:-3]
        spec = importlib.util.spec_from_file_location(module_name, place)
        assert spec is not None and spec.loader is not None
        value: Any = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = value
        spec.loader.exec_module(value)
    else:
        if "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        value = importlib.import_module(place)
    for part in attribute.split("."):
        if not hasattr(value, part):
            near = difflib.get_close_matches(part, dir(value), n=1)
            raise AttributeError(f"{place} has no {part!r}" + (f"; did you mean {near[0]}?" if near else ""))
        value = getattr(value, part)
    return value


def is_factory(found: Any) -> bool:
    """Whether an adapter is made by calling it."""
    return inspect.isclass(found) or inspect.isroutine(found)


class Tree:
    """A draft tree as an adapter sees it: the attributes of specbench's DraftTree, in plain Python.

    tokens, parents: N ints, node 0 the root. draft_probs: N rows of V floats, or None. Tensors or arrays where the
    adapter asks for them by `wire_arrays`; token_list, parent_list and depth are always lists.
    """

    def __init__(self, tokens: list[int], parents: list[int], draft_probs: Any, proposal: str, arrays: str) -> None:
        self.token_list = list(tokens)
        self.parent_list = list(parents)
        self.tokens = vector(self.token_list, arrays)
        self.parents = vector(self.parent_list, arrays)
        self.draft_probs = draft_probs
        self.proposal = proposal
        self.num_nodes = len(self.token_list)
        self.num_drafts = self.num_nodes - 1
        self.depth = [0] * self.num_nodes
        for node in range(1, self.num_nodes):
            self.depth[node] = self.depth[self.parent_list[node]] + 1

    def children(self, node: int) -> list[int]:
        return [one for one in range(1, self.num_nodes) if self.parent_list[one] == node]

    def path_to(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        path = [node]
        while self.parent_list[path[-1]] >= 0:
            path.append(self.parent_list[path[-1]])
        return path[::-1]


class Coins:
    """The uniforms of one request, handed out in order."""

    def __init__(self, uniforms: list[float], arrays: str) -> None:
        self._uniforms = uniforms
        self._arrays = arrays
        self._used = 0

    def uniform(self, num: int) -> Any:
        """The next `num` of them, in [0, 1). ValueError when the request holds fewer."""
        end = self._used + num
        if end > len(self._uniforms):
            raise ValueError(f"{end} uniforms were drawn, the request holds {len(self._uniforms)} (docs/wire.md)")
        drawn = self._uniforms[self._used : end]
        self._used = end
        return as_arrays(drawn, self._arrays)


# Numbers on the wire


def write_matrix(rows: Any, *, use_base64: bool = False) -> Any:
    """rows: a tensor, an array or lists, two-dimensional. Lists of JSON numbers, or base64 of little-endian float64."""
    rows = plain_list(rows)
    if use_base64:
        flat = [float(value) for row in rows for value in row]
        packed = base64.b64encode(struct.pack(f"<{len(flat)}d", *flat)).decode("ascii")
        return {"base64": packed, "shape": [len(rows), len(rows[0]) if rows else 0]}
    return [[write_float(value) for value in row] for row in rows]


def write_float(value: Any) -> Any:
    """The shortest decimal that reads back as the same float64, or "nan", "inf", "-inf"."""
    number = float(value)
    if math.isfinite(number):
        return number
    return "nan" if math.isnan(number) else ("inf" if number > 0 else "-inf")


def read_matrix(value: Any, what: str) -> list[list[float]]:
    """Rows of floats. ValueError names `what` and the place of the first entry that is no number."""
    if isinstance(value, dict):
        raw, num_rows, num_columns = read_base64(value, what)
        flat = struct.unpack(f"<{num_rows * num_columns}d", raw)
        return [list(flat[row * num_columns : (row + 1) * num_columns]) for row in range(num_rows)]
    if not isinstance(value, list):
        raise ValueError(f"{what} must be a list of rows, got {short(value)}")
    for idx, row in enumerate(value):
        if not isinstance(row, list):
            raise ValueError(f"{what}[{idx}] must be a list of numbers, got {short(row)}")
        if len(row) != len(value[0]):
            raise ValueError(f"{what}[{idx}] has {len(row)} numbers, must have {len(value[0])} as the first row")
    return [[read_float(one, what, idx, column) for column, one in enumerate(row)] for idx, row in enumerate(value)]


def read_float(value: Any, what: str, *place: int) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and value in SPECIAL_FLOATS:
        return SPECIAL_FLOATS[value]
    where = what + "".join(f"[{idx}]" for idx in place)
    raise ValueError(f'{where} must be a number or "nan", "inf", "-inf", got {short(value)}')


def read_base64(value: dict[str, Any], what: str) -> tuple[bytes, int, int]:
    """The bytes of a matrix, its rows and its columns. ValueError where they do not fit."""
    shape = value.get("shape")
    if not (isinstance(shape, list) and len(shape) == 2 and all(type(one) is int and one >= 0 for one in shape)):
        raise ValueError(f"{what}.shape must be two ints >= 0, got {short(shape)}")
    try:
        raw = base64.b64decode(value.get("base64", ""), validate=True)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}.base64 must be base64 of little-endian float64: {error}") from error
    num_rows, num_columns = shape
    if len(raw) != 8 * num_rows * num_columns:
        wanted = f"8 x {num_rows} x {num_columns}"
        raise ValueError(f"{what}.base64 holds {len(raw)} bytes, must hold {wanted}")
    return raw, num_rows, num_columns


def short(value: Any) -> str:
    """A value or a line quoted in a sentence: one line, printable, bounded."""
    text = repr(value) if not isinstance(value, str) else repr(value[:200])
    return text if len(text) <= 60 else text[:57] + "..."


def plain_list(value: Any) -> Any:
    """Tensors and arrays as nested lists; tuples as lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [plain_list(one) for one in value] if isinstance(value, (list, tuple)) else value


def as_arrays(values: Any, arrays: str) -> Any:
    """Lists of floats as the adapter wants them: "lists", "numpy" or "torch" (float64)."""
    if arrays == "lists":
        return values
    module = importlib.import_module(arrays)
    return module.array(values, dtype="float64") if arrays == "numpy" else module.tensor(values, dtype=module.float64)


def vector(values: list[int], arrays: str) -> Any:
    """The same for ints: int64."""
    if arrays == "lists":
        return list(values)
    module = importlib.import_module(arrays)
    return module.array(values, dtype="int64") if arrays == "numpy" else module.tensor(values, dtype=module.int64)


# Requests and answers


class _Server:
    """Answers the requests of one process, one after another."""

    def __init__(self, find_adapter: Callable[[], Any]) -> None:
        self._find = find_adapter
        self._found: Any = None  # an object, or the class or factory that makes it
        self._adapter: Any = None
        self._built: Any = None  # what build_from returned last; it answers from then on

    def run(self, requests: BinaryIO, answers: BinaryIO) -> None:
        try:
            with requests, answers:
                for line in requests:
                    method = self._reply(line, answers)
                    if method == "shutdown":
                        return
        except BrokenPipeError:  # nobody is there to read on
            return

    def _reply(self, line: bytes, answers: BinaryIO) -> Any:
        """Answers one line; returns the method that it asked for."""
        request: Any = {}
        answer: dict[str, Any] = {"specbench": VERSION, "id": None}
        try:
            request = json.loads(line.decode("utf-8"))
            answer["id"] = request["id"]
            if request["specbench"] != VERSION:
                raise ValueError(f"this shim speaks version {VERSION}, got {short(request['specbench'])}")
            answer["result"] = self.answer(request["method"], request.get("params", {}))
            text = json.dumps(answer, allow_nan=False, separators=(",", ":"))
        except (Exception, SystemExit) as error:
            traceback.print_exc(file=sys.stderr)
            answer.pop("result", None)
            answer["error"] = {"type": type(error).__name__, "message": str(error), "where": _where(error)}
            text = json.dumps(answer)
        sys.stdout.flush()  # what the adapter printed, on its way to stderr
        sys.stderr.flush()
        answers.write(text.encode("utf-8") + b"\n")
        answers.flush()
        return request.get("method") if isinstance(request, dict) else None

    def answer(self, method: str, params: dict[str, Any]) -> Any:
        if method not in METHODS:
            raise ValueError(f"unknown method {method!r}; known: {', '.join(METHODS)}")
        if method == "shutdown":
            return None
        if self._adapter is None:
            self._found = self._find()
            self._adapter = self._found() if is_factory(self._found) else self._found
        if method == "hello":
            said = capabilities(self._adapter)
            if "draft" in said["methods"] and "reset" not in said["methods"] and is_factory(self._found):
                said["methods"].append("reset")  # by another instance, which costs less than another process
            return said
        if method == "build_from":
            self._built = None  # the old one's memory is free before the new one needs some
            self._built = self._adapter.build_from(params["checkpoint"], params["drafter_checkpoint"])
            return capabilities(self._built)
        adapter = self._adapter if self._built is None else self._built
        return getattr(self, "_" + method)(adapter, getattr(adapter, "wire_arrays", "lists"), dict(params))

    def _logits(self, adapter: Any, arrays: str, params: dict[str, Any]) -> Any:
        return {"logits": write_matrix(adapter.logits(vector(params["tokens"], "lists")), use_base64=True)}

    def _generate(self, adapter: Any, arrays: str, params: dict[str, Any]) -> Any:
        prompt = params.pop("prompt")
        return _generation(adapter.generate(prompt, **_objects(params)))

    def _generate_batch(self, adapter: Any, arrays: str, params: dict[str, Any]) -> Any:
        answers = adapter.generate_batch([_object(one) for one in params["requests"]])
        return {"generations": [_generation(one) for one in answers]}

    def _verify(self, adapter: Any, arrays: str, params: dict[str, Any]) -> Any:
        given = params["tree"]
        probs = given["draft_probs"]
        if probs is not None:
            probs = as_arrays(read_matrix(probs, "draft_probs"), arrays)
        tree = Tree(given["tokens"], given["parents"], probs, given["proposal"], arrays)
        logits = as_arrays(read_matrix(params["target_logits"], "target_logits"), arrays)
        coins = Coins(params["uniforms"], arrays)
        out = adapter.verify(tree, logits, sampling=_object(params["sampling"]), coins=coins)
        path, bonus = out if isinstance(out, (tuple, list)) else (out.path, out.bonus_token)
        return {"path": plain_list(path), "bonus_token": plain_list(bonus)}

    def _draft(self, adapter: Any, arrays: str, params: dict[str, Any]) -> Any:
        context, coins = params.pop("context"), Coins(params.pop("uniforms"), arrays)
        out = adapter.draft(context, coins=coins, **_objects(params))
        probs = getattr(out, "draft_probs", None)
        return {
            "tokens": plain_list(out.tokens),
            "parents": plain_list(out.parents),
            "draft_probs": None if probs is None else write_matrix(probs, use_base64=True),
            "proposal": getattr(out, "proposal", PROPOSALS[0]),
        }

    def _observe(self, adapter: Any, arrays: str, params: dict[str, Any]) -> None:
        path = tuple(params["path"])
        adapter.observe(
            SimpleNamespace(
                path=path,
                bonus_token=params["bonus_token"],
                num_accepted=len(path),
                acceptance_length=len(path) + 1,
            )
        )

    def _reset(self, adapter: Any, arrays: str, params: dict[str, Any]) -> None:
        if callable(getattr(adapter, "reset", None)):
            adapter.reset()
        elif adapter is self._adapter and is_factory(self._found):
            self._adapter = self._found()
        else:
            raise AttributeError(f"{type(adapter).__name__!r} object has no attribute 'reset'")


def capabilities(adapter: Any) -> dict[str, Any]:
    """The result of hello and of build_from: what the object at hand can be asked."""
    arrays = getattr(adapter, "wire_arrays", "lists")
    if arrays not in ("lists", "numpy", "torch"):
        raise ValueError(f"wire_arrays = {arrays!r} must be one of lists, numpy, torch")
    dtype = getattr(adapter, "dtype", None)
    names = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    if dtype is not None and not isinstance(dtype, str):
        dtype = names.get(str(dtype).split(".")[-1], str(dtype))
    checkpoint = getattr(adapter, "checkpoint", None)
    return {
        "name": type(adapter).__name__,
        "methods": [name for name in ADAPTER_METHODS if callable(getattr(adapter, name, None))],
        "features": ["base64", *getattr(adapter, "features", ())],
        "dtype": dtype,
        "vocab_size": getattr(adapter, "vocab_size", None),
        "checkpoint": None if checkpoint is None else str(checkpoint),
    }


def _generation(out: Any) -> dict[str, Any]:
    """Bare tokens, or an object with tokens and, when it has them, finish_reason and rounds."""
    if not hasattr(out, "tokens"):
        return {"tokens": plain_list(out)}
    answer = {"tokens": plain_list(out.tokens)}
    if getattr(out, "finish_reason", None) is not None:
        answer["finish_reason"] = out.finish_reason
    rounds = getattr(out, "rounds", None)
    if rounds:
        fields = [one if isinstance(one, dict) else _fields(one) for one in rounds]
        answer["rounds"] = [{name: plain_list(value) for name, value in one.items()} for one in fields]
    return answer


def _fields(value: Any) -> dict[str, Any]:
    if hasattr(value, "_asdict"):
        return dict(value._asdict())
    return {name: one for name, one in vars(value).items() if not name.startswith("_")}


def _objects(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters that are JSON objects (sampling, stop) as objects with attributes."""
    return {name: _object(value) if isinstance(value, dict) else value for name, value in params.items()}


def _object(fields: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**{name: _frozen(value) for name, value in fields.items()})


def _frozen(value: Any) -> Any:
    """Lists as tuples, as in specbench's own frozen types; the special floats as floats."""
    if isinstance(value, list):
        return tuple(_frozen(one) for one in value)
    if isinstance(value, dict):
        return _object(value)
    return SPECIAL_FLOATS[value] if isinstance(value, str) and value in SPECIAL_FLOATS else value


def _where(error: BaseException) -> str:
    """File and line of the innermost frame."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _take_stdio() -> tuple[BinaryIO, BinaryIO]:
    """The wire's two ends. From here on file descriptor 1 is stderr, for C libraries too, and 0 is empty."""
    sys.stdout.flush()
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return requests, answers


if __name__ == "__main__":
    sys.exit(main())
