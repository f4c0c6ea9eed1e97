"""What the claims have found in drafters of others, each with a reproduction that needs nothing of ours.

Text alone: `run.page` ends with it, and a test runs the first block, so that a finding that was mended is noticed.
"""

FINDINGS = """
## What is wrong, and whose it is

**transformers, other tokenizer, sampled: the law that drafts are verified with is not the one they were drawn from.**
`generate(do_sample=True, assistant_tokenizer=...)` cuts the assistant's head down to the tokens that both vocabularies
have (`AssistantToTargetTranslator(assistant_prune_lm_head=True)`). The rows of the cut head stand in the order of a
dict made from `get_vocab()`, which for fast tokenizers is another order at every call; `get_target_logits` lays
them out as if they stood in ascending order of the assistant's ids. So q is permuted, speculative sampling accepts and
corrects by the wrong q, and the output no longer has the target's law. The claim `drafter.law` shows it; with the head
left whole (`specbench.drafters.universal:Unpruned`, the same generators) every claim holds. Needs transformers alone:

```python
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.generation.candidate_generator import AssistantToTargetTranslator


def tokenizer(characters):
    inner = Tokenizer(models.WordLevel({one: idx for idx, one in enumerate(characters)}, unk_token=characters[0]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def llama(size, seed):
    torch.manual_seed(seed)
    sizes = dict(vocab_size=size, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.5, bos_token_id=None, eos_token_id=None)).eval()


letters = "abcdefghijklmnopqrstuvwxyz"
target, theirs = tokenizer(letters), tokenizer("azyxwvutsrqponmlkjihgfedbXY")  # c is the target's alone, X, Y theirs
assistant, ids = llama(27, seed=1), torch.tensor([[0, 1, 2]])
with torch.no_grad():
    law = assistant(ids).logits[0, -1, :25].softmax(-1)  # over the shared tokens, which stand first
    translator = AssistantToTargetTranslator(target, theirs, 26, assistant, assistant_prune_lm_head=True)
    logits = assistant(ids).logits[:, -1]  # the head is cut now
drawn = torch.stack([law[theirs.get_vocab()[one]] if one != "c" else torch.tensor(0.0) for one in letters])
verified = translator.get_target_logits(logits)[0].softmax(-1)
print("token   ", *letters, sep="     ")
print("drawn   ", *(f"{one:.3f}" for one in drawn.tolist()))
print("verified", *(f"{one:.3f}" for one in verified.tolist()))
```

What `generate` then emits, in one process (the order, and so the error, is another in each): with a target of
`llama(8, seed=0)` over `abcdefgh`, an assistant of `llama(9, seed=1)` over `ahgfedbXY`, `top_k=0`, two drafts and 1,500
seeds, the first token has a total variation of 0.825 from the target's law; without the assistant it has 0.012, which
is sampling noise. Token f comes in 13 % of the texts instead of 86 %, e in 81 % instead of 0.1 %.

**The same generator, second round: the last accepted draft is read as another token.** What the assistant drew are
places in the cut head; `_prev_assistant_ids` keeps them, and after an accept the last of them is fed again with
`_MapInputEmbedding.map = False`, as if it were one of the assistant's own ids: seen with `abc`, of which the draft `f`
was accepted, the embedding is asked for `d a` instead of `f a`. The claims cannot tell this from the first finding.

**The same call changes the assistant for good.** Its head and its embedding are replaced in place. A later greedy call
with the same model object drafts other tokens, or ends with `RuntimeError: mat1 and mat2 shapes cannot be multiplied`,
as the order of the dict has it. Our drafter gives each generator a copy.

**transformers, other tokenizer, greedy: behind a short text drafts are lost.** The window of assistant tokens that is
decoded again starts at `num_prev_assistant - assistant_lookbehind`, which below 10 tokens is negative and then counts
from the end: behind a text of 8 tokens four drafts `w x y z` come out as `y z`. No output is wrong, only drafts.

**transformers, `num_assistant_tokens_schedule="heuristic"`: by design.** How many tokens are drafted depends on what
was accepted before, so a used drafter does not draft what a fresh one does, and `drafter.state` says so. The tokens
are right; a harness that compares drafts with a fresh drafter's has to compare beginnings.

**arctic-inference, remembering: by design.** Answers of earlier requests are looked up too, and the current answer
counts twice, in the request's own tree and in the shared one: what is drafted depends on what was served before.

**arctic-inference 0.3.0: `speculate(request, context)` without `max_spec_tokens` raises AttributeError**, though the
argument has a default: it reads `self.max_depth`, and the attribute is called `max_tree_depth`. Our drafter always
gives the number.

```python
from arctic_inference.suffix_decoding import SuffixDecodingCache

cache = SuffixDecodingCache(max_tree_depth=16)
cache.start_request(0, [1, 2, 3, 1, 2])
cache.speculate(0, [1, 2])  # AttributeError: 'SuffixDecodingCache' object has no attribute 'max_depth'
```
"""
