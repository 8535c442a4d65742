# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import trl_stabledrl
from tests.tiny import published_llada_folder
from trl_stabledrl.cli.main import main

ROWS = Path(__file__).parents[1] / "data" / "gsm8k_like.jsonl"
# ids 0 to 4; the published tokenizer's two end tokens among them
SPECIAL = ["<|startoftext|>", "<|endoftext|>", "<|mdm_mask|>", "<|eot_id|>", "<|pad|>"]
CHAT_TEMPLATE = (
    "{{ '<|startoftext|>' }}{% for message in messages %}<|eot_id|>{{ message['role'] }}\n\n"
    "{{ message['content'] }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}assistant\n\n{% endif %}"
)
pytestmark = pytest.mark.usefixtures("in_its_own_folder")


@pytest.fixture
def real_folder(tmp_path):
    """A tiny LLaDA in the published format, with a byte-level BPE tokenizer trained on the rows."""
    texts = [message["content"] for line in ROWS.read_text().splitlines() for message in json.loads(line)["prompt"]]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|startoftext|>",
        eos_token="<|endoftext|>",
        mask_token="<|mdm_mask|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|eot_id|>"],
        chat_template=CHAT_TEMPLATE,
    )
    folder = published_llada_folder(
        tmp_path / "llada",
        vocab_size=400,
        embedding_size=400,
        eos_token_id=[1, 3],
        mask_token_id=2,
        pad_token_id=4,
        max_sequence_length=512,
    )
    tokenizer.save_pretrained(folder)
    return folder


def test_recipe_of_the_8b_model_trains_on_chat_rows_of_real_text(real_folder, tmp_path, monkeypatch):
    from trl_stabledrl import StableDRLTrainer

    seen = []
    compute_loss = StableDRLTrainer._compute_loss
    monkeypatch.setattr(
        StableDRLTrainer,
        "_compute_loss",
        lambda self, model, inputs: seen.append((self.end_token_ids, inputs)) or compute_loss(self, model, inputs),
    )
    (tmp_path / "chat_rewards.py").write_text(
        "def length(completions, completion_ids, answer, **kwargs):\n"
        "    assert all(message['role'] == 'assistant' for (message,) in completions)\n"
        "    return [-float(len(ids)) for ids in completion_ids]\n"
    )
    recipe = trl_stabledrl.recipes_folder() / "llada_8b_gsm8k.yaml"
    flags = {
        "model_name_or_path": real_folder,
        "dataset_name": ROWS,
        "output_dir": tmp_path / "out",
        "dtype": "float32",
        "bf16": "false",
        "use_cpu": "true",
        "eval_strategy": "no",
        "max_steps": "2",
        "save_steps": "2",
        "per_device_train_batch_size": "16",
        "gradient_accumulation_steps": "2",
        "num_generations": "4",
        "max_completion_length": "32",
        "block_length": "8",
        "num_denoising_steps": "4",
        "learning_rate": "1e-3",
        "temperature": "4.0",  # so that end tokens come up
        "logging_steps": "1",
        "disable_tqdm": "true",
    }
    options = [part for name, value in flags.items() for part in (f"--{name}", str(value))]

    rewards = ["--reward_funcs", "gsm8k_reward", "chat_rewards.length"]
    assert main(["train", "--config", str(recipe), *options, *rewards]) == 0

    state = json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    logs = [entry for entry in state["log_history"] if "grad_norm" in entry]
    assert [entry["step"] for entry in logs] == [1, 2]
    assert all(entry["grad_norm"] > 0 for entry in logs)
    assert {ends for ends, _ in seen} == {(1, 3)}
    lengths = {length for _, batch in seen for length in batch["completion_mask"].sum(-1).tolist()}
    assert len(lengths) > 1
    # left padding: prompts of different length end in the same column
    assert any((batch["prompt_mask"][:, 0] == 0).any() for _, batch in seen)
    assert all((batch["prompt_mask"][:, -1] == 1).all() for _, batch in seen)
    saved = json.loads((tmp_path / "out" / "checkpoint-2" / "config.json").read_text())
    assert saved["d_model"] == 32
    assert (tmp_path / "out" / "checkpoint-2" / "chat_template.jinja").is_file()
