"""`export --push` and `export --adapter`: what arrives on a hub on this machine, and what is refused in one line."""

import json

import pytest

from jaxrl_llm import export
from jaxrl_llm.config import start_up
from jaxrl_llm.models import load_pretrained
from jaxrl_llm.records.checkpointing import Checkpoints
from jaxrl_llm.run.assembly import base_digest
from tests.reference import tiny_run
from tests.reference.upload_hub import COMMIT, upload_hub

constants = pytest.importorskip("huggingface_hub.constants", reason="pip install 'jaxrl_llm[hf]'")


def made(workdir, name="pretrained", **changes):
    """A DIR at step 2 that has learned nothing."""
    small = {"warm_start.steps": 0, "rollout.prompts": 4, "rollout.group_size": 4}
    _, state = tiny_run.untrained(workdir, tiny_run.make_config(workdir, name, **small | changes))
    checkpoints = Checkpoints(workdir)
    checkpoints.save(2, state.saved(), {"base": base_digest(state)})
    checkpoints.close()
    return workdir


@pytest.fixture(scope="module")
def workdirs(tmp_path_factory):
    """{rank: DIR}: of a run of all parameters, and of one of adapters, both from a checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield {rank: made(tmp_path_factory.mktemp(f"rank{rank}"), **{"lora.rank": rank}) for rank in (0, 2)}


@pytest.fixture
def exported(capsys, monkeypatch, tmp_path):
    """exported(DIR, *flags) -> (exit code, what was printed, the error): into `tmp_path / "out"`."""
    monkeypatch.setattr(start_up, "start_jax", lambda: None)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    def call(workdir, *flags):
        code = export.main([f"--workdir={workdir}", f"--to={tmp_path / 'out'}", *flags])
        said = capsys.readouterr()
        *progress, error = said.err.splitlines(keepends=True) or [""]  # the library's bars of bytes before it
        assert not any(line.startswith("error") for line in progress)
        return code, said.out, error

    return call


def test_an_export_arrives_whole_with_its_card(workdirs, exported, tmp_path, monkeypatch):
    """Once in a new private repository; a second push leaves no weights of the first."""
    monkeypatch.setenv("HF_TOKEN", "hf_writes")
    with upload_hub() as (address, repos):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        code, said, _ = exported(workdirs[0], "--push=owner/tuned", "--private")
        assert code == 0
        assert said.endswith(f"pushed to {address}/owner/tuned/commit/{COMMIT}\n")
        repo = repos["owner/tuned"]
        assert repo["private"]
        repo["files"]["model-00001-of-00002.safetensors"] = b"of another size"
        again = exported(workdirs[2], "--push=owner/tuned", f"--to={tmp_path / 'adapter'}", "--adapter")
        assert again[0] == 0, again
    out = tmp_path / "out"
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    assert repo["messages"] == ["Step 2 of a run of grpo", "Step 2 of a run of grpo"]
    assert files["README.md"].decode().startswith("---\nlibrary_name: transformers\ntags:\n- jaxrl_llm\n- grpo\n---\n")
    assert "- objective: grpo\n" in files["README.md"].decode()
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert names == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert {name for name in repo["files"] if "safetensors" in name} == {"adapter_model.safetensors"}
    assert all(repo["files"][name] == files[name] for name in files if name not in names and "model.s" not in name)
    assert repo["files"]["README.md"].startswith(b"---\nlibrary_name: peft\n")
    load_pretrained(out)


def test_adapters_name_the_checkpoint_under_them(workdirs, exported, tmp_path):
    code, said, _ = exported(workdirs[2], "--adapter")
    assert (code, said) == (0, f"step 2 of {workdirs[2]} was written to {tmp_path / 'out'}\n")
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    recorded = json.loads((workdirs[2] / "config.json").read_text())["config"]
    assert written["base_model_name_or_path"] == recorded["model"]["pretrained"]
    assert (written["r"], written["lora_alpha"]) == (2, recorded["lora"]["alpha"])


@pytest.mark.slow
def test_adapters_on_a_start_of_their_own_have_no_base_to_name(exported, tmp_path):
    made(tmp_path / "run", "grpo", **{"lora.rank": 2})
    code, _, error = exported(tmp_path / "run", "--adapter")
    assert code == 2
    assert "the base of the adapters is the run's own start, which PEFT cannot read; leave --adapter out" in error
