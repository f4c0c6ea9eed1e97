"""specbench: conformance harness and benchmark for speculative decoding.

Importing this package is cheap on purpose: nothing here pulls in torch. The public names below are loaded on first use.
"""

from importlib import import_module
from pathlib import Path

__version__ = "0.1.0"

# In a checkout (bare or editable) the sibling folders are the subpackages. setuptools' editable finder cannot see
# `kernels/`, which has no __init__.py, so the checkout root joins the path. A wheel has no sibling pyproject.toml.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").is_file() and (_checkout / "reference" / "__init__.py").is_file():
    __path__.append(str(_checkout))

_HOMES = {
    "DraftTree": "tree",
    "Generation": "types",
    "LayerTap": "types",
    "Round": "types",
    "Sampling": "types",
    "Stop": "types",
    "Taps": "types",
    "VerifyResult": "types",
    "Drafter": "protocols",
    "Generator": "protocols",
    "Sampler": "protocols",
    "TargetModel": "protocols",
    "TreeModel": "protocols",
    "Verifier": "protocols",
    "Steps": "steps",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(f"specbench.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'specbench' has no attribute {name!r}; it offers {', '.join(sorted(__all__))}")
