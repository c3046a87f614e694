"""`lora-merge load` and `lora-merge unload`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import torch

from ..bench.options import device
from .output import add_cache, add_json, add_pause, add_url, tell

if TYPE_CHECKING:
    from ..engine.push.replica import SyncReport


def add_load(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument("adapter", metavar="ADAPTER", help="folder that PEFT has saved, with adapter_config.json")
    parser.add_argument(
        "--base",
        help="folder or hub name of the model that the adapter was trained on and the server serves (default: the one "
        "that adapter_config.json names); only its configuration is read, and for DoRA its weights",
    )
    parser.add_argument(
        "--name", help="name under which the server reports the adapter with its answers (default: the folder's name)"
    )
    parser.add_argument(
        "--device",
        type=device,
        default=torch.device("cpu"),
        help="device from which the adapter is sent: cpu, or cuda for CUDA IPC or NCCL (default: cpu)",
    )
    parser.add_argument("--verify", action="store_true", help="compare checksums of the adapter after the transfer")
    add_cache(parser)
    add_pause(parser)
    add_json(parser)


def add_unload(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    add_pause(parser)
    add_json(parser)


def load(options: argparse.Namespace) -> int:
    from ..serve import load_adapter

    report = load_adapter(
        options.url,
        options.adapter,
        base=options.base,
        name=options.name,
        device=options.device,
        pause=options.pause,
        cache=options.cache,
        verify=options.verify,
    )
    return _told(options, report, f"{options.url} serves {options.name or options.adapter}")


def unload(options: argparse.Namespace) -> int:
    from ..serve import unload_adapter

    return _told(options, unload_adapter(options.url, pause=options.pause), f"{options.url} serves its base")


def _told(options: argparse.Namespace, report: SyncReport, words: str) -> int:
    seconds = sum(report.seconds.values())
    still = seconds - report.seconds.get("check", 0.0)
    crossed = f"{report.nbytes / 1e6:.1f} MB, " if report.nbytes else ""
    waited = f"{crossed}{seconds:.2f} s, {still:.2f} of which requests waited"
    tell(options, f"{words} ({report.mode}@{report.version}): {waited}", report)
    return 0
