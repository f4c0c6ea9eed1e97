"""Drafters in the layouts of others: folders made here, drafts held to transformers' layers or to formulas in full."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig as HFConfig
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from specbench.bench.lean import LeanLlama
from specbench.protocols import SeededCoins
from specbench.reference import autoregressive
from specbench.reference.decoder import Decoder
from specbench.reference.drafters.fused import FusedLayers
from specbench.reference.drafters.growth import BestFirst, Static
from specbench.reference.drafters.layers import LayersDrafter
from specbench.reference.drafters.published import read_published
from specbench.reference.drafters.trained import load_drafter, load_published
from specbench.reference.hf import HFModel
from specbench.reference.model import LlamaConfig, tiny_llama
from specbench.reference.session import TreeSession
from specbench.tree import chain
from specbench.types import GREEDY, TargetState

H, V, INNER, HEADS, KV, D = 16, 13, 24, 4, 2, 4
CONFIG = LlamaConfig(V, H, INNER, num_layers=4, num_heads=HEADS, num_kv_heads=KV, head_dim=D)
MODEL = tiny_llama(CONFIG, seed=0)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
IDS = torch.tensor([1, 2, 3, 5, 8, 9, 12])
T2D = torch.zeros(V, dtype=torch.bool).index_fill(0, IDS, value=True)
SHAPE = Static.widths(2, 2, 1)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "num_hidden_layers": 1,
    "vocab_size": V,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500.0,
    "hidden_act": "silu",
}
Law = Callable[[list[int]], tuple[Tensor, Tensor]]


def numbers(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * shape[-1] ** -0.5


def layer_weights(wide: int) -> dict[str, Tensor]:
    """Of one layer whose q, k and v read `wide` numbers, without norms before its attention."""
    shapes = {
        "self_attn.q_proj": (HEADS * D, wide),
        "self_attn.k_proj": (KV * D, wide),
        "self_attn.v_proj": (KV * D, wide),
        "self_attn.o_proj": (H, HEADS * D),
        "mlp.gate_proj": (INNER, H),
        "mlp.up_proj": (INNER, H),
        "mlp.down_proj": (H, INNER),
    }
    found = {f"{name}.weight": 2 * numbers(*shape, seed=idx) for idx, (name, shape) in enumerate(shapes.items())}
    return found | {"post_attention_layernorm.weight": 1 + numbers(H, seed=20)}


def written(folder: Path, fields: dict[str, Any], weights: dict[str, Tensor], *, name: str = "model") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(
        {key: one.clone(memory_format=torch.contiguous_format) for key, one in weights.items()},
        folder / f"{name}.safetensors",
    )
    return folder


# ---- layouts. Each writes a folder and returns the law behind a path that begins with the root: ids, logits.


def medusa(folder: Path, *, of_vllm: bool = False) -> Law:
    blocks, outputs = (
        [numbers(H, H, seed=30 + idx) for idx in range(3)],
        [numbers(V, H, seed=40 + idx) for idx in range(3)],
    )
    biases = [numbers(H, seed=50 + idx) * (not of_vllm) for idx in range(3)]
    ids = IDS.flip(0)
    if of_vllm:
        fields = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1, "truncated_vocab_size": len(ids)}
        weights = {f"blocks.{idx}.layers.0.weight": one for idx, one in enumerate(blocks)} | {"token_map": ids}
        weights |= {f"lm_heads.{idx}.weight": one[ids] for idx, one in enumerate(outputs)}
    else:
        fields = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "some/model"}
        weights = {f"{idx}.0.linear.weight": one for idx, one in enumerate(blocks)}
        weights |= {f"{idx}.0.linear.bias": one for idx, one in enumerate(biases)}
        weights |= {f"{idx}.1.weight": one for idx, one in enumerate(outputs)}
    written(folder, fields, weights, name="medusa_lm_head")

    def law(path: list[int]) -> tuple[Tensor, Tensor]:
        hidden, idx = MODEL.states(PROMPT[:-1])[-1], len(path) - 1
        inner = blocks[idx] @ hidden + biases[idx]
        logits = outputs[idx] @ (hidden + inner * torch.sigmoid(inner))
        return (ids, logits[ids]) if of_vllm else (torch.arange(V), logits)

    return law


def continued(
    path: list[int], before: list[Tensor], layer: Callable[[Tensor, Tensor], Tensor], embedding: Tensor
) -> Tensor:
    """The last row's output of a layer over (embeddings, what stands before them), guesses behind `before`."""
    text = [*PROMPT, *path[1:]]
    while True:
        out = layer(embedding[text[1 : len(before) + 1]], torch.stack(before))[-1]
        if len(before) == len(text) - 1:
            return out
        before = [*before, out]


def eagle(folder: Path, *, of_speculators: bool = False) -> Law:
    own, fc, bias = layer_weights(H), numbers(H, 2 * H, seed=60), numbers(H, seed=61)
    weights = {f"layers.0.{key}": one for key, one in own.items()} | {"fc.weight": fc, "fc.bias": bias}
    weights["embed_tokens.weight"] = MODEL.embedding
    fields: dict[str, Any] = LLAMA
    head = MODEL.head
    if of_speculators:
        head = numbers(V, H, seed=62)
        weights |= {"lm_head.weight": head}
        fields = {"speculators_model_type": "eagle", "layernorms": False, "fusion_bias": True}
        fields["transformer_layer_config"] = LLAMA
    written(folder, fields, weights)
    theirs = LlamaDecoderLayer(HFConfig(**LLAMA, attn_implementation="eager"), layer_idx=0).to(torch.float64)
    theirs.input_layernorm = torch.nn.Identity()
    theirs.load_state_dict(own)

    def layer(embedded: Tensor, before: Tensor) -> Tensor:
        given = (torch.cat([embedded, before], dim=-1) @ fc.T + bias)[None]
        angles = LlamaRotaryEmbedding(HFConfig(**LLAMA))(given, torch.arange(len(before))[None])
        mask = torch.full((len(before), len(before)), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        with torch.no_grad():
            out = theirs(given, attention_mask=mask, position_embeddings=angles)
        return (out[0] if isinstance(out, tuple) else out).reshape(len(before), H)

    return lambda path: (
        torch.arange(V),
        head @ continued(path, list(MODEL.states(PROMPT[:-1])), layer, MODEL.embedding),
    )


def eagle3(folder: Path, *, of_speculators: bool = False) -> Law:
    own, layers = layer_weights(2 * H), [1, 3, 0] if of_speculators else [2, 2, 1]
    norms = {name: 1 + numbers(H, seed=70 + idx) for idx, name in enumerate(("input", "hidden", "last"))}
    fc, head = numbers(H, 3 * H, seed=80), numbers(len(IDS), H, seed=81)
    prefix = "layers.0." if of_speculators else "midlayer."
    weights = {prefix + key: one for key, one in own.items()}
    weights |= {f"{prefix}input_layernorm.weight": norms["input"], f"{prefix}hidden_norm.weight": norms["hidden"]}
    weights |= {"norm.weight": norms["last"], "fc.weight": fc, "lm_head.weight": head}
    weights |= {"d2t": IDS - torch.arange(len(IDS)), "t2d": T2D}
    embedding = MODEL.embedding
    fields: dict[str, Any] = {**LLAMA, "draft_vocab_size": len(IDS)}
    if of_speculators:
        embedding = MODEL.embedding + numbers(V, H, seed=82)
        weights |= {"embed_tokens.weight": embedding, "verifier_norm.weight": norms["last"]}
        fields = {"speculators_model_type": "eagle3", "draft_vocab_size": len(IDS), "norm_before_residual": True}
        fields |= {"eagle_aux_hidden_state_layer_ids": layers, "transformer_layer_config": LLAMA}
    written(folder, fields, weights)
    MODEL.save(folder.parent / "target")
    target = LlamaForCausalLM.from_pretrained(folder.parent / "target", dtype=torch.float64)
    rope = LlamaRotaryEmbedding(HFConfig(**LLAMA))

    def norm(x: Tensor, name: str) -> Tensor:
        module = LlamaRMSNorm(H, eps=1e-6).to(torch.float64)
        module.weight.data = own["post_attention_layernorm.weight"] if name == "post" else norms[name]
        return module(x).detach()

    def heads(x: Tensor, name: str, num: int) -> Tensor:
        return (x @ own[f"self_attn.{name}_proj.weight"].T).view(1, len(x), num, D).transpose(1, 2)

    def layer(embedded: Tensor, before: Tensor) -> Tensor:
        both = torch.cat([norm(embedded, "input"), norm(before, "hidden")], dim=-1)
        cos, sin = rope(both[None], torch.arange(len(before))[None])
        q, k = apply_rotary_pos_emb(heads(both, "q", HEADS), heads(both, "k", KV), cos, sin)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q, k, heads(both, "v", KV), is_causal=True, enable_gqa=True
        )
        mixed = mixed.transpose(1, 2).reshape(len(before), HEADS * D) @ own["self_attn.o_proj.weight"].T
        hidden = (norm(before, "hidden") if of_speculators else before) + mixed
        inner = norm(hidden, "post")
        gate = torch.nn.functional.silu(inner @ own["mlp.gate_proj.weight"].T)
        return hidden + (gate * (inner @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T

    def law(path: list[int]) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            states = target(torch.tensor([PROMPT[:-1]]), output_hidden_states=True).hidden_states
        fused = torch.cat([states[idx][0] for idx in layers], dim=-1) @ fc.T
        return IDS, head @ norm(continued(path, list(fused), layer, embedding), "last")

    return law


MAKERS: dict[str, Callable[[Path], Law]] = {
    "Medusa": medusa,
    "Medusa of vLLM": lambda folder: medusa(folder, of_vllm=True),
    "EAGLE": eagle,
    "EAGLE of speculators": lambda folder: eagle(folder, of_speculators=True),
    "EAGLE-3": eagle3,
    "EAGLE-3 of speculators": lambda folder: eagle3(folder, of_speculators=True),
}
every_layout = pytest.mark.parametrize("name", MAKERS)


def draft(drafter: Any, context: list[int], state: TargetState | None = None) -> Any:
    return drafter.draft(context, max_nodes=64, max_depth=16, sampling=GREEDY, coins=SeededCoins(0), target_state=state)


@every_layout
def test_each_node_has_the_likeliest_children_of_its_path(name: str, tmp_path: Path) -> None:
    law = MAKERS[name](tmp_path / "drafter")
    tree = draft(load_drafter(tmp_path / "drafter", MODEL, shape=SHAPE), PROMPT)
    assert tree.num_nodes == 11
    for node in range(tree.num_nodes):
        if children := [tree.token_list[child] for child in tree.children(node)]:
            ids, logits = law(list(tree.path_tokens(node)))
            assert children == ids[logits.argsort(descending=True)[: len(children)]].tolist()


@every_layout
@pytest.mark.parametrize("accept", [0, 2])
def test_what_was_accepted_changes_no_later_draft(name: str, accept: int, tmp_path: Path) -> None:
    """The states that a session keeps for such a drafter are those that it would compute itself."""
    MAKERS[name](tmp_path / "drafter")
    lived, context = load_drafter(tmp_path / "drafter", MODEL, shape=BestFirst(6)), list(PROMPT)
    session = TreeSession(MODEL, keeps_states=True, state_layers=getattr(lived, "state_layers", ()))
    session.prefill(context[:-1])
    for _ in range(3):
        assert session.states is not None
        tree = draft(lived, context, TargetState(session.states))
        assert tree == draft(load_drafter(tmp_path / "drafter", MODEL, shape=BestFirst(6)), context)
        session.forward_tree(tree)
        path = next((one[1 : accept + 1] for one in tree.paths() if len(one) > accept), [])
        session.commit(path)
        context += [*(tree.token_list[node] for node in path), 11]


@every_layout
def test_generations_are_plain_decoding(name: str, tmp_path: Path) -> None:
    MAKERS[name](tmp_path / "drafter")
    decoder = Decoder(MODEL, load_published(tmp_path / "drafter", MODEL))
    answer = decoder.generate(PROMPT, max_new_tokens=8)
    assert answer.tokens == autoregressive.generate(MODEL, PROMPT, max_new_tokens=8).tokens
    assert all(len(one.tokens) > 1 for one in answer.rounds[:-1])


def test_sessions_and_forks_keep_what_layers_were_given() -> None:
    session = TreeSession(MODEL, keeps_states=True, state_layers=(0, 3))
    session.prefill(PROMPT[:4])
    twin = session.fork()
    session.forward_tree(chain([PROMPT[4], 7]))
    session.commit([])
    twin.extend([8])
    torch.testing.assert_close(session.states, MODEL.layer_inputs(PROMPT[:5], (0, 3)), rtol=0, atol=1e-12)
    torch.testing.assert_close(twin.states, MODEL.layer_inputs([*PROMPT[:4], 8], (0, 3)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2", "falcon"])
def test_a_transformers_model_tells_what_its_layers_are_given(model_type: str) -> None:
    """As its own output_hidden_states has them, and in a decoder too."""
    model = HFModel.tiny(model_type, seed=1, dtype=torch.float64)
    with torch.no_grad():
        theirs = model.model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    expected = torch.cat([theirs[1][0], theirs[0][0]], dim=-1)
    torch.testing.assert_close(model.layer_inputs(PROMPT, (1, 0)), expected, rtol=0, atol=1e-5)
    session = TreeSession(model, keeps_states=True, state_layers=(1, 0))
    session.prefill(PROMPT[:-1])
    session.forward_tree(chain([PROMPT[-1], 3]))
    session.commit([])
    torch.testing.assert_close(session.states, expected, rtol=0, atol=1e-5)


def test_fused_layers_draft_for_transformers_models_alike(tmp_path: Path) -> None:
    eagle3(tmp_path / "drafter")
    theirs = HFModel.load(tmp_path / "target", dtype=torch.float64)
    drafts = [draft(load_drafter(tmp_path / "drafter", one, shape=SHAPE), PROMPT) for one in (MODEL, theirs)]
    assert drafts[0] == drafts[1]


def test_fused_layers_come_back_from_a_folder(tmp_path: Path) -> None:
    eagle3(tmp_path / "drafter")
    layers = read_published(tmp_path / "drafter", MODEL)
    assert isinstance(layers, FusedLayers)
    layers.write(tmp_path / "ours", dtype=torch.float64)
    drafts = [draft(load_drafter(tmp_path / name, MODEL, shape=SHAPE), PROMPT) for name in ("drafter", "ours")]
    assert drafts[0] == drafts[1]


def test_matrices_that_are_the_targets_are_not_held_twice(tmp_path: Path) -> None:
    eagle(tmp_path / "drafter")
    layers = read_published(tmp_path / "drafter", MODEL)
    assert not {"embedding.weight", "output.weight"} & set(layers.own)  # type: ignore[union-attr]


# ---- refused


def test_targets_that_do_not_tell_are_refused(tmp_path: Path) -> None:
    eagle3(tmp_path / "drafter")
    layers = read_published(tmp_path / "drafter", MODEL)
    assert isinstance(layers, FusedLayers)

    class Silent:
        embedding, head, dtype, device = MODEL.embedding, MODEL.head, MODEL.dtype, MODEL.device

    with pytest.raises(
        ValueError, match=r"what layers \[2, 2, 1\] of its target are given, which a Silent does not tell"
    ):
        LayersDrafter(Silent(), layers, shape=SHAPE)
    lean = LeanLlama.of(tiny_llama(CONFIG, seed=0))
    with pytest.raises(ValueError, match="does not tell what its layers are given: use the model that it was made of"):
        Decoder(lean, LayersDrafter(lean, layers, shape=SHAPE))


def test_pickles_are_read_on_request_alone(tmp_path: Path) -> None:
    eagle(tmp_path / "drafter")
    expected = draft(load_published(tmp_path / "drafter", MODEL, shape=SHAPE), PROMPT)
    from safetensors.torch import load_file

    torch.save(load_file(tmp_path / "drafter" / "model.safetensors"), tmp_path / "drafter" / "pytorch_model.bin")
    (tmp_path / "drafter" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"as a pickle, pytorch_model.bin, which is not read unasked: save them as"):
        load_published(tmp_path / "drafter", MODEL)
    assert draft(load_published(tmp_path / "drafter", MODEL, shape=SHAPE, pickles=True), PROMPT) == expected


EAGLE3 = {**LLAMA, "draft_vocab_size": len(IDS)}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Tensor], str]] = {
    "another speculator": (
        {"speculators_model_type": "dflash"},
        {},
        "speculators_model_type 'dflash' must be 'eagle' or 'eagle3': no other is computed here",
    ),
    "two blocks a head": (
        {"medusa_num_heads": 2, "medusa_num_layers": 2},
        {},
        "its heads have 2 residual blocks each, must have 1 to be computed here",
    ),
    "a head without a matrix": (
        {"medusa_num_heads": 1},
        {"0.0.linear.weight": torch.zeros(H, H)},
        "there is no tensor 0.1.weight or lm_heads.0.weight",
    ),
    "more heads than are told": (
        {"medusa_num_heads": 0},
        {"0.0.linear.weight": torch.zeros(H, H)},
        "0.0.linear.weight must not be there: nothing is computed with it here",
    ),
    "norms of TTT": (
        {"speculators_model_type": "eagle", "layernorms": True},
        {},
        "config.json says layernorms, which is not computed here",
    ),
    "biases": (
        {"speculators_model_type": "eagle3", "transformer_layer_config": {"attention_bias": True}},
        {},
        "config.json says attention_bias, which is not computed here",
    ),
    "scaled angles": (
        {**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"fc.weight": torch.zeros(H, 2 * H)},
        "its rotary embedding {'rope_type': 'llama3', 'factor': 8.0} must be of type 'default' to be computed here",
    ),
    "another activation": (
        {**LLAMA, "hidden_act": "gelu"},
        {"fc.weight": torch.zeros(H, 2 * H)},
        "hidden_act = 'gelu' must be 'silu' to be computed here",
    ),
    "a smaller drafter": (
        {**EAGLE3, "target_hidden_size": 64},
        {"d2t": IDS},
        "its hidden size 16 must be its target's, 64, to be computed here",
    ),
    "two lists of tokens": (
        EAGLE3,
        {"d2t": IDS - torch.arange(len(IDS)), "t2d": ~T2D},
        "d2t and t2d name other tokens of the target",
    ),
    "a longer list of tokens": (
        EAGLE3,
        {"d2t": IDS - torch.arange(len(IDS)), "t2d": torch.ones_like(T2D)},
        "d2t and t2d name other tokens of the target",
    ),
    "half a head turns": (
        {**LLAMA, "partial_rotary_factor": 0.5},
        {"fc.weight": torch.zeros(H, 2 * H)},
        "partial_rotary_factor = 0.5 must be 1 to be computed here: all of a head turns",
    ),
    "sliding windows": (
        {**LLAMA, "use_sliding_window": True},
        {"fc.weight": torch.zeros(H, 2 * H)},
        "config.json says use_sliding_window, which is not computed here",
    ),
    "layers of a deeper target": (
        {**EAGLE3, "eagle_aux_hidden_state_layer_ids": [2, 16, 29]},
        {"d2t": IDS - torch.arange(len(IDS))},
        "it reads what layers [2, 16, 29] are given, of which the target has 4",
    ),
    "a speculator that does not say": (
        {"speculators_model_type": "eagle3", "transformer_layer_config": LLAMA},
        {},
        "config.json lacks 'norm_before_residual'",
    ),
    "another target": (
        {**LLAMA, "vocab_size": 99},
        {"fc.weight": torch.zeros(H, 2 * H)},
        "the drafter is made for a target of 99 tokens and hidden size 16, must fit this one's 13 and 16: train one "
        "with specbench train-drafter",
    ),
    "no drafter": (
        LLAMA,
        {"model.norm.weight": torch.zeros(H)},
        "this is the layout of no drafter that is known here: Medusa (medusa_num_heads), EAGLE (fc.weight), EAGLE-3 "
        "(d2t) or speculators (speculators_model_type)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_computed_otherwise_is_refused_by_name(case: str, tmp_path: Path) -> None:
    fields, weights, message = REFUSED[case]
    folder = written(tmp_path / "drafter", fields, weights or {"unused": torch.zeros(1)})
    with pytest.raises(ValueError) as caught:
        load_drafter(folder, MODEL)
    assert str(caught.value) == f"{folder}: {message}"


def test_sizes_that_do_not_fit_are_told_in_one_sentence(tmp_path: Path) -> None:
    """Whatever library trips over them."""
    shifts = IDS - torch.arange(len(IDS))
    broken = {
        "beyond": (EAGLE3, {"d2t": shifts + 13}),
        "short": (EAGLE3, {"d2t": shifts[:-1]}),
        "none": ({**LLAMA, "num_attention_heads": 0}, {"fc.weight": torch.zeros(H, 2 * H)}),
        "words": ({"medusa_num_heads": "2"}, {"0.0.linear.weight": torch.zeros(H, H)}),
        "null": ({"transformer_layer_config": None}, {"fc.weight": torch.zeros(H, 2 * H)}),
    }
    for name, (fields, weights) in broken.items():
        with pytest.raises(ValueError, match=f"{name}: sizes in config.json and its tensors do not fit each other: "):
            load_drafter(written(tmp_path / name, fields, weights), MODEL)
    (tmp_path / "short" / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(ValueError, match=r"short: sizes in config.json and its tensors do not fit each other: "):
        load_drafter(tmp_path / "short", MODEL)


def test_a_folder_without_weights_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ValueError, match=r"holds no \*.safetensors, which must have the drafter's weights"):
        load_drafter(tmp_path, MODEL)
