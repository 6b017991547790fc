"""Rollout time: this engine against bare vLLM with the same requests.

    PYTHONPATH=. OMP_NUM_THREADS=1 python tools/benchmarks/rollout.py [--rounds 9] [--model FOLDER]

Both run vLLM in one process each, with the same model, prompts, seeds and engine arguments. They
alternate, the first round is a warm-up, and both must generate the same tokens. Bare vLLM is
`LLM.generate` without text. This engine's time includes everything that training waits for:
requests with seeds, the time limit, detokenization and the exchange between ranks.
"""

import argparse
import multiprocessing
import statistics
import time
from pathlib import Path

SEED = 11


def load(arguments):
    """Return the prompts and the sampling parameters of the rollout."""
    from megatron_rl.data.prompts import load_prompts
    from megatron_rl.data.tokenizer import load_tokenizer
    from megatron_rl.types import SamplingSettings

    tokenizer = load_tokenizer(arguments.model)
    prompts = load_prompts(arguments.data, tokenizer, max_prompt_tokens=arguments.prompt_tokens)
    sampling = SamplingSettings(
        temperature=1.0, top_p=1.0, max_tokens=arguments.max_tokens, seed=SEED
    )
    return prompts[: arguments.prompts], sampling


def make_ours(arguments):
    """Return a function that generates with this engine and returns token ids."""
    import torch
    from safetensors.torch import load_file

    from megatron_rl.actor import groups
    from megatron_rl.data.tokenizer import load_tokenizer
    from megatron_rl.engine.vllm_engine import VllmEngine

    prompts, sampling = load(arguments)
    engine = VllmEngine(
        arguments.model,
        tokenizer=load_tokenizer(arguments.model),
        tensor=1,
        topology=groups.initialise(),
        dtype=torch.float32,
        max_model_len=arguments.prompt_tokens + arguments.max_tokens,
        kv_cache_bytes=64 << 20,
    )
    files = Path(arguments.model).glob("*.safetensors")
    engine.receive((item for file in files for item in load_file(file).items()), version=0)

    def generate():
        responses = engine.generate(prompts, samples=arguments.samples, sampling=sampling)
        return [response.token_ids.tolist() for response in responses]

    return generate


def make_bare(arguments):
    """Return a function that generates with bare vLLM and returns token ids."""
    import os

    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCHDYNAMO_DISABLE": "1",
    }
    import torch
    from vllm import LLM

    from megatron_rl.engine.requests import sampling_requests
    from megatron_rl.engine.stopping import find_stop_rule

    threads = torch.get_num_threads()
    prompts, sampling = load(arguments)
    llm = LLM(
        arguments.model,
        skip_tokenizer_init=True,
        dtype="float32",
        logprobs_mode="processed_logprobs",
        max_model_len=arguments.prompt_tokens + arguments.max_tokens,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=64 << 20,
        enforce_eager=True,
        block_size=32,
        enable_chunked_prefill=False,
    )
    torch.set_num_threads(threads)
    requests = sampling_requests(
        [(place, prompt, sampling) for place, prompt in enumerate(prompts)],
        samples=arguments.samples,
        stop=find_stop_rule(arguments.model, None, vocab_size=llm.model_config.get_vocab_size()),
    )
    texts = [{"prompt_token_ids": list(request.token_ids)} for request in requests]
    params = [request.params for request in requests]

    def generate():
        llm.reset_prefix_cache()
        outputs = llm.generate(texts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


def serve(make, arguments, pipe):
    """Serve timed rollouts on request, in a separate process."""
    generate = make(arguments)
    pipe.send("ready")
    while pipe.recv():
        start, cpu = time.perf_counter(), time.process_time()
        tokens = generate()
        pipe.send((time.perf_counter() - start, time.process_time() - cpu, tokens))


def main():
    """Print every round and the ratio of the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=".cache/tiny_task/model")
    parser.add_argument("--data", default=".cache/tiny_task/train.parquet")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=56)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    pipes = {}
    for name, make in (("ours", make_ours), ("bare", make_bare)):
        pipes[name], end = context.Pipe()
        context.Process(target=serve, args=(make, arguments, end), daemon=True).start()
        assert pipes[name].recv() == "ready"
    seconds, cpu = {name: [] for name in pipes}, {name: [] for name in pipes}
    for number in range(arguments.rounds + 1):
        printed = {}
        for name in sorted(pipes, reverse=number % 2 == 1):
            pipes[name].send(True)
            taken, worked, printed[name] = pipes[name].recv()
            if number:
                seconds[name].append(taken)
                cpu[name].append(worked)
        assert printed["ours"] == printed["bare"], "the two did not generate the same tokens"
    tokens = sum(map(len, printed["ours"]))
    for name, times in seconds.items():
        print(
            f"{name}: median {statistics.median(times):.3f} s of {len(times)} rounds "
            f"({min(times):.3f} to {max(times):.3f}; {statistics.median(cpu[name]):.3f} s of "
            f"processor time), {tokens} tokens, "
            f"{tokens / statistics.median(times):,.0f} tokens/s"
        )
    for what, table in (("seconds", seconds), ("processor seconds", cpu)):
        ratio = statistics.median(table["ours"]) / statistics.median(table["bare"])
        pairs = [a / b for a, b in zip(table["ours"], table["bare"], strict=True)]
        print(
            f"ours / bare, {what}: {ratio:.3f} "
            f"(of each round's pair {min(pairs):.3f} to {max(pairs):.3f})"
        )
    for pipe in pipes.values():
        pipe.send(False)


if __name__ == "__main__":
    main()
