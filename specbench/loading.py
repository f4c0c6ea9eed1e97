"""From a name on the command line to a target, and from a target to what it can do.

A name is `package.module:attribute` or `./file.py:attribute`; the attribute is an object, a class, a zero-argument
factory, or a tree-attention kernel itself (level 4). `cmd: COMMAND` names an engine that speaks JSON lines
(docs/wire.md). A method with the wrong signature is told here, with the call that we would make, and never guessed at.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class TargetError(ValueError):
    """The target cannot be used as given. One sentence: what, where, expected, what to do."""


@dataclass(frozen=True)
class Target:
    """A loaded target. name: as given. adapter: the object behind it. make: makes another one, where a class or a
    factory was named."""

    name: str
    adapter: Any
    is_reference: bool = False  # the default target, judged when none is named
    keeps_time: bool = False  # ends calls that take too long by itself, so that no watchdog has to end the run
    make: Callable[[], Any] | None = None

    @property
    def has_build(self) -> bool:
        return callable(getattr(self.adapter, "build", None))

    @property
    def has_build_from(self) -> bool:
        return callable(getattr(self.adapter, "build_from", None))

    @property
    def has_build_drafter(self) -> bool:
        return callable(getattr(self.adapter, "build_drafter", None))


# The call we make, by method: positional parameter names, then keyword names.
CALLS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "logits": (("tokens",), ()),
    "generate": (("prompt",), ("max_new_tokens", "sampling", "stop", "seed")),
    "verify": (("tree", "target_logits"), ("sampling", "coins")),
    "prefill": (("tokens",), ()),
    "forward_tree": (("tree",), ()),
    "commit": (("path",), ()),
    "truncate": (("length",), ()),
    "kv": (("layer",), ()),
    "build": (("model", "drafter"), ()),
    "build_from": (("checkpoint", "drafter_checkpoint"), ()),
    "with_threshold": (("threshold",), ()),
    "generate_batch": (("requests",), ()),
    "session": ((), ()),
    "verify_batch": (("trees", "flat_logits", "cu_nodes"), ("sampling", "coins")),
    "extend": (("tokens",), ()),
    "fork": ((), ()),
    "abort": ((), ()),
    "reset": ((), ()),
    "poison": (("value",), ()),
    "draft": (("context",), ("max_nodes", "max_depth", "sampling", "coins")),
    "observe": (("result",), ()),
    "build_drafter": (("model",), ()),
    "probs": (("logits", "sampling"), ()),
    "sample": (("probs", "coins"), ()),
    "attention": (("q", "k", "v", "parents", "prefix_lens", "scale"), ()),
}
# One of these a target has: each opens a level.
ENTRY_CALLS = (
    *("logits", "generate", "verify", "forward_tree", "attention", "draft"),
    *("build", "build_from", "build_drafter", "probs"),
)
TREE_METHODS = ("prefill", "forward_tree", "commit", "truncate")

# What a target honours in `sampling` and `stop` besides end tokens, and whether it loads its drafter from the second
# folder that build_from is given; it says so by `features`, since ignoring a field looks like every other wrong output.
FEATURES = (
    *("stop_sequences", "min_new_tokens", "penalties", "bad_words", "grammar", "processors", "sampling"),
    "drafter_checkpoint",
)

# What `attention` may be asked for besides: it is given those that its signature names. The first two say what can be
# read from the others and are always given, the rest where a case has them.
ATTENTION_OPTIONS = (
    *("cu_nodes", "max_nodes", "page_table", "window", "soft_cap", "alibi_slopes", "k_scale", "v_scale", "num_splits"),
)
# What no parameter shows, said by `features` like those above.
ATTENTION_FEATURES = ("any_order", "unused_rows", "strides")

EXPOSE = {
    "generate": "give the target generate(prompt, *, max_new_tokens, sampling, stop, seed) (level 1)",
    "verify": "give the target verify(tree, target_logits, *, sampling, coins) (level 2)",
    "tree": "give the target prefill, forward_tree, commit, truncate and cache_len (level 3)",
    "kv": "give the target kv(layer) -> (keys, values), each [Hkv, cache_len, D], and an int num_layers (level 3)",
    "taps": "let forward_tree accept taps=None and fill the specbench.types.Taps it is given",
    "oracle": "give the target logits(tokens) -> [S, V], a `checkpoint` that transformers loads, or a build factory",
    "build": "give the target build(model, drafter), so that the harness can hand it models and drafters",
    "threshold": "give the target with_threshold(threshold), the same decoder under lossy threshold acceptance",
    "generate_batch": "give the target generate_batch(requests) -> one answer per specbench.types.Request (level 1)",
    "session": "give the target session() -> an object whose generate(...) goes on with the same text (level 1)",
    "verify_batch": "give the target verify_batch(trees, flat_logits, cu_nodes, *, sampling, coins) (level 2)",
    "extend": "give the target extend(tokens), which appends known tokens to the cache (level 3)",
    "fork": "give the target fork() -> a second instance that shares the committed prefix (level 3)",
    "abort": "give the target abort(), which drops a forward that will not be committed (level 3)",
    "poison": "give the target poison(value), which overwrites dead cache rows and buffers with a value (level 3)",
    "pages": "give the target reset(), and ints pages_in_use and page_size, where its cache has pages (level 3)",
    "draft": "give the target draft(context, *, max_nodes, max_depth, sampling, coins) -> DraftTree, "
    "or build_drafter(model) (level 5)",
    "ranks": "let build accept group=, a specbench.lockstep.Group through which ranks hear the first one's decisions",
    **{
        feature: f"honour {where}.{field} in generate, and say so by features = ({feature!r}, ...)"
        for feature, where, field in (
            ("stop_sequences", "stop", "stop_sequences"),
            ("min_new_tokens", "stop", "min_new_tokens"),
            ("penalties", "sampling", "repetition_penalty, presence_penalty and frequency_penalty"),
            ("bad_words", "sampling", "bad_words"),
            ("grammar", "sampling", "grammar"),
            ("processors", "sampling", "processors"),
            ("sampling", "sampling", "temperature, top_k, top_p and min_p"),
        )
    },
    "drafter_checkpoint": "load the drafter from build_from's drafter_checkpoint, a folder like `checkpoint`, and say "
    "so by features = ('drafter_checkpoint', ...)",
    "law": "let draft name the law of its draws in draft_probs: at temperature > 0 no drafter of this target does",
    "fresh": "name a class or a factory instead of an object, or give the drafter reset(), so that what it drafts can "
    "be compared with what a fresh one drafts",
    "sampler": "give the target probs(logits, sampling) -> the law [V], and sample(probs, coins) -> a token (level 6)",
    "rounds": "let generate return a specbench.types.Generation with one Round per verification",
    "attention": "give the target attention(q, k, v, parents, prefix_lens, scale) -> out, or (out, lse) (level 4)",
    "lse": "let attention return (out, lse), lse [R, Hq] the natural logarithm of the summed exponentials of scores",
    "cu_nodes": "let attention accept cu_nodes=, int32 [B+1]: where the rows of each sequence's tree begin and end",
    "page_table": "let attention accept page_table=, int32 [B, pages]: row r is in page page_table[b, r // T] at r % T",
    "window": "let attention accept window=, how many positions a row sees, its own included",
    "soft_cap": "let attention accept soft_cap=: scores become soft_cap * tanh(score / soft_cap)",
    "alibi_slopes": "let attention accept alibi_slopes=, [Hq]: slope * (key's position - row's position) is added",
    **dict.fromkeys(
        ("k_scale", "v_scale"),
        "let attention accept k_scale= and v_scale=, by which codes (int8, fp8) of keys and values are multiplied",
    ),
    "any_order": "take parents that stand behind their children, and say so by features = ('any_order', ...)",
    "unused_rows": "give rows of parent -2 zeros and an lse of -inf, and say so by features = ('unused_rows', ...)",
    "strides": "read q, k and v by their strides, and say so by features = ('strides', ...)",
    "dead_rows": "leave out reads_dead_rows = True: rows behind the last one may then hold NaN, and 0 x NaN is NaN",
}


class Kernel:
    """A bare function as a target with `attention`; what it declares stands on the function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.attention = function

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self).get("attention"), name)


COMMAND_PREFIX = "cmd:"


def load_target(name: str, *, timeout: float = 300.0, on_hang: Callable[[str], None] | None = None) -> Target:
    """The target behind `name`. TargetError when there is none, or when making it fails.

    timeout, on_hang: for commands; seconds for one answer, and who is told when the engine hangs again and again.
    """
    if name.startswith(COMMAND_PREFIX):
        return _checked(_start_command(name, timeout, on_hang))
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise TargetError(f"target {name!r} must be package.module:attribute or ./file.py:attribute")
    module = _load_file(Path(place), name) if place.endswith(".py") else _load_module(place, name)
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            public = [one for one in dir(value) if not one.startswith("_")]
            raise TargetError(f"target {name!r}: {place} has no {part!r}{_near(part, public)}")
        value = getattr(value, part)
    make: Callable[[], Any] | None = None
    if is_kernel(value):
        return _checked(Target(name, Kernel(value)))
    if inspect.isclass(value) or inspect.isroutine(value):
        try:
            inspect.signature(value).bind()
        except TypeError as error:
            raise TargetError(
                f"target {name!r}: {attribute} must be callable without arguments, but it is not ({error}): "
                "name a zero-argument factory, an object, or a kernel (q, k, v, parents, prefix_lens, scale)"
            ) from error
        make = value
        try:
            value = make()
        except Exception as error:
            raise TargetError(f"target {name!r}: {attribute}() raised {type(error).__name__}: {error}") from error
        if is_kernel(value):
            value = Kernel(value)
    return _checked(Target(name, value, make=make))


def is_kernel(value: Any) -> bool:
    """Whether an object is itself what `attention` would be: it takes our six arguments, and not none."""
    if not callable(value) or inspect.isclass(value) or hasattr(value, "attention"):
        return False
    try:
        signature = inspect.signature(value)
        signature.bind(*CALLS["attention"][0], **dict.fromkeys(_options_of(value)))
    except (TypeError, ValueError):
        return False
    return "parents" in signature.parameters


def through_shim(python: str, name: str) -> str:
    """The name under which `package.module:attribute` or `./file.py:attribute` runs in another interpreter."""
    from specbench import shim

    if name.startswith(COMMAND_PREFIX):
        raise TargetError(f"--specbench-python is for Python targets; {name!r} is a command already")
    return f"{COMMAND_PREFIX} {shlex.join([python, str(shim.__file__), name])}"


def _start_command(name: str, timeout: float, on_hang: Callable[[str], None] | None) -> Target:
    # Late, since naming a target must not cost an import of torch.
    from specbench.wire import Command
    from specbench.wire_process import RemoteError, WireError

    try:
        words = shlex.split(name[len(COMMAND_PREFIX) :])
    except ValueError as error:
        raise TargetError(f"target {name!r}: the command cannot be split into words: {error}") from error
    if not words:
        raise TargetError(f"target {name!r} names no command: write '{COMMAND_PREFIX} ./engine --option'")
    command = Command(words, timeout=timeout, on_hang=on_hang)
    try:
        adapter = command.adapter()
        # A drafter that can forget its texts need not be started afresh for each.
        make = None if hasattr(adapter, "reset") else command.adapter
        return Target(name, adapter, keeps_time=True, make=make)
    except RemoteError as error:
        raise TargetError(f"target {name!r}: hello raised {type(error).__name__}: {error}") from error
    except WireError as error:
        raise TargetError(f"target {name!r}: {error}") from error


def _checked(target: Target) -> Target:
    """The target, when it can be called as its levels ask."""
    name, value = target.name, target.adapter
    try:
        for method in (*CALLS, "cache_len", "num_layers", "checkpoint"):
            getattr(value, method, None)
    except Exception as error:
        raise TargetError(f"target {name!r}: reading its {method} raised {type(error).__name__}: {error}") from error
    if not capabilities(value, name) and not (target.has_build or target.has_build_from or target.has_build_drafter):
        raise TargetError(
            f"target {name!r} has none of the methods that specbench calls ({', '.join(ENTRY_CALLS)})"
            f"{_near_methods(value)}: see the adapter levels in the README"
        )
    return target


def check_command(name: str | None) -> list[str]:
    """The words that judge a target in any folder: a file by its whole path. None: the reference decoder."""
    if name is None:
        return ["specbench", "check"]
    place, colon, attribute = name.rpartition(":")
    if place.endswith(".py") and not name.startswith(COMMAND_PREFIX):
        name = f"{Path(place).resolve()}{colon}{attribute}"
    return ["specbench", "check", name]


def capabilities(adapter: Any, name: str) -> frozenset[str]:
    """What an adapter can do, as the words that claims need. TargetError on a method with another signature."""
    found: set[str] = set()
    for method in CALLS:
        if callable(getattr(adapter, method, None)):
            if method == "attention" and not is_kernel(adapter.attention) and _has_other_entry(adapter):
                continue  # a decoder's own part of that name
            check_signature(adapter, method, name)
            found.add(method)
    has_tree = all(one in found for one in TREE_METHODS)
    words: set[str] = {one for one in ("generate", "verify", "draft", "verify_batch") if one in found}
    if "generate" in words:
        words |= {one for one in ("generate_batch", "session") if one in found}
    if {"generate", "verify", "attention"} & found:
        words |= _features(adapter, name)
    if "attention" in found:
        _check_options(adapter.attention, name)
        words |= {"attention", *_options_of(adapter.attention)}
        if getattr(adapter, "reads_dead_rows", False) is not True:
            words.add("dead_rows")
    if {"probs", "sample"} <= found:
        words.add("sampler")
    if has_tree:
        if not hasattr(type(adapter), "cache_len") and not hasattr(adapter, "cache_len"):
            raise TargetError(f"target {name!r} has forward_tree but no `cache_len` property: add it (committed rows)")
        words.add("tree")
        if "kv" in found and isinstance(getattr(adapter, "num_layers", None), int):
            words.add("kv")
        if "taps" in inspect.signature(adapter.forward_tree).parameters:
            words.add("taps")
        words |= {one for one in ("extend", "fork", "abort", "poison") if one in found}
        if "reset" in found and hasattr(adapter, "page_size"):
            words.add("pages")
    if "logits" in found or getattr(adapter, "checkpoint", None):
        words.add("oracle")
    if "with_threshold" in found:
        words.add("threshold")
    return frozenset(words)


def _has_other_entry(adapter: Any) -> bool:
    return any(callable(getattr(adapter, one, None)) for one in ENTRY_CALLS if one != "attention")


def _options_of(attention: Callable[..., Any]) -> tuple[str, ...]:
    """Which of `ATTENTION_OPTIONS` a kernel takes by name. `**others` declares nothing."""
    parameters = inspect.signature(attention).parameters
    return tuple(one for one in ATTENTION_OPTIONS if one in parameters)


def _check_options(attention: Callable[..., Any], name: str) -> None:
    """TargetError for a parameter that is an option's name but for its spelling: it would never be given, and its claim
    would say that the kernel lacks it."""
    own = list(inspect.signature(attention).parameters.values())[len(CALLS["attention"][0]) :]
    for one in own:
        if one.name in ATTENTION_OPTIONS or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            continue
        for option in ATTENTION_OPTIONS:
            word, known = (text.replace("_", "").lower() for text in (one.name, option))
            if known in word or (len(word) > 4 and word in known):
                raise TargetError(
                    f"target {name!r}: attention takes {one.name!r}, which is never given: did you mean {option!r}? It "
                    f"must be one of {', '.join(ATTENTION_OPTIONS)}, or a name unlike all of them"
                )


def _features(adapter: Any, name: str) -> set[str]:
    """What the adapter declares to honour. TargetError for a word that no claim knows."""
    known = (*FEATURES, *ATTENTION_FEATURES)
    declared = getattr(adapter, "features", ())
    if isinstance(declared, str) or not isinstance(declared, Iterable):
        raise TargetError(f"target {name!r}: features = {declared!r} must be a tuple of {', '.join(known)}")
    declared = list(declared)
    for one in declared:
        if one not in known:
            near = _near(str(one), list(known), holder="specbench")
            raise TargetError(f"target {name!r}: features names {one!r}, which no claim knows{near}")
    return set(declared)


def check_signature(adapter: Any, method: str, name: str) -> None:
    """TargetError unless `method` accepts the call that we make."""
    positional, keywords = CALLS[method]
    if method == "attention":
        keywords = _options_of(adapter.attention)
    if method == "build_drafter" and getattr(adapter, "drafter_names", None):
        keywords = ("name",)
    try:
        inspect.signature(getattr(adapter, method)).bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        shown = ", ".join([*positional, *(f"{one}=..." for one in keywords)])
        raise TargetError(f"target {name!r}: {method} cannot be called as {method}({shown}): {error}") from error
    except ValueError:  # builtins without a signature are called as they are
        return


def _load_file(path: Path, name: str) -> Any:
    if not path.is_file():
        others = [str(one) for one in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise TargetError(f"target {name!r}: there is no file {path}{_near(str(path), others, holder='the folder')}")
    spec = importlib.util.spec_from_file_location(f"specbench_target_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling look their module up here
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise TargetError(f"target {name!r}: {path} raised {type(error).__name__} on import: {error}") from error
    return module


def _load_module(place: str, name: str) -> Any:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not (place == error.name or place.startswith(error.name + ".")):
            raise TargetError(f"target {name!r}: importing {place} needs the missing module {error.name!r}") from error
        near = _near(place.rpartition(".")[2], _siblings(place))
        raise TargetError(f"target {name!r}: there is no module {error.name!r}{near}") from error
    except Exception as error:
        raise TargetError(f"target {name!r}: {place} raised {type(error).__name__} on import: {error}") from error


def _siblings(place: str) -> list[str]:
    import pkgutil

    parent = place.rpartition(".")[0]
    if not parent:
        return [one.name for one in pkgutil.iter_modules()]
    try:
        paths = importlib.import_module(parent).__path__
    except Exception:
        return []
    return [one.name for one in pkgutil.iter_modules(paths)]


def _near(word: str, known: list[str], *, holder: str = "it") -> str:
    matches = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    if matches:
        return f"; did you mean {' or '.join(matches)}?"
    if 0 < len(known) <= 12:
        return f"; {holder} has {', '.join(sorted(known))}"
    return ""


def _near_methods(value: Any) -> str:
    public = [one for one in dir(value) if not one.startswith("_") and callable(getattr(value, one, None))]
    for one in public:
        matches = difflib.get_close_matches(one, list(CALLS), n=1, cutoff=0.7)
        if matches:
            return f"; it has {one!r}, did you mean {matches[0]!r}?"
    return ""
