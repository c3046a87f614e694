"""Versions published for an hour, a hundred a minute, to a real vLLM server on a CPU that answers all the time.

    python benchmarks/soak.py --json soak-cpu.json                 # an hour; an engine that follows by itself
    python benchmarks/soak.py --beside --interval 0.2              # and by `lora-merge follow` beside it
    python benchmarks/soak.py --minutes 0.5 --every 5              # a smoke test

A `Publisher` publishes a few tiny policies in turn into a folder. Clients ask, greedily; each token of each answer has
to have the log-prob of the version that the answer names for it (`weight_versions`), as transformers computes it, and
to be the most likely one there. Every `--every` seconds something happens, in turn: a torn version and a copied one lie
in the store (refused by name), a rollback to the pinned version, and what follows is killed (SIGKILL: the process
beside, or the whole engine) and started anew. Each minute is a point of the record: versions published and switched to,
answers, how long they took; memory (what processes share counted once), open files and threads of publisher (with the
clients), engine and follower; files and bytes in the store, and files that killed processes have left.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import served
import torch

from lora_merge import Publisher
from lora_merge.bench import report
from lora_merge.publish.store import Store

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
POLICIES = 3
KEEP = 4
LENGTHS = (8, 24, 48)
"""Tokens of an answer."""
TOLERANCE = 1e-3
"""Of a log-prob: both sides compute in float32, in another order."""
REMEMBERED = 1000
"""Versions whose policy is known; an answer of an older one is strange."""


class Policies:
    """A few policies of one base: what is published in turn, and what each would answer."""

    def __init__(self) -> None:
        import models  # type: ignore[import-not-found]
        import policies  # type: ignore[import-not-found]

        self.all = [models.with_lora(policies.qwen2, target_modules=policies.LINEARS) for _ in range(POLICIES + 1)]
        for seed, policy in enumerate(self.all):
            policies.train(policy, seed, 0.2)
        self.trained = self.all.pop()  # what the publisher has
        self.prompts: list[list[int]] = policies.prompts()
        self.save_base = policies.save_base
        self.table = functools.lru_cache(256)(self._table)

    def become(self, number: int) -> None:
        """Have the trained model be one of the policies."""
        with torch.no_grad():
            for mine, other in zip(self.trained.parameters(), self.all[number].parameters(), strict=True):
                mine.copy_(other)

    def _table(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> torch.Tensor:
        """Log-prob of each token of an answer, and of the most likely one there, by each policy: [policies, 2, T]."""
        with torch.no_grad():
            ids = torch.tensor([prompt + answer])
            logits = torch.cat([policy(ids).logits[:, len(prompt) - 1 : -1] for policy in self.all])
        logs = logits.float().log_softmax(-1)
        return torch.stack([logs[:, range(len(answer)), answer], logs.amax(-1)], 1)


class Soak:
    """What runs, and what has been counted."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder, self.url = args, folder, folder / "run"
        self.policies, self.store = Policies(), Store(self.url)
        self.policies.save_base(self.policies.trained.get_base_model(), folder / "base")
        self.publisher = Publisher(self.policies.trained, self.url, keep=KEEP)
        self.named: dict[str, int] = {}  # version -> policy
        self.counts, self.waits = Counter[str](), list[float]()
        self.worst_s, self.largest, self.strange, self.events = 0.0, 0.0, list[str](), list[dict[str, Any]]()
        self.stop, self.down, self.lock = threading.Event(), threading.Event(), threading.Lock()
        self.versions, self.newest = 0, ""
        self.engine: subprocess.Popen[bytes] | None = None
        self.follower: subprocess.Popen[bytes] | None = None
        self.port = served.free_port()

    # ---- processes ---------------------------------------------------------------------------------------------------

    def _start(self, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        kept = self.folder / "tmp"
        kept.mkdir(exist_ok=True)
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *command],
                env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(kept)} | environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def start_engine(self) -> None:
        """Start vLLM's server, and wait until it answers."""
        flags = ["--enforce-eager", "--skip-tokenizer-init", "--max-model-len", "64", "--dtype", "float32"]
        flags += ["--enable-scale-out", "--max-num-seqs", "8"]
        environment = {"VLLM_SERVER_DEV_MODE": "1"} if self.args.beside else {"LORA_MERGE_FOLLOW": str(self.url)}
        self.engine = self._start(*served.command(self.folder / "base", self.port, flags), **environment)
        self.until(self.is_up)

    def start_follower(self) -> None:
        interval = ("--interval", str(self.args.interval), "--base", str(self.folder / "base"))
        self.follower = self._start("lora_merge", "follow", f"http://127.0.0.1:{self.port}", str(self.url), *interval)

    def is_up(self) -> bool:
        assert self.engine is not None
        if self.engine.poll() is not None:
            raise SystemExit("the engine has ended:\n" + self.log_tail())
        return served.is_up(f"http://127.0.0.1:{self.port}")

    def log_tail(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-3000:]

    def until(self, what: Callable[[], Any], seconds: float = 300) -> float:
        """Wait for something; return for how long."""
        begin = time.monotonic()
        while not what():
            if time.monotonic() > begin + seconds:
                raise SystemExit(f"it takes longer than {seconds} s; {self.store.engines()}\n{self.log_tail()}")
            time.sleep(0.05)
        return time.monotonic() - begin

    def served(self) -> str:
        """Version that an engine said last that it serves."""
        said = max(self.store.engines().values(), key=lambda one: str(one.get("at", "")), default={})
        return str(said.get("serves", ""))

    def refused(self) -> str:
        return " ".join(str(said.get("error", "")) for said in self.store.engines().values())

    def end(self) -> None:
        self.stop.set()
        for process in (self.follower, self.engine):
            if process is not None:
                served.stop(process)

    # ---- what is published -------------------------------------------------------------------------------------------

    def note(self, name: str, policy: int) -> None:
        self.newest, self.versions = name, self.versions + 1
        self.named[name] = policy
        if len(self.named) > REMEMBERED:
            del self.named[next(iter(self.named))]

    def publish(self, pin: bool = False) -> None:
        policy = 0 if pin else self.versions % POLICIES
        self.policies.become(policy)
        self.note(self.publisher.publish(pin=pin).name, policy)

    def event(self, turn: int) -> None:
        """Let something happen; return when the engine is at the newest version again, or has refused one."""
        what = (self._torn, self._copied, self._rollback, self._kill)[turn % 4]
        begin = time.monotonic()
        said = what()
        done = {"event": what.__name__.strip("_"), "seconds": round(time.monotonic() - begin, 2), "said": said}
        self.events.append(done)
        print(f"  {done}", flush=True)

    def _newest_copied(self) -> tuple[int, Path]:
        versions, last = self.url / "versions", self.store.numbers()[-1]
        return last + 1, Path(shutil.copytree(versions / f"{last:08d}", versions / f"{last + 1:08d}.draft"))

    def _lies_there(self, number: int, draft: Path, why: str) -> str:
        """Have a wrong version lie in the store until the follower says why it is refused."""
        draft.rename(draft.with_suffix(""))
        self.until(lambda: f"version {number} " in self.refused() and why in self.refused())
        self.until(lambda: self.served() == self.newest)
        return why

    def _torn(self) -> str:
        number, draft = self._newest_copied()
        said = json.loads((draft / "manifest.json").read_text())
        (draft / "manifest.json").write_text(json.dumps(said | {"version": number}))
        tensors = draft / "adapter_model.safetensors"
        tensors.write_bytes(tensors.read_bytes()[:-1])
        return self._lies_there(number, draft, "manifest")

    def _copied(self) -> str:
        return self._lies_there(*self._newest_copied(), "somebody has copied it")

    def _rollback(self) -> str:
        self.note(self.publisher.rollback(1).name, 0)
        self.until(lambda: self.served() == self.newest)
        versions = self.ask(self.policies.prompts[0], LENGTHS[0])
        if versions != [self.newest]:
            self.strange.append(f"{versions} answers after a rollback to {self.newest}")
        return self.newest

    def _kill(self) -> str:
        killed = self.follower or self.engine
        assert killed is not None
        self.down.set()
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
        self.publish()
        if self.args.beside:
            self.start_follower()
        else:
            self.start_engine()
        self.until(lambda: self.served() == self.newest)
        self.down.clear()
        return "the follower" if self.args.beside else "the engine"

    # ---- what is answered --------------------------------------------------------------------------------------------

    def ask(self, prompt: list[int], length: int) -> list[str]:
        """Ask, check each token of the answer, and return the versions that it names."""
        sampling = {"temperature": 0, "max_tokens": length, "ignore_eos": True, "logprobs": 1}
        body = json.dumps({"token_ids": prompt, "sampling_params": sampling}).encode()
        kind, begin = {"Content-Type": "application/json"}, time.monotonic()
        url = f"http://127.0.0.1:{self.port}/inference/v1/generate"
        with urllib.request.urlopen(urllib.request.Request(url, body, kind), timeout=300) as response:
            (choice,) = json.loads(response.read())["choices"]
        seconds, spans = time.monotonic() - begin, choice["weight_versions"]
        problem = self.check(prompt, length, choice)
        with self.lock:
            self.counts += Counter(answers=1, over_a_switch=len(spans) > 1)
            self.waits.append(seconds)
            self.worst_s = max(self.worst_s, seconds)
            if problem:
                self.strange.append(f"{problem}: {spans}"[:2000])
        return [span["version"] for span in spans]

    def check(self, prompt: list[int], length: int, choice: dict[str, Any]) -> str:
        """Return what is wrong with an answer; "" for nothing."""
        tokens, spans = tuple(choice["token_ids"]), choice["weight_versions"]
        if len(tokens) != length:
            return f"{len(tokens)} tokens of {length}"
        said = torch.tensor([one["top_logprobs"][0]["logprob"] for one in choice["logprobs"]["content"]])
        logs, wanted, apart = self.policies.table(tuple(prompt), tokens), torch.full((2, length), torch.nan), 0
        for span in spans:
            here = slice(span["start"], span["end"])
            policy = self.policy_of(span["version"])
            if policy is None:
                return f"{span['version']} is no version of late"
            wanted[:, here] = logs[policy, :, here]
            others = logs[[one for one in range(POLICIES) if one != policy], 0, here]
            apart += int((others - said[here]).abs().gt(TOLERANCE).all(0).sum())
        off = (wanted - said).abs().max().item()
        if not off < TOLERANCE:  # nan: no span names a token
            return f"log-probs {said.tolist()}, wanted {wanted.tolist()}, of {tokens}"
        with self.lock:
            self.counts += Counter(tokens=length, told_apart=apart)
            self.largest = max(self.largest, off)
        return ""

    def policy_of(self, version: str) -> int | None:
        """Return which policy a version is; it may be served a moment before `publish` returns here."""
        for _ in range(100):
            if version in self.named:
                return self.named[version]
            time.sleep(0.05)
        return None

    def keep_asking(self, number: int) -> None:
        turn = number
        while not self.stop.is_set():
            turn += 1
            try:
                self.ask(self.policies.prompts[turn % 4], LENGTHS[turn % len(LENGTHS)])
            except OSError as error:
                if self.args.beside or not self.down.is_set():  # else the engine was killed
                    self.strange.append(f"no answer: {error}")
                time.sleep(0.2)
            except Exception as error:
                self.strange.append(f"no answer: {type(error).__name__}: {error}")
                self.stop.set()

    # ---- what it takes -----------------------------------------------------------------------------------------------

    def point(self, begin: float) -> dict[str, Any]:
        """What a minute has brought, and what is held at its end."""
        with self.lock:
            waits, self.waits = sorted(self.waits) or [0.0], []
            counts = dict(self.counts)
        files = [path for path in self.url.rglob("*") if path.is_file()]
        held = {"publisher": of_processes([os.getpid()])}
        for name, process in (("engine", self.engine), ("follower", self.follower)):
            if process is not None:
                held[name] = of_processes(session(process.pid))
        return {
            "minutes": round((time.monotonic() - begin) / 60, 2),
            "published": self.versions,
            "switched": self.switches(),
            **counts,
            "strange": len(self.strange),
            "answer_ms": [round(1e3 * statistics.median(waits), 1), round(1e3 * waits[-1], 1)],
            **held,
            "store_files": len(files),
            "store_bytes": sum(path.stat().st_size for path in files if path.exists()),
            "left_over": len(list((self.folder / "tmp").iterdir())),
        }

    def switches(self) -> int:
        """Versions that a follower has said to be served."""
        with (self.folder / "log").open("rb") as log:
            return sum(b" serves " in line and b" of which requests waited" in line for line in log)

    def run(self, record: dict[str, Any]) -> None:
        args = self.args
        self.publish(pin=True)
        self.start_engine()
        if args.beside:
            self.start_follower()
            self.until(lambda: self.served() == self.newest)
        for prompt in self.policies.prompts:  # the first answers take longest
            self.ask(prompt, LENGTHS[-1])
        self.waits, self.worst_s = [], 0.0
        asking = [threading.Thread(target=self.keep_asking, args=(number,)) for number in range(args.clients)]
        for thread in asking:
            thread.start()
        begin, turn, points = time.monotonic(), 0, record["points"]
        sample = min(60.0, 10 * args.minutes)
        try:
            while (now := time.monotonic() - begin) < 60 * args.minutes and not self.stop.is_set():
                if now > args.every * (turn + 1):
                    self.event(turn)
                    turn += 1
                if now > sample * (len(points) + 1):
                    points.append(self.point(begin))
                    print(json.dumps(points[-1]), flush=True)
                    self.summarize(record)
                self.publish()
                time.sleep(max(0.0, begin + 60 / args.per_minute * self.versions - time.monotonic()))
            self.until(lambda: self.served() == self.newest)
        finally:
            self.stop.set()
            for thread in asking:
                thread.join()
        points.append(self.point(begin))
        self.summarize(record)

    def summarize(self, record: dict[str, Any]) -> None:
        record |= {
            "worst_answer_ms": round(1e3 * self.worst_s, 1),
            "largest_difference": self.largest,
            "strange": self.strange[:20],
            "events": self.events,
        }
        report.save(record, self.args.json)


def session(leader: int) -> list[int]:
    """The processes that a command has started, and itself."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if os.getsid(int(folder.name)) == leader:
                found.append(int(folder.name))
    return found


def of_processes(ids: Sequence[int]) -> dict[str, float]:
    """Memory, open files and threads of processes; what several share counted once."""
    found = Counter[str](processes=0, mb=0, files=0, threads=0)
    for process in ids:
        with suppress(OSError):
            folder = Path("/proc", str(process))
            rows = (folder / "smaps_rollup").read_text().splitlines()
            pss = sum(int(row.split()[1]) for row in rows if row.startswith("Pss:"))
            files, threads = (len(list((folder / what).iterdir())) for what in ("fd", "task"))
            found += Counter(processes=1, kb=pss, files=files, threads=threads)
    return {"mb": round(found.pop("kb", 0) / 1024, 1), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="default %(default)s")
    parser.add_argument("--per-minute", type=float, default=100.0, help="versions (default %(default)s)")
    parser.add_argument("--clients", type=int, default=2, help="default %(default)s")
    parser.add_argument("--every", type=float, default=150.0, help="seconds between two events (default %(default)s)")
    parser.add_argument("--beside", action="store_true", help="`lora-merge follow` instead of LORA_MERGE_FOLLOW")
    parser.add_argument("--interval", type=float, default=1.0, help="its seconds between two looks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING"}
    record: dict[str, Any] = report.provenance(torch.device("cpu")) | {
        key: getattr(args, key) for key in ("minutes", "per_minute", "clients", "every", "beside", "interval")
    }
    record["points"] = []
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(args, Path(folder))
        try:
            soak.run(record)
        finally:
            soak.end()
    last = record["points"][-1]
    print(f"{last['published']} versions, {last['switched']} switches, {last['answers']} answers")
    if soak.strange:
        sys.exit(f"{len(soak.strange)} are strange, the first: {soak.strange[0]}")


if __name__ == "__main__":
    main()
