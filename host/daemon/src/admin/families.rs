//! Every family of metrics: name, kind, labels and help. `docs/metrics.md` has the same table, and a test compares the two: a name on
//! which alerts depend does not change by accident.

use prometheus_client::metrics::MetricType;

/// A family of metrics. The name of a counter is without its `_total`.
#[derive(Debug)]
pub(super) struct Family {
    pub(super) name: &'static str,
    pub(super) kind: MetricType,
    pub(super) labels: &'static [&'static str],
    pub(super) help: &'static str,
}

macro_rules! families {
    ($($id:ident = $kind:ident $name:literal [$($label:literal),*] $help:literal;)+) => {
        $(pub(super) const $id: Family =
            Family { name: $name, kind: MetricType::$kind, labels: &[$($label),*], help: $help };)+

        /// Families in the order of the exposition.
        #[cfg(test)]
        pub(super) const ALL: &[Family] = &[$($id),+];
    };
}

families! {
    BUILD = Gauge "nodedock_build_info" ["version"] "Version of the daemon; the value is always 1";
    CRASHES = Counter "nodedock_daemon_crashes" [] "Crashes after which the parent process (nodedockd run --supervise) started the daemon again";
    DRIVERS = Gauge "nodedock_driver_state" ["driver", "kind", "state"] "Sources (files, plugins) of a driver by state";
    CALLS = Counter "nodedock_driver_calls" ["driver", "operation", "outcome"] "Calls of a WASM driver since it was loaded";
    CALL_SECONDS = Histogram "nodedock_driver_call_duration_seconds" ["driver", "operation"] "Duration of calls of a WASM driver, including the wait for a permit";
    CPU = Counter "nodedock_driver_cpu_seconds" ["driver"] "CPU time used by a WASM driver's calls";
    PEAK_CPU = Gauge "nodedock_driver_call_cpu_peak_seconds" ["driver"] "Maximum CPU time of one call";
    PEAK_MEMORY = Gauge "nodedock_driver_memory_peak_bytes" ["driver"] "Maximum memory of one call, summed over its memories";
    MEMORY_LIMIT = Gauge "nodedock_driver_memory_limit_bytes" ["driver"] "Memory that one call may have, summed over its memories";
    PEAK_TABLES = Gauge "nodedock_driver_table_elements_peak" ["driver"] "Maximum number of table elements of one call";
    PEAK_HOST_BYTES = Gauge "nodedock_driver_host_bytes_peak" ["driver"] "Maximum number of bytes returned by host functions in one call";
    PEAK_HOST_OPERATIONS = Gauge "nodedock_driver_host_operations_peak" ["driver"] "Maximum number of host function calls in one call";
    TRAPS = Counter "nodedock_driver_traps" ["driver"] "Calls that trapped or exited";
    LIMITS = Counter "nodedock_driver_limit_refusals" ["driver", "limit"] "Refusals by limit: one for each call, log line or host function call that exceeded it";
    REFUSED = Counter "nodedock_driver_answers_refused" ["driver"] "Responses of a driver that were out of bounds, invalid or not granted";
    LOG_LINES = Counter "nodedock_driver_log_lines" ["driver"] "Log lines written by the driver";
    LOG_DROPPED = Counter "nodedock_driver_log_lines_dropped" ["driver"] "Log lines dropped by the rate limit";
    HOST_BYTES = Counter "nodedock_driver_host_bytes" ["driver"] "Bytes returned to the driver by host functions";
    HOST_OPERATIONS = Counter "nodedock_driver_host_operations" ["driver"] "Host function calls of the driver";
    READINGS = Gauge "nodedock_device_reading" ["driver", "pool", "device", "reading"] "Value that a WASM driver measured of a device at its last discovery; the reading is named by what it is and its unit";
    DEVICES = Gauge "nodedock_devices" ["driver", "pool", "state"] "Devices of a pool by state: held by a claim, free, or unhealthy and held by none";
    DEVICE_CLAIMS = Gauge "nodedock_device_claims" ["driver", "pool", "device"] "Claims that hold a device; 0 if it is free";
    DEVICE_HEALTHY = Gauge "nodedock_device_healthy" ["driver", "pool", "device"] "1 if a device is healthy, 0 if it is not; a device whose driver reports no health has no sample";
    DEVICE_INFO = Gauge "nodedock_device_info" ["namespace", "pod", "container", "claim", "driver", "pool", "device", "uuid", "pci_address"] "Device of a prepared claim, with the pod and the container that use it; the value is always 1, and what is not known is empty";
    CLAIMS = Gauge "nodedock_claims" ["state"] "Claims in the checkpoint by state";
    CLAIMS_PENDING = Gauge "nodedock_claims_pending" [] "Claims of the local API that wait for devices";
    CLAIM_WAIT = Gauge "nodedock_claim_wait_seconds" [] "Time since the creation of the oldest claim of the local API that waits for devices; 0 if none waits";
    PODS = Gauge "nodedock_pods" [] "Pods with claims or extended resources, including those of a kubelet";
    CONDITIONS = Gauge "nodedock_conditions" ["code"] "Current conditions of the node by problem code";
    CDI_AGAIN = Counter "nodedock_cdi_files_rendered_again" [] "CDI files of prepared claims that were rendered again because they were missing or altered";
    VALUES_LEFT = Counter "nodedock_sysfs_values_left" ["driver", "outcome"] "Values below /sys that a driver left behind when it unprepared a claim, by outcome: put-back by the host, or left";
    COMMITS = Counter "nodedock_checkpoint_commits" ["outcome"] "Checkpoint commits by outcome: durable or failed";
    COMMIT_CHANGES = Histogram "nodedock_checkpoint_commit_changes" [] "Records changed by one durable commit";
    COMMIT_SECONDS = Histogram "nodedock_checkpoint_commit_duration_seconds" [] "Duration of one durable commit, including its sync";
    COMMIT_BYTES = Counter "nodedock_checkpoint_value_bytes" [] "Bytes of records written to the checkpoint";
    DRA_OPERATIONS = Histogram "dra_operations_duration_seconds" ["operation_name", "is_error"] "Duration of preparing and unpreparing the claims of a pod";
    DRA_RPCS = Histogram "dra_grpc_operations_duration_seconds" ["driver_name", "method_name", "grpc_status_code"] "Duration of calls of a native DRA plugin since it registered";
    DRA_CLAIMS = Gauge "dra_resource_claims_in_use" ["driver_name"] "Prepared claims by driver; the driver <any> counts all";
    PLUGINS = Gauge "plugin_manager_total_plugins" ["socket_path", "state"] "Registration sockets: existing (desired_state_of_world) and registered (actual_state_of_world)";
    REGISTRATIONS = Counter "kubelet_device_plugin_registration" ["resource_name"] "Register calls of device plugins, including refused ones";
    ALLOCATIONS = Histogram "kubelet_device_plugin_alloc_duration_seconds" ["resource_name"] "Duration of Allocate calls of a device plugin";
    POD_RESOURCES = Counter "kubelet_pod_resources_endpoint_requests" ["server_api_version"] "Calls on the pod-resources socket";
    POD_RESOURCES_LIST = Counter "kubelet_pod_resources_endpoint_requests_list" ["server_api_version"] "Calls of List";
    POD_RESOURCES_ALLOCATABLE = Counter "kubelet_pod_resources_endpoint_requests_get_allocatable" ["server_api_version"] "Calls of GetAllocatableResources";
    POD_RESOURCES_GET = Counter "kubelet_pod_resources_endpoint_requests_get" ["server_api_version"] "Calls of Get";
    POD_RESOURCES_GET_ERRORS = Counter "kubelet_pod_resources_endpoint_errors_get" ["server_api_version"] "Calls of Get for a pod without devices";
    BRIDGE_DRIVERS = Gauge "nodedock_bridge_drivers" ["driver", "registration"] "Drivers offered to the kubelet by registration state: offered, asked, registered or refused";
    BRIDGE_REGISTRATIONS = Counter "nodedock_bridge_registrations" ["outcome"] "Registration results reported by a kubelet";
    BRIDGE_OPEN = Gauge "nodedock_bridge_connections_open" [] "Open connections to sockets in the kubelet's directories";
    BRIDGE_CONNECTIONS = Counter "nodedock_bridge_connections" [] "Connections to sockets in the kubelet's directories";
    BRIDGE_IN_FLIGHT = Gauge "nodedock_bridge_calls_in_flight" [] "Prepare and unprepare calls of the kubelet in progress";
    BRIDGE_CALLS = Histogram "nodedock_bridge_call_duration_seconds" ["driver", "method", "code"] "Duration of the kubelet's calls, measured by the daemon";
    BRIDGE_OPERATIONS = Histogram "nodedock_bridge_operation_duration_seconds" ["operation", "is_error"] "Duration of the kubelet's prepare and unprepare calls over all drivers; a call that failed for one of its claims is an error";
    RESOURCE_DEVICES = Gauge "nodedock_bridge_resource_devices" ["resource", "health"] "Devices of an extended resource reported to the kubelet, by health";
    RESOURCE_REGISTRATIONS = Counter "nodedock_bridge_resource_registrations" ["resource", "outcome"] "Registrations of an extended resource at the kubelet, by outcome";
    RESOURCE_LISTS = Counter "nodedock_bridge_resource_lists" ["resource"] "Device lists sent to the kubelet";
    RESOURCE_ALLOCATIONS = Histogram "nodedock_bridge_allocation_duration_seconds" ["resource"] "Duration of the kubelet's Allocate calls to the daemon";
    RESOURCE_FAILURES = Counter "nodedock_bridge_allocation_failures" ["resource"] "Refused allocations";
    RESOURCE_LOOKS = Counter "nodedock_bridge_in_use_looks" ["outcome"] "Queries of the kubelet for the devices of its pods";
    RESOURCE_RELEASED = Counter "nodedock_bridge_devices_given_up" [] "Allocations released because no pod has their devices";
    API_REACHABLE = Gauge "nodedock_api_reachable" [] "1 if the API server responded to the last request, else 0";
    API_REQUESTS = Counter "nodedock_api_requests" ["verb", "resource", "code"] "Requests to the API server; code 0 means no response";
    API_SECONDS = Histogram "nodedock_api_request_duration_seconds" [] "Duration of requests to the API server, except watches";
    API_WAITS = Histogram "nodedock_api_rate_wait_seconds" [] "Time that requests waited for the client's rate limit";
    API_RETRIES = Counter "nodedock_api_credential_retries" [] "Requests repeated with newer credentials";
    API_WATCHES = Counter "nodedock_api_watch_restarts" [] "Watches that were restarted";
    SLICES = Gauge "nodedock_slices" ["driver", "pool"] "ResourceSlices of a pool";
    SLICE_DEVICES = Gauge "nodedock_slice_devices" ["driver", "pool"] "Devices in the ResourceSlices of a pool";
    SLICE_GENERATION = Gauge "nodedock_slice_generation" ["driver", "pool"] "Generation of a pool in its ResourceSlices";
    SLICES_CURRENT = Gauge "nodedock_slices_current" ["driver", "pool"] "1 if the ResourceSlices of a pool match its driver's inventory, else 0";
    SLICE_WRITES = Counter "nodedock_slice_writes" ["verb", "outcome"] "Writes of ResourceSlices";
    SLICE_REPAIRS = Counter "nodedock_slice_repairs" [] "Pools written again after another client had changed or deleted their ResourceSlices";
    CLAIM_READS = Counter "nodedock_claim_reads" ["from"] "Reads of claims of the API server by source: memory, the API server, or memory while it was unreachable";
    CLAIMS_KNOWN = Gauge "nodedock_claims_known" ["how"] "Claims of the API server in memory, and watched ones";
    CLAIM_STATUSES = Counter "nodedock_claim_statuses" ["outcome"] "Device statuses reported by drivers: written, unchanged, refused by the API server, or dropped because too many were pending";
    EVENTS = Counter "nodedock_events" ["outcome"] "Events by outcome: created, updated, refused by the API server, or dropped";
    RECONCILES = Counter "nodedock_reconcile_rounds" ["outcome"] "Reconciliations of the kubelet's claims with its pods; blind ones could not read enough";
    RECONCILE_UNPREPARED = Counter "nodedock_reconcile_given_up" [] "Claims unprepared because the kubelet no longer needs them";
}
