"""How a replica is spread, as flags of a serving engine. Checked against the sources of `ENGINE_TITLES` (naming.py):

vLLM        vllm/engine/arg_utils.py, vllm/config/{parallel,scheduler}.py (max_num_seqs is of each data-parallel rank)
SGLang      sglang/srt/arg_groups/fields/parallel.py, parallel_hook.py (tp_size counts all ranks of a stage)
TensorRT-LLM  tensorrt_llm/llmapi/llm_args.py, tensorrt_llm/commands/serve.py
"""

from __future__ import annotations

from magicdec.reports.deployment import Deployment

Words = list[list[str]]


def vllm_words(plan: Deployment, lines: list[str]) -> Words:
    row = plan.candidate
    words = [["--tensor-parallel-size", str(plan.best.tp_size)]]
    if row is None:
        return words
    nodes = row.num_nodes
    if row.pp_size > 1:
        words.append(["--pipeline-parallel-size", str(row.pp_size)])
    if row.ep_size > 1:
        words.append(["--enable-expert-parallel"])
    if row.dp_size > 1:
        words += [["--data-parallel-size", str(row.dp_size)], ["--all2all-backend", "deepep_low_latency"]]
        lines.append("Priced with DeepEP's low-latency kernels, which must be installed beside vLLM.")
    if nodes > 1 and row.dp_size > 1:
        local = -(-row.dp_size // nodes)
        words.append(["--data-parallel-size-local", str(local)])
        lines.append(
            f"{nodes} nodes: run it on the first with --data-parallel-address ADDRESS-OF-THE-FIRST and "
            "--data-parallel-rpc-port PORT; on node R with these, --headless and --data-parallel-start-rank "
            f"{local} x R."
        )
    elif nodes > 1:
        words.append(["--nnodes", str(nodes)])
        lines.append(
            f"{nodes} nodes: run it on each with --node-rank R (0 is the first) and --master-addr "
            "ADDRESS-OF-THE-FIRST; on the others with --headless."
        )
    return words


def sglang_words(plan: Deployment, lines: list[str]) -> Words:
    row = plan.candidate
    if row is None:
        return [["--tp-size", str(plan.best.tp_size)]]
    nodes = row.num_nodes
    words = [["--tp-size", str(row.tp_size * row.dp_size)]]
    if row.pp_size > 1:
        words.append(["--pp-size", str(row.pp_size)])
    if row.dp_size > 1:
        words += [["--dp-size", str(row.dp_size)], ["--enable-dp-attention"], ["--enable-dp-lm-head"]]
        words += [["--moe-dense-tp-size", "1"]] if row.tp_size == 1 else []
        words += [["--moe-a2a-backend", "deepep"], ["--deepep-mode", "auto"]]
        lines.append("--tp-size counts all ranks of a stage here; attention has --tp-size / --dp-size of them.")
    if row.ep_size > 1:
        words.append(["--ep-size", str(row.ep_size)])
    if nodes > 1:
        words.append(["--nnodes", str(nodes)])
        lines.append(
            f"{nodes} nodes: run it on each with --node-rank R (0 is the first) and "
            "--dist-init-addr ADDRESS-OF-THE-FIRST:PORT."
        )
    return words


def trtllm_flags(plan: Deployment, lines: list[str]) -> tuple[str, list[str]]:
    """Flags of trtllm-serve, and lines of its configuration file."""
    row = plan.candidate
    if row is None:
        return f"--tp_size {plan.best.tp_size}", []
    flags = f"--tp_size {row.tp_size * row.dp_size}"
    flags += f" --pp_size {row.pp_size}" if row.pp_size > 1 else ""
    flags += f" --ep_size {row.ep_size}" if row.ep_size > 1 else ""
    body = ["enable_attention_dp: true"] if row.dp_size > 1 else []
    if row.dp_size > 1 and row.tp_size > 1:
        lines.append(
            f"Not supported: groups of {row.tp_size} ranks in attention; each rank will be a group of its own."
        )
    if row.dp_size > 1:
        lines.append("--tp_size counts all ranks of a stage here, and --max_batch_size is of each of them.")
    if row.num_nodes > 1:
        lines.append(
            f"{row.num_nodes} nodes: run it under MPI, as mpirun or srun with one task per GPU: trtllm-llmapi-launch."
        )
    return flags, body
