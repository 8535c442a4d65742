# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""
Checkpoints that are complete or not there, and what they hold so that a run goes on exactly where it stopped.

Transformers writes into `checkpoint-N` file by file, and deletes older checkpoints on the way: a run that is killed
meanwhile leaves half a folder under the name of the newest. Here the files are written to `_saving/checkpoint-N`, the
list of them comes last, and one rename makes the checkpoint; older ones go after that.
"""

import copy
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DistributedType, is_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import rotate_checkpoints

from .batching import Batch, gathered
from .checks import check_output_dir, resume_request

logger = get_logger(__name__)

RUN_STATE_FILE = "stabledrl_state.json"
"""Counters and settings of the run, and the files of the checkpoint with their sizes. Written last."""

ROLLOUTS_FILE = "stabledrl_rollouts.safetensors"
"""Rows of a generation that the run has not finished with, in the order of their `row_index`."""

ARGS_FILE = "training_args.json"
"""The resolved configuration, readable; `training_args.bin` is its pickle."""

STAGING_FOLDER = "_saving"

_DESCRIPTIONS = ("README.md", ARGS_FILE)
"""Files that a reader may edit without harm."""


# Which checkpoint to resume from


def problem_of(folder: Path) -> str | None:
    """Why a run cannot be resumed from a checkpoint, or None if it can."""
    path = folder / RUN_STATE_FILE
    if not path.is_file():
        return f"{RUN_STATE_FILE} is missing: the save was not finished, or another trainer wrote it"
    try:
        state = json.loads(path.read_text())
    except ValueError:  # the machine went down before the file was on the disk
        return f"{RUN_STATE_FILE} is cut off"
    if "files" not in state:
        return f"{RUN_STATE_FILE} does not list the files: an earlier version of the package wrote it"
    for name, size in state["files"].items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        found = (folder / name).stat().st_size
        if found < size:
            return f"{name} is cut off: {found} of {size} bytes"
    return "it was saved with save_only_model=True, without the optimizer" if state["save_only_model"] else None


def checkpoints_in(folder: Path) -> list[Path]:
    """Checkpoint folders, the newest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if re.fullmatch(r"checkpoint-\d+", path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")), reverse=True)


def last_complete_checkpoint(folder: Path) -> Path:
    """
    The newest checkpoint that a run can be resumed from. Warns of newer ones that are left out.

    Args:
        folder (`Path`):
            The run's `output_dir`.

    Returns:
        `Path`
    """
    problems: list[str] = []
    for checkpoint in checkpoints_in(folder):
        problem = problem_of(checkpoint)
        if problem is None:
            if problems:
                logger.warning(f"Resuming from {checkpoint}, since newer ones are not complete: {'; '.join(problems)}")
            return checkpoint
        problems.append(f"{checkpoint.name}: {problem}")
    raise ValueError(
        f"resume_from_checkpoint is true, but output_dir={str(folder)!r} holds no complete checkpoint"
        + (f" ({'; '.join(problems)})" if problems else "")
        + ". Leave resume_from_checkpoint out and choose another output_dir to start anew."
    )


def sharding_of(accelerator: Accelerator) -> str:
    """Whose format the optimizer state of a checkpoint has."""
    names = {DistributedType.DEEPSPEED: "deepspeed", DistributedType.FSDP: "fsdp"}
    return names.get(accelerator.distributed_type, "none")


def recover_staged(run_folder: Path) -> None:
    """
    Give its name to a checkpoint that was complete when its run was killed, and only lacked the renaming.

    Without this a kill between the two renames of [`_publish`] would leave none at all.
    """
    for staged in checkpoints_in(run_folder / STAGING_FOLDER):
        final = run_folder / staged.name
        if problem_of(staged) is None and (not final.exists() or problem_of(final) is not None):
            _publish(staged, final)
            return  # there is one at most, and its folder is gone


def set_aside_later(folder: Path) -> None:
    """
    Rename the checkpoints of the line that is left when a run goes back to an earlier one.

    They would be the newest of the run, and what a later `resume_from_checkpoint: true` goes on with.
    """
    step = int(folder.name.removeprefix("checkpoint-"))
    for path in checkpoints_in(folder.parent):
        if int(path.name.removeprefix("checkpoint-")) <= step or problem_of(path) is not None:
            continue  # what is not complete is never gone on with
        number = 1
        while (target := path.with_name(f"abandoned-{path.name}-{number}")).exists():
            number += 1
        path.rename(target)
        logger.warning(f"Going on from {folder.name}: the later {path.name} was renamed to {target.name}.")


def checked_resume(
    args: Any, request: str | bool | None, *, global_step: int, accelerator: Accelerator
) -> str | bool | None:
    """
    What `train` resumes from: its argument, else the configuration's.

    Raises before another run is overwritten, and before anything is loaded from a checkpoint that is not complete or
    cannot be continued here.
    """
    resume = resume_request(args.resume_from_checkpoint if request is None else request)
    if global_step == 0:
        check_output_dir(args.output_dir, resume)
    if not resume:
        return resume
    if accelerator.is_main_process:
        recover_staged(Path(args.output_dir))
    accelerator.wait_for_everyone()
    folder = last_complete_checkpoint(Path(args.output_dir)) if resume is True else Path(resume)
    problem = problem_of(folder)
    if problem is not None:
        others = [other for other in checkpoints_in(folder.parent) if problem_of(other) is None]
        raise ValueError(
            f"{folder} cannot be resumed from: {problem}. "
            + (f"The last complete one beside it is {others[0].name}. " if others else "")
            + "Resume from a complete checkpoint, or load its weights with model= and start anew."
        )
    state = load_run_state(folder)
    sharding, num_processes = sharding_of(accelerator), accelerator.num_processes
    if state["sharding"] != sharding:
        raise ValueError(
            f"{folder} was saved with sharding {state['sharding']!r}, but this run has {sharding!r}, which cannot "
            "read its optimizer state. Resume with the accelerate config of the first part, or load the weights with "
            "model= and start anew."
        )
    if sharding == "deepspeed" and state["num_processes"] != num_processes:
        raise ValueError(
            f"{folder} was saved by {state['num_processes']} processes under DeepSpeed, but this run has "
            f"{num_processes}: DeepSpeed cannot split its optimizer state anew. Resume on {state['num_processes']} "
            "processes, or load the weights with model= and start anew."
        )
    accelerator.wait_for_everyone()  # every process has chosen
    if accelerator.is_main_process and folder.parent.resolve() == Path(args.output_dir).resolve():
        set_aside_later(folder)
    return str(folder)


def load_run_state(folder: Path) -> dict[str, Any]:
    """What [`CheckpointWriter.finish`] wrote."""
    return json.loads((folder / RUN_STATE_FILE).read_text())


def check_same_checkpoint(accelerator: Accelerator, global_step: int) -> None:
    """Raise, on every process, where they resume from different steps: each looks for its checkpoint alone."""
    if accelerator.num_processes == 1:
        return
    steps = gathered(accelerator, torch.tensor([global_step], device=accelerator.device)).tolist()
    if len(set(steps)) > 1:
        raise RuntimeError(
            f"The processes found different last checkpoints: they resume at steps {steps}. They have to see the same "
            "output_dir; name the checkpoint in resume_from_checkpoint."
        )


def load_active_adapter(model: Any, folder: Path) -> None:
    """
    Load the adapter in training from the checkpoint's own folder.

    Transformers loads only the adapters in sub-folders where there are any. With a frozen copy named `ref` there is
    one, and the run would silently go on with the adapter it started from.
    """
    if not is_peft_model(model) or not any(folder.glob("adapter_model.*")):
        return
    if any(folder.glob("*/adapter_model.*")):
        model.load_adapter(str(folder), model.active_adapters[0], is_trainable=True)


_SAME_ADAPTER = ("peft_type", "r", "lora_alpha", "target_modules", "modules_to_save", "use_rslora", "use_dora")


def check_same_adapter(model: Any, folder: Path) -> None:
    """
    Raise where a checkpoint holds another adapter than the one in training, which would go on from its start.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The model in training.
        folder (`Path`):
            The checkpoint.
    """
    path = folder / "adapter_config.json"
    if not is_peft_model(model):
        if path.is_file():
            raise ValueError(
                f"{folder} holds an adapter, but this run trains the whole model. Pass the peft_config (or use_peft) "
                "of the first part."
            )
        return
    if not path.is_file():
        raise ValueError(
            f"{folder} holds a whole model, but this run trains an adapter. Leave peft_config (or use_peft) out, or "
            "pass the folder as model= to start an adapter on it."
        )
    saved, current = json.loads(path.read_text()), model.peft_config[model.active_adapters[0]].to_dict()

    def plain(value: Any) -> Any:
        return sorted(value) if isinstance(value, (list, set, tuple)) else getattr(value, "value", value)

    for name in _SAME_ADAPTER:
        if name in saved and plain(saved[name]) != plain(current.get(name)):
            raise ValueError(
                f"{folder} holds an adapter with {name}={plain(saved[name])!r}, but this run has "
                f"{plain(current.get(name))!r}. Set it back, or start anew in another output_dir."
            )
    base = current.get("base_model_name_or_path")
    if saved.get("base_model_name_or_path") != base:
        logger.warning(
            f"{folder} holds an adapter of {saved.get('base_model_name_or_path')!r}, but this run has {base!r}. "
            "Unless that is the same model in another place, the run goes on from a wrong one."
        )


# Writing them


class CheckpointWriter:
    """Writes the checkpoints of one trainer, which asks it for the folder to write to."""

    def __init__(self) -> None:
        self.is_open = False

    def output_dir(self, run_folder: str) -> str:
        """Where the files of a checkpoint go: beside the run while one is being written."""
        return str(Path(run_folder, STAGING_FOLDER)) if self.is_open else run_folder

    @contextmanager
    def staged(self, trainer: Any, run_folder: Path) -> Iterator[Path]:
        """
        Have the trainer write its checkpoint to a folder that is not one yet, which is given.

        Args:
            trainer ([`~transformers.Trainer`]):
                Whose `_get_output_dir` asks [`output_dir`].
            run_folder (`Path`):
                Folder that the checkpoints are in.
        """
        if trainer.accelerator.is_local_main_process:
            shutil.rmtree(run_folder / STAGING_FOLDER, ignore_errors=True)  # of a run that was killed while saving
        trainer.accelerator.wait_for_everyone()
        self.is_open = True
        try:
            yield run_folder / STAGING_FOLDER / f"checkpoint-{trainer.state.global_step}"
        finally:
            self.is_open = False

    def finish(self, trainer: Any, staged: Path, state: Mapping[str, Any]) -> None:
        """
        Make the staged folder a checkpoint, then delete the oldest ones beyond `save_total_limit`.

        Args:
            trainer ([`~transformers.Trainer`]):
                Has written all files but this one's.
            staged (`Path`):
                Folder given by [`staged`].
            state (`Mapping[str, Any]`):
                What the trainer needs to go on.
        """
        args, accelerator = trainer.args, trainer.accelerator
        run_folder = staged.parent.parent
        final = run_folder / staged.name
        best = trainer.state.best_model_checkpoint
        is_best = best is not None and Path(best) == staged
        if is_best:
            trainer.state.best_model_checkpoint = str(final)
        accelerator.wait_for_everyone()  # every process has written its part
        if args.should_save:
            if is_best:
                trainer.state.save_to_json(str(staged / TRAINER_STATE_NAME))
            check_is_loadable(staged)
            common = {
                "num_processes": accelerator.num_processes,
                "sharding": sharding_of(accelerator),
                "save_only_model": args.save_only_model,
            }
            values = {**state, **common, "files": _sizes(staged)}
            (staged / RUN_STATE_FILE).write_text(json.dumps(values, indent=2) + "\n")
            _publish(staged, final)
        accelerator.wait_for_everyone()
        if staged.is_dir():
            raise RuntimeError(
                f"Process {accelerator.process_index} wrote its part of the checkpoint to {staged}, which the main "
                "process does not see. output_dir has to be on a disk that all nodes share."
            )
        if args.should_save:
            rotate_checkpoints(
                output_dir=str(run_folder),
                save_total_limit=args.save_total_limit,
                best_model_checkpoint=trainer.state.best_model_checkpoint,
                use_mtime=True,
            )
        accelerator.wait_for_everyone()
        if args.push_to_hub:
            trainer._push_from_checkpoint(str(final))


def _sizes(folder: Path) -> dict[str, int]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    return {name: size for name, size in sizes.items() if name not in _DESCRIPTIONS}


def _publish(staged: Path, final: Path) -> None:
    if final.exists():  # what an earlier attempt left, or a run that this one goes over again
        final.rename(staged.parent / "replaced")
    staged.rename(final)
    shutil.rmtree(staged.parent)


def check_is_loadable(folder: Path) -> None:
    """Raise unless a checkpoint holds weights that `from_pretrained` finds."""
    if not any(folder.glob("*model*.safetensors")) and not any(folder.glob("*model*.bin")):
        raise RuntimeError(
            f"{folder} holds no weights that from_pretrained could load, only {', '.join(sorted(_sizes(folder)))}. "
            "Have them gathered: fsdp_state_dict_type: FULL_STATE_DICT in the accelerate config under FSDP, "
            "zero3_save_16bit_model: true under ZeRO-3."
        )


# What is saved


def check_tensors(model: Any, state_dict: Mapping[str, Tensor] | None) -> None:
    """
    Raise before a save that could not be loaded: a tensor is absent, empty or of another shape than the model's.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The model.
        state_dict (`Mapping[str, torch.Tensor]`, *optional*):
            What was gathered from the processes, where the model is sharded.
    """
    is_adapter = is_peft_model(model)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad or not is_adapter}
    if state_dict is not None:
        # ZeRO-3 leaves a parameter without elements outside the forward of its module
        shapes = {name: p.ds_shape if is_deepspeed_zero3_enabled() else p.shape for name, p in parameters.items()}
    elif is_adapter:
        shapes = {name: p.shape for name, p in parameters.items()}
    else:
        with torch.device("meta"):
            shapes = {name: p.shape for name, p in type(model)(copy.deepcopy(model.config)).named_parameters()}
    found = parameters if state_dict is None else state_dict
    for name, shape in shapes.items():
        tensor = found.get(name)
        # no ValueError: Trainer.save_model takes that for a setting of DeepSpeed and writes an empty model instead
        if tensor is None or tensor.numel() == 0 or tuple(tensor.shape) != tuple(shape):
            problem = "absent" if tensor is None else f"of shape {tuple(tensor.shape)}"
            raise RuntimeError(
                f"Nothing was saved: tensor {name} is {problem}, expected {tuple(shape)}. Under ZeRO-3 set "
                "zero3_save_16bit_model: true in the accelerate config, so that weights are gathered for a save."
            )


def describe(trainer: Any, output_dir: str | None) -> None:
    """
    Write the model card and the resolved configuration into a folder that weights are about to be saved to.

    Args:
        trainer (`trl.trainer.base_trainer._BaseTrainer`):
            Makes the card, in its own output folder.
        output_dir (`str`, *optional*):
            Where the weights go. Defaults to the trainer's output folder.
    """
    args = trainer.args
    folder = Path(args.output_dir if output_dir is None else output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    trainer.create_model_card(model_name=Path(args.hub_model_id or args.output_dir).name)
    card = Path(args.output_dir, "README.md")
    if card.is_file() and folder != card.parent:
        shutil.copyfile(card, folder / card.name)
    (folder / ARGS_FILE).write_text(json.dumps(args.to_dict(), indent=2, default=str) + "\n")


# Rollouts that the run has not finished with


def save_rollouts(
    accelerator: Accelerator, slices: Sequence[Batch], *, without: Sequence[str], path: Path | None
) -> None:
    """
    Write the rows of a generation from every process into one file, so that any number of processes can read it.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            Gathers over processes.
        slices (`Sequence[dict]`):
            The buffered micro-batches of this process, in the order of the rows.
        without (`Sequence[str]`):
            Keys that are made anew.
        path (`Path`, *optional*):
            The file, on the process that writes it.
    """
    everyone: dict[str, Tensor] = {}
    for name in sorted(set(slices[0]) - set(without)):
        value = slices[0][name]
        assert isinstance(value, Tensor), name  # what else TRL puts there belongs to options that we refuse
        if value.dim() > 0:
            value = torch.cat([gathered(accelerator, part[name]) for part in slices])
        everyone[name] = value.cpu().contiguous()
    if path is not None:
        save_file(everyone, path, metadata={"format": "pt"})


def load_rollouts(path: Path, *, num_slices: int, accelerator: Accelerator) -> list[Batch]:
    """
    Read back this process's micro-batches, in the layout of [`~batching.in_row_order`].

    Args:
        path (`Path`):
            The file.
        num_slices (`int`):
            Micro-batches of a generation; the number of processes need not be that of the save.
        accelerator ([`~accelerate.Accelerator`]):
            Says which process this is.

    Returns:
        `list[dict]`
    """
    everyone = load_file(path)
    num_processes = accelerator.num_processes
    size = len(everyone["row_index"]) // (num_slices * num_processes)
    starts = [(index * num_processes + accelerator.process_index) * size for index in range(num_slices)]
    return [
        {
            name: (value[start : start + size] if value.dim() > 0 else value).to(accelerator.device)
            for name, value in everyone.items()
        }
        for start in starts
    ]


def check_settings(folder: Path, saved: Mapping[str, Any], current: Mapping[str, Any], *, save_steps: int) -> None:
    """
    Raise where pending rollouts were made and scored under other settings than the run's.

    Args:
        folder (`Path`):
            The checkpoint, for the message.
        saved (`Mapping[str, Any]`):
            Settings in the checkpoint.
        current (`Mapping[str, Any]`):
            The same settings of this run.
        save_steps (`int`):
            Optimizer steps of a generation, after each of which a checkpoint has no pending rollouts.
    """
    for name, value in current.items():
        if saved[name] != value:
            raise ValueError(
                f"{folder} holds rollouts made with {name}={saved[name]!r}, but this run has {value!r}. Set it back, "
                f"or resume from a checkpoint between two generations, that is after a multiple of {save_steps} steps."
            )


# The trainers


class CheckpointedTrainer:
    """
    What [`StableDRLTrainer`] and [`DiffusionSFTTrainer`] override of their hosts alike: a class to derive from first.

    Its owner sets `self.checkpoints` to a [`CheckpointWriter`].

    Attributes:
        epoch_number (`int`):
            The epoch that runs. `state.epoch` lags behind where a callback cuts one short.
    """

    checkpoints: CheckpointWriter
    args: Any
    model: Any
    state: Any
    control: Any
    accelerator: Accelerator
    epoch_number = 0

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        resume_from_checkpoint = checked_resume(
            self.args, resume_from_checkpoint, global_step=self.state.global_step, accelerator=self.accelerator
        )
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)  # type: ignore[misc]

    def _run_epoch(self, *, epoch: int, **kwargs: Any) -> None:
        self.epoch_number = epoch
        if 0 < self.args.max_steps <= self.state.global_step:
            self.control.should_training_stop = True  # resumed when it had ended: the host looks after a step only
            return
        super()._run_epoch(epoch=epoch, **kwargs)  # type: ignore[misc]

    def _get_output_dir(self, trial: Any) -> str:
        return self.checkpoints.output_dir(super()._get_output_dir(trial))  # type: ignore[misc]

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self.checkpoints.is_open:  # not before it is complete
            super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        check_tensors(self.model, state_dict)
        describe(self, output_dir)
        super()._save(output_dir, state_dict)  # type: ignore[misc]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        check_same_adapter(self.model, Path(resume_from_checkpoint))
        super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        load_active_adapter(self.model, Path(resume_from_checkpoint))
