"""Sweeps of collectives over message sizes, with nccl-tests' flags and columns.

module         subject
arguments      flags -> a checked plan of sizes, types and reductions (no torch)
table          nccl-tests' text format (no torch)
progress       a bar on a terminal
watch          deadlines, interrupts, and what a rank was doing when they came
placement      which world this process belongs to; refuses a world that fell apart
launch_local   --nproc: ranks by fork on this host
session        one rank: join, sweep, report, leave
"""
