# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""
The maths, as functions of tensors: no model, no trainer, no global state, no host sync.

Axes, in annotations and docstrings alike:

| Letter | Axis |
|---|---|
| `B` | rows: one completion each |
| `N` | prompts; in a scoring call, the positions scored |
| `G` | completions per prompt |
| `M` | Monte Carlo draws per row |
| `P` | prompt length, in tokens |
| `C` | completion length, in tokens |
| `S` | sequence length, `P + C` |
| `V` | vocabulary |
| `K` | blocks of a completion |

Words, from YAML to metric:

| Word | Meaning |
|---|---|
| `prompt`, `completion` | what is given, what is generated |
| `clean_ids`, `noised_ids` | tokens before and after masking (`x_0` and `x_t` of the papers) |
| `t` | noise level, in (0, 1] |
| `elbo` | evidence lower bound in nats, summed over the completion; `elbo_per_token` is divided by its length |
| `eubo` | evidence upper bound, likewise |
| `log_ratio`, `ratio` | new over old likelihood of a completion, in log space and out of it |
| `num_mc_samples` | draws of a mask per completion |
| `block_length` | tokens denoised together |
| `num_denoising_steps` | denoising steps per block |
| `remasking` | how the tokens that a step does not commit are chosen |
| `commit` | fix a token for the rest of the rollout |
| `mask_token_id` | the token that stands for "not known yet" |
| `is_noised`, `completion_mask`, `may_attend` | what other code calls a mask: positions hidden, real, visible |
"""
