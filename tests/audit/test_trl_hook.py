"""The hook for TRL on a live trainer: its captures are whole, and identified without being told."""

import runpy
from pathlib import Path

import pytest

from jaxrl_llm.audit.capture import read
from tests.audit.test_opinion import told

pytestmark = pytest.mark.slow
WORDS = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 12)}}


def _trainer(folder, **settings):
    """A trainer of a random model of 12 words, with two reward functions."""
    trl, datasets, transformers = (pytest.importorskip(name) for name in ("trl", "datasets", "transformers"))
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel(WORDS, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = {"pad_token": "<pad>", "eos_token": "<eos>", "padding_side": "left"}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 12, "initializer_range": 0.3}
    config = transformers.Qwen3Config(**sizes, eos_token_id=1, pad_token_id=0, bos_token_id=None)
    run = {"max_steps": 3, "num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 12}
    run |= {"num_iterations": 2, "learning_rate": 3e-3, "gradient_accumulation_steps": 2, "top_k": 0, "seed": 1}
    quiet = {"use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}

    def distinct(completions, **_):
        return [len(set(text.split())) / 7 - 0.04 * len(text.split()) for text in completions]

    def late(completions, **_):
        return [float(text > "w4") for text in completions]

    return trl.GRPOTrainer(
        model=transformers.Qwen3ForCausalLM(config),
        reward_funcs=[distinct, late],
        args=trl.GRPOConfig(output_dir=str(folder), gradient_checkpointing=False, **run, **quiet, **settings),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["w5 w9 w11 w7", "w3 w6", "w10 w8 w2"] * 8}),
        processing_class=transformers.PreTrainedTokenizerFast(tokenizer_object=words, **ends),
    )


@pytest.mark.filterwarnings("ignore")
def test_a_live_trainer_is_identified(tmp_path):
    """DAPO's divisor is that of the generation batch, and rows are shuffled: all arrays of the batch are needed."""
    hook = Path(__file__).parents[2] / "docs" / "capture" / "trl_capture.py"
    module = runpy.run_path(str(hook))
    trainer = _trainer(tmp_path / "run", loss_type="dapo", epsilon_high=0.28)
    module["capture"](trainer, tmp_path)
    trainer.train()
    files = sorted(tmp_path.glob("*.safetensors"), key=lambda file: int(file.stem))
    assert len(files) == 6
    found = told(read(files[3]))  # of the second update on the same answers
    assert found.capture.unknown == ()
    assert found.faults == []
    assert found.reproduced
    assert found.fits[0].objective == "dapo"
    assert {"accumulation": 2, "aggregation": "token_mean"}.items() <= found.fits[0].settings.items()
