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

        /// In the order of the exposition.
        #[cfg(test)]
        pub(super) const ALL: &[Family] = &[$($id),+];
    };
}

families! {
    BUILD = Gauge "nodedock_build_info" ["version"] "Always 1: the version that runs";
    CRASHES = Counter "nodedock_daemon_crashes" [] "Crashes after which the parent process (nodedockd run --supervise) started the daemon again";
    DRIVERS = Gauge "nodedock_driver_state" ["driver", "kind", "state"] "Sources of a driver in each state that one is in";
    CALLS = Counter "nodedock_driver_calls" ["driver", "operation", "outcome"] "Calls of a WASM driver since it was loaded";
    CALL_SECONDS = Histogram "nodedock_driver_call_duration_seconds" ["driver", "operation"] "Time of the calls, waiting for a place included";
    CPU = Counter "nodedock_driver_cpu_seconds" ["driver"] "CPU time that a WASM driver's calls used";
    PEAK_CPU = Gauge "nodedock_driver_call_cpu_peak_seconds" ["driver"] "The most CPU time of one call";
    PEAK_MEMORY = Gauge "nodedock_driver_memory_peak_bytes" ["driver"] "The most memory of one call, over all its memories";
    PEAK_TABLES = Gauge "nodedock_driver_table_elements_peak" ["driver"] "The most table entries of one call";
    PEAK_HOST_BYTES = Gauge "nodedock_driver_host_bytes_peak" ["driver"] "The most bytes that the host gave in one call";
    PEAK_HOST_OPERATIONS = Gauge "nodedock_driver_host_operations_peak" ["driver"] "The most questions to the host in one call";
    TRAPS = Counter "nodedock_driver_traps" ["driver"] "Calls that trapped, or ended by the driver's own will";
    LIMITS = Counter "nodedock_driver_limit_refusals" ["driver", "limit"] "Refusals for a limit: one for each call that reached it, each line of the log, each look at the node";
    REFUSED = Counter "nodedock_driver_answers_refused" ["driver"] "Answers beyond the bounds, not valid, or against the grant";
    LOG_LINES = Counter "nodedock_driver_log_lines" ["driver"] "Lines that the driver wrote into the log";
    LOG_DROPPED = Counter "nodedock_driver_log_lines_dropped" ["driver"] "Lines that did not go into the log: it writes too much";
    HOST_BYTES = Counter "nodedock_driver_host_bytes" ["driver"] "Bytes that the host gave the driver";
    HOST_OPERATIONS = Counter "nodedock_driver_host_operations" ["driver"] "Questions of the driver to the host";
    CLAIMS = Gauge "nodedock_claims" ["state"] "Claims that the node knows";
    PODS = Gauge "nodedock_pods" [] "Pods that hold something, those of a kubelet among them";
    CONDITIONS = Gauge "nodedock_conditions" ["code"] "What is wrong with the node now";
    CDI_AGAIN = Counter "nodedock_cdi_files_rendered_again" [] "CDI files of prepared claims that were missing or altered";
    COMMITS = Counter "nodedock_checkpoint_commits" ["outcome"] "Commits of the checkpoint, durable and failed";
    COMMIT_CHANGES = Histogram "nodedock_checkpoint_commit_changes" [] "Changes of one durable commit";
    COMMIT_SECONDS = Histogram "nodedock_checkpoint_commit_duration_seconds" [] "Time of one durable commit, nearly all of it in its sync";
    COMMIT_BYTES = Counter "nodedock_checkpoint_value_bytes" [] "Bytes of the records that were written";
    DRA_OPERATIONS = Histogram "dra_operations_duration_seconds" ["operation_name", "is_error"] "Time of preparing and unpreparing the claims of a pod";
    DRA_RPCS = Histogram "dra_grpc_operations_duration_seconds" ["driver_name", "method_name", "grpc_status_code"] "Time of the calls of a native DRA plugin since it registered";
    DRA_CLAIMS = Gauge "dra_resource_claims_in_use" ["driver_name"] "Claims that are prepared, by driver and, as <any>, altogether";
    PLUGINS = Gauge "plugin_manager_total_plugins" ["socket_path", "state"] "Registration sockets: all of them as desired_state_of_world, those that are registered as actual_state_of_world";
    REGISTRATIONS = Counter "kubelet_device_plugin_registration" ["resource_name"] "Calls of device plugins to register, those that are refused too";
    ALLOCATIONS = Histogram "kubelet_device_plugin_alloc_duration_seconds" ["resource_name"] "Time of a device plugin's answer to Allocate";
    POD_RESOURCES = Counter "kubelet_pod_resources_endpoint_requests" ["server_api_version"] "Calls on the pod-resources socket";
    POD_RESOURCES_LIST = Counter "kubelet_pod_resources_endpoint_requests_list" ["server_api_version"] "Calls of List";
    POD_RESOURCES_ALLOCATABLE = Counter "kubelet_pod_resources_endpoint_requests_get_allocatable" ["server_api_version"] "Calls of GetAllocatableResources";
    POD_RESOURCES_GET = Counter "kubelet_pod_resources_endpoint_requests_get" ["server_api_version"] "Calls of Get";
    POD_RESOURCES_GET_ERRORS = Counter "kubelet_pod_resources_endpoint_errors_get" ["server_api_version"] "Calls of Get for a pod that holds nothing";
    BRIDGE_DRIVERS = Gauge "nodedock_bridge_drivers" ["driver", "registration"] "Drivers that are offered to the kubelet, and what it made of each: offered, asked, registered or refused";
    BRIDGE_REGISTRATIONS = Counter "nodedock_bridge_registrations" ["outcome"] "Times that a kubelet said that a driver is registered, or why not";
    BRIDGE_OPEN = Gauge "nodedock_bridge_connections_open" [] "Open connections to sockets in the kubelet's directories";
    BRIDGE_CONNECTIONS = Counter "nodedock_bridge_connections" [] "Connections to sockets in the kubelet's directories";
    BRIDGE_IN_FLIGHT = Gauge "nodedock_bridge_calls_in_flight" [] "Prepares and unprepares of the kubelet that are not answered yet";
    BRIDGE_CALLS = Histogram "nodedock_bridge_call_duration_seconds" ["driver", "method", "code"] "Time of the kubelet's calls, as they are seen from here";
    BRIDGE_OPERATIONS = Histogram "nodedock_bridge_operation_duration_seconds" ["operation", "is_error"] "The same of all drivers; an error is also a call that failed for one of its claims";
    RESOURCE_DEVICES = Gauge "nodedock_bridge_resource_devices" ["resource", "health"] "Devices of an extended resource as reported to the kubelet";
    RESOURCE_REGISTRATIONS = Counter "nodedock_bridge_resource_registrations" ["resource", "outcome"] "Registrations of an extended resource that the kubelet took, and that it refused";
    RESOURCE_LISTS = Counter "nodedock_bridge_resource_lists" ["resource"] "Lists of devices sent to the kubelet";
    RESOURCE_ALLOCATIONS = Histogram "nodedock_bridge_allocation_duration_seconds" ["resource"] "Time of our answers to Allocate";
    RESOURCE_FAILURES = Counter "nodedock_bridge_allocation_failures" ["resource"] "Allocations that were refused";
    RESOURCE_LOOKS = Counter "nodedock_bridge_in_use_looks" ["outcome"] "Times that the kubelet was asked which devices pods have";
    RESOURCE_RELEASED = Counter "nodedock_bridge_devices_given_up" [] "Allocations that were released since no pod has their devices";
    API_REACHABLE = Gauge "nodedock_api_reachable" [] "1: the last request was answered by the API server";
    API_REQUESTS = Counter "nodedock_api_requests" ["verb", "resource", "code"] "Requests to the API server; code 0 is no answer of it";
    API_SECONDS = Histogram "nodedock_api_request_duration_seconds" [] "Time of requests with their answers, watches left out";
    API_WAITS = Histogram "nodedock_api_rate_wait_seconds" [] "Time that requests waited for their turn";
    API_RETRIES = Counter "nodedock_api_credential_retries" [] "Requests that were repeated with newer credentials";
    API_WATCHES = Counter "nodedock_api_watch_restarts" [] "Watches that had to begin again";
    SLICES = Gauge "nodedock_slices" ["driver", "pool"] "ResourceSlices of a pool";
    SLICE_DEVICES = Gauge "nodedock_slice_devices" ["driver", "pool"] "Devices in them";
    SLICE_GENERATION = Gauge "nodedock_slice_generation" ["driver", "pool"] "The pool's generation";
    SLICES_CURRENT = Gauge "nodedock_slices_current" ["driver", "pool"] "1: the API server has the pool as its driver tells it";
    SLICE_WRITES = Counter "nodedock_slice_writes" ["verb", "outcome"] "Writes of slices";
    SLICE_REPAIRS = Counter "nodedock_slice_repairs" [] "Times that a pool was written since another client had changed or deleted it";
    CLAIM_READS = Counter "nodedock_claim_reads" ["from"] "Claims of the API server that were answered from memory, by asking it, and from memory since it was away";
    CLAIMS_KNOWN = Gauge "nodedock_claims_known" ["how"] "Claims of the API server in memory, and those of them that are watched";
    CLAIM_STATUSES = Counter "nodedock_claim_statuses" ["outcome"] "Statuses of claims' devices, as drivers report them: written, standing already, refused by the API server, dropped for want of room";
    EVENTS = Counter "nodedock_events" ["outcome"] "Events: created, counted once more, refused by the API server, dropped";
    RECONCILES = Counter "nodedock_reconcile_rounds" ["outcome"] "Looks whether pods still need the claims that the kubelet holds; blind ones saw too little";
    RECONCILE_UNPREPARED = Counter "nodedock_reconcile_given_up" [] "Claims unprepared that the kubelet left behind";
}
