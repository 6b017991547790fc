"""Make a tiny base model with random weights whose tokens are bytes: every alphabet, no training.

python examples/pnpo/make_byte_model.py FOLDER
"""

import sys

from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

pieces = ["<|end|>", *sorted(ByteLevel.alphabet())]
ends = {"unk_token": None, "eos_token": "<|end|>", "pad_token": "<|end|>"}
Qwen2Tokenizer(
    vocab={piece: n for n, piece in enumerate(pieces)}, merges=[], **ends
).save_pretrained(sys.argv[1])
sizes = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
config = Qwen2Config(
    vocab_size=len(pieces),
    max_position_embeddings=512,
    eos_token_id=0,
    tie_word_embeddings=True,
    **sizes,
)
Qwen2ForCausalLM(config).save_pretrained(sys.argv[1])
