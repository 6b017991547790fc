"""Read files of the Hugging Face hub, and prompt sets by the library `datasets`.

A data set is named `hf:OWNER/NAME[@REVISION][/CONFIG][:SPLIT]`; the split is `train` by default.
Files come from the cache of huggingface_hub; what is not there is downloaded, except where
HF_HUB_OFFLINE=1 is set, as in every rank: a command downloads before it starts them. A folder is
what `Dataset.save_to_disk` wrote.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple, Self

from megatron_rl.errors import UserError
from megatron_rl.fields import has_classes, with_class_names

HUB = "hf:"
_NAME = re.compile(
    r"hf:(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w.-]+))?(/(?P<config>[^:]+))?(:(?P<split>.+))?"
)
MODEL_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]


class HubSet(NamedTuple):
    """The parts of the name of a data set."""

    repository: str
    revision: str | None
    config: str | None
    split: str | None

    @classmethod
    def parse(cls, name: str | Path) -> Self:
        """The parts of `name`; ValueError if it has another form."""
        found = _NAME.fullmatch(str(name))
        if found is None:
            raise UserError(
                f"{name}: a data set of the hub is named {HUB}OWNER/NAME, or in full "
                f"{HUB}OWNER/NAME@REVISION/CONFIG:SPLIT"
            )
        return cls(**found.groupdict())

    @property
    def name(self) -> str:
        """The repository's name without its owner."""
        return self.repository.rpartition("/")[2]

    def __str__(self) -> str:
        return (
            HUB + self.repository
            + (f"@{self.revision}" if self.revision else "")
            + (f"/{self.config}" if self.config else "")
            + (f":{self.split}" if self.split else "")
        )  # fmt: skip


def is_on_hub(path: str | Path) -> bool:
    """Return True if the path names a data set of the hub instead of a file."""
    return str(path).startswith(HUB)


def find_snapshot(
    repository: str,
    revision: str | None,
    *,
    kind: Literal["model", "dataset"],
    echo: Callable[[str], object] = lambda text: None,
) -> Path:
    """Return the folder of a repository's files in the cache; its name is the commit.

    echo: called with a line before a download. Raises ValueError if the files are unavailable.
    """
    at = f" --revision {revision}" if revision else ""
    cure = f"hf download {repository}{at}" + (" --repo-type dataset" if kind == "dataset" else "")
    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError as error:
        raise UserError(
            f"{repository} on the hub: huggingface_hub is not installed here; where it is, run: "
            f"{cure}, and give the folder that it prints"
        ) from error
    files = MODEL_FILES if kind == "model" else None

    def find(*, local_files_only: bool) -> Path:
        folder = snapshot_download(
            repository,
            repo_type=kind,
            revision=revision,
            allow_patterns=files,
            local_files_only=local_files_only,
        )
        return Path(folder)

    try:
        return find(local_files_only=True)
    except LocalEntryNotFoundError:
        if not constants.HF_HUB_OFFLINE:
            echo(f"looking for {repository} on the Hugging Face hub")
    except ValueError as error:  # a name that the hub does not allow
        raise UserError(f"{repository} is no name of a {kind} on the hub: {error}") from None
    try:
        return find(local_files_only=False)
    except Exception as error:  # the library raises a dozen kinds
        if (problem := _refusal(error)) is not None:
            raise UserError(f"{kind} {repository} on the hub: {problem}") from error
        reason = "HF_HUB_OFFLINE is set"
        if not constants.HF_HUB_OFFLINE:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{repository} is neither in the Hugging Face cache nor can it be downloaded here "
            f"({reason}); if it has this name there, where there is a network, run: {cure}"
        ) from error


def _refusal(error: Exception) -> str | None:
    """Return why the hub itself refuses a repository, and the fix; None for other errors."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "its owner has to permit it: ask on its page, and log in by hf auth login"
    if isinstance(error, errors.RevisionNotFoundError):
        return "it has no such revision; correct what follows @"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is none, or it is private: correct the name, or log in by hf auth login"
    return None


def read_hub(path: Path) -> Iterator[tuple[int, Any]]:
    """The rows of a data set of the hub; ValueError where they are not to be had."""
    name = HubSet.parse(path)
    library = _datasets(path)
    folder = find_snapshot(name.repository, name.revision, kind="dataset")
    try:
        found = library.load_dataset(str(folder), name.config, split=name.split or "train")
    except Exception as error:  # the library raises a dozen kinds
        raise UserError(
            f"{path} cannot be loaded: {error}; correct the name ({HUB}OWNER/NAME/CONFIG:SPLIT), "
            "or give a file"
        ) from error
    yield from _rows_of(found, library)


def read_saved(path: Path) -> Iterator[tuple[int, Any]]:
    """The rows of a folder that `datasets` saved; of several splits, `train`."""
    library = _datasets(path)
    try:
        found = library.load_from_disk(str(path))
    except Exception as error:
        raise UserError(
            f"{path} is a folder that `datasets` cannot load: {error}; give a .parquet, .jsonl or "
            ".csv file, or what Dataset.save_to_disk has written"
        ) from error
    if isinstance(found, library.DatasetDict):
        if "train" not in found:
            raise UserError(f"{path} has the splits {', '.join(found)}; give the folder of one")
        found = found["train"]
    yield from _rows_of(found, library)


def _rows_of(found: Any, library: ModuleType) -> Iterator[tuple[int, Any]]:
    """Yield rows with the names of classes, and with images and sounds as they are stored."""
    for name, kind in found.features.items():
        if type(kind).__name__ in ("Image", "Audio", "Video"):
            found = found.cast_column(name, type(kind)(decode=False))
    types = found.features.to_dict()
    for number, row in enumerate(found):
        yield number, with_class_names(row, types) if has_classes(types) else row


def _datasets(path: Path) -> ModuleType:
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{path}: reading it needs the library datasets; pip install it") from error
    return datasets
