"""Values of the devices that change: how often each node is there, which is once or never."""

import driver
from wit_world import exports
from wit_world.exports.telemetry import DeviceReadings, Reading
from wit_world.imports import device_nodes


class Telemetry(exports.Telemetry):
    def read(self, ctx):
        return [readings(name, path) for name, path in driver.NODES.items()]


def readings(name, path):
    nodes = float(len(device_nodes.glob(path)))
    return DeviceReadings(driver.POOL, name, [Reading("nodes", nodes)])
