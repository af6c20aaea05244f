"""The day that a chat template names is that of a run's first start, whenever it goes on and whatever reads its DIR."""

import datetime
import json
from types import SimpleNamespace

import pytest

from configs import base
from configs.stand_ins.trained_tokenizer import write_tokenizer
from jaxrl_llm import main, tasks
from jaxrl_llm.ground.json_files import json_object
from jaxrl_llm.records.checkpointing import Checkpoints
from jaxrl_llm.records.recorded import FORMAT
from jaxrl_llm.records.run_log import plain
from jaxrl_llm.run import loaded, run_dir, settings
from tests.reference import tiny_run

pytest.importorskip("transformers")
DATED = (
    "{{ strftime_now('%d %b %Y') }}\n{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}!{% endif %}"
)
FIRST, LATER = "2024-02-29", "2024-03-01"


@pytest.fixture
def on(monkeypatch):
    def set_today(day):
        today = SimpleNamespace(today=lambda: datetime.date.fromisoformat(day))
        monkeypatch.setattr(settings, "datetime", SimpleNamespace(date=today))

    return set_today


@pytest.fixture
def fields(tmp_path):
    folder = tmp_path / "tokenizer"
    write_tokenizer(folder, ["0123456789=! Feb Mar"], 270)
    (folder / "chat_template.jinja").write_text(DATED)
    return {"task.tokenizer": str(folder), "task.chat": True, "steps": 1}


def started(workdir, fields, **more):
    """The config and the settings of a start, as `main` makes them; the DIR's record is written."""
    config = tiny_run.make_config(workdir.parent, **fields, **more)
    run_dir.keep_day(workdir, config, workdir)
    made = settings.validate(config)
    config.task.date = made.task.day or config.task.date
    blocks = {"format": FORMAT, "config": plain(config.to_dict()), "config_hash": settings.config_hash(config)}
    workdir.mkdir(exist_ok=True)
    (workdir / "config.json").write_text(json.dumps(blocks))
    return config, made


def test_a_resume_on_another_day_reads_the_same_prompts(on, fields, tmp_path):
    on(FIRST)
    first, made = started(tmp_path / "run", fields)
    assert tasks.load_tokenizer(fields["task.tokenizer"], FIRST).chat([{"role": "user", "content": "1="}]) == (
        "29 Feb 2024\n1=<|im_end|>!"
    )
    asked = made.task.ids_of_prompt("31=")
    assert made.task.tokenizer.backend.decode(asked).startswith("29 Feb 2024")
    on(LATER)
    again, later = started(tmp_path / "run", fields)
    assert (first.task.date, again.task.date) == (FIRST, FIRST)
    assert later.task.ids_of_prompt("31=") == asked
    assert tasks.data_name(later.task) == tasks.data_name(made.task)
    other, anew = started(tmp_path / "other", fields)
    assert other.task.date == LATER
    assert anew.task.ids_of_prompt("31=") != asked
    assert settings.config_hash(other) == settings.config_hash(first)
    assert tasks.data_name(anew.task) != tasks.data_name(made.task)  # the lengths of prompts may differ
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match=r"task\.date='2024-03-01', and the prompts of .*run name 2024-02-29; leave"):
        started(tmp_path / "run", fields, **{"task.date": LATER})


def test_a_checkpoint_knows_the_day_where_config_json_is_lost_or_damaged(on, fields, tmp_path):
    on(FIRST)
    config, _ = started(tmp_path / "run", fields)
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.save(1, {"x": 0.0}, {"day": FIRST})
    checkpoints.close()
    on(LATER)
    for damage in ('{"config": {}}', None):
        (tmp_path / "run" / "config.json").unlink()
        if damage:
            (tmp_path / "run" / "config.json").write_text(damage)
        config, _ = started(tmp_path / "run", fields)
        assert config.task.date == FIRST


def test_a_day_is_recorded_only_where_a_template_asks(on, fields, tmp_path):
    on(FIRST)
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert started(tmp_path / "run", fields)[0].task.date == ""
    assert started(tmp_path / "sort", {})[0].task.date == ""
    with pytest.raises(ValueError, match=r"task\.date='29 Feb' is no day; give it as YYYY-MM-DD"):
        started(tmp_path / "run", fields, **{"task.date": "29 Feb"})


@pytest.mark.slow
def test_the_command_records_it_and_what_reads_the_dir_follows(on, fields, tmp_path):
    given = ["--config=grpo:smoke", f"--workdir={tmp_path / 'run'}", f"--config.task.data_dir={tmp_path / 'data'}"]
    given += [f"--config.{name}={value}" for name, value in fields.items() if name != "steps"]
    given += ["--config.warm_start.steps=0", "--config.rollout.prompts=2", "--config.rollout.group_size=2"]
    given += ["--config.evaluation.prompts=2", "--config.evaluation.samples=1", "--config.rollout.max_new_tokens=4"]
    for day, steps in ((FIRST, 1), (LATER, 2)):
        on(day)
        assert main.main([*given, f"--config.steps={steps}"]) == 0
        assert json_object(tmp_path / "run" / "config.json", "")["config"]["task"]["date"] == FIRST
    task = loaded.from_workdir(tmp_path / "run").run.settings.task
    assert task.day == FIRST
    assert task.tokenizer.backend.decode(task.ids_of_prompt("31=")).startswith("29 Feb 2024")
    assert main.main([*given, "--config.steps=1", "--restart"]) == 0
    assert json_object(tmp_path / "run" / "config.json", "")["config"]["task"]["date"] == LATER


def test_a_dir_without_a_step_has_no_day_yet(tmp_path):
    """A start that died before its first step leaves a config.json, which another config may overwrite."""
    config = base.get_config("smoke")
    config.task.date = "2026-01-02"
    record = {"format": FORMAT, "config": config.to_dict(), "config_hash": "?"}
    (tmp_path / "config.json").write_text(json.dumps(record))
    config.task.date = "2026-03-04"
    assert not run_dir.keep_day(tmp_path, config, tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match=r"task.date='2026-03-04', and the prompts of .* name 2026-01-02"):
        run_dir.keep_day(tmp_path, config, tmp_path)
