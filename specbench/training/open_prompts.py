"""Prompts for self-distillation: templates of ours over subjects of ours, in an order that a seed decides.

Open questions, sums in words, sentences to translate, and, of what the target has written itself, texts to be worked
on. None of it is what a benchmark asks: every prompt is compared by hash with the questions of Spec-Bench
(`held_out.txt`: the first 16 hex digits of SHA-256 of each turn, lower-cased, white space and punctuation made one
blank). No text of anybody else stands here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
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


QUESTIONS = (
    "What is {} good for?", "Where does the word for {} come from?", "Who is known for work on {}?",
    "When did people first take an interest in {}?", "How long does it take to understand {}?",
    "What is the most important fact about {}?", "Which country is best known for {}?", "Why does {} matter?",
    "What happens at the beginning and at the end of {}?", "How many kinds of {} are there?",
)  # fmt: skip
SUMS = (
    "{name} has {a} {things} and buys {b} more every week. How many {things} does {name} have after {c} weeks?",
    "A box of {things} costs ${a}. {name} buys {c} boxes and pays with ${big}. How much change does {name} get?",
    "{name} reads {b} pages on Monday, twice as many on Tuesday and {a} on Wednesday. How many pages is that in total?",
    "{c} friends share {big} {things} equally. How many does each of them get, and how many are left over?",
    "A train travels {big} miles in {c} hours and then {a} miles in {b} hours. What is its average speed?",
    "{name} earns ${a} an hour, works {b} hours a week and spends ${big} a month. How much is saved in {c} months?",
    "A garden is {a} metres long and {b} metres wide. A fence costs ${c} a metre. What does the fence cost?",
    "{name} had ${big}, spent half of it on {things} and then ${a} on lunch. How much money is left?",
    "There are {a} {things} in a shop. {b} percent of them are sold on Friday. How many are left on Saturday?",
    "{name} bakes {a} rolls an hour for {c} hours and sells all but {b}. How many rolls are sold?",
)
NAMES = ("Marta", "Oleg", "Priya", "Tom", "Aiko", "Samuel", "Ines", "Kofi")
THINGS = ("stamps", "pencils", "apples", "marbles", "candles", "postcards")
SENTENCES = (
    "Der alte {} steht seit vielen Jahren am Rand der Stadt.",
    "Niemand wusste, wem der {} gehörte.",
    "Gestern hat meine Schwester einen {} gekauft, der viel zu teuer war.",
    "Ohne den {} hätten wir den Weg nie gefunden.",
    "Der {} wurde im Jahr 1923 gebaut und später zweimal erweitert.",
    "Die Kinder spielten den ganzen Tag neben dem {}.",
    "Nach dem Regen war der {} nicht mehr zu sehen.",
    "In der Zeitung stand, dass der {} verkauft werden soll.",
    "Er erzählte uns, wie er den {} als junger Mann zum ersten Mal sah.",
    "Für den {} gibt es bis heute keine Erklärung.",
)
WORDS = (
    "Turm", "Garten", "Wagen", "Brunnen", "Bahnhof", "Hafen", "Baum", "Spiegel", "Markt", "Schlüssel", "Berg", "Hund",
    "Tisch", "Film", "Vertrag", "Fluss", "Stein", "Laden", "Brief", "Flughafen",
)  # fmt: skip
READINGS = (
    "Summarize: {}",
    "Summarise the following text in three sentences.\n\n{}",
    "{}\n\nWhat is the main point of the text above? Answer in one short paragraph and quote its words.",
    "Here is a text:\n\n{}\n\nList the facts that it states, one a line.",
    "Answer from this passage only. Passage: {}\nQuestion: What does the passage say first, and what last?",
    "Correct any mistakes in this text and write it out again:\n\n{}",
)


def open_prompts(num: int, *, seed: int = 0) -> list[str]:
    """`num` different prompts. ValueError when there are not so many, or one is a question of Spec-Bench."""
    everything = _everything()
    if not 0 < num <= len(everything):
        raise ValueError(f"num = {num} must be between 1 and {len(everything)} (open prompts)")
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(seed))[:num].tolist()
    return _allowed([everything[idx] for idx in order])


def readings(texts: Sequence[str], *, seed: int = 0) -> list[str]:
    """One prompt about each text, which the target wrote itself. ValueError when one is a question of Spec-Bench."""
    chosen = torch.randint(len(READINGS), (len(texts),), generator=torch.Generator().manual_seed(seed)).tolist()
    return _allowed([READINGS[which].format(text.strip()) for which, text in zip(chosen, texts, strict=True)])


def _everything() -> list[str]:
    found = [template.format(subject) for template in (*TEMPLATES, *QUESTIONS) for subject in SUBJECTS]
    found += [f"Translate German to English: {one.format(word)}" for one in SENTENCES for word in WORDS]
    for idx in range(60 * len(SUMS)):
        a, b, c = 11 + 7 * idx % 83, 2 + 5 * idx % 17, 3 + idx % 6
        name, things = NAMES[idx % len(NAMES)], THINGS[idx // 7 % len(THINGS)]
        found.append(SUMS[idx % len(SUMS)].format(name=name, things=things, a=a, b=b, c=c, big=a * c + 10 * b))
    return list(dict.fromkeys(found))


def _allowed(prompts: list[str]) -> list[str]:
    held_out = set(files("specbench.training").joinpath("held_out.txt").read_text("utf-8").split())
    for one in prompts:
        if digest(one) in held_out:
            raise ValueError(f"the prompt {one!r} is a question of Spec-Bench: who learns it proves nothing")
    return prompts


def digest(text: str) -> str:
    """Of a turn, as `held_out.txt` holds it."""
    return hashlib.sha256(" ".join(re.findall(r"\w+", text.lower())).encode()).hexdigest()[:16]
