"""The planted faults of kernels, by id. `suites/kernels/test_faults.py` demands that each is caught."""

from __future__ import annotations

from specbench.kernels.faults.fault import KernelFault

_ATTENTION = [
    KernelFault(
        "one_pass_without_the_tree",
        "tree_attention",
        "a program that goes through all keys leaves the tree's out",
        (("if (split == num_splits) | (not HAS_SPLITS):", "if split == num_splits:"),),
    ),
    KernelFault(
        "group_mapping",
        "tree_attention",
        "query heads take key heads in turn instead of in groups",
        (("head = key_head * GROUP + row % GROUP", "head = row % GROUP * (QUERY_HEADS // GROUP) + key_head"),),
    ),
    KernelFault(
        "last_block_skipped",
        "tree_attention",
        "the last, partial block of keys is left out",
        (("range(tl.cdiv(tl.maximum(end - begin, 0), STEP))", "range(tl.maximum(end - begin, 0) // STEP)"),),
    ),
    KernelFault(
        "mask_shared",
        "tree_attention",
        "every sequence is masked as the first one is",
        (
            (
                "tl.load(bits + (start + node) * num_words + (block * STEP >> 6)",
                "tl.load(bits + node * num_words + (block * STEP >> 6)",
            ),
        ),
        origin="vllm-project/vllm#20401",
    ),
    KernelFault(
        "lower_triangle_unmasked",
        "tree_attention",
        "the mask is not looked at below the diagonal: right for chains, wrong for siblings",
        (
            (
                "visible = visible & (((word[:, None] >> (other & 63).to(tl.int64)[None, :]) & 1) == 1)",
                "visible = visible & ((((word[:, None] >> (other & 63).to(tl.int64)[None, :]) & 1) == 1) | "
                "(other[None, :] < node[:, None]))",
            ),
        ),
        origin="PaddlePaddle/FastDeploy#3514",
    ),
    KernelFault(
        "mask_ignores_the_words",
        "tree_attention",
        "nodes from the 64th on are masked by the bits of the first 64",
        (("(block * STEP >> 6), mask=is_row", "(block * STEP >> 30), mask=is_row"),),
    ),
    KernelFault(
        "window_edge",
        "tree_attention",
        "a row sees one position more than its window holds",
        (
            (
                "key_position[None, :] > (position - window)[:, None]",
                "key_position[None, :] >= (position - window)[:, None]",
            ),
        ),
    ),
    KernelFault(
        "window_by_block",
        "tree_attention",
        "the window ends where a block of keys does",
        (
            (
                "visible = visible & (key_position[None, :] > (position - window)[:, None])",
                "visible = visible & (key_position[None, :] // STEP >= ((position - window + 1) // STEP)[:, None])",
            ),
        ),
    ),
    KernelFault(
        "window_by_slot",
        "tree_attention",
        "the window counts a node's row instead of its depth",
        (("key_position = prefix_len + tl.load(depth + start + other, mask=is_key, other=0)", "key_position = key"),),
    ),
    KernelFault(
        "window_of_the_deepest",
        "tree_attention",
        "the prefix is cut by the window of the deepest node",
        (
            (
                "first = tl.maximum(prefix_len - window + 1, 0)",
                "first = tl.minimum(tl.maximum(tl.max(position, axis=0) - window + 1, 0), prefix_len)",
            ),
        ),
    ),
    KernelFault(
        "merge_without_rescale",
        "tree_attention",
        "partial outputs are averaged without their weights",
        (
            (
                "merged = merged * rescale[:, None] + values * weight[:, None]",
                "merged = merged + values * weight[:, None]",
            ),
        ),
    ),
    KernelFault(
        "merge_forgets_the_tree",
        "tree_attention",
        "the last partial result, the tree's own, is not merged",
        (("for part in tl.range(num_parts, ", "for part in tl.range(num_parts - 1, "),),
    ),
    KernelFault(
        "softmax_without_maximum",
        "tree_attention",
        "exponentials of the scores themselves are summed up: right until one overflows",
        (
            ("new_top = tl.maximum(top, tl.max(scores, axis=1))", "new_top = top"),
            ('top = tl.full([BLOCK_ROWS], float("-inf"), dtype=ACC)', "top = tl.zeros([BLOCK_ROWS], dtype=ACC)"),
        ),
    ),
    KernelFault(
        "online_without_rescale",
        "tree_attention",
        "what a program summed up so far keeps the scale of an older maximum",
        (("out = out * rescale[:, None] + tl.dot(", "out = out + tl.dot("),),
    ),
    KernelFault(
        "empty_row_is_nan",
        "tree_attention",
        "a row that sees nothing divides zero by zero",
        (
            ("divisor = tl.where(total > 0, total, 1.0)\n    part =", "divisor = total\n    part ="),
            ('is_number = (one > float("-inf"))[:, None] &', "is_number = (one == one)[:, None] &"),
        ),
    ),
    KernelFault(
        "unused_rows_see_the_prefix",
        "tree_attention",
        "a row without a node attends to the prefix",
        (("is_row = is_stored & (((own >> (node & 63)) & 1) == 1)", "is_row = is_stored"),),
    ),
    KernelFault(
        "dead_rows_times_zero",
        "tree_attention",
        "rows behind the last one are loaded and multiplied by zero",
        (("mask=is_row[:, None] & (dims < HEAD_DIM)[None, :], other=0)", "mask=(dims < HEAD_DIM)[None, :], other=0)"),),
    ),
    KernelFault(
        "cap_of_one",
        "tree_attention",
        "scores are not measured in caps before they are capped",
        (("ratio = scores / CAP", "ratio = scores"),),
    ),
    KernelFault(
        "bias_by_row",
        "tree_attention",
        "ALiBi counts a node's row instead of its depth",
        (("(key_position[None, :] - position[:, None]).to(ACC)", "(key[None, :] - position[:, None]).to(ACC)"),),
    ),
    KernelFault(
        "bias_of_the_first_head",
        "tree_attention",
        "all heads of a group share a slope",
        (("tl.load(alibi_slopes + head, mask", "tl.load(alibi_slopes + key_head * GROUP + row * 0, mask"),),
    ),
    KernelFault(
        "value_scale_forgotten",
        "tree_attention",
        "codes of values are taken for values",
        (("weights *= tl.load(v_scale + s_offsets", "weights *= 1.0 + 0.0 * tl.load(v_scale + s_offsets"),),
    ),
    KernelFault(
        "scale_of_the_first_head",
        "tree_attention",
        "all key heads share the scales of the first",
        (
            (
                "s_offsets = page * strides[6] + slot * strides[7] + key_head * strides[8]",
                "s_offsets = page * strides[6] + slot * strides[7]",
            ),
        ),
    ),
    KernelFault(
        "fp8_subnormals",
        "tree_attention",
        "the smallest fp8 numbers are taken for zero",
        (
            (
                'wide = tl.where((code & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)',
                "wide = tl.where((code & 0x78) == 0, 0.0, half.to(tl.float32) * 256.0)",
            ),
        ),
    ),
    KernelFault(
        "page_of_another",
        "tree_attention",
        "every sequence reads through the first page table",
        (("page_table + sequence.to(tl.int64) * table_stride", "page_table"),),
    ),
    KernelFault(
        "int32_offset",
        "tree_attention",
        "offsets of pages far out do not fit into 32 bits",
        (
            (
                "k_offsets = page * strides[0] + slot * strides[1] + key_head * strides[2]",
                "k_offsets = (page * strides[0] + slot * strides[1] + key_head * strides[2]).to(tl.int32)",
            ),
        ),
    ),
    KernelFault(
        "narrow_sums",
        "tree_attention",
        "weights and sums are rounded to half precision",
        (
            (
                "weights = tl.exp(scores - shift[:, None])",
                "weights = tl.exp(scores - shift[:, None]).to(tl.float16).to(ACC)",
            ),
        ),
    ),
    KernelFault(
        "lse_without_maximum",
        "tree_attention",
        "the lse of a row lacks the maximum that was taken off",
        (
            (
                'tl.store(lse + result, tl.where(total > 0, top + tl.log(divisor), float("-inf"))',
                'tl.store(lse + result, tl.where(total > 0, tl.log(divisor), float("-inf"))',
            ),
        ),
    ),
]
_MASK = [
    KernelFault(
        "bit_of_word_one",
        "tree_mask",
        "bit 64 lands on bit 0 of the first word",
        (("((at >> 6)[:, None] == words[None, :])", "((at >> 20)[:, None] == words[None, :])"),),
    ),
    KernelFault(
        "self_left_out",
        "tree_mask",
        "a node does not see itself",
        (
            (
                "at = tl.where(parent == UNUSED, -1, node).to(tl.int64)",
                "at = tl.where(parent == UNUSED, -1, parent).to(tl.int64)",
            ),
        ),
    ),
    KernelFault(
        "one_level",
        "tree_mask",
        "a node sees its parent and nothing above",
        (("while (num_steps < num_nodes) &", "while (num_steps < 2) &"),),
    ),
    KernelFault(
        "position_of_the_node",
        "tree_mask",
        "positions follow the order of nodes instead of their depth",
        (
            (
                "tl.load(prefix_lens + tree).to(tl.int64) + levels, mask=is_row)",
                "tl.load(prefix_lens + tree).to(tl.int64) + node, mask=is_row)",
            ),
        ),
    ),
    KernelFault(
        "prefix_of_the_first",
        "tree_mask",
        "all trees stand behind the first prefix",
        (("tl.load(prefix_lens + tree).to(tl.int64) + levels", "tl.load(prefix_lens).to(tl.int64) + levels"),),
    ),
    KernelFault(
        "parents_of_the_batch",
        "tree_mask",
        "parents are read as rows of the batch",
        (
            (
                "at = tl.load(parents + start + at, mask=is_node, other=-1)",
                "at = tl.load(parents + at, mask=is_node, other=-1)",
            ),
        ),
    ),
]
_GREEDY = [
    KernelFault(
        "last_of_equals",
        "verify_greedy",
        "of equal maxima the highest id wins",
        (
            ("((value > top) | (at < 0))", "((value >= top) | (at < 0))"),
            (
                "lowest = tl.min(tl.where((top == largest) & (at >= 0), at, vocab_size), axis=0)",
                "lowest = tl.max(tl.where((top == largest) & (at >= 0), at, -1), axis=0)",
            ),
        ),
    ),
    KernelFault(
        "stretches_not_compared",
        "verify_greedy",
        "the first stretch of the vocabulary decides",
        (
            (
                'largest = tl.max(tl.where(tops == tops, tops, float("-inf")), axis=0)',
                'largest = tl.max(tl.where((tops == tops) & (stretches == 0), tops, float("-inf")), axis=0)',
            ),
        ),
    ),
    KernelFault(
        "first_sibling_only",
        "verify_greedy",
        "the walk goes on below the first of several copies only",
        (("fits = has_parent & (spelt == depth)", "fits = has_parent & (spelt == depth) & (parent == node)"),),
    ),
    KernelFault(
        "row_of_the_child",
        "verify_greedy",
        "a draft is judged by its own row",
        (
            (
                "where = (start + node) * NUM_STRETCHES",
                "where = (start + tl.minimum(node + 1, num_nodes - 1)) * NUM_STRETCHES",
            ),
        ),
    ),
    KernelFault(
        "bonus_of_the_root",
        "verify_greedy",
        "the bonus token is the root's winner",
        (
            (
                "tl.store(bonus_tokens + tree, token.to(tl.int64))",
                "tl.store(bonus_tokens + tree, tl.load(winner + start * NUM_STRETCHES).to(tl.int64))",
            ),
        ),
    ),
    KernelFault(
        "nan_passes",
        "verify_greedy",
        "NaN is passed over",
        (("is_bad = tl.max(has_nan, axis=0) > 0", "is_bad = tl.max(has_nan, axis=0) > 1"),),
    ),
    KernelFault(
        "tree_of_the_batch",
        "verify_greedy",
        "parents are compared with rows of the batch",
        (("spelt = tl.load(reached + start + parent,", "spelt = tl.load(reached + parent,"),),
    ),
    KernelFault(
        "path_backwards",
        "verify_greedy",
        "the path is told from its end",
        (
            (
                "tl.store(path + tree * max_depth + place, tl.where(is_path, at, -1))",
                "back = tl.where(is_path, depth - 1 - place, place)\n"
                "        tl.store(path + tree * max_depth + back, tl.where(is_path, at, -1))",
            ),
        ),
    ),
]
_SAMPLE = [
    KernelFault(
        "residual_is_p",
        "verify_sample",
        "after a refusal the token is drawn from p itself",
        (("weight -= share * q", "weight -= 0.0 * q"),),
    ),
    KernelFault(
        "one_coin",
        "verify_sample",
        "the last draw uses the coin of the last decision again",
        (
            (
                "tl.load(uniforms + tree * uniforms_stride + tl.load(num_coins + tree) - 1)",
                "tl.load(uniforms + tree * uniforms_stride + tl.maximum(tl.load(num_coins + tree) - 2, 0))",
            ),
        ),
    ),
    KernelFault(
        "struck_mass_stays",
        "verify_sample",
        "what is left of p after a refusal is not normalised",
        (("p_left -= p", "p_left -= 0.0 * p"),),
    ),
    KernelFault(
        "struck_may_be_drawn",
        "verify_sample",
        "a refused child may still be drawn",
        (("tl.store(num_struck + tree, refused)", "tl.store(num_struck + tree, refused * 0)"),),
    ),
    KernelFault(
        "copy_has_its_chance",
        "verify_sample",
        "a copy of a refused sibling is tried again",
        (("is_struck(struck + start, refused, token)", "is_struck(struck + start, refused * 0, token)"),),
    ),
    KernelFault(
        "q_of_the_child",
        "verify_sample",
        "a draft is divided by the law of its own row",
        (
            (
                "q = tl.load(draft_probs + row * q_stride + token).to(ACC)",
                "q = tl.load(draft_probs + (start + child) * q_stride + token).to(ACC)",
            ),
        ),
    ),
    KernelFault(
        "q_of_a_leaf",
        "verify_sample",
        "q is multiplied by zero where nothing was drawn from it",
        (("token < tl.where(share > 0, end, 0)", "token < end"),),
    ),
    KernelFault(
        "residual_not_normalised",
        "verify_sample",
        "what refused siblings left of p is not normalised",
        (("p_left = new_p_left", "p_left = 1.0 + 0.0 * new_p_left"),),
    ),
    KernelFault(
        "residual_of_the_first",
        "verify_sample",
        "all later siblings are judged by what the first refusal left",
        (("if next_share > share:", "if (next_share > share) & (share == 0.0):"),),
    ),
    KernelFault(
        "siblings_judged_by_p",
        "verify_sample",
        "every sibling is judged by p itself",
        (("p = tl.maximum(p - share * q, 0.0)", "p = p_left * p"),),
    ),
    KernelFault(
        "drawn_from_the_first_residual",
        "verify_sample",
        "the token is drawn from what the first refusal left, however many there were",
        (("tl.store(shares + tree * 3, next_share)", "tl.store(shares + tree * 3, tl.minimum(next_share, 1.0))"),),
    ),
    KernelFault(
        "p_stands_in",
        "verify_sample",
        "where a copy of a refused sibling leaves nothing, the token is drawn from p itself",
        (("tl.store(shares + tree * 3 + 1, share)", "tl.store(shares + tree * 3 + 1, share * 0.0)"),),
    ),
    KernelFault(
        "q_keeps_the_refused",
        "verify_sample",
        "q is not conditioned on the refused siblings",
        (("STRIKE=without_replacement", "STRIKE=False"),),
    ),
    KernelFault(
        "q_always_conditioned",
        "verify_sample",
        "siblings that were drawn independently are judged as if drawn without replacement",
        (("STRIKE=without_replacement", "STRIKE=True"),),
    ),
    KernelFault(
        "siblings_backwards",
        "verify_sample",
        "the last sibling is judged first",
        (
            ("tried = node  # children", "tried = num_nodes  # children"),
            ("child = num_nodes\n", "child = num_nodes * 0 - 1\n"),
            ("(other > tried)", "(other < tried)"),
            (
                "tl.minimum(child, tl.min(tl.where(fits, other, num_nodes), axis=0))",
                "tl.maximum(child, tl.max(tl.where(fits, other, -1), axis=0))",
            ),
            ("looks = child < num_nodes", "looks = child >= 0"),
        ),
    ),
    KernelFault(
        "temperature_at_the_end_only",
        "verify_sample",
        "drafts are judged at temperature 1",
        (
            (
                "p = tl.exp(tl.load(logits + row * row_stride + token).to(ACC) / temperature - total)",
                "p = tl.exp(tl.load(logits + row * row_stride + token).to(ACC) - total)",
            ),
        ),
    ),
    KernelFault(
        "stretches_left_out",
        "verify_sample",
        "the first stretch of the vocabulary is always drawn from",
        (
            (
                "hit = tl.min(tl.where((reached > goal) & (mass > 0), stretches, NUM_STRETCHES), axis=0)",
                "hit = tl.min(stretches, axis=0)",
            ),
        ),
    ),
]
_DRAFT = [
    KernelFault(
        "highest_of_equals",
        "draft_topk",
        "of equal logits the highest id comes first",
        (
            (
                "return_indices=True)  # the lowest of equals",
                "return_indices=True)\n        at = tl.max(tl.where(left == top, ids, -1), axis=0)",
            ),
        ),
    ),
    KernelFault(
        "last_ids_left_out",
        "draft_topk",
        "the last, partial block of ids is not searched",
        (("num_blocks = triton.cdiv(vocab_size, block)", "num_blocks = max(1, vocab_size // block)"),),
    ),
    KernelFault(
        "first_block_decides",
        "draft_topk",
        "the best of the first block are taken for those of the row",
        (("mask=entries < num_blocks * k", "mask=entries < k"),),
    ),
    KernelFault(
        "one_too_few",
        "draft_topk",
        "a block offers one token less than is asked for",
        (
            (
                "tl.store(best + where * k + rank, top)",
                'tl.store(best + where * k + rank, tl.where(rank < k - 1, top, float("-inf")))',
            ),
        ),
    ),
    KernelFault(
        "taken_again",
        "draft_topk",
        "a token that was taken is not put aside",
        (('left = tl.where(entries == at, float("-inf"), left)', "left = tl.where(entries == at, left, left)"),),
    ),
    KernelFault(
        "no_normaliser",
        "draft_topk",
        "logits less their maximum are taken for log-probabilities",
        (("value - shift - tl.log(tl.where(total > 0, total, 1.0))", "value - shift"),),
    ),
    KernelFault(
        "sums_without_rescale",
        "draft_topk",
        "sums of blocks are added up though they count from different maxima",
        (("total = tl.sum(part * tl.exp(top - shift), axis=0)", "total = tl.sum(part, axis=0)"),),
    ),
    KernelFault(
        "narrow_exponentials",
        "draft_topk",
        "exponentials are rounded to half precision",
        (
            (
                "tl.sum(tl.exp(value - shift), axis=0)",
                "tl.sum(tl.exp(value - shift).to(tl.float16).to(value.dtype), axis=0)",
            ),
        ),
    ),
    KernelFault(
        "nan_is_passed_over",
        "draft_topk",
        "a row that holds NaN is drafted from",
        (('tl.where(total == total, log_prob, float("nan"))', "tl.where(total == total, log_prob, log_prob)"),),
    ),
    KernelFault(
        "score_of_the_parent",
        "draft_topk",
        "a node's score is its own log-probability alone",
        (
            (
                'score = tl.load(scores + old + parent, mask=has_parent, other=float("-inf"))',
                'score = tl.where(has_parent, 0.0, float("-inf")).to(new_scores.dtype.element_ty)',
            ),
        ),
    ),
    KernelFault(
        "frontier_by_own",
        "draft_topk",
        "the next frontier is chosen by a node's own log-probability",
        (
            (
                'left = tl.where(is_node, score, float("-inf"))',
                "own = tl.load(log_probs + tree * num_children + child, mask=is_node, other=0.0)\n"
                '    left = tl.where(is_node, own, float("-inf"))',
            ),
        ),
    ),
    KernelFault(
        "frontier_of_the_level",
        "draft_topk",
        "the next frontier is counted from the level's first child",
        (('tl.where(top > float("-inf"), num_old + at, UNUSED)', 'tl.where(top > float("-inf"), at, UNUSED)'),),
    ),
    KernelFault(
        "parent_in_the_frontier",
        "draft_topk",
        "a child's parent is a place in the frontier, not a column",
        (("tl.where(is_node, parent, UNUSED)", "tl.where(is_node, place, UNUSED)"),),
    ),
    KernelFault(
        "frontier_of_the_first_tree",
        "draft_topk",
        "all trees expand the first one's frontier",
        (("tl.load(frontier + tree * frontier_len + place,", "tl.load(frontier + place,"),),
    ),
    KernelFault(
        "child_before_its_parent",
        "draft_topk",
        "of equal scores the last one is kept, a child without its parent",
        (("(other[None, :] < node[:, None])\n        )", "(other[None, :] > node[:, None])\n        )"),),
    ),
    KernelFault(
        "root_not_counted",
        "draft_topk",
        "the root's row is taken off the budget twice",
        (("(num_before < max_nodes)", "(num_before < max_nodes - 1)"),),
    ),
    KernelFault(
        "parents_not_renumbered",
        "draft_topk",
        "parents still name columns of candidates",
        (("tl.where(parent < 0, parent, parent_row)", "parent"),),
    ),
    KernelFault(
        "last_row_unwritten",
        "draft_topk",
        "the last row is left as it was found",
        (("(node < max_nodes)", "(node < max_nodes - 1)"),),
    ),
    KernelFault(
        "nan_is_dropped",
        "draft_topk",
        "a tree from which NaN was dropped looks like any other",
        (("(tl.max(num_nan, axis=0) > 0)", "(tl.max(num_nan, axis=0) > 999)"),),
    ),
]
_COMMIT = [
    KernelFault(
        "in_turn",
        "commit_kv",
        "rows are moved one after the other, over others that are still to be read",
        (
            ("rows = tl.load(base + reads, mask=is_entry)", "only = is_entry"),
            (
                "tl.store(base + writes, rows, mask=is_entry)",
                "for moved in range(MAX_PATH):\n"
                "        only = is_entry & (step == moved)[:, None]\n"
                "        tl.store(base + writes, tl.load(base + reads, mask=only), mask=only)",
            ),
        ),
    ),
    KernelFault(
        "over_the_root",
        "commit_kv",
        "the path's first row lands on the root's",
        (
            (
                "source, destination = prefix_len + node, prefix_len + 1 + step",
                "source, destination = prefix_len + node, prefix_len + step",
            ),
        ),
    ),
    KernelFault(
        "one_too_many",
        "commit_kv",
        "one row more than was accepted is moved",
        (("is_moved = step < num_moved", "is_moved = step < num_moved + tl.minimum(num_moved, 1)"),),
    ),
    KernelFault(
        "first_buffer_only",
        "commit_kv",
        "keys are moved, values are not",
        (("base = tl.load(pointers + tl.program_id(1))", "base = tl.load(pointers)"),),
    ),
    KernelFault(
        "destination_page",
        "commit_kv",
        "a row stays in the page that it came from",
        (
            (
                "destination_page = tl.load(table + destination // PAGE,",
                "destination_page = tl.load(table + source // PAGE,",
            ),
        ),
    ),
    KernelFault(
        "heads_beyond_the_first",
        "commit_kv",
        "the heads behind the first program's columns stay",
        (
            (
                "column = (tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)",
                "column = tl.arange(0, COLUMNS).to(tl.int64)",
            ),
        ),
    ),
    KernelFault(
        "prefix_of_the_first_sequence",
        "commit_kv",
        "all sequences are taken to have the first one's prefix",
        (("prefix_len = tl.load(prefix_lens + sequence)", "prefix_len = tl.load(prefix_lens)"),),
    ),
]

_ROUND = [
    KernelFault(
        "round_without_its_root",
        "round",
        "the root's row is not counted among the committed ones",
        (("self.prefix_lens += 1 + result.num_accepted", "self.prefix_lens += result.num_accepted"),),
    ),
    KernelFault(
        "root_of_the_round_before",
        "round",
        "the next tree hangs below the old root, not below the bonus token",
        (("self.tokens[:, 0] = result.bonus_tokens.clamp(min=0)", "pass"),),
    ),
    KernelFault(
        "lengths_moved_before_rows",
        "round",
        "accepted rows are looked for behind the new length",
        (
            (
                "        commit_kv(\n            self._buffers,",
                "        self.prefix_lens += 1 + result.num_accepted\n        commit_kv(\n            self._buffers,",
            ),
            ("        self.prefix_lens += 1 + result.num_accepted\n        # A row", "        # A row"),
        ),
    ),
    KernelFault(
        "round_moves_no_rows",
        "round",
        "accepted rows stay where they were computed",
        (
            (
                "            result.num_accepted,\n            page_table",
                "            result.num_accepted * 0,\n            page_table",
            ),
        ),
    ),
    KernelFault(
        "pages_in_order",
        "round",
        "rows are written as if pages stood in the order of the sequences",
        (
            (
                "return self._page_table[sequences, rows // self._page].to(torch.int64)",
                "return (sequences * self._page_table.shape[1] + rows // self._page)",
            ),
        ),
    ),
    KernelFault(
        "positions_of_the_first_sequence",
        "round",
        "all sequences' rows are rotated by the first one's positions",
        (
            (
                "self._model.rows(tokens[None], mask.position_ids, attend)",
                "self._model.rows(tokens[None], mask.depth + self.prefix_lens[0], attend)",
            ),
        ),
    ),
    KernelFault(
        "window_of_the_first_layer",
        "round",
        "every layer sees the first one's window",
        (("window=self._model.layer_windows[layer]", "window=self._model.layer_windows[0]"),),
    ),
    KernelFault(
        "path_of_the_first_sequence",
        "round",
        "every sequence's accepted tokens are looked up at the nodes of the first one's path",
        (("result.path.clamp(min=0)", "result.path[:1].clamp(min=0).expand(len(self.tokens), -1)"),),
    ),
]

FAULTS: dict[str, KernelFault] = {
    one.id: one for one in (*_ATTENTION, *_MASK, *_GREEDY, *_SAMPLE, *_DRAFT, *_COMMIT, *_ROUND)
}
