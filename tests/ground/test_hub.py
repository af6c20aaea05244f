"""Names of checkpoints and data sets, fetched from a hub on this machine by the library that asks the real one."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from configs import stand_ins
from jaxrl_llm import generate, main, tasks
from jaxrl_llm.config.loading import Source
from jaxrl_llm.ground import hub, hub_names
from jaxrl_llm.models import fingerprint, read_published
from jaxrl_llm.records import provenance
from tests.reference.data_forms import written
from tests.reference.fake_hub import COMMIT, fake_hub

ROWS = [{"prompt": f"{n} + 1 =", "answer": n + 1} for n in range(9)]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("Qwen/Qwen2.5-0.5B@main", True),
        ("openai/gsm8k/main@refs/pr/1", True),
        ("gsm8k", False),
        ("/none/here", False),
        ("./none/here", False),
        ("~/none", False),
        ("none/../here", False),
        ("none/data.jsonl", False),
        ("none/model.gguf", False),
        ("here/none", False),  # the folder is here, what it should hold is not
        ("", False),
    ],
)
def test_what_is_a_name(text, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert hub_names.is_name(text) == named


# Repositories of which no run can start, by name.
LLAMA = {
    **{"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1},
    **{"num_attention_heads": 1, "num_key_value_heads": 1, "rms_norm_eps": 1e-6, "rope_theta": 1e4},
}
WEIGHTS = {"model-00001-of-00002.safetensors": "much", "model-00002-of-00002.safetensors": "more"}
UNREADABLE = {
    "gemma": {"config.json": '{"model_type": "gemma4_text"}', "tokenizer.json": "{}", **WEIGHTS},
    "longrope": {"config.json": json.dumps(LLAMA | {"rope_scaling": {"rope_type": "longrope"}}), **WEIGHTS},
    "fp8": {"config.json": json.dumps(LLAMA | {"quantization_config": {"quant_method": "fp8"}}), **WEIGHTS},
    "pickled": {"config.json": json.dumps(LLAMA), "pytorch_model.bin": "much"},
    "quantised": {"README.md": "#", "tiny-Q4_K_M.gguf": "much", "tiny-Q8_0.gguf": "more"},
    "words": {"README.md": "#"},
}


@pytest.fixture
def served(tmp_path, monkeypatch):
    """(address, downloads): a hub with one checkpoint and one data set, and an empty cache."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="pip install 'jaxrl_llm[hf]'")
    model = {"config.json": '{"model_type": "qwen3"}', "model.safetensors": "weights", "tokenizer.json": "{}"}
    model |= {"pytorch_model.bin": "not asked for", "onnx/config.json": "{}", "model.safetensors.index.json": "{ }"}
    data = {
        "README.md": "#",
        "main/train-0-of-1.parquet": ROWS,
        "main/test-0-of-1.parquet": ROWS[:2],
        "x/a.jsonl": ROWS,
    }
    repos = {"models/owner/tiny": written(tmp_path / "m", model), "datasets/owner/sums": written(tmp_path / "d", data)}
    repos |= {f"models/owner/{name}": written(tmp_path / name, files) for name, files in UNREADABLE.items()}
    hub.fetched.cache_clear()
    hub.listed.cache_clear()
    with fake_hub(repos) as (address, downloads):
        # What the library makes of HF_ENDPOINT and HF_HUB_CACHE when it is imported.
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants._HF_DEFAULT_ENDPOINT)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{address}{template}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(hub_names, "REVISIONS", {})
        yield address, downloads
    hub.fetched.cache_clear()


def test_a_checkpoint_by_its_name(served, tmp_path):
    """What is read of it, and only that, and once; the record says which commit it was."""
    published = read_published("owner/tiny")
    assert published.config == {"model_type": "qwen3"}
    with pytest.raises(ValueError, match="weight_map must name a file"):  # as of a folder: what is fetched is checked
        fingerprint("owner/tiny@main")
    read_published("owner/tiny")
    asked = ("config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json")
    assert served[1] == dict.fromkeys(asked, 1)
    assert hub_names.REVISIONS == {"owner/tiny": COMMIT, "owner/tiny@main": COMMIT}
    recorded = provenance.describe({"task": {"options": {}}}, "hash", Source("none.py", ""))
    assert recorded["fetched"] == hub_names.REVISIONS


def test_a_data_set_by_its_name(served):
    drawn = tasks.make("jsonl", path="owner/sums/main").source.read()
    assert {split: [answer for _, answer, _ in draws] for split, draws in drawn.items()} == {
        "train": [str(n + 1) for n in range(9)],
        "test": ["1", "2"],
    }
    assert set(served[1]) == {"main/train-0-of-1.parquet", "main/test-0-of-1.parquet"}


def test_several_at_once_download_once(served, tmp_path):
    """As the processes of a host do: each asks, one downloads."""
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: hub.fetched.__wrapped__("owner/tiny", "model", ("config.json",)), range(4)))
    assert len(found) == 1
    assert served[1] == {"config.json": 1}


def test_without_a_network_what_was_fetched_is_there(served, monkeypatch):
    from huggingface_hub import constants

    first = hub.fetched("owner/tiny", "model", ("config.json",))
    hub.fetched.cache_clear()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    assert hub.fetched("owner/tiny", "model", ("config.json",)) == first
    with pytest.raises(
        FileNotFoundError, match=OTHERWISE % ("owner/other", "the hub cannot be reached", "owner/other")
    ):
        hub.fetched("owner/other", "model", ("config.json",))


OTHERWISE = r"'%s' is no path here, and %s.*; or on a machine with a network run `hf download %s --local-dir DIR` and"


@pytest.mark.parametrize(
    ("name", "kind", "why"),
    [
        ("owner/none", "model", "the hub has none of that name or keeps it private: correct the name, or set HF_TOKEN"),
        ("gated/tiny", "model", "the hub gives it to who has accepted its conditions: do so on its page, and set HF_"),
        ("owner/tiny@lost", "model", "the hub has no revision 'lost' of it: correct what follows @"),
        ("owner/none", "dataset", "the hub has none of that name"),
    ],
)  # fmt: skip
def test_what_the_hub_refuses_is_one_line_with_the_remedy(name, kind, why, served):
    repo = name.partition("@")[0] + (" --repo-type dataset" if kind == "dataset" else "")
    with pytest.raises(FileNotFoundError, match=OTHERWISE % (name, why, repo)) as caught:
        hub.fetched(name, kind, ("config.json",))
    assert "\n" not in str(caught.value)


def test_without_the_package_its_pip_command_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxrl_llm\[hf\]'; or on a machine with a network"):
        tasks.load_tokenizer("owner/not-fetched-yet")


@pytest.mark.parametrize(
    ("name", "fetched", "says"),
    [
        ("owner/gemma", 1, "owner/gemma: config.json: model_type='gemma4_text' is not one of qwen3, qwen3_moe, llama,"),
        (
            "owner/longrope",
            1,
            "owner/longrope: config.json asks for rope scaling='longrope', which this model does not",
        ),
        ("owner/fp8", 1, "owner/fp8: config.json asks for quantization_config='fp8', which"),
        (
            "owner/pickled",
            0,
            "'owner/pickled' holds no model*.safetensors, but config.json, pytorch_model.bin; save th",
        ),
        ("owner/quantised", 0, "`hf download owner/quantised tiny-Q4_K_M.gguf --local-dir DIR`, then give DIR/tiny-Q4"),
        ("owner/words", 0, "'owner/words' holds no config.json, but README.md; name a repository that does"),
        ("owner/tinny", 0, "'owner/tinny' is no path here, and the hub has none of that name or keeps it private: "),
        ("gated/tiny", 0, "'gated/tiny' is no path here, and the hub gives it to who has accepted its conditions"),
    ],
)
def test_what_cannot_load_is_named_before_its_weights_are_fetched(served, tmp_path, capsys, name, fetched, says):
    """By `train` and by a command that takes a checkpoint; of the files config.json is fetched at most, and once."""
    for command, arguments in ((main, ["--config=pretrained", f"--config.model.pretrained={name}"]),
                               (generate, [f"--checkpoint={name}", "--prompt=a"])):  # fmt: skip
        given = [*arguments, f"--workdir={tmp_path / 'run'}"] if command is main else arguments
        assert command.main(given) == 2
        *progress, error = capsys.readouterr().err.splitlines()
        assert error.startswith("error: ")
        assert says in error
        assert all(line.startswith(("Fetching", "Download")) for line in progress if line), progress
    assert served[1] == ({"config.json": 1} if fetched else {})
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_by_names_alone(tmp_path):
    """The command, its environment and what it records."""
    pytest.importorskip("huggingface_hub", reason="pip install 'jaxrl_llm[hf]'")
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 8, "qk_norm": "head", "param_dtype": "float32", "dtype": "float32"}
    data = written(tmp_path / "data", {"train.parquet": ROWS, "validation.parquet": ROWS[:2]})
    repos = {"models/owner/tiny": stand_ins.checkpoint(sizes | {"num_experts": 0}), "datasets/owner/sums": data}
    fields = {"model.pretrained": "owner/tiny", "task.name": "jsonl", "task.options": "{'path': 'owner/sums'}"}
    fields |= {"steps": 1, "task.chat": True, "rollout.prompts": 1, "rollout.max_new_tokens": 4}
    fields |= {"updates.minibatches": 1, "evaluation.prompts": 2, "evaluation.samples": 1}
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    command = [sys.executable, "-m", "jaxrl_llm.main", "--config", "configs/pretrained.py", "--workdir", "run", *flags]
    with fake_hub(repos) as (address, _):
        env = os.environ | {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": os.getcwd()}
        command[4] = os.path.abspath(command[4])
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "prompts that are in train too" in done.stdout
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())
    assert recorded["fetched"] == {"owner/tiny": COMMIT, "owner/sums": COMMIT}
    assert recorded["data"]["test"]["shared"] == 2
    assert recorded["config"]["model"]["pretrained"] == "owner/tiny"
