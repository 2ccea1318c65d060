"""What the fabric looks like and where ranks should sit on it: no torch, no sockets of the job.

Reachable as `commkit.topology` only: under a second name every class would exist twice, and
`isinstance` would fail far from the cause.
"""

if __name__ != "commkit.topology":
    raise ImportError(
        f"this package is commkit.topology, not {__name__}: write `import commkit.topology`",
        name=__name__,
    )
