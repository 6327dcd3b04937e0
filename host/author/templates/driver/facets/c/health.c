// The health of the devices: a node that is gone is unhealthy.

#include "nodes.h"

typedef exports_nodedock_driver_health_device_health_t device_health_t;

bool exports_nodedock_driver_health_check(exports_nodedock_driver_health_context_t *context,
                                          exports_nodedock_driver_health_list_device_health_t *devices,
                                          exports_nodedock_driver_health_problem_t *problem) {
  (void)context;
  *devices = (exports_nodedock_driver_health_list_device_health_t){zeroed(COUNT, sizeof(device_health_t)), COUNT};
  for (int i = 0; i < COUNT; i++) {
    text_t path = view(NODES[i].path);
    nodedock_driver_device_nodes_list_node_info_t found;
    if (!nodedock_driver_device_nodes_glob(&path, &found, problem)) return false;
    bool is_there = found.len > 0;
    devices->ptr[i] = (device_health_t){
        .pool = owned(POOL),
        .device = owned(NODES[i].device),
        .state = is_there ? EXPORTS_NODEDOCK_DRIVER_HEALTH_HEALTH_STATE_HEALTHY : EXPORTS_NODEDOCK_DRIVER_HEALTH_HEALTH_STATE_UNHEALTHY,
        .message = owned(is_there ? "" : "the node is gone"),
    };
  }
  return true;
}
