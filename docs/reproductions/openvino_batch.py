"""OpenVINO GenAI 2026.4.1.0 on the CPU: with several requests at once, drafts are kept that were never verified.

    pip install openvino-genai==2026.4.1.0
    python repro_openvino_batch.py TARGET.gguf DRAFTER.gguf      # `specbench sentinel export pair --gguf f16 ...`

Expected is what the same engine says without drafts, one request at a time (for a sentinel, also the program).
"""

import random
import sys
import tempfile
from pathlib import Path

import numpy as np
import openvino as ov
import openvino.opset15 as ops
import openvino_genai as genai
from openvino_tokenizers.build_tokenizer import build_rwkv_tokenizer

NUM_NEW = 24


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


def ask(target, prompts, *, drafter=None, lookup=False, at_once=True, **scheduler):
    config = genai.SchedulerConfig()
    for name, value in scheduler.items():
        setattr(config, name, value)
    options = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    more = {"prompt_lookup": True} if lookup else {}
    if drafter:
        more["draft_model"] = genai.draft_model(drafter, "CPU", **options)
    pipe = genai.ContinuousBatchingPipeline(target, genai.Tokenizer(target), config, "CPU", **options, **more)
    how = {"num_assistant_tokens": 4} if lookup or drafter else {}
    if lookup:
        how["max_ngram_size"] = 3
    one = genai.GenerationConfig(max_new_tokens=NUM_NEW, ignore_eos=True, eos_token_id=16, **how)
    ids = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
    calls = [(ids, [one] * len(ids))] if at_once else [([each], [one]) for each in ids]
    return [list(result.m_generation_ids[0]) for call in calls for result in pipe.generate(*call)]


def main(target_gguf, drafter_gguf):
    with tempfile.TemporaryDirectory() as work:
        target, drafter = convert(target_gguf, Path(work) / "t"), convert(drafter_gguf, Path(work) / "d")

        def report(name, lengths, *, drafts, **scheduler):
            rng = random.Random(0)
            prompts = [[16, *(rng.randrange(16) for _ in range(length - 1))] for length in lengths]
            expected = ask(target, prompts, at_once=False)
            plain = ask(target, prompts, **scheduler)
            more = {"drafter": drafter} if drafts == "model" else {"lookup": True}
            print(
                f"{name}: {len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens, {scheduler or 'default scheduler'}"
            )
            print(f"  plain at once: {sum(map(list.__ne__, plain, expected))} texts differ")
            try:
                said = ask(target, prompts, **more, **scheduler)
            except RuntimeError as error:
                print(f"  {drafts}: RuntimeError {' '.join(str(error).split())[:200]}")
                return
            print(
                f"  {drafts}: {sum(map(list.__ne__, said, expected))} texts differ, lengths {sorted(set(map(len, said)))}"
            )
            for number, (prompt, here, there) in enumerate(zip(prompts, said, expected)):
                place = next((i for i, (a, b) in enumerate(zip(here, there)) if a != b), None)
                if place is not None and drafts == "model":
                    same = [*prompt, *here[:place]]
                    draft = ask(drafter, [same], at_once=False)[0][0]
                    print(
                        f"    prompt {number}, new token {place}: {here[place]}, expected {there[place]}, the drafter says {draft}"
                    )

        report("A", [2, 40], drafts="model", max_num_batched_tokens=16)
        report("B", [2, 3, 33, 64, 65, 66, 132, 177, 177], drafts="model")
        report("C", [90, 90], drafts="model", num_kv_blocks=6)
        report("D", [2, 2, 2, 2, 2, 2, 64], drafts="lookup", max_num_batched_tokens=16)
        report("E", [2] * 60, drafts="lookup")
        report("F", [90, 90], drafts="lookup", num_kv_blocks=6)


main(*sys.argv[1:3])
