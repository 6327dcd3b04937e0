// Values of the devices that change: how often each node is there, which is once or never.

#include "nodes.h"

typedef exports_nodedock_driver_telemetry_device_readings_t device_readings_t;
typedef exports_nodedock_driver_telemetry_reading_t reading_t;

bool exports_nodedock_driver_telemetry_read(exports_nodedock_driver_telemetry_context_t *context,
                                            exports_nodedock_driver_telemetry_list_device_readings_t *devices,
                                            exports_nodedock_driver_telemetry_problem_t *problem) {
  (void)context;
  *devices = (exports_nodedock_driver_telemetry_list_device_readings_t){zeroed(COUNT, sizeof(device_readings_t)), COUNT};
  for (int i = 0; i < COUNT; i++) {
    text_t path = view(NODES[i].path);
    nodedock_driver_device_nodes_list_node_info_t found;
    if (!nodedock_driver_device_nodes_glob(&path, &found, problem)) return false;
    reading_t *reading = zeroed(1, sizeof(reading_t));
    *reading = (reading_t){.name = owned("nodes"), .value = (double)found.len};
    devices->ptr[i] = (device_readings_t){
        .pool = owned(POOL), .device = owned(NODES[i].device), .readings = {reading, 1}};
  }
  return true;
}
