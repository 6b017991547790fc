"""Tokenizer folders in the forms of published models, with vocabularies of a few hundred pieces."""

import base64
import json

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXT = ["hello world, how are you? don't 1234 def f(x): return x\n\tGröße 你好"] * 3
WORDS = (  # of Llama 3, without its rules for spaces
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"
)
BOS, EOS, TURN = "<|begin|>", "<|end|>", "<|turn|>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>{% endif %}"
)


def byte_level(*, adds_bos=False, pieces=300):
    """BPE of bytes, as of Qwen, Llama 3, DeepSeek, GLM, gpt-oss and Mistral's tekken.

    pieces: number of tokens but for the three special ones.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=pieces, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return _with_special(tokenizer, adds_bos=adds_bos)


def metaspace(*, prefix):
    """BPE of characters with bytes for unknown ones, as of Llama 2, Mistral 7B and Gemma.

    prefix: whether a text starts with a space of its own, as in Llama 2 and Mistral.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    space = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * prefix)
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=pieces, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    saved = json.loads(tokenizer.to_str())  # bytes are pieces, but no special tokens
    saved["added_tokens"] = saved["added_tokens"][:1]
    return _with_special(Tokenizer.from_str(json.dumps(saved)), adds_bos=True)


def _with_special(tokenizer, *, adds_bos):
    tokens = [AddedToken(token, normalized=False) for token in (BOS, EOS, TURN)]
    tokenizer.add_special_tokens(tokens)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
        )
    return tokenizer


def write_folder(folder, tokenizer, *, model_type, **settings):
    """Write config.json, tokenizer_config.json and tokenizer.json, unless `tokenizer` is None."""
    folder.mkdir(exist_ok=True)
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    settings = {"bos_token": BOS, "eos_token": EOS, "chat_template": TEMPLATE} | settings
    settings = {key: value for key, value in settings.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_tekken(folder):
    """Mistral's own format of a tokenizer, which Mistral publishes next to tokenizer.json."""
    vocabulary = [
        {"rank": byte, "token_bytes": base64.b64encode(bytes([byte])).decode(), "token_str": None}
        for byte in range(256)
    ]
    settings = {
        "pattern": WORDS, "num_vocab_tokens": 256, "default_vocab_size": 259,
        "default_num_special_tokens": 3, "version": "v3",
    }  # fmt: skip
    (folder / "tekken.json").write_text(json.dumps({"config": settings, "vocab": vocabulary}))


CODE = """
import re
from transformers import PreTrainedTokenizer
from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode  # moved in transformers 5
from .pieces import read


class TikTokenTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file, added_tokens_decoder, **settings):
        self.ranks = read(vocab_file)
        self.letters = bytes_to_unicode()
        names = ["".join(self.letters[byte] for byte in piece) for piece in self.ranks]
        self.special = {str(token): number for number, token in added_tokens_decoder.items()}
        self.encoder = dict(zip(names, self.ranks.values())) | self.special
        self.names = {number: name for name, number in self.encoder.items()}
        super().__init__(added_tokens_decoder=added_tokens_decoder, **settings)

    @property
    def vocab_size(self):
        return len(self.ranks)

    def get_vocab(self):
        return dict(self.encoder)

    def _tokenize(self, text, **settings):
        tokens = []
        for word in re.findall(r"\\w+'t|.", text, re.DOTALL):  # keeps don't whole
            data = word.encode()
            pieces = [data] if data in self.ranks else [bytes([byte]) for byte in data]
            tokens += ["".join(self.letters[byte] for byte in piece) for piece in pieces]
        return tokens

    def _convert_token_to_id(self, token):
        return self.encoder[token]

    def _convert_id_to_token(self, number):
        return self.names[number]

    def convert_tokens_to_string(self, tokens):
        back = {letter: byte for byte, letter in self.letters.items()}
        return bytes(back[letter] for letter in "".join(tokens)).decode("utf-8", "replace")
"""
PIECES = """
import base64


def read(file):
    lines = open(file, "rb").read().splitlines()
    return {base64.b64decode(piece): int(rank) for piece, rank in map(bytes.split, lines)}
"""


def write_tiktoken(folder, **settings):
    """Folder in the form of Moonlight and Kimi: ranks of pieces, and code that splits texts."""
    pieces = [bytes([byte]) for byte in range(256)] + [b"don't"]
    lines = (base64.b64encode(piece) + b" %d\n" % rank for rank, piece in enumerate(pieces))
    special = {"lstrip": False, "normalized": False, "rstrip": False, "special": True}
    added = {
        str(257 + number): {"content": token} | special
        for number, token in enumerate((BOS, EOS, TURN))
    }
    settings = {
        "tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added,
        "additional_special_tokens": [TURN],
        "auto_map": {"AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", None]},
    } | settings  # fmt: skip
    write_folder(folder, None, model_type="deepseek_v3", **settings)
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    (folder / "tokenization_moonshot.py").write_text(CODE)
    (folder / "pieces.py").write_text(PIECES)
    return folder
