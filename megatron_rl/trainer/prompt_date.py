"""The date in prompts, for chat templates that write today's."""

from collections.abc import Callable
from datetime import date
from pathlib import Path

from megatron_rl.config import Config, read_mapping
from megatron_rl.distributed.agreement import run_on_rank_0
from megatron_rl.runs.directory import RunDirectory


def fix_date(config: Config, directory: RunDirectory, *, echo: Callable[[str], object]) -> Config:
    """Return the config with `data.date`, if the chat template writes a date. Collective.

    It is that of the config, else that of the run's first start, else today's. The run directory
    keeps it in config.yaml.
    """

    def find() -> str | None:
        data = config.data
        if data.date or data.template == "raw" or not has_date(Path(config.model.path)):
            return data.date
        saved = read_mapping(directory.config_file) if directory.config_file.is_file() else {}
        return (saved.get("data") or {}).get("date") or date.today().isoformat()

    day = run_on_rank_0(find, doing="reading the date of the prompts")
    if day is None:
        return config
    echo(f"the chat template writes the date into prompts: {day} (data.date)")
    data = config.data.model_copy(update={"date": str(day)})
    return config.model_copy(update={"data": data})


def has_date(folder: Path) -> bool:
    """Return True if a chat template of a model folder calls `strftime_now`."""
    places = ("tokenizer_config.json", "chat_template*", "additional_chat_templates/*")
    files = [file for place in places for file in folder.glob(place) if file.is_file()]
    return any(b"strftime_now" in file.read_bytes() for file in files)
