# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""
Reinforcement learning of masked diffusion language models with StableDRL, on TRL.

Importing the package registers the model families with the Auto classes of Transformers, so that
`AutoModelForCausalLM.from_pretrained("GSAI-ML/LLaDA-8B-Instruct")` needs no remote code. The trainers, which import
TRL, are loaded when first asked for.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import models as _models  # noqa: F401  # registers the model families

if TYPE_CHECKING:
    from .evaluation import TaskEvaluation, evaluate
    from .evaluation_config import EvaluationConfig
    from .inference import generate, score
    from .sft_config import DiffusionSFTConfig
    from .sft_trainer import DiffusionSFTTrainer
    from .stabledrl_config import StableDRLConfig
    from .stabledrl_trainer import StableDRLTrainer
    from .trace import write_trace

__version__ = "0.1.0"

__all__ = [
    "DiffusionSFTConfig",
    "DiffusionSFTTrainer",
    "EvaluationConfig",
    "StableDRLConfig",
    "StableDRLTrainer",
    "TaskEvaluation",
    "__version__",
    "evaluate",
    "generate",
    "recipes_folder",
    "score",
    "write_trace",
]

_MODULE_OF = {
    "DiffusionSFTConfig": "sft_config",
    "DiffusionSFTTrainer": "sft_trainer",
    "StableDRLConfig": "stabledrl_config",
    "StableDRLTrainer": "stabledrl_trainer",
    "EvaluationConfig": "evaluation_config",
    "TaskEvaluation": "evaluation",
    "evaluate": "evaluation",
    "generate": "inference",
    "score": "inference",
    "write_trace": "trace",
}


def recipes_folder() -> Path:
    """
    Find the recipes: beside the package in a source checkout, inside it where a wheel is installed.

    Returns:
        `pathlib.Path`:
            Folder that holds `quickstart.yaml` and the other recipes.
    """
    package = Path(__file__).resolve().parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value  # asked once: later look-ups do not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
