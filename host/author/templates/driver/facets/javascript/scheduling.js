// What the scheduler should know beyond the inventory: an entry for each device, to be filled.

export const scheduling = {
  schedule(_context, inventory) {
    const devices = inventory.pools.flatMap((pool) => pool.devices.map((device) => additions(pool, device)));
    return { devices, pools: [] };
  },
};

function additions(pool, device) {
  return {
    pool: pool.name,
    device: device.name,
    bindsToNode: false,
    bindingConditions: [],
    bindingFailureConditions: [],
    nodeAllocatable: [],
    compatibility: [],
  };
}
