"""Other rooms see what `jaxrl_llm.models` lists, and its modules `lora` and `scoring`, and nothing behind these."""

from jaxrl_llm import models
from tests.test_floors import imported, sources


def test_other_rooms_import_nothing_behind_the_face():
    public = (*models.__all__, *models._LATER, "lora", "scoring")
    for file, source in sources().items():
        for name in imported(source) if not file.startswith("models") else ():
            part = name.removeprefix("jaxrl_llm.models.")
            assert part == name or part.split(".")[0] in public, f"{file} imports {name}; list it in models/__init__.py"
