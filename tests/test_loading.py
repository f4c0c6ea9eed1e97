"""specbench.loading: what a target's name may be, and the one sentence that answers each way of getting it wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from specbench.loading import Target, TargetError, capabilities, load_target

HERE = Path(__file__).parent
METHODS = "logits, generate, verify, forward_tree, attention, draft, build, build_from, build_drafter, probs"


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are relative to tests/targets, and what loading adds to sys.path and sys.modules is forgotten again."""
    monkeypatch.chdir(HERE / "targets")
    monkeypatch.setattr(sys, "path", list(sys.path))
    for one in ("loadable", "specbench_target_loadable", "broken", "pack", "pack.inner"):
        monkeypatch.delitem(sys.modules, one, raising=False)


def message_of(name: str) -> str:
    with pytest.raises(TargetError) as error:
        load_target(name)
    return str(error.value)


@pytest.mark.parametrize("attribute", ["Adapter", "ready_made", "factory", "Holder.inner"])
@pytest.mark.parametrize("place", ["./loadable.py", "loadable"])
def test_classes_objects_factories_and_dotted_attributes_load(place: str, attribute: str) -> None:
    assert type(load_target(f"{place}:{attribute}").adapter).__name__ == "Adapter"


def test_a_target_keeps_the_name_it_was_given() -> None:
    assert load_target("./loadable.py:Adapter").name == "./loadable.py:Adapter"


def test_a_file_outside_the_current_folder_loads_and_finds_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_mine.py").write_text("from loadable import Adapter\n")
    (tmp_path / "loadable.py").write_text("class Adapter:\n    def logits(self, tokens): ...\n")
    assert load_target(f"{tmp_path}/neighbour_of_mine.py:Adapter").adapter is not None


@pytest.mark.parametrize("name", ["loadable", "loadable.Adapter", ":Adapter", "loadable:", "./loadable.py"])
def test_a_name_without_both_parts_says_what_a_name_is(name: str) -> None:
    assert message_of(name) == f"target {name!r} must be package.module:attribute or ./file.py:attribute"


MESSAGES = {
    "./loadible.py:Adapter": "there is no file loadible.py; did you mean loadable.py?",
    "nowhere/mine.py:Adapter": "there is no file nowhere/mine.py",
    "specbench.reference.targt:reference": "there is no module 'specbench.reference.targt'; did you mean target?",
    "./loadable.py:Adaptor": "./loadable.py has no 'Adaptor'; did you mean Adapter?",
    "loadable:Holder.iner": "loadable has no 'iner'; did you mean inner?",
    "loadable:Holder.something": "loadable has no 'something'; it has inner",
    "loadable:NeedsArguments": (
        "NeedsArguments must be callable without arguments, but it is not (missing a required argument: 'path'): "
        "name a zero-argument factory, an object, or a kernel (q, k, v, parents, prefix_lens, scale)"
    ),
    "loadable:failing_factory": "failing_factory() raised FileNotFoundError: weights.bin is not here",
    "loadable:OldGenerate": (
        "generate cannot be called as generate(prompt, max_new_tokens=..., sampling=..., stop=..., seed=...): "
        "missing a required argument: 'max_tokens'"
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_wrong_name_gets_one_sentence_with_near_matches(name: str) -> None:
    assert message_of(name) == f"target {name!r}: {MESSAGES[name]}"


WHOLE_MESSAGES = {
    "loadable:Misspelt": (
        f"target 'loadable:Misspelt' has none of the methods that specbench calls ({METHODS}); "
        "it has 'genrate', did you mean 'generate'?: see the adapter levels in the README"
    ),
    "loadable:Stranger": (
        f"target 'loadable:Stranger' has none of the methods that specbench calls ({METHODS}): "
        "see the adapter levels in the README"
    ),
    "loadable:NoCacheLen": (
        "target 'loadable:NoCacheLen' has forward_tree but no `cache_len` property: add it (committed rows)"
    ),
}


@pytest.mark.parametrize("name", WHOLE_MESSAGES)
def test_an_object_that_is_no_target_is_told_what_it_lacks(name: str) -> None:
    assert message_of(name) == WHOLE_MESSAGES[name]


def test_an_import_error_inside_the_module_names_the_missing_module_and_not_the_target(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import a_module_nobody_has\n")
    sys.path.insert(0, str(tmp_path))
    assert message_of("broken:Adapter") == (
        "target 'broken:Adapter': importing broken needs the missing module 'a_module_nobody_has'"
    )


def test_an_exception_while_a_module_is_imported_is_told(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    sys.path.insert(0, str(tmp_path))
    assert message_of("broken:Adapter") == (
        "target 'broken:Adapter': broken raised ZeroDivisionError on import: division by zero"
    )


def test_an_exception_while_a_file_is_imported_is_told(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("raise RuntimeError('no licence')\n")
    assert message_of(f"{file}:Adapter") == (
        f"target '{file}:Adapter': {file} raised RuntimeError on import: no licence"
    )


def test_a_missing_module_is_looked_up_among_all_that_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "zyx_quixotic.py").write_text("")
    sys.path.insert(0, str(tmp_path))
    assert message_of("zyx_quixotik:Adapter") == (
        "target 'zyx_quixotik:Adapter': there is no module 'zyx_quixotik'; did you mean zyx_quixotic?"
    )


def test_a_missing_module_inside_a_package_is_looked_up_among_its_siblings(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "inner.py").write_text("")
    sys.path.insert(0, str(tmp_path))
    assert message_of("pack.iner:Adapter") == (
        "target 'pack.iner:Adapter': there is no module 'pack.iner'; did you mean inner?"
    )


CAPABILITIES = {
    "Adapter": {"oracle"},
    "Full": {"generate", "verify", "tree", "kv", "taps", "threshold"},
}


@pytest.mark.parametrize("attribute", CAPABILITIES)
def test_capabilities_are_what_the_methods_say(attribute: str) -> None:
    adapter = load_target(f"loadable:{attribute}").adapter
    assert capabilities(adapter, "it") == CAPABILITIES[attribute]


def test_a_checkpoint_attribute_is_an_oracle() -> None:
    class Named:
        checkpoint = "some/folder"

    assert capabilities(Named(), "it") == {"oracle"}


def test_a_build_factory_is_seen() -> None:
    class Factory:
        def build(self, model: object, drafter: object) -> None: ...

    target = Target("it", Factory())
    assert (target.has_build, target.has_build_from) == (True, False)
