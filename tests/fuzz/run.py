"""Fuzzes what reads bytes of others: make fuzz.  Needs a clang++ with libFuzzer.

Each harness of programs.py runs for --seconds with the address and undefined-behaviour sanitizers,
two at a time, from the inputs of corpus/ and crashes/.  What fails is left in
build/fuzz/HARNESS/failed; once mended, it goes into crashes/HARNESS under a name of its own, and
tests/unit/test_fuzz_inputs.py replays it for ever.  --keep writes the smallest set of inputs that
reaches all that has been reached so far into corpus/.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import inputs
import programs

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "build" / "fuzz"
MEGABYTES = 2048  # of memory, the sanitizers' own included
INPUT_SECONDS = 20
LONGEST = 4096  # bytes of an input
RUNNING: list[subprocess.Popen[bytes]] = []


def fuzz(harness: str, program: Path, seconds: int) -> bool:
    place = OUTPUT / harness
    (place / "failed").mkdir(parents=True, exist_ok=True)
    before = set((place / "failed").iterdir())
    inputs.unpack(harness, place / "corpus")
    command = [
        str(program),
        f"-max_total_time={seconds}",
        f"-rss_limit_mb={MEGABYTES}",
        f"-timeout={INPUT_SECONDS}",
        f"-max_len={LONGEST}",
        "-print_final_stats=1",
        f"-artifact_prefix={place / 'failed'}/",
        str(place / "corpus"),
    ]
    with (place / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=place)
        RUNNING.append(process)
        code = process.wait()
    text = (place / "log").read_text(errors="replace")
    runs = re.findall(r"stat::number_of_executed_units: (\d+)", text)
    reached = re.findall(r" cov: (\d+) ", text)
    print(
        f"fuzz {harness}: {'ok' if code == 0 else 'FAILED'}, {(runs or ['?'])[-1]} inputs, "
        f"{(reached or ['?'])[-1]} edges, {seconds} s",
        flush=True,
    )
    if code != 0:
        print("\n".join(text.splitlines()[-60:]))
        for path in sorted(set((place / "failed").iterdir()) - before):
            print(f"{path.relative_to(ROOT)}: {path.read_bytes().hex()}")
    return code == 0


def cut_short(*_: object) -> None:
    for process in RUNNING:
        process.kill()
    os._exit(143)


def keep(harness: str, program: Path) -> None:
    place = OUTPUT / harness
    inputs.unpack(harness, place / "corpus")
    smallest = place / "smallest"
    smallest.mkdir(exist_ok=True)
    for old in smallest.iterdir():
        old.unlink()
    # Edges alone, not how often each: the kept inputs are to be few.
    command = [str(program), "-set_cover_merge=1", "-use_counters=0", "-max_len=512"]
    command += [str(smallest), str(place / "corpus")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=place, errors="replace")
    if done.returncode != 0:
        raise SystemExit(done.stderr[-4000:])
    found = [path.read_bytes() for path in smallest.iterdir()]
    inputs.keep(harness, found)
    print(f"{harness}: {len(found)} inputs, {sum(map(len, found))} bytes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("harness", nargs="*", help=", ".join(programs.HARNESSES))
    parser.add_argument("--seconds", type=int, default=60, help="for each harness (60)")
    parser.add_argument("--jobs", type=int, default=2, help="harnesses at a time (2)")
    parser.add_argument("--keep", action="store_true", help="write corpus/ instead of fuzzing")
    options = parser.parse_args()
    wanted = options.harness or list(programs.HARNESSES)
    if unknown := sorted(set(wanted) - set(programs.HARNESSES)):
        parser.error(f"{', '.join(unknown)}: expected {', '.join(programs.HARNESSES)}")
    if not programs.clang():
        print("make fuzz: no clang++ with libFuzzer (Debian: clang)", file=sys.stderr)
        return 1
    os.environ.setdefault("ASAN_OPTIONS", "detect_leaks=1")
    built = {harness: programs.fuzzer(harness) for harness in wanted}
    if options.keep:
        for harness, program in built.items():
            keep(harness, program)
        return 0
    signal.signal(signal.SIGTERM, cut_short)
    with ThreadPoolExecutor(options.jobs) as pool:
        results = pool.map(lambda one: fuzz(*one, options.seconds), built.items())
        return 0 if all(list(results)) else 1


if __name__ == "__main__":
    sys.exit(main())
