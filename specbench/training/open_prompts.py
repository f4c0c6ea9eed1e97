"""Open prompts for self-distillation: templates of ours over subjects of ours, in an order that a seed decides.

What is asked matters little, that it is none of what a benchmark asks matters much: every prompt is compared by hash
with the questions of Spec-Bench (`held_out.txt`: the first 16 hex digits of SHA-256 of each turn, lower-cased, white
space and punctuation made one blank). No text of anybody else stands here.
"""

from __future__ import annotations

import hashlib
import re
from importlib.resources import files

import torch

SUBJECTS = (
    "tides", "sourdough bread", "bicycle gears", "the printing press", "coral reefs", "compound interest", "sleep",
    "chess openings", "volcanoes", "vaccines", "jazz", "public libraries", "soil", "lighthouses", "the Silk Road",
    "batteries", "honeybees", "glaciers", "map projections", "espresso", "earthquakes", "origami", "trade unions",
    "satellite navigation", "the metric system", "composting", "opera", "fermentation", "bridges", "migration of birds",
    "insulation of old houses", "the stock market", "rainbows", "marathon training", "ceramics", "electric cars",
    "the water cycle", "typography", "beekeeping", "black holes", "knitting", "city parks", "sailing", "antibiotics",
    "wind turbines", "perfume", "the Olympic Games", "rice farming", "suspension of disbelief", "tree rings",
    "unit tests", "hash tables", "version control", "binary search", "web caching", "regular expressions", "recursion",
    "database indexes", "garbage collection", "floating-point numbers",
)  # fmt: skip
TEMPLATES = (
    "Explain {} to a ten-year-old.",
    "Explain {} to someone who knows nothing about it, in three short paragraphs.",
    "What are the most common misunderstandings about {}?",
    "Write a short dialogue between two friends who disagree about {}.",
    "List seven surprising facts about {} and say why each is surprising.",
    "Give me a step-by-step plan to learn about {} in a month.",
    "Write the opening of a mystery novel in which {} plays a part.",
    "Compare {} with something from everyday life and say where the comparison fails.",
    "What should a journalist ask an expert on {}? Give ten questions.",
    "Summarise the history of {} in about 150 words.",
    "Write an email to a colleague proposing a talk about {}.",
    "Make a table of the advantages and disadvantages of {}.",
    "Write a poem of four stanzas about {}.",
    "Which numbers would you need to compare two examples of {}, and how would you compute them?",
    "Write a Python function that has something to do with {}, with a docstring and an example.",
    "Write a quiz of five multiple-choice questions about {} with the answers at the end.",
    "Describe {} as if you were selling it.",
    "What would the world be like without {}?",
    "Write a JSON object that describes {} with at least six fields.",
    "Translate this into French and then into German: 'Last year I read a whole book about {}.'",
    "Give instructions for a classroom activity about {} that takes half an hour.",
    "Write a news item of 120 words about a new discovery in connection with {}.",
    "Argue for and against spending public money on {}.",
    "What is the difference between a beginner's and an expert's view of {}?",
    "Write a short story in which someone changes their mind about {}.",
    "Make an outline for an essay on {} with an introduction, three parts and a conclusion.",
    "Which five words does everyone need in order to talk about {}? Define each of them.",
    "Write a review of an imaginary museum about {}.",
    "How would you explain {} using only very simple words?",
    "Write a letter of complaint that mentions {}, politely.",
)


def open_prompts(num: int, *, seed: int = 0) -> list[str]:
    """`num` different prompts. ValueError when there are not so many, or one is a question of Spec-Bench."""
    all_of_them = [template.format(subject) for template in TEMPLATES for subject in SUBJECTS]
    if not 0 < num <= len(all_of_them):
        raise ValueError(f"num = {num} must be between 1 and {len(all_of_them)} (open prompts)")
    order = torch.randperm(len(all_of_them), generator=torch.Generator().manual_seed(seed))[:num].tolist()
    chosen = [all_of_them[idx] for idx in order]
    held_out = set(files("specbench.training").joinpath("held_out.txt").read_text("utf-8").split())
    for one in chosen:
        if digest(one) in held_out:
            raise ValueError(f"the prompt {one!r} is a question of Spec-Bench: who learns it proves nothing")
    return chosen


def digest(text: str) -> str:
    """Of a turn, as `held_out.txt` holds it."""
    return hashlib.sha256(" ".join(re.findall(r"\w+", text.lower())).encode()).hexdigest()[:16]
