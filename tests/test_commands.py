"""generate, evaluate and export, on the DIR of a tiny model of characters and on checkpoints with a chat template."""

import dataclasses
import io
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import evaluation, export, generate, tasks
from jaxrl_llm.config import start_up
from jaxrl_llm.ground.terminal import visible
from jaxrl_llm.models import Published, load_pretrained, read_published
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.pass_rate import Evaluator
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.run import exported, loaded
from jaxrl_llm.run.settings import validate
from jaxrl_llm.run.text_generator import TextGenerator
from tests.reference import tiny_run

pytest.importorskip("tokenizers")
QUESTION = "Ada has 1 apples and buys 2 more. How many apples does Ada have now?"
OWN_TASK = """
from configs import pretrained
from jaxrl_llm import tasks


@tasks.register
def shout():
    return tasks.Task(name="shout", prompt_length=24, answer_length=3, tokenizer=tasks.ByteTokenizer(),
                      verify=lambda prompt, answer, gold, row: float(answer == gold), train_size=8, test_size=4,
                      sample=lambda rng: (f"{rng.integers(10**6)}!", "7"))


def get_config(variant=""):
    config = pretrained.get_config()
    config.task.name, config.task.options = "shout", {}
    return config
"""


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Stand-ins and data go into a folder of their own; JAX is started already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(start_up, "start_jax", lambda: None)
        yield


@pytest.fixture(scope="module")
def characters(tmp_path_factory):
    """(DIR, run, state): the tiny mixture of experts that sorts digits."""
    workdir = tmp_path_factory.mktemp("characters")
    return workdir, *tiny_run.untrained(workdir, tiny_run.make_config(workdir, **{"warm_start.steps": 0}))


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """(DIR, run, state): of a checkpoint with a BPE tokenizer and a chat template, put to questions as a chat."""
    workdir = tmp_path_factory.mktemp("chats")
    changes = {"warm_start.steps": 0, "task.chat": True, "rollout.prompts": 4, "rollout.group_size": 4}
    return workdir, *tiny_run.untrained(workdir, tiny_run.make_config(workdir, "pretrained", **changes))


@pytest.fixture
def run(capsys, monkeypatch):
    """run(module, *arguments, typed="") -> (exit code, printed, printed on standard error)."""

    def call(module, *arguments, typed=""):
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        code = module.main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def greedy(run, params, prompt):
    """The engine's greedy answer, as text."""
    task = run.settings.task
    ids = task.ids_of_prompt(prompt)
    dtype = run.model.config.dtype
    engine = Engine(run.model, Sampling(0.0), 1, run.settings.answer_length, task.tokenizer.end_ids, dtype=dtype)
    out = engine.generate(params, np.array([ids], np.int32), np.array([len(ids)]), np.array([0]), jax.random.key(0))
    return task.tokenizer.decode(np.asarray(out.tokens[0])[np.asarray(out.loss_mask[0])].tolist())


@pytest.mark.parametrize(
    ("which", "prompt"), [("characters", "312="), pytest.param("chats", QUESTION, marks=pytest.mark.slow)]
)
def test_a_dir_answers_as_its_engine_does(run, request, which, prompt):
    workdir, made, state = request.getfixturevalue(which)
    expected = greedy(made, state.trained.policy, prompt)
    assert expected
    assert run(generate, "--workdir", workdir, "--prompt", prompt, "--greedy") == (0, f"{expected}\n", "")
    assert run(generate, "--workdir", workdir, "--temperature=0", typed=prompt) == (0, f"{expected}\n", "")


def test_an_export_is_whole_and_is_the_same_policy(run, chats, tmp_path):
    workdir, made, state = chats
    source, folder = made.settings.pretrained, tmp_path / "export"
    said = f"step 1 of {workdir} was written to {folder}\n"
    assert run(export, "--workdir", workdir, "--to", folder) == (0, said, "")
    before, after = read_published(source), read_published(folder)
    assert after.files == before.files
    kept = ("max_position_embeddings", "eos_token_id", "bos_token_id", "pad_token_id")
    assert {name: after.config[name] for name in kept} == {name: before.config[name] for name in kept}
    model, params = load_pretrained(folder)
    assert dataclasses.replace(model.config, remat="block") == made.model.config  # how a run computes is not stored
    jax.tree.map(np.testing.assert_array_equal, params, dict(state.trained.policy))
    chat = tasks.Prompting(chat=True).text(tasks.load_tokenizer(folder), QUESTION)
    said = run(generate, "--checkpoint", folder, "--prompt", chat, "--greedy", "--max-tokens=4")
    assert said == (0, f"{greedy(made, state.trained.policy, QUESTION)}\n", "")
    assert "holds a checkpoint already" in run(export, "--workdir", workdir, "--to", folder)[2]


@pytest.mark.slow
def test_an_export_of_a_tiny_model_trains_on_and_is_read_by_transformers(run, characters, tmp_path):
    """Its tokenizer of characters becomes a tokenizer.json with the same ids."""
    workdir, made, state = characters
    folder, prompt = tmp_path / "export", "312="
    assert run(export, "--workdir", workdir, "--to", folder)[0] == 0
    pretrained = {"model.pretrained": str(folder), "warm_start.steps": 0}
    again = validate(tiny_run.make_config(tmp_path, **pretrained))
    assert again.task.tokenizer.encode(prompt) == made.settings.task.tokenizer.encode(prompt)
    read = loaded.from_checkpoint(folder)
    assert read.model.config == made.model.config
    assert "".join(TextGenerator(read, Sampling(0.0), 4).answer(prompt)) == greedy(made, state.trained.policy, prompt)

    theirs = assert_transformers_agrees(folder, made.model, state.trained.policy, prompt)
    assert theirs.generation_config.eos_token_id == [1]


def assert_transformers_agrees(folder, model, params, text):
    """transformers reads the folder, and its logits of the text are those of our parameters; returns its model."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        logits = theirs(tokens["input_ids"]).logits.numpy()
    with jax.default_matmul_precision("highest"):
        hidden = model.apply(params, jnp.asarray(tokens["input_ids"].numpy(), jnp.int32)).hidden
        np.testing.assert_allclose(logits, model.logits(params, hidden), atol=1e-5)
    return theirs


@pytest.mark.slow
def test_a_value_head_stays_out_of_the_export(run, tmp_path):
    config = tiny_run.make_config(tmp_path, "ppo", **{"warm_start.steps": 0, "critic.kind": "head"})
    _, state = tiny_run.untrained(tmp_path / "run", config)
    code, said, _ = run(export, "--workdir", tmp_path / "run", "--to", tmp_path / "export")
    assert (code, "value head is no part of the policy" in said) == (0, True)
    _, params = load_pretrained(tmp_path / "export")
    assert set(params) == set(state.trained.policy) - {"value_head"}


def test_a_chat_remembers_what_was_said(run, chats, tmp_path):
    """Its second answer continues the template of all messages before it."""
    _, made, _ = chats
    source = made.settings.pretrained
    options = ("--checkpoint", source, "--greedy", "--max-tokens=5")
    code, said, _ = run(generate, *options, "--chat", "--system=Add.", typed="1 + 1?\n2 + 2?\n\n3?\n")
    generator = TextGenerator(loaded.from_checkpoint(source), Sampling(0.0), 5)
    messages = [{"role": "system", "content": "Add."}]
    for question in ("1 + 1?", "2 + 2?"):
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": "".join(generator.reply(messages))})
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    assert (code, said) == (0, "".join(f"{visible(answer)}\n" for answer in answers))
    once = run(generate, *options, "--chat", "--system=Add.", "--prompt=1 + 1?", typed="2 + 2?\n")
    assert once == (0, f"{visible(answers[0])}\n", "")  # standard input is not read


@pytest.mark.slow
def test_seeds(run, characters):
    said = [run(generate, "--workdir", characters[0], "--prompt=312=", f"--seed={seed}")[1] for seed in range(4)]
    assert len(set(said)) > 1
    assert said[2] == run(generate, "--workdir", characters[0], "--prompt=312=", "--seed=2")[1]


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_as_its_dir_is(run, chats, tmp_path):
    """The same prompts and keys, from the DIR and from its export: the same numbers; one row is appended to the DIR."""
    workdir, *_ = chats
    folder = tmp_path / "export"
    assert run(export, "--workdir", workdir, "--to", folder)[0] == 0
    sizes = ("--prompts=4", "--samples=2", "--k=1,2", "--show=1")
    code, said, _ = run(evaluation, "--workdir", workdir, *sizes)
    shown, sentence, header, *rows = said.splitlines()
    assert code == 0
    assert sentence == "gsm8k: Solve word problems of school arithmetic"
    assert "greedy: " in shown
    assert "4 test prompts, step 1" in header
    told = json.loads((workdir / "evaluation.jsonl").read_text().splitlines()[-1])
    config = (f"--json={tmp_path / 'told.json'}", "--config=pretrained:smoke", "--config.task.chat=true")
    code, said, error = run(evaluation, "--checkpoint", folder, *sizes, *config)
    assert (code, error) == (0, "")
    assert said.splitlines()[-len(rows) :] == rows
    assert {"step": 1, **json.loads((tmp_path / "told.json").read_text())} == told


def test_a_policy_on_the_task_of_the_users_own_config(run, chats, tmp_path, monkeypatch):
    """With the slots of that config, also where the policy is that of a run."""
    (tmp_path / "mine.py").write_text(OWN_TASK)
    workdir, made, _ = chats
    slots, answered = [], Evaluator.__call__
    monkeypatch.setattr(Evaluator, "__call__", lambda self, params: slots.append(self.slots) or answered(self, params))
    for place in (("--workdir", workdir), ("--checkpoint", made.settings.pretrained)):
        arguments = ("--prompts=2", "--samples=1", "--k=1", f"--config.task.data_dir={tmp_path}")
        own = (f"--config={tmp_path / 'mine.py'}", "--config.rollout.slots=3")
        code, said, error = run(evaluation, *place, *arguments, *own)
        assert (code, error) == (0, "")
        assert re.search("^shout, 2 test prompts", said, re.MULTILINE)
        assert "!  greedy: " in said
    assert slots == [3, 3]


def test_an_export_keeps_the_ids_of_the_first_checkpoint():
    whole = exported.with_tokenizer(Published({"eos_token_id": 7}, {}), tasks.ByteTokenizer())
    assert whole.config["eos_token_id"] == 7
    assert json.loads(whole.files["generation_config.json"])["eos_token_id"] != 7


MISTAKES = {
    "generate --prompt=1": "one of the arguments --workdir --checkpoint is required",
    "generate --workdir=DIR --checkpoint=x": "not allowed with argument --workdir",
    "generate --workdir=DIR --prompt=x=": "character 'x' at position 0",
    "generate --workdir=DIR --chat": "--chat needs a tokenizer with a chat template",
    "generate --workdir=DIR --prompt=1= --system=x": "--system='x' is part of a chat; give --chat too",
    "generate --workdir=DIR --prompt=": "the prompt has no token",
    "generate --workdir=DIR --prompt=1= --temperature=-1": "temperature=-1.0 must be at least 0",
    "generate --workdir=DIR --prompt=1= --max-tokens=0": "max_new_tokens=0 must be at least 1",
    f"generate --workdir=DIR --prompt=1= --max-tokens={10**12}": "max_new_tokens=1000000000000 is out of range",
    "generate --workdir=DIR --prompt=1= --dtype=bfloat16": "--dtype=bfloat16 belongs to a --checkpoint",
    "generate --checkpoint=DIR --prompt=1": "is the DIR of a run; give it as --workdir=",
    "generate --checkpoint=nowhere --prompt=1": "'nowhere' is neither a folder nor a .gguf file, nor OWNER/NAME of",
    "evaluate --checkpoint=x": "--checkpoint=x has no task; name a config that has one: --config=NAME",
    "evaluate --checkpoint=x --step=1 --config=grpo": "--step=1 belongs to a DIR",
    "evaluate --workdir=DIR --config.task.name=sort": "--config.task.name is a field of no config",
    "evaluate --workdir=DIR --config=countdown": "--config=countdown is neither a file nor",
    "export --workdir=DIR": "the following arguments are required: --to",
    "export --workdir=nowhere --to=x": "nowhere holds no run (no config.json)",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_are_one_line_and_exit_code_2(run, capsys, characters, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, *arguments = line.replace("DIR", str(characters[0])).split(" ")
    module = {"generate": generate, "evaluate": evaluation, "export": export}[name]
    try:
        code, _, error = run(module, *arguments)
    except SystemExit as stop:
        code, error = stop.code, capsys.readouterr().err
    assert (code, error.count("\n")) == (2, 1)
    assert MISTAKES[line] in error
