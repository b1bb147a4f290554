"""Simulate a fleet, send every vehicle one message, and print how the vehicles behaved.

motorcade serve &
python examples/fleet/commuters.py --vehicles 200
"""

import argparse
import asyncio
import json

from motorcade.client import Client
from motorcade.fleet import Fleet, FleetOptions, find_profile


async def run(host: str, port: int, vehicles: int, profile: str) -> None:
    options = FleetOptions(host=host, port=port, vehicles=vehicles, profile=find_profile(profile))
    async with Fleet(options) as fleet:
        batch = {"ids": fleet.vins, "request_id": "welcome", "data": '{"do": "greet"}', "encoding": "utf8"}
        async with await Client.connect(host, port, client_id="platform") as platform:
            await platform.publish("$SDV-FANOUT", json.dumps(batch).encode(), qos=1)

        def done() -> bool:
            return fleet.figures().total.acked >= vehicles

        await fleet.wait_until(done, "every vehicle has acknowledged")
        for kind, tally in fleet.figures().kinds.items():
            print(f"{kind}: {tally.acked} of {tally.vehicles} acknowledged, {tally.repeated} repeated")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=1883)
    parser.add_argument("--vehicles", type=int, default=50)
    parser.add_argument("--profile", default="steady")
    given = parser.parse_args()
    asyncio.run(run(given.host, given.port, given.vehicles, given.profile))
