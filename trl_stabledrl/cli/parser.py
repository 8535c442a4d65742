# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""TRL's parser, made strict: a key that nothing reads stops the run, in YAML and on the command line alike."""

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text
from trl import TrlParser

from .. import recipes_folder
from .console import UserError, blamed_on

HELP_FLAGS = ("-h", "--help", "--help_all", "--help-all")
# where the launch options of `accelerate launch` are named by TRL's command line
ACCELERATE_CONFIG = "accelerate_config"


class RecipeParser(TrlParser):
    r"""
    [`~trl.TrlParser`] that refuses what it does not know and names the nearest key it does.

    A recipe sets defaults and flags win, as in TRL. Values in YAML are checked against the type of their field.

    Args:
        dataclass_types (`Sequence[type]`):
            Dataclasses to fill.
        prog (`str`):
            How the command is called.
        launch_names (`Callable[[], set[str]]`, *optional*):
            Names of the options that belong to the launcher. Called only when something is not a field.
    """

    def __init__(
        self, dataclass_types: Sequence[Any], *, prog: str, launch_names: Callable[[], set[str]] | None = None
    ):
        super().__init__(dataclass_types, prog=prog, allow_abbrev=False)
        self.types = tuple(dataclass_types)
        self.launch_names = launch_names or (lambda: set())
        self.hints = {name: hint for kind in self.types for name, hint in get_type_hints(kind).items()}
        self.parsed: dict[str, Any] = {}
        """Values of every field after the last `parse`, before the dataclasses derived others from them."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)

    def split(self, argv: Sequence[str]) -> tuple[list[str], list[str]]:
        """
        Tell the launcher's options from the command's own, without loading anything.

        Args:
            argv (`Sequence[str]`):
                Command line without the command's name.

        Returns:
            `tuple[list[str], list[str]]`:
                Arguments of the command, and options of the launcher from the recipe and, overriding it, from flags.
        """
        own_options = {option for action in self._actions for option in action.option_strings} | {"--config"}
        own: list[str] = []
        foreign: list[str] = []
        target = own
        for token in argv:
            if token.startswith("--"):
                target = own if token.partition("=")[0] in own_options else foreign
            target.append(token)
        self._refuse_unknown((t.partition("=")[0] for t in foreign if t.startswith("--")), "on the command line")
        own, path = _without_config(own)
        if path is None:
            return own, foreign
        recipe = read_recipe(path)
        launch_keys = [key for key in recipe if key != "env" and not self._is_field(key)]
        self._refuse_unknown(launch_keys, f"in {path}")
        return [*own, "--config", str(path)], [
            *(token for key in launch_keys for token in _as_flag(key, recipe[key])),
            *foreign,
        ]

    def parse(self, argv: Sequence[str]) -> tuple[Any, ...]:
        """
        Fill the dataclasses.

        Args:
            argv (`Sequence[str]`):
                Command line without the command's name. Options of the launcher are refused here; in a recipe they
                are left to the launcher that started this process.

        Returns:
            `tuple`:
                One instance of each dataclass.
        """
        own, path = _without_config(argv)
        self.split([*own, *(["--config", str(path)] if path else [])])
        args = [*own, *(["--config", str(path)] if path else [])]
        # what cannot be parsed, and what TRL and Transformers refuse in a field; our own fields speak for themselves
        with blamed_on(str(path) if path else "command line", ValueError, TypeError, OSError, ImportError):
            *values, _, unused = self.parse_args_and_config(
                args, return_remaining_strings=True, separate_remaining_strings=True
            )
        if unused:
            options = [token for token in unused if token.startswith("--")]
            if options:
                raise UserError(
                    f"{' '.join(options)} is an option of accelerate launch: put it before the script, as in "
                    f"`accelerate launch {options[0]} ... scripts/train.py`, or use `trl-stabledrl`."
                )
            raise UserError(f"unexpected argument {unused[0]!r}. Options are written --name value.")
        return tuple(values)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        namespace, unused = super().parse_known_args(args, namespace)
        self.parsed = dict(vars(namespace))
        return namespace, unused

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        checked = {key: self._checked(key, value) if self._is_field(key) else value for key, value in kwargs.items()}
        return super().set_defaults_with_config(**checked)

    def _is_field(self, key: str) -> bool:
        return key in self.hints

    def _refuse_unknown(self, names: Iterable[str], where: str) -> None:
        names = [name for name in names if not self._is_field(name)]
        if not names:
            return
        launch_names = self.launch_names()
        known = sorted({*self.hints, *launch_names, "config"})
        for name in names:
            bare = name.removeprefix("--").replace("-", "_")
            if bare in launch_names:
                continue
            dashes = "--" if name.startswith("--") else ""
            nearest = difflib.get_close_matches(bare, known, n=1, cutoff=0.0)[0]
            raise UserError(
                f"unknown key '{name}' {where}. Did you mean '{dashes}{nearest}'? All keys: {self.prog} --help_all"
            )

    def _checked(self, key: str, value: Any) -> Any:
        """Refuse a value of a recipe that does not fit its field; argparse looks at strings alone."""
        action = next(action for action in self._actions if action.dest == key)
        kinds = get_args(self.hints[key]) or (self.hints[key],)
        is_list = action.nargs == "+"
        if value is None:
            if NoneType not in kinds and action.default is not None:
                raise UserError(f"{key}: null in the recipe. Give a value, or leave the line out.")
            return None
        if is_list:
            return value if isinstance(value, list) else [value]
        for kind, allowed in ((bool, (bool, str)), (int, (int, str)), (float, (int, float, str))):
            # `True` is an int to Python; a field that takes strings too decides for itself
            is_wrong = not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool)
            if kind in kinds and str not in kinds and bool not in set(kinds) - {kind} and is_wrong:
                raise UserError(f"{key}: {value!r} in the recipe must be {_KINDS[kind]}.")
        if isinstance(value, int) and not isinstance(value, bool) and float in kinds and int not in kinds:
            value = float(value)  # as argparse would from a flag
        choices = list(action.choices or ())
        if choices and value not in choices:
            nearest = difflib.get_close_matches(str(value), map(str, choices), n=1, cutoff=0.0)[0]
            raise UserError(
                f"{key}: {value!r} in the recipe is not one of {', '.join(map(repr, choices))}. Did you mean "
                f"{nearest!r}?"
            )
        return value


# for --help; the host libraries explain at length, which --help_all shows
_SHORT_HELP = {
    "attn_implementation": "Such as sdpa or eager.",
    "beta": "Weight of the KL to the reference model; 0 loads none.",
    "dtype": "Data type of the weights.",
    "eval_steps": "Optimizer steps between two evaluations.",
    "gradient_accumulation_steps": "Micro-steps per optimizer step.",
    "learning_rate": "Largest learning rate.",
    "lora_r": "Rank of the LoRA adapter.",
    "max_completion_length": "Tokens of the window behind the prompt; a completion is never longer.",
    "max_steps": "Optimizer steps; above 0 it overrides num_train_epochs.",
    "model_name_or_path": "Checkpoint: folder or name on the Hub.",
    "num_generations": "Completions per prompt. Divides batch size * processes * steps_per_generation.",
    "num_iterations": "Passes over each rollout.",
    "output_dir": "Folder for checkpoints and the resolved configuration.",
    "per_device_train_batch_size": "Rows per process and micro-step.",
    "resume_from_checkpoint": "true for the last checkpoint in output_dir, or the path of one.",
    "report_to": "Trackers, such as wandb; none for no tracker.",
    "save_steps": "Optimizer steps between checkpoints.",
    "seed": "Seed of everything random.",
    "temperature": "Sampling temperature; 0 is greedy.",
    "use_cpu": "Stay on the CPU.",
    "use_peft": "Train a LoRA adapter.",
}
_KINDS = {bool: "true or false", int: "a whole number", float: "a number"}


def read_recipe(path: Path) -> dict[str, Any]:
    """
    Read a YAML mapping.

    Args:
        path (`pathlib.Path`):
            The recipe.

    Returns:
        `dict`
    """
    try:
        recipe = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {error}") from error
    if not isinstance(recipe, dict):
        raise UserError(f"{path} must hold lines of the form `key: value`, but holds {type(recipe).__name__}.")
    return recipe


def find_recipe(name: str) -> Path:
    """
    Find a recipe by its path, or by the name of one that ships with the package, from any folder.

    Args:
        name (`str`):
            Such as `my/run.yaml`, `recipes/llada_8b_gsm8k.yaml` or `llada_8b_gsm8k`.

    Returns:
        `pathlib.Path`
    """
    path = Path(name)
    if path.is_file():
        return path
    shipped = {recipe.stem: recipe for recipe in recipes_folder().glob("*.yaml")}
    if path.parent.name in ("", "recipes") and path.stem in shipped:
        return shipped[path.stem]
    nearest = difflib.get_close_matches(path.stem, shipped, n=1, cutoff=0.0)
    hint = f" Nearest of those that ship with the package: {nearest[0]}" if nearest else ""
    raise UserError(f"--config {name}: there is no such file.{hint}")


def _without_config(argv: Sequence[str]) -> tuple[list[str], Path | None]:
    """Take `--config PATH` or `--config=PATH` out of a command line."""
    rest: list[str] = []
    path = None
    tokens = iter(argv)
    for token in tokens:
        name, equals, value = token.partition("=")
        if name != "--config":
            rest.append(token)
            continue
        value = value if equals else next(tokens, "")
        if not value or value.startswith("--"):
            raise UserError("--config needs the path of a recipe, such as --config recipes/llada_8b_gsm8k.yaml")
        path = find_recipe(value)
    return rest, path


def _as_flag(key: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{key}"] if value else []
    return [f"--{key}", str(value)]


def show_fields(console: Console, title: str, rows: Iterable[tuple[type, str]]) -> None:
    """
    Print a table of fields with their defaults and help.

    Args:
        console ([`~rich.console.Console`]):
            Where to print.
        title (`str`):
            Heading.
        rows (`Iterable[tuple[type, str]]`):
            Dataclass and name of each field.
    """
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    table.add_column(no_wrap=True, style="cyan")
    table.add_column(overflow="fold")
    for kind, name in rows:
        by_name: dict[str, Field[Any]] = {field.name: field for field in fields(kind)}
        text = _description(by_name[name], get_type_hints(kind)[name], is_ours=_is_ours(kind, name))
        table.add_row(f"--{name}", text)
    console.print(Text(title, style="bold"))
    console.print(table)
    console.print()


def _is_ours(kind: type, name: str) -> bool:
    """Whether the class of this package, and not of a host library, declares the field."""
    declaring = next(one for one in kind.__mro__ if name in vars(one).get("__annotations__", {}))
    return declaring.__module__.partition(".")[0] == __name__.partition(".")[0]


def _description(field: "Field[Any]", hint: Any, *, is_ours: bool) -> Text:
    short_help = None if is_ours else _SHORT_HELP.get(field.name)
    help_text = short_help or " ".join(str(field.metadata.get("help", "")).split())
    text = Text(help_text)
    literals = [choice for kind in (hint, *get_args(hint)) if get_origin(kind) is Literal for choice in get_args(kind)]
    choices = [str(choice) for choice in field.metadata.get("choices", literals)]
    notes = [" | ".join(choices)] if choices else []
    if field.default is not MISSING and field.default is not None:
        notes.append(f"default {field.default}")
    if notes:
        text.append(f" [{'; '.join(notes)}]", style="dim")
    return text
