"""mistral.rs 0.6.0 on the CPU: with a draft model it decodes greedily whatever the temperature.

    pip install mistralrs==0.6.0
    python repro_mistralrs_temperature.py TARGET DRAFTER

Folders of any two Llamas of one vocabulary that it reads. Without a draft model 20 texts at temperature 1 differ.
"""

import os
import sys

from mistralrs import Architecture, CompletionRequest, ModelDType, Runner, Which


def which(folder):
    return Which.Plain(model_id=os.path.abspath(folder), arch=Architecture.Llama, dtype=ModelDType.F32)


def texts(temperature, **options):
    asked = CompletionRequest(prompt="c0ffee", model="", max_tokens=12, temperature=temperature)
    return {runner.send_completion_request(asked).choices[0].text for _ in range(20 if temperature else 1)}


target, drafter, *rest = sys.argv[1:]
if rest:  # one runner a process
    options = {"which_draft": which(drafter), "speculative_gamma": 4} if rest[0] == "draft" else {}
    runner = Runner(which=which(target), **options)
    at_one, at_zero = texts(1.0), texts(0.0)
    print(f"{rest[0]}: {len(at_one)} different texts in 20 at temperature 1, the greedy one alone: {at_one == at_zero}")
    sys.stdout.flush()
    os._exit(0)
for mode in ("plain", "draft"):
    os.system(f"RUST_LOG=off {sys.executable} {sys.argv[0]} {target} {drafter} {mode} | grep -a '^{mode}:'")
