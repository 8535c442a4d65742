# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""The trainer with each objective: gradients against the peers' losses, memory, and what is refused."""

import pytest
import torch

from tests.trainer_tools import config_of, largest_difference, run_of

# groups inside a micro-step, and straddling them with two updates a rollout; two inner iterations each
LAYOUTS = [(16, 1, 1), (2, 4, 8)]
OPTIONS = {
    "clip_only": [{}, {"ratio_normalization": "sequence", "mask_coupling": "independent", "epsilon": 0.5}],
    "self_norm_only": [{}, {"ratio_normalization": "sequence"}],
    "grpo": [{}, {"ratio_normalization": "sequence", "mask_coupling": "independent"}],
    "espo": [{}, {"mask_law": "uniform", "mask_coupling": "independent", "epsilon": 0.02}],
    "spg": [{}, {"surrogate": "sandwich"}],
    "diffu_grpo": [{}, {"epsilon": 0.05}],
    "coupled_grpo": [{}, {"num_mc_samples": 4, "mask_coupling": "independent"}],
    "wd1": [{}],
    "gdpo": [{}, {"num_mc_samples": 3, "ratio_normalization": "sequence", "mask_coupling": "independent"}],
}
CASES = [(name, options) for name, variants in OPTIONS.items() for options in variants]


@pytest.mark.parametrize(("b", "a", "s"), LAYOUTS)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_the_gradient_is_that_of_the_papers_loss(name, options, b, a, s, tmp_path):
    run = run_of(
        tmp_path,
        objective=name,
        mc_sampling=None,
        mask_law=options.get("mask_law"),
        per_device_train_batch_size=b,
        gradient_accumulation_steps=a,
        steps_per_generation=s,
        num_iterations=2,
        max_steps=3,
        learning_rate=0.2,
        **{key: value for key, value in options.items() if key != "mask_law"},
    )

    assert all(gradient.norm() > 1e-3 for gradient in run.gradients)
    # measured 2e-7: RoPE and RMSNorm are float32
    assert largest_difference(run) < 1e-6
    if name in ("grpo", "espo", "gdpo", "diffu_grpo", "coupled_grpo"):
        assert any(value > 0 for value in run.recorder.logged("drift"))


def test_without_clip_or_normalisation_it_is_grpo_and_on_policy_reinforce(tmp_path):
    options = {"num_iterations": 1, "max_steps": 2, "ratio_normalization": "sequence"}

    runs = {
        name: run_of(tmp_path / name, objective=name, **(options | changes))
        for name, changes in {
            "stabledrl": {},
            "clip_only": {"epsilon": 1e9},
            "grpo": {"epsilon": 1e9},
            "self_norm_only": {},
        }.items()
    }

    first = runs["stabledrl"].gradients
    for run in runs.values():  # every ratio is 1 right after a rollout
        for found, expected in zip(run.gradients, first, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "spg", "epsilon": 0.2}, r"epsilon=0\.2 has no part in objective='spg'. Leave it at None"),
        ({"objective": "self_norm_only", "clip_mode": "upper"}, r"clip_mode='upper' has no part in"),
        ({"objective": "wd1", "mask_coupling": "independent"}, r"mask_coupling='independent' has no part in"),
        ({"objective": "wd1", "ratio_normalization": "sequence"}, r"ratio_normalization='sequence' has no part in"),
        ({"objective": "diffu_grpo", "mask_law": "uniform"}, r"mask_law='uniform' does not go with .* Use 'full'"),
        ({"objective": "diffu_grpo", "surrogate": "sandwich"}, r"surrogate='sandwich' has no part in"),
        ({"objective": "gdpo", "mc_sampling": "stratified"}, r"mc_sampling='stratified' does not go with .*'quadr"),
        ({"mask_law": "semi_ar", "mc_sampling": "quadrature", "num_mc_samples": 2}, r"mc_sampling='quadrature' with"),
    ],
)
def test_what_has_no_part_in_an_objective_is_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path, **({"mask_law": None, "mc_sampling": None} | options))
