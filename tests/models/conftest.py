# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.model_tools import CASES, ModelCase
from tests.model_tools import restored_families as restored


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> ModelCase:
    """Each family in turn."""
    return CASES[request.param]


@pytest.fixture
def batch(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of ids without padding, the same behind 3 padding tokens, and the padded rows' mask."""
    ids = torch.randint(5, 64, (3, 10), generator=generator)
    padded = torch.cat([torch.zeros(3, 3, dtype=torch.long), ids], dim=1)  # 3: blocks of 4 would move with them
    return ids, padded, (padded != 0).long()


@pytest.fixture
def restored_families() -> Iterator[None]:
    with restored():
        yield
