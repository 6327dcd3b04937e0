"""Devices that the driver does not offer: nodes that this machine does not have."""

import driver
from wit_world import exports
from wit_world.exports.left_out import LeftOutDevice
from wit_world.imports import device_nodes


class LeftOut(exports.LeftOut):
    def list_devices(self, ctx):
        missing = [path for path in driver.NODES.values() if not device_nodes.glob(path)]
        return [LeftOutDevice(path, "the node does not exist: load its kernel module") for path in missing]
