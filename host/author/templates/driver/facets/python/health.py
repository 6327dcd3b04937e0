"""The health of the devices: a node that is gone is unhealthy."""

import driver
from wit_world import exports
from wit_world.exports.health import DeviceHealth, HealthState
from wit_world.imports import device_nodes


class Health(exports.Health):
    def check(self, ctx):
        return [health(name, path) for name, path in driver.NODES.items()]


def health(name, path):
    if device_nodes.glob(path):
        return DeviceHealth(driver.POOL, name, HealthState.HEALTHY, "")
    return DeviceHealth(driver.POOL, name, HealthState.UNHEALTHY, f"{path} is gone")
