// Devices that the driver does not offer: nodes that this machine does not have.

#include "nodes.h"

typedef exports_nodedock_driver_left_out_left_out_device_t left_out_device_t;

bool exports_nodedock_driver_left_out_list_devices(exports_nodedock_driver_left_out_context_t *context,
                                                   exports_nodedock_driver_left_out_list_left_out_device_t *devices,
                                                   exports_nodedock_driver_left_out_problem_t *problem) {
  (void)context;
  *devices = (exports_nodedock_driver_left_out_list_left_out_device_t){zeroed(COUNT, sizeof(left_out_device_t)), 0};
  for (int i = 0; i < COUNT; i++) {
    text_t path = view(NODES[i].path);
    nodedock_driver_device_nodes_list_node_info_t found;
    if (!nodedock_driver_device_nodes_glob(&path, &found, problem)) return false;
    if (found.len > 0) continue;
    devices->ptr[devices->len++] = (left_out_device_t){
        .name = owned(NODES[i].path), .reason = owned("the node does not exist: load its kernel module")};
  }
  return true;
}
