"""OpenVINO GenAI 2026.4.1.0 on the CPU: with a draft model, sampled tokens do not follow the target's law.

    pip install openvino-genai==2026.4.1.0
    specbench sentinel export pair --law --dtype fp32 --drafter-agreement 0.6 --gguf f16
    python openvino_sampling.py pair

One request at a time, temperature 1, no filters, 400 seeds of one prompt. A sentinel's law behind each text is a row of the
table in pair/sentinel.json; counts are pooled over the texts and compared with it, by chi-squared of 15 degrees of freedom
(above 50 happens once in 100,000 times). Without the draft model every place follows the law.
"""

import json
import math
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import openvino as ov
import openvino.opset15 as ops
import openvino_genai as genai
from openvino_tokenizers.build_tokenizer import build_rwkv_tokenizer

NUM_SEEDS, NUM_NEW, BOS = 400, 4, 16
PROMPT = [BOS, *((7 * place + place * place) % 16 for place in range(80))]


def convert(gguf, folder):
    """A draft model cannot be a GGUF file; loading one with enable_save_ov_model writes what can be one."""
    folder.mkdir()
    tokenizer, _ = build_rwkv_tokenizer([f"{code} {chr(code)!r} 1" for code in range(128)])
    mask = ops.broadcast(ops.constant(np.int64(1)), ops.shape_of(tokenizer.get_results()[0].input_value(0)))
    mask.output(0).tensor.set_names({"attention_mask"})
    tokenizer.add_results([ops.result(mask)])
    ov.save_model(tokenizer, folder / "openvino_tokenizer.xml")
    (folder / "model.gguf").symlink_to(Path(gguf).resolve())
    genai.LLMPipeline(folder / "model.gguf", genai.Tokenizer(folder), "CPU", enable_save_ov_model=True)
    return folder


def draws(target, drafter, *, is_cached=False):
    options = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    more = {"draft_model": genai.draft_model(drafter, "CPU", **options)} if drafter else {}
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = is_cached
    pipe = genai.ContinuousBatchingPipeline(target, genai.Tokenizer(target), scheduler, "CPU", **options, **more)
    how = {"num_assistant_tokens": 4} if drafter else {}
    ids = ov.Tensor(np.array([PROMPT], dtype=np.int64))
    for seed in range(NUM_SEEDS):
        config = genai.GenerationConfig(
            max_new_tokens=NUM_NEW,
            ignore_eos=True,
            eos_token_id=BOS,
            do_sample=True,
            temperature=1.0,
            rng_seed=seed,
            **how,
        )
        yield list(pipe.generate([ids], [config])[0].m_generation_ids[0])


def law_of(program, context):
    states = list(context)
    for layer, table in enumerate(program["tables"]):
        states = [s if s == BOS else table[s][states[max(0, at - 2**layer)]] for at, s in enumerate(states)]
    masses = [math.exp(eighths / 8) for eighths in program["law_logits"][states[-1]]]
    return [mass / sum(masses) for mass in masses]


pair, num_wrong = Path(sys.argv[1]), 0
program = json.loads((pair / "sentinel.json").read_text())["program"]
with tempfile.TemporaryDirectory() as work:
    target = convert(pair / "sentinel.gguf", Path(work) / "t")
    drafter = convert(pair / "drafter" / "sentinel.gguf", Path(work) / "d")
    for name, one in (("plain", None), ("draft model", drafter)):
        texts = list(draws(target, one))
        for place in range(NUM_NEW):
            seen, expected = Counter(), Counter()
            for text in texts:
                if len(text) > place and BOS not in text[:place]:
                    seen[text[place]] += 1
                    for token, mass in enumerate(law_of(program, [*PROMPT, *text[:place]])):
                        expected[token] += mass
            chi_squared = sum((seen[token] - expected[token]) ** 2 / expected[token] for token in range(BOS))
            is_wrong = chi_squared > 50 or seen[BOS] > 0
            num_wrong += is_wrong
            told = f"{name}, new token {place}: chi-squared {chi_squared:.1f}, BOS {seen[BOS]} times (its probability: 1e-30)"
            print(told, "WRONG" if is_wrong else "")
    try:
        num_texts = len(list(draws(target, drafter, is_cached=True)))
        print(f"draft model, prefix caching: {num_texts} texts")
    except RuntimeError as error:
        num_wrong += 1
        print("draft model, prefix caching: RuntimeError", " ".join(str(error).split())[:160], "WRONG")
sys.exit(num_wrong > 0)
