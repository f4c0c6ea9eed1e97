"""The reference decoder as a target: what `pytest suites/consistency` judges when no other is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from specbench.lockstep import Group
from specbench.protocols import Drafter, LanguageModel
from specbench.reference.batch import BATCH_STEPS, BatchSteps
from specbench.reference.batch_layouts import BATCH_LAYOUTS
from specbench.reference.decoder import Decoder
from specbench.reference.drafters.by_name import DRAFTERS, LOOKUP_DRAFTERS, SELF_DRAFTERS
from specbench.reference.layouts import LAYOUTS
from specbench.reference.steps import STEPS
from specbench.steps import Steps

_LEVEL_2 = ("verify", "verify_batch", "accept")


class ReferenceTarget:
    """plant, plant_batch, plant_group, plant_model: turn good steps, batch steps, a group of ranks or models into
    faulty ones, for the fault bank; None leaves them alone. decoder: the class that is built. drafters: by name, each
    made over a model; self_drafters: those of them that draft what the model itself says; lookup_drafters: those that
    draft what stands in the context."""

    def __init__(
        self,
        plant: Callable[[Steps], Steps] | None = None,
        *,
        plant_batch: Callable[[BatchSteps], BatchSteps] | None = None,
        plant_group: Callable[[Group], Group | None] | None = None,
        plant_model: Callable[[LanguageModel], LanguageModel] | None = None,
        decoder: type[Decoder] = Decoder,
        drafters: Mapping[str, Callable[[LanguageModel], Drafter]] = DRAFTERS,
        self_drafters: Sequence[str] = SELF_DRAFTERS,
        lookup_drafters: Sequence[str] = LOOKUP_DRAFTERS,
    ) -> None:
        self._plant = plant
        self._plant_batch = plant_batch
        self._plant_group = plant_group
        self._plant_model = plant_model
        self._decoder = decoder
        self._drafters = dict(drafters)
        self.drafter_names = tuple(drafters)
        self.self_drafters = tuple(self_drafters)
        self.lookup_drafters = tuple(lookup_drafters)

    def build(
        self,
        model: LanguageModel,
        drafter: Drafter | None,
        *,
        cache: str = "contiguous",
        layout: str = "tree_mask",
        batch_layout: str = "packed",
        group: Group | None = None,
    ) -> Decoder:
        """A fresh decoder over in-process objects."""
        steps = replace(STEPS, flatten=LAYOUTS[layout])
        batch_steps = replace(BATCH_STEPS, forward=BATCH_LAYOUTS[batch_layout])
        if group is not None and self._plant_group is not None:
            group = self._plant_group(group)
        return self._decoder(
            self._plant_model(model) if self._plant_model else model,
            drafter,
            steps=self._plant(steps) if self._plant else steps,
            cache=cache,
            batch_steps=self._plant_batch(batch_steps) if self._plant_batch else batch_steps,
            group=group,
        )

    @property
    def planted(self) -> frozenset[str]:
        """What is not as it should be: names of steps ("walk"), of batch steps ("batch.verify"), "group", "model",
        "decoder", "verifier" besides where that is in its level 2, "drafters"; empty for the correct decoder."""
        parts: set[str] = set()
        if self._plant is not None:
            parts |= {name for name, step in vars(self._plant(STEPS)).items() if step is not getattr(STEPS, name)}
        if self._plant_batch is not None:
            planted = vars(self._plant_batch(BATCH_STEPS)).items()
            parts |= {f"batch.{name}" for name, step in planted if step is not getattr(BATCH_STEPS, name)}
        others = {
            "group": self._plant_group is not None,
            "model": self._plant_model is not None,
            "decoder": self._decoder is not Decoder,
            "verifier": any(getattr(self._decoder, name) is not getattr(Decoder, name) for name in _LEVEL_2),
            "drafters": self._drafters != dict(DRAFTERS) or self.self_drafters != tuple(SELF_DRAFTERS),
        }
        return frozenset(parts | {name for name, is_planted in others.items() if is_planted})

    def build_drafter(self, model: LanguageModel, *, name: str = "self_chain") -> Drafter:
        """A fresh drafter over a model. name: one of `drafter_names`."""
        return self._drafters[name](model)


def reference() -> ReferenceTarget:
    """The correct decoder."""
    return ReferenceTarget()
