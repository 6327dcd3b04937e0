// What the scheduler should know beyond the inventory: an entry for each device, to be filled.

#include "nodes.h"

typedef exports_nodedock_driver_scheduling_device_scheduling_t device_scheduling_t;

bool exports_nodedock_driver_scheduling_schedule(exports_nodedock_driver_scheduling_context_t *context,
                                                 exports_nodedock_driver_scheduling_inventory_t *inventory,
                                                 exports_nodedock_driver_scheduling_additions_t *additions,
                                                 exports_nodedock_driver_scheduling_problem_t *problem) {
  (void)context, (void)problem;
  size_t count = 0;
  for (size_t i = 0; i < inventory->pools.len; i++) count += inventory->pools.ptr[i].devices.len;
  *additions = (exports_nodedock_driver_scheduling_additions_t){
      .devices = {zeroed(count, sizeof(device_scheduling_t)), 0}};
  for (size_t i = 0; i < inventory->pools.len; i++) {
    nodedock_driver_inventory_pool_t *pool = &inventory->pools.ptr[i];
    for (size_t j = 0; j < pool->devices.len; j++)
      additions->devices.ptr[additions->devices.len++] = (device_scheduling_t){
          .pool = copy(pool->name), .device = copy(pool->devices.ptr[j].name), .binds_to_node = false};
  }
  return true;
}
