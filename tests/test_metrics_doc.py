"""docs/metrics.md and docs/preferences.md name every key that the source can log; test_trainer.py asks a whole run."""

import re

from jaxrl_llm.records.watch import TEXTS
from tests.reference.metrics_doc import ROOT, documented

ROOMS = (
    "reward|rollout|eval|loss|grad|optimizer|update|ratio|kl|clip|gate|gradient_weight|mismatch"
    "|check|routing|time|pairs|log"
)
KEY = re.compile(rf'f?"((?:{ROOMS})/[\w{{}}/]+)"')
SUFFIXES = ("", "_mean", "_share")  # Moments and the run-time checks add theirs when they are finalised


def undocumented(source, known):
    """The keys in a source that no documented key matches; a {name} in an f-string stands for anything."""
    keys = set(KEY.findall(source))
    patterns = {key: re.sub(r"\\\{\w+\\\}", r"[\\w]+", re.escape(key)) for key in keys}
    return {
        key
        for key, pattern in patterns.items()
        if not any(re.fullmatch(pattern + suffix, name) for name in known for suffix in SUFFIXES)
    }


def test_every_key_of_the_source_is_documented():
    known = documented()
    missing = {
        (path.name, key)
        for path in (ROOT / "jaxrl_llm").rglob("*.py")
        if "report" not in path.parts
        for key in undocumented(path.read_text(), known)
    }
    assert missing == set(), "add them to docs/metrics.md"


def test_every_warning_is_documented():
    files = ("check/doubts.py", "check/row_doubts.py", "training/optimizer.py", "check/fresh_weights.py")
    source = "".join((ROOT / "jaxrl_llm" / path).read_text() for path in files)
    before = set(re.findall(r'"([a-z]+(?:_[a-z]+)+)": (?!"jaxrl_llm\.)', source))
    assert {"learning_rate", "splits_overlap", "fresh_weights"} <= before
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) >= before | set(TEXTS)


def test_the_search_sees_what_it_should():
    known = {"kl/old", "ratio/token_mean", "routing/ratio_flipped_max"}
    assert undocumented('"kl/old", "ratio/token", f"routing/ratio_{name}_max", "docs/metrics.md"', known) == set()
    assert undocumented('{"kl/new": 1, f"ratio/{name}_p99": 2}', known) == {"kl/new", "ratio/{name}_p99"}
