// Offers nodes below /dev as devices.
//
// Every call runs in a fresh instance of this program. Variables do not keep their value until the next call: state that must
// persist goes into the memo of a claim. Nothing is freed here either: the whole memory ends with the instance. Each part of a
// result must be allocated separately, since the bindings free it after the host has read it.

#include "nodes.h"

typedef nodedock_driver_claims_allocated_device_t allocated_t;
typedef nodedock_driver_inventory_device_t device_t;

void exports_nodedock_driver_identity_describe(exports_nodedock_driver_identity_driver_info_t *info) {
  *info = (exports_nodedock_driver_identity_driver_info_t){
      .name = owned("my-gpu.example.com"),
      .version = owned("0.1.0"),
      .summary = owned("Nodes below /dev"),
      .capabilities = {.device_nodes = {zeroed(COUNT, sizeof(text_t)), COUNT}, .env = one_text("MY_GPU_*")},
      .event_subsystems = one_text("misc"),
  };
  for (int i = 0; i < COUNT; i++) info->capabilities.device_nodes.ptr[i] = owned(NODES[i].path);
}

static device_t device(int index, int64_t minor) {
  device_t device = {.name = owned(NODES[index].device), .identity = one_text(NODES[index].identity)};
  device.attributes.len = 1;
  device.attributes.ptr = zeroed(1, sizeof *device.attributes.ptr);
  *device.attributes.ptr = (nodedock_driver_inventory_attribute_t){
      owned("minor"), {NODEDOCK_DRIVER_INVENTORY_ATTRIBUTE_VALUE_INT, {.int_ = minor}}};
  return device;
}

bool exports_nodedock_driver_discovery_discover(exports_nodedock_driver_discovery_context_t *context,
                                                exports_nodedock_driver_discovery_trigger_t *trigger,
                                                exports_nodedock_driver_discovery_inventory_t *inventory,
                                                exports_nodedock_driver_discovery_problem_t *refusal) {
  (void)context, (void)trigger;
  nodedock_driver_inventory_pool_t *pool = zeroed(1, sizeof *pool);
  *pool = (nodedock_driver_inventory_pool_t){.name = owned(POOL), .devices = {zeroed(COUNT, sizeof(device_t)), 0}};
  for (int i = 0; i < COUNT; i++) {
    text_t path = view(NODES[i].path);
    nodedock_driver_device_nodes_list_node_info_t found;
    if (!nodedock_driver_device_nodes_glob(&path, &found, refusal)) return false;
    // A node that this machine does not have is not an error.
    if (found.len > 0) pool->devices.ptr[pool->devices.len++] = device(i, found.ptr[0].minor);
  }
  inventory->pools.ptr = pool;
  inventory->pools.len = 1;
  return true;
}

// Returns the request without the subrequest of a prioritised list.
static text_t base_request(text_t request) {
  const uint8_t *slash = memchr(request.ptr, '/', request.len);
  return (text_t){request.ptr, slash ? (size_t)(slash - request.ptr) : request.len};
}

// Returns false with a refusal.
static bool prepare_device(const allocated_t *allocated, nodedock_driver_claims_prepared_device_t *prepared,
                           nodedock_driver_common_problem_t *refusal) {
  int i = 0;
  text_t wanted = allocated->device;
  while (i < COUNT && (strlen(NODES[i].device) != wanted.len || memcmp(NODES[i].device, wanted.ptr, wanted.len))) i++;
  if (i == COUNT) {
    *refusal = (nodedock_driver_common_problem_t){
        .kind = NODEDOCK_DRIVER_COMMON_PROBLEM_KIND_NOT_FOUND, .code = owned("no-such-device"), .message = copy(wanted)};
    return false;
  }
  // Without the node, the host's problem is the refusal.
  text_t path = view(NODES[i].path);
  nodedock_driver_device_nodes_node_info_t info;
  if (!nodedock_driver_device_nodes_stat(&path, &info, refusal)) return false;
  *prepared = (nodedock_driver_claims_prepared_device_t){
      .requests = {zeroed(1, sizeof(text_t)), 1}, .pool = copy(allocated->pool), .device = copy(wanted)};
  prepared->requests.ptr[0] = copy(base_request(allocated->request));
  prepared->share_id.is_some = allocated->share_id.is_some;
  if (allocated->share_id.is_some) prepared->share_id.val = copy(allocated->share_id.val);
  prepared->edits.env.len = prepared->edits.device_nodes.len = 1;
  prepared->edits.env.ptr = zeroed(1, sizeof *prepared->edits.env.ptr);
  prepared->edits.env.ptr->key = owned(NODES[i].variable);
  prepared->edits.env.ptr->value = owned(NODES[i].path);
  prepared->edits.device_nodes.ptr = zeroed(1, sizeof *prepared->edits.device_nodes.ptr);
  prepared->edits.device_nodes.ptr->path = owned(NODES[i].path);
  prepared->edits.device_nodes.ptr->access =
      NODEDOCK_DRIVER_CONTAINER_EDITS_NODE_ACCESS_READ | NODEDOCK_DRIVER_CONTAINER_EDITS_NODE_ACCESS_WRITE;
  return true;
}

// Returns false with a refusal.
static bool prepare(const nodedock_driver_claims_claim_t *claim, nodedock_driver_claims_prepared_claim_t *prepared,
                    nodedock_driver_common_problem_t *refusal) {
  size_t count = claim->devices.len;
  *prepared = (nodedock_driver_claims_prepared_claim_t){
      .devices = {zeroed(count, sizeof(nodedock_driver_claims_prepared_device_t)), count}};
  for (size_t i = 0; i < count; i++)
    if (!prepare_device(&claim->devices.ptr[i], &prepared->devices.ptr[i], refusal)) return false;
  return true;
}

void exports_nodedock_driver_preparation_prepare(exports_nodedock_driver_preparation_context_t *context,
                                                 exports_nodedock_driver_preparation_list_claim_t *claims,
                                                 exports_nodedock_driver_preparation_list_prepare_outcome_t *outcomes) {
  (void)context;
  outcomes->len = claims->len;
  outcomes->ptr = zeroed(claims->len, sizeof *outcomes->ptr);
  for (size_t i = 0; i < claims->len; i++) {
    nodedock_driver_claims_prepared_claim_t prepared;
    nodedock_driver_common_problem_t refusal;
    outcomes->ptr[i].uid = copy(claims->ptr[i].id.uid);
    outcomes->ptr[i].outcome.is_err = !prepare(&claims->ptr[i], &prepared, &refusal);
    if (outcomes->ptr[i].outcome.is_err) outcomes->ptr[i].outcome.val.err = refusal;
    else outcomes->ptr[i].outcome.val.ok = prepared;
  }
}

void exports_nodedock_driver_preparation_unprepare(
    exports_nodedock_driver_preparation_context_t *context, exports_nodedock_driver_preparation_list_claim_record_t *claims,
    exports_nodedock_driver_preparation_list_unprepare_outcome_t *outcomes) {
  (void)context;
  outcomes->len = claims->len;
  outcomes->ptr = zeroed(claims->len, sizeof *outcomes->ptr);
  // Nothing of a claim is left on the node.
  for (size_t i = 0; i < claims->len; i++) outcomes->ptr[i].uid = copy(claims->ptr[i].claim.id.uid);
}
