"""What requests and answers hold: our types as JSON values, and JSON values as our types, checked field by field."""

from __future__ import annotations

import base64
import dataclasses
import difflib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbench import shim
from specbench.tree import DraftTree
from specbench.types import DTYPES, Generation, Round, VerifyResult
from specbench.wire_process import WireError


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """The result of hello, checked.

    methods: of the adapter, hello and shutdown left out. use_base64: matrices are sent as base64. features: what the
    decoder honours, in the words of `loading.FEATURES`. dtype: in which the engine computes. vocab_size, checkpoint:
    None when the engine names none.
    """

    methods: tuple[str, ...]
    use_base64: bool = False
    features: tuple[str, ...] = ()
    dtype: str = "fp32"
    vocab_size: int | None = None
    checkpoint: str | None = None

    @classmethod
    def of_hello(cls, result: Any) -> Capabilities:
        methods = field(as_object(result, "hello"), "methods", "hello")
        return cls(_methods(methods, "hello"))._with(result, "hello")

    def after_build(self, result: Any) -> Capabilities:
        """What build_from says counts for what was built; what it leaves out stands as hello said it."""
        given = {} if result is None else as_object(result, "build_from")
        methods = given.get("methods")
        known = self.methods if methods is None else _methods(methods, "build_from")
        built = dataclasses.replace(self, methods=tuple(one for one in known if one != "build_from"))
        return built._with(given, "build_from")

    def _with(self, result: dict[str, Any], where: str) -> Capabilities:
        changes: dict[str, Any] = {}
        if (features := result.get("features")) is not None:
            if not isinstance(features, list) or not all(isinstance(one, str) for one in features):
                raise WireError(f"{where}: features must be a list of names, got {shim.short(features)}")
            if "processors" in features:
                raise WireError(f"{where}: features names processors, which are callables and cannot cross the wire")
            changes["use_base64"] = "base64" in features
            changes["features"] = tuple(one for one in features if one != "base64")
        if (dtype := result.get("dtype")) is not None:
            if not isinstance(dtype, str) or dtype not in DTYPES:
                raise WireError(f"{where}: dtype = {shim.short(dtype)} must be one of {', '.join(DTYPES)}")
            changes["dtype"] = dtype
        if (size := result.get("vocab_size")) is not None:
            changes["vocab_size"] = as_int(size, f"{where}: vocab_size")
        if (checkpoint := result.get("checkpoint")) is not None:
            if not isinstance(checkpoint, str):
                raise WireError(f"{where}: checkpoint must be a string, got {shim.short(checkpoint)}")
            changes["checkpoint"] = checkpoint
        return dataclasses.replace(self, **changes)


def _methods(names: Any, where: str) -> tuple[str, ...]:
    if not isinstance(names, list):
        raise WireError(f"{where}: methods must be a list of names, got {shim.short(names)}")
    for one in names:
        if one not in shim.METHODS:
            near = difflib.get_close_matches(str(one), shim.ADAPTER_METHODS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(shim.ADAPTER_METHODS)}"
            raise WireError(f"{where}: unknown method {shim.short(one)}; {hint}")
    return tuple(one for one in names if one in shim.ADAPTER_METHODS)


def written(value: Any, name: str, *, use_base64: bool) -> Any:
    """A parameter as JSON values: dataclasses with all their fields, matrices as numbers or base64.

    WireError names the field that JSON cannot carry, a callable for instance.
    """
    if isinstance(value, DraftTree):
        return {
            "tokens": value.token_list,
            "parents": value.parent_list,
            "draft_probs": written(value.draft_probs, "draft_probs", use_base64=use_base64),
            "proposal": value.proposal,
        }
    if isinstance(value, Tensor):
        return _written_matrix(value.detach().to("cpu", torch.float64), use_base64)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        return {key: written(one, f"{name}.{key}", use_base64=use_base64) for key, one in parts.items()}
    if isinstance(value, list | tuple):
        return [written(one, f"{name}[{idx}]", use_base64=use_base64) for idx, one in enumerate(value)]
    if isinstance(value, float):
        return shim.write_float(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    raise WireError(f"{name} is a {type(value).__name__}, which JSON lines cannot carry: judge it in process")


def _written_matrix(wide: Tensor, use_base64: bool) -> Any:
    if use_base64:
        raw = wide.numpy().astype("<f8").tobytes()
        return {"base64": base64.b64encode(raw).decode("ascii"), "shape": list(wide.shape)}
    return wide.tolist() if bool(wide.isfinite().all()) else shim.write_matrix(wide)


def as_matrix(value: Any, what: str) -> Tensor:
    """float64 [N, V], from rows of numbers or base64."""
    try:
        if isinstance(value, dict):
            raw, num_rows, num_columns = shim.read_base64(value, what)
            return torch.from_numpy(np.frombuffer(raw, "<f8").astype(np.float64)).reshape(num_rows, num_columns)
        rows = shim.read_matrix(value, what)
    except ValueError as error:
        raise WireError(str(error)) from error
    return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), len(rows[0]) if rows else 0)


def as_object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WireError(f"{what}: result must be an object, got {shim.short(value)}")
    return value


def field(result: dict[str, Any], name: str, what: str) -> Any:
    if name not in result:
        near = difflib.get_close_matches(name, result, n=1, cutoff=0.5)
        raise WireError(f"{what}: the result has no {name!r}" + (f"; did you mean it by {near[0]!r}?" if near else ""))
    return result[name]


def as_int(value: Any, what: str) -> int:
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise WireError(f"{what} must be an int of 64 bits, got {shim.short(value)}")
    return value


def as_ints(values: Any, what: str) -> list[int]:
    if not isinstance(values, list):
        raise WireError(f"{what} must be a list of ints, got {shim.short(values)}")
    return [as_int(value, f"{what}[{idx}]") for idx, value in enumerate(values)]


def as_verify_result(result: dict[str, Any]) -> VerifyResult:
    path = as_ints(field(result, "path", "verify"), "verify: path")
    return VerifyResult(tuple(path), as_int(field(result, "bonus_token", "verify"), "verify: bonus_token"))


def as_tree(result: dict[str, Any]) -> DraftTree:
    tokens = as_ints(field(result, "tokens", "draft"), "draft: tokens")
    parents = as_ints(field(result, "parents", "draft"), "draft: parents")
    probs = result.get("draft_probs")
    try:
        return DraftTree(
            torch.tensor(tokens, dtype=torch.int64),
            torch.tensor(parents, dtype=torch.int64),
            None if probs is None else as_matrix(probs, "draft: draft_probs"),
            result.get("proposal", shim.PROPOSALS[0]),
        )
    except ValueError as error:
        raise WireError(f"draft answered no tree: {error}") from error


def as_generation(result: dict[str, Any], what: str) -> Generation | list[int]:
    """Tokens alone when there is neither a reason nor a round: whoever asked knows why they ended."""
    tokens = as_ints(field(result, "tokens", what), f"{what}: tokens")
    reason, rounds = result.get("finish_reason"), result.get("rounds")
    if reason is None and not rounds:
        return tokens
    if not isinstance(reason, str):
        raise WireError(f"{what}: finish_reason must be a string, got {shim.short(reason)}")
    if not isinstance(rounds, list | None):
        raise WireError(f"{what}: rounds must be a list, got {shim.short(rounds)}")
    records = tuple(_round(one, f"{what}: rounds[{idx}]") for idx, one in enumerate(rounds or ()))
    return Generation(tuple(tokens), reason, records)


def _round(value: Any, what: str) -> Round:
    """Fields that have a default may be left out."""
    if not isinstance(value, dict):
        raise WireError(f"{what} must be an object, got {shim.short(value)}")
    found: dict[str, Any] = {}
    for one in dataclasses.fields(Round):
        if one.name in value or one.default is dataclasses.MISSING:
            given, place = field(value, one.name, what), f"{what}.{one.name}"
            found[one.name] = tuple(as_ints(given, place)) if isinstance(given, list) else as_int(given, place)
    return Round(**found)
