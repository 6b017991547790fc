"""Models in GGUF files: read once, by transformers, into a Hugging Face folder.

A GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) has sizes, tokenizer and
tensors of a model, mostly quantized. The folder has the dequantized tensors, in float32 unless the
file has half precision; training converts them to `trainer.dtype`. It lies next to the file, gets
its name when it is complete, and names the file that it was read from.

    python -m megatron_rl.preflight.gguf_models FILE.gguf FOLDER

reads a file into a new folder. Commands run this in a process of its own, because it imports
torch.
"""

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.data.tokenizer import require_tokenizer
from megatron_rl.errors import UserError
from megatron_rl.models.safetensors_headers import (
    DOWNLOAD_AGAIN,
    GGUF_ORIGIN,
    add_samples,
    format_problems,
)
from megatron_rl.models.shape import ModelShape, read_model_shape, tensor_shapes
from megatron_rl.models.stored_tensors import check_headers
from megatron_rl.runtime.failures import is_full_disk
from megatron_rl.runtime.versions import hide_unloadable_builds

SUFFIX = ".gguf"
INSTALL = "pip install gguf accelerate"
TEMPORARY = ".reading-"
READING = 2  # raised when files are read in another way, so that they are read again
# By the format's names; these are read exactly (tests), and others are refused.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Settings that are read here, or from tensors or the tokenizer.
WITHOUT_EFFECT = ("vocab_size", "attention.key_length", "attention.value_length")
# Splits of text before byte-level BPE that transformers' table lacks: GPT-2's, its default, and the
# same after every digit is split off.
GPT2_SPLITS = ("default", "gpt-2")
DIGIT_SPLITS = ("smollm", "starcoder", "refact", "command-r")
# With these, as in llama.cpp, a word of the vocabulary is one token whatever the merges are, and a
# text begins with the token bos, unless add_bos_token is false (src/llama-vocab.cpp).
WHOLE_WORDS = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    "jina-v5-nano", "tekken",
)  # fmt: skip


def find_gguf(path: str | Path) -> Path | None:
    """Return the GGUF file that `path` is, or the GGUF file in a folder without config.json.

    None for any other path. Raises UserError if the folder has several, or the file is missing.
    """
    path = Path(path)
    if path.suffix.lower() == SUFFIX and not path.is_dir():
        if not path.exists():
            raise UserError(
                f"{path.absolute()} does not exist; give a GGUF file or a Hugging Face model folder"
            )
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == SUFFIX)
    if len(files) > 1:
        names = format_problems([file.name for file in files])
        raise UserError(
            f"{path} has {len(files)} GGUF files and no config.json: {names}; give the path of one"
        )
    return files[0] if files else None


def folder_of_gguf(
    file: Path, *, echo: Callable[[str], object] = lambda text: None, or_in: Path | None = None
) -> Path:
    """Return the folder of a GGUF file's model, reading the file unless that was done.

    or_in: used instead of the file's own folder if that cannot be written. Raises UserError if the
    file cannot be read. Processes that call this together wait for one of them.
    """
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise UserError(f"{file} does not start as a GGUF file does; {DOWNLOAD_AGAIN}")
    digest = hashlib.sha256(f"{READING}".encode())
    add_samples(file, digest)
    parents = [file.parent, *([] if or_in is None else [or_in])]
    folders = [parent / f"{file.stem}-{digest.hexdigest()[:12]}" for parent in parents]
    for folder in folders:
        if (folder / GGUF_ORIGIN).is_file():
            return folder.absolute()
    folder = next(
        (each for each in folders if os.access(existing_parent(each), os.W_OK)), folders[0]
    )
    with only_process(folder):
        if not (folder / GGUF_ORIGIN).is_file():
            _read_in_process(file, folder, echo)
    return folder.absolute()


def existing_parent(path: Path) -> Path:
    """Return the nearest parent that exists."""
    return next(parent for parent in path.absolute().parents if parent.is_dir())


@contextmanager
def only_process(folder: Path) -> Iterator[None]:
    """Let one process at a time make `folder`."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder.parent, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"{folder.parent} cannot be used: {error.strerror}") from None
    try:
        with suppress(OSError):  # no locks on this disk: each process then reads the file
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _read_in_process(file: Path, folder: Path, echo: Callable[[str], object]) -> None:
    command = [sys.executable, "-m", __name__, str(file), str(folder)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", env=environment
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            echo(line.rstrip("\n"))
        problem = process.stderr.read() if process.stderr is not None else ""
    if process.returncode:
        last = problem.strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
        raise UserError(last[0].removeprefix("error: "))


def read_gguf(
    file: Path, folder: Path, *, echo: Callable[[str], object] = lambda text: None
) -> None:
    """Read a GGUF file into the new Hugging Face folder `folder`.

    Raises UserError if the file is incomplete, or has an architecture, settings or tensors that are
    not known here. The folder appears complete or not at all.
    """
    reader = open_gguf(file)
    check_known(file, reader)
    kinds = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    dtype = dtype_of_folder(kinds)
    needed = dtype.bytes * sum(int(tensor.n_elements) for tensor in reader.tensors)
    echo(
        f"{file} has {_describe(kinds)}; reading it into {folder}, once ({needed / 1e6:,.0f} MB "
        f"in {dtype.name}); training continues in trainer.dtype"
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(folder.parent).free) < needed:
        raise _full(folder, needed, free)
    here = f"{TEMPORARY}{socket.gethostname()}-"  # another node may be reading the file, too
    for old in folder.parent.glob(f"{here}*"):
        if not Path("/proc", old.name.removeprefix(here).partition("-")[0]).exists():  # killed
            shutil.rmtree(old, ignore_errors=True)
    prefix = f"{here}{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as parent:
        made = Path(parent) / folder.name
        try:
            _write_folder(file, reader, made, dtype=dtype.name)
        except (OSError, ValueError, RuntimeError) as error:
            if not is_full_disk(error):
                raise
            raise _full(folder, needed, shutil.disk_usage(folder.parent).free) from None
        origin = {"file": str(file.absolute()), "tensors": dict(kinds)}
        (made / GGUF_ORIGIN).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
        try:
            made.rename(folder)
        except OSError:
            if not (folder / GGUF_ORIGIN).is_file():  # otherwise another node was faster
                raise


def _full(folder: Path, needed: int, free: int) -> UserError:
    return UserError(
        f"no space left on the disk of {folder}: the model takes {needed:,} bytes and {free:,} are "
        "free; free some, or move the file to another disk. Nothing was kept"
    )


class StoredDtype(NamedTuple):
    """The dtype of a folder's tensors."""

    name: str
    bytes: int


def dtype_of_folder(kinds: Mapping[str, int]) -> StoredDtype:
    """Return the narrowest dtype that has all values of these kinds of tensors.

    Norms are F32 in every file, which the other tensors decide: half precision stays as it is.
    """
    halves = {"F16": StoredDtype("float16", 2), "BF16": StoredDtype("bfloat16", 2)}
    others = [*set(kinds) - {"F32"}]
    full = StoredDtype("float32", 4)
    return halves.get(others[0], full) if len(others) == 1 else full


def _describe(kinds: Mapping[str, int]) -> str:
    """List kinds of tensors and their numbers, most frequent first."""
    ordered = sorted(kinds.items(), key=lambda item: -item[1])
    return "tensors in " + ", ".join(f"{kind} ({count})" for kind, count in ordered)


def open_gguf(file: Path) -> Any:
    """Open a GGUF file; raises UserError if it is none or incomplete."""
    try:
        import gguf
    except ImportError:
        raise UserError(f"{file}: reading it needs the library gguf; {INSTALL}") from None
    try:
        reader = gguf.GGUFReader(file)
        for field in reader.fields.values():
            field.contents()  # texts are decoded
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise UserError(
            f"{file} is not a complete GGUF file ({file.stat().st_size:,} bytes: {error}); "
            f"{DOWNLOAD_AGAIN}"
        ) from None
    return reader


def check_known(file: Path, reader: Any) -> None:
    """Raise UserError unless transformers reads all that determines what the model computes."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    name = _value(reader, "general.architecture")
    if name not in ARCHITECTURES:
        raise UserError(
            f"{file}: GGUF architecture {name} is not supported; choose from "
            f"{sorted(ARCHITECTURES)}, or give the model's Hugging Face folder"
        )
    if (parts := _value(reader, "split.count")) not in (None, 1):
        raise UserError(f"{file} is one of {parts} files; join them with llama-gguf-split --merge")
    read = {*GGUF_CONFIG_MAPPING[name], *WITHOUT_EFFECT}
    settings = [key for key in reader.fields if key.startswith(f"{name}.")]
    if unknown := [key for key in settings if key.partition(".")[2] not in read]:
        raise UserError(
            f"{file} has {format_problems(unknown)}, which transformers does not read from GGUF "
            "files; give the model's Hugging Face folder"
        )
    model, split = (_value(reader, f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if model not in ("gpt2", "llama") or (model == "gpt2" and split not in known_splits()):
        raise UserError(
            f"{file}: its tokenizer ({model}, text split as {split}) cannot be rebuilt; give the "
            "model's Hugging Face folder"
        )
    for key, unread in {"add_eos_token": True, "add_space_prefix": model == "gpt2"}.items():
        if _value(reader, f"tokenizer.ggml.{key}") is unread:
            raise UserError(
                f"{file} has tokenizer.ggml.{key}={str(unread).lower()}, which transformers does "
                "not read from GGUF files; give the model's Hugging Face folder"
            )


def known_splits() -> set[str]:
    """Return the ways to split text before byte-level BPE that can be rebuilt."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    return {*GGUF_PRE_TOKENIZER_SPLITS, *GPT2_SPLITS, *DIGIT_SPLITS}


def _value(reader: Any, key: str) -> Any:
    return reader.fields[key].contents() if key in reader.fields else None


def check_tensors(file: Path, reader: Any, shape: ModelShape) -> None:
    """Raise UserError if the file has tensors that the model lacks, or the reverse."""
    import gguf

    kind = next(
        k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == _value(reader, "general.architecture")
    )
    names = gguf.get_tensor_name_map(kind, shape.num_layers)
    expected = {
        names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        for name in tensor_shapes(shape)
    }
    present = {tensor.name for tensor in reader.tensors}
    problems = [
        f"{name} is not a tensor of {shape.architecture}" for name in sorted(present - expected)
    ]
    problems += [f"{name} is missing" for name in sorted(expected - present)]
    if problems:
        raise UserError(
            f"{file}: {format_problems(problems)}; give the model's Hugging Face folder"
        )


def _write_folder(file: Path, reader: Any, folder: Path, *, dtype: str) -> None:
    """Write config.json, tokenizer and weights, each checked."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    config, name = AutoConfig.from_pretrained(**where), _value(reader, "general.architecture")
    config.architectures = [ARCHITECTURES[name]]
    if head_dim := _value(reader, f"{name}.attention.key_length"):  # not read for Qwen3
        config.head_dim = head_dim
    config.save_pretrained(folder)
    shape = read_model_shape(folder)
    check_tensors(file, reader, shape)
    _write_tokenizer(file, reader, folder)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            **where, config=config, dtype=getattr(torch, dtype)
        )
    except (NotImplementedError, RuntimeError, ImportError) as error:
        raise UserError(f"{file} cannot be read by transformers: {error}") from error
    # It is dequantized, but transformers saves no model that has these marks.
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(folder)
    check_headers(folder, shape)


def _write_tokenizer(file: Path, reader: Any, folder: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    except Exception as error:  # the libraries raise a dozen kinds
        raise UserError(
            f"{file}: its tokenizer cannot be rebuilt ({error}); give the model's Hugging Face "
            "folder"
        ) from error
    model, split, begins = (
        _value(reader, f"tokenizer.ggml.{key}") for key in ("model", "pre", "add_bos_token")
    )
    if split in WHOLE_WORDS:
        tokenizer.backend_tokenizer.model.ignore_merges = True
    begins = model == "llama" or split in WHOLE_WORDS if begins is None else begins
    if begins and tokenizer.bos_token is None:
        raise UserError(
            f"{file} has no tokenizer.ggml.bos_token_id, with which a text begins; give the "
            "model's Hugging Face folder"
        )
    tokenizer.add_bos_token = begins
    if split in DIGIT_SPLITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ])  # fmt: skip
    tokenizer.save_pretrained(folder)
    require_tokenizer(folder)


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Read the file named by the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    hide_unloadable_builds()
    try:
        read_gguf(options.file, options.folder, echo=_print)
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
