"""Qwen3.5 text models rewritten as they are published: part of a model that also reads images."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 2,
    "num_position_embeddings": 4, "temporal_patch_size": 1,
}  # fmt: skip
EXPERT = re.compile(r"(.+\.mlp\.experts)\.\d+\.(gate|up|down)_proj\.weight")


def publish(folder: str | Path) -> None:
    """Rewrite config.json and weights of a text model in the published form.

    Adds a random vision tower and a tensor of a layer that predicts further tokens (MTP); the
    experts of a layer are in one tensor, gate above up.
    """
    import transformers

    folder = Path(folder)
    text = json.loads((folder / "config.json").read_text())
    name = text.pop("architectures")[0].removesuffix("ForCausalLM")
    rotary = text["rope_parameters"]
    pairs = int(text["head_dim"] * rotary["partial_rotary_factor"]) // 2
    third = pairs // 3
    sections = [pairs - 2 * third, third, third]  # of time, height and width
    rotary |= {"mrope_section": sections, "mrope_interleaved": True}
    text |= {"mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32"}
    config = getattr(transformers, f"{name}Config")(
        text_config=text,
        vision_config=VISION | {"out_hidden_size": text["hidden_size"]},
        tie_word_embeddings=text["tie_word_embeddings"],
        architectures=[f"{name}ForConditionalGeneration"],
    )
    torch.manual_seed(11)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    tower = {key: value for key, value in model.state_dict().items() if ".visual." in key}
    tensors = load_file(folder / "model.safetensors")
    stored = _fuse(tensors) | tower | {"mtp.fc.weight": torch.randn(4, 8)}
    stored = {key: value.contiguous() for key, value in stored.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)


def load_model(folder: str | Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load a folder by the transformers class that its config.json names."""
    import transformers

    (name,) = json.loads((Path(folder) / "config.json").read_text())["architectures"]
    return getattr(transformers, name).from_pretrained(folder, dtype=dtype).eval()


def _fuse(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    stored, experts = dict[str, Tensor](), dict[str, list[Tensor]]()
    for name in sorted(tensors, key=lambda name: [*map(int, re.findall(r"\d+", name))]):
        place = re.sub(r"^model\.", "model.language_model.", name)
        if match := EXPERT.fullmatch(place):
            experts.setdefault(f"{match[1]}.{match[2]}", []).append(tensors[name])
        else:
            stored[place] = tensors[name]
    whole = {name: torch.stack(each) for name, each in experts.items()}
    for name in [name for name in whole if name.endswith(".gate")]:
        stem = name.removesuffix(".gate")
        stored[f"{stem}.gate_up_proj"] = torch.cat((whole[name], whole[f"{stem}.up"]), dim=1)
        stored[f"{stem}.down_proj"] = whole[f"{stem}.down"]
    return stored
