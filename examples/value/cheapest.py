"""Which arena is cheapest, with your prices, for the traffic that a kvpool-server has had?

    kvpool value --json | python cheapest.py --gib-month 3 --gpu-hour 2.5 --prefill 8000 --peak 2

The model: prefill runs on whole GPUs, of which there are enough for `--peak` times the average load, and a hit saves
the prefill of its tokens. Hit ratios are estimates; an hour of traffic says little of a month.
"""

import argparse
import json
import math
import sys

GIB = 1 << 30
HOURS_A_MONTH = 730.0


def main() -> None:
    """Reads the JSON of `kvpool value` from standard input; prints a line per size, the cheapest first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib-month", type=float, required=True, help="price of a GiB of memory per month")
    parser.add_argument("--gpu-hour", type=float, required=True, help="price of a GPU per hour")
    parser.add_argument("--prefill", type=float, required=True, help="tokens that one GPU prefills per second")
    parser.add_argument("--peak", type=float, default=2.0, help="largest load over the average load")
    prices = parser.parse_args()
    for name, value in vars(prices).items():
        if not 0 < value < math.inf:
            parser.error(f"--{name.replace('_', '-')} {value} must be above 0, and finite")
    printed = sys.stdin.read()
    if not printed:
        sys.exit("nothing on standard input: kvpool value has failed")
    report = json.loads(printed)
    if not report["curves"] or not report["curves"][0]["estimates"]:
        sys.exit("no lookups yet: ask again when engines have used the server")
    total = report["curves"][0]
    tokens_per_s = total["lookup_tokens"] / report["seconds"]
    found = []
    for each in [{"arena_bytes": 0, "hit_ratio_with_tiers": 0.0}, *total["estimates"]]:
        load = tokens_per_s * (1 - each["hit_ratio_with_tiers"]) / prices.prefill
        gpus = max(1, math.ceil(prices.peak * load))
        memory = each["arena_bytes"] / GIB
        cost = memory * prices.gib_month + gpus * prices.gpu_hour * HOURS_A_MONTH
        found.append((cost, memory, each["hit_ratio_with_tiers"], gpus))
    for cost, memory, hit_ratio, gpus in sorted(found):
        print(f"{memory:10.2f} GiB  {hit_ratio:6.1%} hit  {gpus:4} GPUs for prefill  {cost:12,.0f} a month")


if __name__ == "__main__":
    main()
