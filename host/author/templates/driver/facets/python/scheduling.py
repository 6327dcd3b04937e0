"""What the scheduler should know beyond the inventory: an entry for each device, to be filled."""

from wit_world import exports
from wit_world.exports.scheduling import Additions, DeviceScheduling


class Scheduling(exports.Scheduling):
    def schedule(self, ctx, inventory):
        devices = [additions(pool, device) for pool in inventory.pools for device in pool.devices]
        return Additions(devices, pools=[])


def additions(pool, device):
    return DeviceScheduling(
        pool.name, device.name, binds_to_node=False, binding_conditions=[], binding_failure_conditions=[],
        node_allocatable=[], compatibility=[],
    )
