"""Servers as sysfs describes them."""

from fugaku_megatron.host.topology import format_list


def _write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def tree(folder, domains, sockets=1, gib=64, siblings=lambda cpu: (cpu,)):
    """Write a /sys tree for domains (number -> CPUs). siblings: all CPUs in a CPU's core"""
    system = folder / "sys" / "devices" / "system"
    size = len(domains) // sockets
    for index, (number, cpus) in enumerate(domains.items()):
        _write(system / "node" / f"node{number}" / "cpulist", format_list(cpus) + "\n")
        kib = (gib[number] if isinstance(gib, dict) else gib) * 2**20
        _write(
            system / "node" / f"node{number}" / "meminfo",
            f"Node {number} MemTotal:  {kib} kB\nNode {number} MemFree: 1 kB\n",
        )
        for cpu in cpus:
            _write(
                system / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list",
                format_list(siblings(cpu)) + "\n",
            )
            _write(
                system / "cpu" / f"cpu{cpu}" / "topology" / "physical_package_id",
                f"{index // size}\n",
            )
    return folder


def even(count, cores, smt=1):
    """Return domains of equal size, numbered like Linux: second hardware threads follow all first ones."""
    total = count * cores
    cpus = {
        d: [t * total + d * cores + i for t in range(smt) for i in range(cores)]
        for d in range(count)
    }
    return {"domains": cpus, "siblings": lambda cpu: range(cpu % total, smt * total, total)}


SERVERS = {
    "EPYC 2 x 96, NPS1": (
        {**even(2, 96, 2), "sockets": 2, "gib": 756},
        2,
        96,
        ["0-95", "96-191"],
        "2 sockets, 2 NUMA domains of 96 cores and 756 GiB, 2 hardware threads a core",
    ),
    "EPYC 2 x 96, NPS4": (
        {**even(8, 24, 2), "sockets": 2, "gib": 189},
        8,
        24,
        ["0-23", "24-47", "48-71", "72-95", "96-119", "120-143", "144-167", "168-191"],
        "2 sockets, 8 NUMA domains of 24 cores and 189 GiB, 2 hardware threads a core",
    ),
    "Xeon 2 x 56, SNC-4": (
        {**even(8, 14, 2), "sockets": 2, "gib": 63},
        8,
        14,
        ["0-13", "14-27", "28-41", "42-55", "56-69", "70-83", "84-97", "98-111"],
        "2 sockets, 8 NUMA domains of 14 cores and 63 GiB, 2 hardware threads a core",
    ),
    "Graviton4 2 x 96": (
        {**even(2, 96), "sockets": 2, "gib": 756},
        2,
        96,
        ["0-95", "96-191"],
        "2 sockets, 2 NUMA domains of 96 cores and 756 GiB",
    ),
    "Grace 2 x 72": (
        {**even(2, 72), "sockets": 2, "gib": 240},
        2,
        72,
        ["0-71", "72-143"],
        "2 sockets, 2 NUMA domains of 72 cores and 240 GiB",
    ),
    "A64FX 4 x 12": (
        {
            "domains": {
                0: [0],
                1: [1],
                **{4 + i: range(12 + 12 * i, 24 + 12 * i) for i in range(4)},
            },
            "gib": 8,
        },
        4,
        12,
        ["12-23", "24-35", "36-47", "48-59"],
        "1 socket, 4 NUMA domains of 12 cores and 8 GiB",
    ),
}
