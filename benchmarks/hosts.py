"""Time of one training step over a slow network between hosts, compared to torch's DDP and FSDP2.

    sudo .venv/bin/python benchmarks/hosts.py --hosts 2 --mbit 100 500

The hosts are namespaces of this machine (`tests/hosts`), each with one rank, which torchrun starts. Each host sends,
and receives, at most `--mbit` Mbit/s. All contenders live in the same ranks and take turns, step by step, as in
`step_time.py`, which does the measuring: read there what is timed and how. Needs root, iproute2 and pytest.

For each network it prints the ratios of medians, and each contender's median in units of the time that the wire needs
alone for what this contender sends: 2 (d-1)/d of the weights' bytes, or 3 (d-1)/d under ZeRO-3. At 1, all computation
is hidden behind the communication.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import step_time
import torch.distributed as dist

import zeroshard

SENDS = {"zero3": 3, "torch FSDP2": 3}
"""Multiples of (d-1)/d of the weights' bytes; of the others, 2."""
TMP = Path("/tmp")
"""On each host, a folder of its own."""
CONTENDERS = ["ddp", "zero1", "zero2", "zero3", "torch DDP", "torch FSDP2"]


def rank_main(options: argparse.Namespace) -> None:
    """In a rank: measure once for each network, as soon as the hosts have it."""
    zeroshard.init(timeout=1800)
    for mbit in options.mbit:
        while not (TMP / f"go-{mbit}").exists():
            time.sleep(0.05)
        rounds = options.warmup + options.steps
        turns = step_time.Turns(options.contenders, rounds, dist.get_world_size(), apart=False)
        result = step_time.measure(dist.get_rank(), options, turns)
        if dist.get_rank() == 0:
            (TMP / "writing").write_text(json.dumps(result))
            (TMP / "writing").rename(TMP / f"result-{mbit}")
        dist.barrier()


def measure_on_hosts(options: argparse.Namespace, arguments: list[str]) -> dict[int, dict[str, Any]]:
    """Mbit/s -> rank 0's results."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.hosts.namespaces import Hosts, what_is_missing

    if missing := what_is_missing():
        raise SystemExit(f"hosts in namespaces need {missing}")
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={options.hosts}", "--nproc-per-node=1"]
    launcher += ["--rdzv-backend=c10d", "--rdzv-endpoint=node0:29400", "--rdzv-id=run", __file__, "--as-rank"]
    with Hosts(options.hosts) as hosts:
        processes = [host.start([*launcher, *arguments], forked=True) for host in hosts]
        results = {}
        for mbit in options.mbit:
            hosts.limit(mbit)
            for host in hosts:
                host.path(TMP / f"go-{mbit}").touch()
            found = hosts[0].path(TMP / f"result-{mbit}")
            while not found.exists():
                if any(process.poll() is not None for process in processes):
                    raise SystemExit("the ranks have ended without a result")
                time.sleep(0.1)
            results[mbit] = json.loads(found.read_text())
        for process in processes:
            process.wait()
        return results


def report(mbit: int, result: dict[str, Any], options: argparse.Namespace) -> bool:
    print(f"\n{options.hosts} hosts, {f'{mbit} Mbit/s' if mbit else 'no limit'}", end="")
    equal = step_time.report(options.hosts, result, options)
    if equal:
        width = {"fp32": 4, "bf16": 2}[options.dtype]
        num_bytes = (options.hosts - 1) / options.hosts * width * result["num_parameters"]
        medians = {name: statistics.median(seconds) for name, seconds in result["seconds"].items()}
        base = medians.get("torch DDP")
        print(f"{'':<14} {'/ torch DDP':>12} {'/ wire alone':>13}")
        for name, median in medians.items():
            of_ddp = f"{median / base:.3f}" if base else ""
            of_wire = f"{median / (8e-6 * SENDS.get(name, 2) * num_bytes / mbit):.3f}" if mbit else ""
            print(f"{name:<14} {of_ddp:>12} {of_wire:>13}")
    return equal


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--mbit", type=int, nargs="+", default=[100, 500], help="one after the other; 0: no limit")
    parser.add_argument("--steps", type=int, default=10, help="rounds that count")
    parser.add_argument("--warmup", type=int, default=2, help="rounds before them")
    parser.add_argument("--block", type=int, default=1, help="steps in a row that are timed as one")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS, metavar="NAME")
    step_time.add_units(parser)
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write all times and losses to this file")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(model="gpt", tied=False, clip=0.0, device="cpu", other=None, starts=1, messages=False)
    options = parser.parse_args()
    if options.steps < 2 or options.hosts < 2:
        parser.error("--steps and --hosts must be at least 2")
    return options, sys.argv[1:]


def main() -> None:
    options, arguments = parse()
    if options.as_rank:
        return rank_main(options)
    results = measure_on_hosts(options, arguments)
    equal = [report(mbit, result, options) for mbit, result in results.items()]
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    raise SystemExit(0 if all(equal) else 1)


if __name__ == "__main__":
    main()
