# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from scripts import gpu_check
from trl_stabledrl.models import SDARConfig, SDARForCausalLM

SMALL = gpu_check.Sizes(1, 9, 22, 2, 32, 48, 4, 2, 8, 64)


def test_the_pass_that_is_timed_gives_every_parameter_a_gradient():
    model = gpu_check.build_model(SMALL, form="sdpa", device="cpu", dtype=torch.float32)
    gpu_check.forward_backward(model, gpu_check.build_rows(SMALL, device="cpu"), SMALL)

    assert model.is_gradient_checkpointing
    assert all(p.grad is not None and p.grad.norm() > 0 for p in model.parameters())


def test_forms_are_compared_on_the_same_weights():
    assert gpu_check.gradients_differ_by(device="cpu", forms=("eager", "sdpa")) < 1e-5


def test_layers_are_counted_as_the_model_has_them():
    with torch.device("meta"):
        sizes = gpu_check.Sizes(1)
        config = SDARConfig(
            num_hidden_layers=1,
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.intermediate_size,
            num_attention_heads=sizes.num_attention_heads,
            num_key_value_heads=sizes.num_key_value_heads,
            head_dim=sizes.head_dim,
        )
        matrices = [p.numel() for p in SDARForCausalLM(config).model.layers.parameters() if p.ndim == 2]
    assert sum(matrices) == gpu_check.LAYER_PARAMETERS
    assert gpu_check.layers_that_fit(141 * 10**9) == 36
    assert gpu_check.layers_that_fit(40 * 10**9) < 20
    assert gpu_check.layers_that_fit(0) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device to run on")
def test_without_a_device_it_says_so(capsys):
    assert gpu_check.main([]) == 1
    assert "needs a CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
def test_flex_attention_has_the_gradient_of_sdpa():
    assert gpu_check.gradients_differ_by(device="cuda") < 1e-4


@pytest.mark.gpu
def test_flex_attention_is_measured_beside_sdpa():
    for form in gpu_check.FORMS:
        found = gpu_check.measure(
            gpu_check.Sizes(1), form=form, device="cuda", dtype=torch.bfloat16, num_repetitions=1
        )
        assert found["seconds"] > 0
        assert math.isfinite(found["peak_memory_gb"])
