"""A merged checkpoint on disk: `lora-merge merge`, and `save_merged` of a live model, beside PEFT's
merge_and_unload().save_pretrained(), and a copy.

Random weights in a known model's shapes and an adapter on all of its linear layers are written shard by shard. Each way
then runs in a process of its own, of which the memory is watched, with nothing of the base in the system's cache, until
everything is on the disk. Those that load the model first say how long saving it alone took, and what memory they had
before. Before and after, the bytes of the result are written plainly, and the base is copied. With --nf4 the base lies
in codes of 4 bits, as bitsandbytes has them; PEFT would quantise the sum again.

    python benchmarks/save.py --shape qwen2.5-1.5b --json out.json
    python benchmarks/save.py --shape qwen2.5-7b --ours --json out.json
    python benchmarks/save.py --shape qwen2.5-7b --nf4 --json out.json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lora_merge.bench import report
from lora_merge.saving.chunks import CHUNK
from lora_merge.saving.format import as_bytes
from lora_merge.saving.writer import Writer, shards_of
from lora_merge.stream.buckets import Meta

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "vocab_size": 256},
    "qwen2.5-0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    | {"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "qwen2.5-1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
    | {"num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "qwen2.5-7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
    | {"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064},
}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LIVE = """
import json, os, sys, time
from peft import PeftModel
from transformers import AutoModelForCausalLM
import lora_merge
base, adapter, out = sys.argv[1:]
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), adapter)
with open("/proc/self/status") as status:
    held = next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))
begin = time.perf_counter()
{save}
for name in os.listdir(out):
    descriptor = os.open(os.path.join(out, name), os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
print(json.dumps({{"seconds_of_saving": time.perf_counter() - begin, "loaded_anonymous_bytes": held}}))
"""
SAVES = {
    "save_merged": "lora_merge.save_merged(model, out)",
    "save_merged, verify": "lora_merge.save_merged(model, out, verify=True)",
    "peft": "model.merge_and_unload().save_pretrained(out)",
}
"""Ways to save a live model."""


def metas(shape: str) -> tuple[Any, list[Meta]]:
    """The config and the tensors of a model of this shape, in bf16."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**SIZES[shape], dtype="bfloat16", architectures=["Qwen2ForCausalLM"])
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    tied = set(model._tied_weights_keys or ()) if config.tie_word_embeddings else set()
    named = [(name, t) for name, t in model.state_dict().items() if name not in tied]
    return config, [Meta(name, torch.bfloat16, tuple(t.shape)) for name, t in named]


def in_codes(tensors: list[Meta]) -> tuple[list[Meta], dict[str, torch.Tensor]]:
    """Linear layers as bitsandbytes has them in NF4; and the tensors of these that are no random bytes."""
    code = torch.tensor([-1 + n / 7.5 for n in range(16)])  # any codebook is decoded alike
    held: list[Meta] = []
    known: dict[str, torch.Tensor] = {}
    for wanted in tensors:
        if not wanted.name.removesuffix(".weight").endswith(TARGETS) or len(wanted.shape) != 2:
            held.append(wanted)
            continue
        count = torch.Size(wanted.shape).numel()
        held.append(Meta(wanted.name, torch.uint8, (count // 2, 1)))
        said = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(wanted.shape)}
        known[f"{wanted.name}.absmax"] = torch.full((count // 64,), 0.05)
        known[f"{wanted.name}.quant_map"] = code
        state = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
        known[f"{wanted.name}.quant_state.bitsandbytes__nf4"] = state
    return held + [Meta(name, t.dtype, tuple(t.shape)) for name, t in known.items()], known


def write_base(folder: Path, shape: str, nf4: bool) -> None:
    """Random weights: chunks of normal numbers out of a few that were drawn, which are as good as any codes."""
    config, tensors = metas(shape)
    known: dict[str, torch.Tensor] = {}
    torch.manual_seed(0)
    blocks = [(torch.randn(CHUNK // 2) * 0.02).bfloat16() for _ in range(4)]
    if nf4:
        tensors, known = in_codes(tensors)
    shards = shards_of(tensors, 4 * 10**9)
    said = json.loads(config.to_json_string())
    if nf4:
        said["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with Writer(
        folder, shards, metadata={"format": "pt"}, index={} if len(shards) > 1 else None, config=said
    ) as writer:
        number = 0
        for wanted in tensors:
            size = writer.places[wanted.name].nbytes
            if wanted.name in known:
                writer.write(wanted.name, 0, as_bytes(known[wanted.name]))
                continue
            for begin in range(0, size, CHUNK):
                writer.write(wanted.name, begin, as_bytes(blocks[number % 4])[: min(CHUNK, size - begin)])
                number += 1


def write_adapter(folder: Path, base: Path, shape: str, rank: int) -> None:
    """A LoRA adapter on every linear layer, in float32 as PEFT trains it."""
    from peft import LoraConfig
    from safetensors.torch import save_file

    torch.manual_seed(1)
    tensors = {}
    for name, _, size in metas(shape)[1]:
        module = name.removesuffix(".weight")
        if module.endswith(TARGETS) and len(size) == 2:
            key = f"base_model.model.{module}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, size[1]) / size[1] ** 0.5
            tensors[f"{key}.lora_B.weight"] = torch.randn(size[0], rank) * 0.01
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(TARGETS), base_model_name_or_path=str(base))
    config.task_type = "CAUSAL_LM"
    config.save_pretrained(str(folder))


def forget(folder: Path) -> None:
    """Nothing of a folder's files stays in the system's cache."""
    for file in sorted(folder.iterdir()):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def watched(command: list[str], out: Path) -> dict[str, Any]:
    """Run a command; seconds until all that it wrote is on the disk, seconds of a processor (which other work on the
    machine changes less), and its memory."""
    used = _processor()
    begin = time.perf_counter()
    anonymous, resident = 0, 0
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        while process.poll() is None:
            for field, value in _status(process.pid):
                anonymous = max(anonymous, value if field == "RssAnon" else 0)
                resident = max(resident, value if field == "VmHWM" else 0)
            time.sleep(0.02)
        ended = time.perf_counter() - begin
        told = process.communicate()[0].strip()
        if process.returncode:
            errors.seek(0)
            raise SystemExit(f"{command} failed:\n{errors.read()}")
    for file in sorted(out.rglob("*")):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return {
        "seconds": time.perf_counter() - begin,
        "seconds_of_process": ended,
        "processor_seconds": _processor() - used,
        "peak_rss_bytes": resident,
        "peak_anonymous_bytes": anonymous,
        **(json.loads(told.splitlines()[-1]) if told.endswith("}") else {}),
    }


def _processor() -> float:
    """Seconds that processes which have ended took."""
    told = resource.getrusage(resource.RUSAGE_CHILDREN)
    return told.ru_utime + told.ru_stime


def _status(pid: int) -> Iterator[tuple[str, int]]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return
    for line in lines:
        field, _, value = line.partition(":")
        if field in ("VmHWM", "RssAnon"):
            yield field, int(value.split()[0]) * 1024


def plain_write(folder: Path, nbytes: int) -> float:
    """Seconds in which the disk takes this many bytes, written in chunks and brought there as ours are."""
    block = os.urandom(CHUNK)
    file = folder / "plain"
    begin = time.perf_counter()
    with file.open("wb", buffering=0) as opened:
        for at in range(0, nbytes, CHUNK):
            opened.write(block[: min(CHUNK, nbytes - at)])
            if at // CHUNK % 8 == 7:
                os.fdatasync(opened.fileno())
        os.fsync(opened.fileno())
    seconds = time.perf_counter() - begin
    file.unlink()
    return seconds


def plain_copy(base: Path, to: Path) -> float:
    """Seconds in which the base's files are copied, read from the disk and brought back to it."""
    forget(base)
    begin = time.perf_counter()
    shutil.copytree(base, to)
    for file in sorted(to.iterdir()):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    seconds = time.perf_counter() - begin
    shutil.rmtree(to)
    return seconds


def plain_bytes(shape: str) -> int:
    """Of all tensors of the merged checkpoint."""
    return sum(torch.Size(wanted.shape).numel() * wanted.dtype.itemsize for wanted in metas(shape)[1])


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Every way, on the same base."""
    base, adapter, out = folder / "base", folder / "adapter", folder / "out"
    write_base(base, args.shape, args.nf4)
    write_adapter(adapter, base, args.shape, args.rank)
    nbytes = sum(file.stat().st_size for file in base.iterdir())
    ours = [sys.executable, "-m", "lora_merge", "merge", str(base), str(adapter), "--out", str(out)]
    ways = {"lora-merge merge": ours, "lora-merge merge --verify": [*ours, "--verify"]}
    if not args.ours and not args.nf4:
        ways |= {
            way: [sys.executable, "-c", LIVE.format(save=save), str(base), str(adapter), str(out)]
            for way, save in SAVES.items()
        }
    # What the disk takes: of a base in codes the result, which is larger.
    writes, copies = [plain_write(folder, plain_bytes(args.shape))], [plain_copy(base, folder / "copy")]
    measured = {}
    for name, command in ways.items():
        forget(base)
        forget(adapter)
        measured[name] = watched(command, out)
        shutil.rmtree(out)
        print(name, {key: round(value, 2) for key, value in measured[name].items()}, flush=True)
    writes.append(plain_write(folder, plain_bytes(args.shape)))
    copies.append(plain_copy(base, folder / "copy"))
    for figures in measured.values():
        figures["of_disk_write"] = min(writes) / figures["seconds"]
        figures["of_disk_copy"] = min(copies) / figures["seconds"]
    return {
        "shape": args.shape,
        "rank": args.rank,
        "bytes": nbytes,
        "bytes_of_result": plain_bytes(args.shape),
        "adapter_bytes": (adapter / "adapter_model.safetensors").stat().st_size,
        "disk_write_s": writes,
        "disk_copy_s": copies,
        "methods": measured,
        **_provenance(),
    }


def _provenance() -> dict[str, Any]:
    """Of a record, without the folder of this machine."""
    told = report.provenance(torch.device("cpu"))
    command: list[str] = told["command"]
    if "--work" in command:
        at = command.index("--work")
        told["command"] = command[:at] + command[at + 2 :]
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SIZES, default="qwen2.5-1.5b", help="default %(default)s")
    parser.add_argument("--rank", type=int, default=32, help="of the adapter (default %(default)s)")
    parser.add_argument("--ours", action="store_true", help="without the ways that hold the model in memory")
    parser.add_argument("--nf4", action="store_true", help="a base in bitsandbytes' codes of 4 bits; implies --ours")
    parser.add_argument("--work", type=Path, help="folder on the disk that is meant; default: that of temporary files")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the figures to this record, by shape")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        record = run(args, Path(folder))
    print(json.dumps(record["methods"], indent=2))
    if args.json:
        known = json.loads(args.json.read_text()) if args.json.exists() else {}
        report.save(known | {f"{args.shape}{' in nf4' if args.nf4 else ''}": record}, args.json)


if __name__ == "__main__":
    main()
