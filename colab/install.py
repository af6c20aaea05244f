# %% [markdown]
# The next cell installs the package where it is missing: from its wheel beside the notebook, from the checkout around
# it, or from the public address. On Colab choose the runtime first (CPU, GPU or TPU); if it then asks to restart, do so
# and run the cells again from the top.

# %%
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

ADDRESS = ""  # what [project.urls] of pyproject.toml says

if importlib.util.find_spec("jaxrl_llm") is None:
    wheels = [path.resolve() for path in Path().glob("jaxrl_llm-*.whl")]
    checkouts = [path for path in Path.cwd().parents if (path / "jaxrl_llm" / "__init__.py").exists()]
    sources = [*(path.as_uri() for path in wheels + checkouts), *([f"git+{ADDRESS}"] if ADDRESS else [])]
    if not sources:
        raise RuntimeError("jaxrl_llm has no public address yet; put its wheel beside this notebook")
    tpu = any(Path(device).exists() for device in ("/dev/accel0", "/dev/vfio/0"))
    extras = "colab,gpu" if shutil.which("nvidia-smi") else "colab,tpu" if tpu else "colab"
    package = f"jaxrl_llm[{extras}] @ {sources[0]}"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", package], check=True)
