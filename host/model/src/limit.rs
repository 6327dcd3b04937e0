//! Bounds that the contract, an API or an operator can see, each with its reason. A request or a result beyond one is refused as a whole.

use std::time::Duration;

/// Pools of one driver: an inventory is kept in memory and compared at each discovery.
pub const POOLS_MAX: usize = 64;
/// Devices of one driver: 32 ResourceSlices of 128.
pub const DEVICES_MAX: usize = 4096;
/// Attributes and capacities of a device together (`resource.k8s.io/v1`).
pub const ATTRIBUTES_MAX: usize = 32;
/// Values over all attributes of a device, lists counted by entry (`resource.k8s.io/v1`).
pub const ATTRIBUTE_VALUES_MAX: usize = 48;
/// Bytes of a text or version attribute (`resource.k8s.io/v1`).
pub const ATTRIBUTE_TEXT_MAX: usize = 64;
/// Taints of a device (`resource.k8s.io/v1`).
pub const TAINTS_MAX: usize = 16;
/// Counter sets that a device consumes (`resource.k8s.io/v1`).
pub const CONSUMED_SETS_MAX: usize = 2;
/// Counter sets of a pool and counters of a set (`resource.k8s.io/v1`).
pub const COUNTER_SETS_MAX: usize = 8;
pub const COUNTERS_MAX: usize = 32;
/// Devices of a ResourceSlice; the second if one of them has taints, consumes counters or has a list (`resource.k8s.io/v1`).
pub const SLICE_DEVICES_MAX: usize = 128;
pub const SLICE_HEAVY_DEVICES_MAX: usize = 64;
/// Bytes of a slice's devices as JSON: an API server stores objects of at most 1.5 MiB.
pub const SLICE_BYTES_MAX: usize = 1 << 20;
/// Bytes of the generated prefix of a slice's name: an API server truncates a longer one, and appends five letters.
pub const SLICE_PREFIX_BYTES_MAX: usize = 58;
/// Slices of this node that are read: many times those of a node with many drivers.
pub const SLICES_MAX: usize = 16 * 1024;
/// Delay from the first change of slices to the reconcile: changes come in bursts.
pub const SLICE_SETTLE: Duration = Duration::from_millis(100);
/// Minimum interval between two writes of a pool, however fast its devices change.
pub const SLICE_PERIOD: Duration = Duration::from_secs(1);
/// Backoff of writes of a pool that the API server refused or that failed; doubled up to the second.
pub const SLICE_RETRY_MIN: Duration = Duration::from_secs(1);
pub const SLICE_RETRY_MAX: Duration = Duration::from_secs(120);
/// Backoff between repairs of a pool that another client changed, from the second repair on; doubled up to the second. After the third
/// without a change, the next repair is immediate again.
pub const SLICE_REPAIR_MIN: Duration = Duration::from_secs(1);
pub const SLICE_REPAIR_MAX: Duration = Duration::from_secs(30);
pub const SLICE_CALM: Duration = Duration::from_secs(300);
/// Repairs of a pool without such a pause after which another writer is assumed: a kubelet that restarts causes one repair.
pub const SLICE_REPAIRS_TOLERATED: u32 = 5;
/// Delay from the removal of a driver's file to the deletion of its slices: files are replaced by removing and copying.
pub const SLICE_WITHDRAW_GRACE: Duration = Duration::from_secs(10);
/// Time that a device keeps the taint after its last unhealthy report: flapping must not cause a write each time.
pub const SLICE_TAINT_HOLD: Duration = Duration::from_secs(30);
/// Values of a capacity's request policy (`resource.k8s.io/v1`).
pub const POLICY_VALUES_MAX: usize = 10;
/// Identity strings of a device, and bytes of each.
pub const IDENTITIES_MAX: usize = 16;
pub const IDENTITY_BYTES_MAX: usize = 253;
/// NUMA nodes of a device: more than any machine has.
pub const NUMA_NODES_MAX: usize = 64;
/// Annotations and details of one value; a key is a qualified name, a value is one line.
pub const LABELS_MAX: usize = 16;
pub const LABEL_KEY_BYTES_MAX: usize = 253;
pub const LABEL_VALUE_BYTES_MAX: usize = 1024;
/// Bytes of a problem's code and message: they appear in Events and terminals.
pub const PROBLEM_CODE_BYTES_MAX: usize = 63;
pub const PROBLEM_MESSAGE_BYTES_MAX: usize = 1024;
/// Failed attempts after which the version that prepared a claim is called to unprepare it, even if the serving version is only unavailable.
pub const PREDECESSOR_PATIENCE: u32 = 2;
/// Interval of the collection of stored files without claims, unless another event triggers it.
pub const KEPT_SWEEP: Duration = Duration::from_secs(60);
/// Bytes of a quantity: the longest in use have fewer than 20.
pub const QUANTITY_BYTES_MAX: usize = 64;
/// Bytes of a driver's summary.
pub const SUMMARY_BYTES_MAX: usize = 1024;
/// Values below `/sys` that one driver changes for a claim, and bytes of them with their paths: each write makes all values of a claim
/// durable again.
pub const VALUES_PER_CLAIM_MAX: usize = 256;
pub const VALUES_BYTES_PER_CLAIM_MAX: usize = 256 << 10;
/// Deadline of a write below `/sys`: creating virtual functions takes seconds.
pub const SYSFS_WRITE_WALL: Duration = Duration::from_secs(10);
/// Globs of one list of a driver's requested capabilities, and bytes of each.
pub const GRANT_ENTRIES_MAX: usize = 64;
pub const GRANT_ENTRY_BYTES_MAX: usize = 512;
/// Kernel subsystems that a driver names.
pub const EVENT_SUBSYSTEMS_MAX: usize = 32;
/// Seconds between discoveries: the minimum limits the CPU time, the maximum the delay.
pub const DISCOVERY_PERIOD_MIN: Duration = Duration::from_secs(1);
pub const DISCOVERY_PERIOD_MAX: Duration = Duration::from_secs(3600);
pub const DISCOVERY_PERIOD: Duration = Duration::from_secs(60);

/// Entries of each list of edits: a whole NVSwitch baseboard has about 30 nodes.
pub const EDITS_MAX: usize = 64;
/// Bytes of an environment variable's value and of a mount option.
pub const ENV_VALUE_BYTES_MAX: usize = 4096;
pub const ENV_NAME_BYTES_MAX: usize = 256;
/// Linux' PATH_MAX.
pub const PATH_BYTES_MAX: usize = 4096;
/// Bytes of a memo, which is stored with the claim in the checkpoint.
pub const MEMO_BYTES_MAX: usize = 64 << 10;
/// `status.devices[].data` (`resource.k8s.io/v1`).
pub const STATUS_DATA_BYTES_MAX: usize = 10 << 10;
pub const STATUS_CONDITIONS_MAX: usize = 8;
pub const STATUS_IPS_MAX: usize = 16;
/// Type, reason and message of a condition (`metav1.Condition`), the name of an interface and a hardware address (`resource.k8s.io/v1`).
pub const CONDITION_TYPE_BYTES_MAX: usize = 316;
pub const CONDITION_REASON_BYTES_MAX: usize = 1024;
pub const CONDITION_MESSAGE_BYTES_MAX: usize = 32768;
pub const INTERFACE_NAME_BYTES_MAX: usize = 256;
pub const HARDWARE_ADDRESS_BYTES_MAX: usize = 128;
/// Claims whose status waits for a write: many times the claims of a node.
pub const STATUSES_WAITING_MAX: usize = 1024;
/// Attempts to change an object that other clients change as well.
pub const KUBE_CONFLICTS_MAX: u32 = 5;
/// Backoff of background requests while the API server is unreachable; doubled up to the second.
pub const KUBE_RETRY_MIN: Duration = Duration::from_secs(1);
pub const KUBE_RETRY_MAX: Duration = Duration::from_secs(60);
/// Delay of a retry after 403: an operator must change a role first.
pub const KUBE_FORBIDDEN_PAUSE: Duration = Duration::from_secs(300);
/// Events that wait to be published.
pub const EVENTS_MAX: usize = 512;
/// An event that waits for longer is dropped.
pub const EVENT_AGE_MAX: Duration = Duration::from_secs(600);
/// Burst of events, and the interval of further ones: a kubelet retries the claims of all pods of the node in the same steps.
pub const EVENTS_BURST: u32 = 50;
pub const EVENTS_EVERY: Duration = Duration::from_secs(2);
/// Pods of a refused claim that get an event.
pub const EVENT_PODS_MAX: usize = 8;
/// Reason and note of an event (`events.k8s.io/v1`).
pub const EVENT_REASON_BYTES_MAX: usize = 128;
pub const EVENT_MESSAGE_BYTES_MAX: usize = 1024;
/// Interval of reads of the Node object; the backoff after a failure is from the second to the third.
pub const NODE_READ_PERIOD: Duration = Duration::from_secs(600);
pub const NODE_READ_MIN: Duration = Duration::from_secs(1);
pub const NODE_READ_MAX: Duration = Duration::from_secs(60);
/// Pods of the node's list: a kubelet usually has 110.
pub const NODE_PODS_MAX: usize = 10_000;
/// Interval of reconciliation of prepared claims: normally, while one seems unneeded, and the minimum.
pub const RECONCILE_PERIOD: Duration = Duration::from_secs(180);
pub const RECONCILE_PERIOD_PENDING: Duration = Duration::from_secs(60);
pub const RECONCILE_PERIOD_MIN: Duration = Duration::from_secs(15);
/// Time and number of checks after which a claim without consumers is unprepared: a kubelet does it itself within a minute or two.
pub const RECONCILE_DELAY: Duration = Duration::from_secs(300);
pub const RECONCILE_LOOKS_MIN: u32 = 3;
/// Claims and pods that are read in one round: more than the claims of a node.
pub const RECONCILE_ASKS_MAX: usize = 512;

/// Results of an allocation, its configs and its consumers (`resource.k8s.io/v1`).
pub const ALLOCATED_DEVICES_MAX: usize = 32;
pub const CONFIGS_MAX: usize = 64;
pub const RESERVED_FOR_MAX: usize = 256;
/// Deadline of reading a claim for a kubelet, which waits 45 s for a prepare: after it the cached claim is used, or the kubelet retries.
pub const CLAIM_SOURCE_WAIT: Duration = Duration::from_secs(10);
/// Opaque parameters (`resource.k8s.io/v1`).
pub const PARAMETERS_BYTES_MAX: usize = 10 << 10;
/// Claims of a pod and its containers: far more than a pod can use, far less than would harm.
pub const POD_CLAIMS_MAX: usize = 128;
pub const POD_CONTAINERS_MAX: usize = 256;
/// Extended resources of a container, and devices that it may have of one: more than any node has.
pub const CONTAINER_RESOURCES_MAX: usize = 64;
pub const RESOURCE_COUNT_MAX: u32 = 4096;
/// NUMA nodes that Linux can number (`MAX_NUMNODES`).
pub const NUMA_NODES_OF_LINUX: u32 = 1024;
/// Claims that a container names, counted by request: a pod's claims have no more requests.
pub const CONTAINER_CLAIMS_MAX: usize = 1024;
/// Entries of a claim's or a driver's history.
pub const TIMELINE_MAX: usize = 32;

/// Bytes of a driver's file. Rust drivers have 20 to 200 kB, Python ones 18 MB.
pub const DRIVER_FILE_BYTES_MAX: u64 = 64 << 20;
/// Bytes of drivers' files in memory during loads, which are sequential: a dozen Python files fit, or three of the largest.
pub const LOADED_FILES_BYTES_MAX: u64 = 256 << 20;
/// The same while files are only verified, which takes a second for the largest.
pub const JUDGED_FILES_BYTES_MAX: u64 = 128 << 20;
/// Grant and config files: written by people.
pub const SIDE_FILE_BYTES_MAX: u64 = 256 << 10;
/// A signature beside a driver: the longest in use, a bundle with an entry of a log, have some 10 kB.
pub const SIGNATURE_FILE_BYTES_MAX: u64 = 64 << 10;
/// A public key as PEM has 200 bytes; with words before it a page.
pub const KEY_FILE_BYTES_MAX: u64 = 16 << 10;
/// Trusted keys, name globs of each, drivers with pins and digests of each: each key is tried for each file.
pub const TRUST_KEYS_MAX: usize = 64;
pub const TRUST_NAMES_MAX: usize = 64;
pub const TRUST_PINS_MAX: usize = DRIVER_FILES_MAX;
pub const TRUST_DIGESTS_MAX: usize = 64;
/// Files in the drivers directory that are read; further ones are reported.
pub const DRIVER_FILES_MAX: usize = 512;
/// A claims file or a command's input file.
pub const MANIFEST_BYTES_MAX: u64 = 4 << 20;

/// Elapsed time of a prepare or unprepare, and of a discovery or health check.
pub const CALL_WALL: Duration = Duration::from_secs(10);
pub const LOOK_WALL: Duration = Duration::from_secs(5);
/// CPU of a call.
pub const CALL_CPU: Duration = Duration::from_secs(2);
/// Memory of a call over all linear memories, and the maximum of a grant.
pub const CALL_MEMORY: usize = 64 << 20;
pub const CALL_MEMORY_MAX: usize = 512 << 20;
pub const CALL_WALL_MAX: Duration = Duration::from_secs(40);
pub const CALL_CPU_MAX: Duration = Duration::from_secs(20);
/// Bytes that one call may pass from a guest: 4,096 devices of 4 KiB in the host's memory; and the maximum of a grant.
pub const HOSTCALL_BYTES: usize = 16 << 20;
pub const HOSTCALL_BYTES_MAX: usize = 64 << 20;
/// Concurrent calls of one driver; further calls wait. A grant may raise it to half of all permits.
pub const CALLS_PER_DRIVER: usize = 16;
pub const CALLS_PER_DRIVER_MAX: usize = 32;
/// Retry delay during a probe: most calls have ended by then.
pub const QUARANTINE_PROBE_WAIT: Duration = Duration::from_secs(1);
/// Bytes and operations of all host calls of one driver call: a driver that walks all of `/sys` is defective.
pub const HOST_BYTES_PER_CALL: usize = 16 << 20;
pub const HOST_OPERATIONS_PER_CALL: usize = 100_000;
/// Their maximum in a grant.
pub const HOST_BYTES_PER_CALL_MAX: usize = 128 << 20;
pub const HOST_OPERATIONS_PER_CALL_MAX: usize = 1_000_000;
/// A driver's log: lines and bytes per second.
pub const LOG_LINES_PER_SECOND: u32 = 50;
pub const LOG_BYTES_PER_SECOND: u32 = 64 << 10;
/// Their maximum in a grant: a log that a person can still read.
pub const LOG_LINES_PER_SECOND_MAX: u32 = 1000;
pub const LOG_BYTES_PER_SECOND_MAX: u32 = 1 << 20;

/// A kubelet's deadline for a prepare or an unprepare: half of its 90 s between retries.
pub const CLAIM_CALL_DEADLINE: Duration = Duration::from_secs(45);
/// Time that a prepare waits for another claim to release a device.
pub const EXCLUSIVE_WAIT: Duration = Duration::from_secs(5);
/// Time that the manager waits for a driver after the deadline: the driver ends its calls itself, and checks files afterwards.
pub const CALL_MARGIN: Duration = Duration::from_secs(5);
/// Backoff of prepares that a driver refused temporarily, from the second retry on; doubled up to the second. The first is short for a
/// person who retries, the second is close to a kubelet's interval.
pub const PREPARE_RETRY_MIN: Duration = Duration::from_millis(250);
pub const PREPARE_RETRY_MAX: Duration = Duration::from_secs(60);
/// Longest rest of such a delay that a request waits for: the caller hardly notices it.
pub const PREPARE_RETRY_PATIENCE: Duration = Duration::from_millis(500);
/// Maximum of a driver's `retry-after-ms`: a wrong number must not block a claim for days.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(3600);
/// Recorded refusals, by claim and driver: many times the pods of a node, in about a MiB. The oldest is dropped first.
pub const REFUSALS_MAX: usize = 4096;
/// Records of released claims, the newest: years of manual releases.
pub const RELEASED_MAX: usize = 256;
/// Delay after the start before an interrupted release is completed without all drivers of the claim: installed drivers are loaded by then.
pub const RELEASE_GRACE: Duration = Duration::from_secs(15);
/// Backoff of unprepares that a driver refuses; doubled up to the second.
pub const UNPREPARE_RETRY_MIN: Duration = Duration::from_secs(1);
pub const UNPREPARE_RETRY_MAX: Duration = Duration::from_secs(60);
/// Delay from a kernel event to a discovery: events come in bursts.
pub const EVENT_DEBOUNCE: Duration = Duration::from_millis(100);
/// Delay from a file's last change to its load, unless the file was closed or renamed into place.
pub const FILE_SETTLE: Duration = Duration::from_millis(200);
/// Interval of listing the directory, in addition to the watch.
pub const RELIST_PERIOD: Duration = Duration::from_secs(30);
/// Interval of checking the CDI directories, in addition to the watch: retries failures, and finds changes without events.
pub const CDI_SWEEP_PERIOD: Duration = Duration::from_secs(60);
/// Backoff of repairs of a claim's CDI files; doubled up to the interval above.
pub const CDI_RETRY_MIN: Duration = Duration::from_secs(1);
/// Interval of checking by one `stat` that the watched directory is still the CDI directory.
pub const CDI_DIRECTORY_LOOK: Duration = Duration::from_millis(500);
/// Directories of CDI specs that runtimes read: two are usual.
pub const CDI_DIRECTORIES_MAX: usize = 16;
/// Claims whose files are repaired together: bounds the time for which each is locked.
pub const CDI_CLAIMS_AT_ONCE: usize = 64;
/// Entries of the directory of registration sockets that are read, and the depth: far more than a node's plugins need.
pub const REGISTRY_ENTRIES_MAX: usize = 10_000;
pub const REGISTRY_DEPTH_MAX: usize = 8;
/// Concurrent registration sockets: each has a worker.
pub const PLUGIN_SOCKETS_MAX: usize = 512;
/// A kubelet's deadline for the steps of a registration.
pub const PLUGIN_DIAL: Duration = Duration::from_secs(10);
pub const PLUGIN_INFO: Duration = Duration::from_secs(1);
pub const PLUGIN_NOTIFY: Duration = Duration::from_secs(5);
/// Backoff of failed registrations: doubled from the first to the second, as in a kubelet.
pub const PLUGIN_RETRY_MIN: Duration = Duration::from_millis(500);
pub const PLUGIN_RETRY_MAX: Duration = Duration::from_secs(120);
/// Bytes of a plugin's GetInfo response, and services in it: real ones have 100 bytes and four.
pub const PLUGIN_INFO_BYTES_MAX: usize = 64 << 10;
pub const PLUGIN_SERVICES_MAX: usize = 64;
/// Delay of a reconnect: a plugin that restarts is back within seconds, and an attempt costs one system call.
pub const RECONNECT_MIN: Duration = Duration::from_millis(20);
pub const RECONNECT_MAX: Duration = Duration::from_secs(2);
/// Time that a call waits for a lost connection: a plugin that is replaced in place takes about a second.
pub const RECONNECT_WAIT: Duration = Duration::from_secs(2);
/// Bytes of a plugin's response; grpc-go's bound for messages.
pub const PLUGIN_ANSWER_BYTES_MAX: usize = 4 << 20;
/// Bytes of the headers of a plugin's response: they contain an error's text, and a longer one would end the call without the text.
pub const PLUGIN_HEADERS_BYTES_MAX: u32 = 256 << 10;
/// Devices in a plugin's result for a claim (one for each request and share), and CDI names of a device.
pub const PLUGIN_DEVICES_MAX: usize = 256;
pub const PLUGIN_CDI_NAMES_MAX: usize = 64;
/// Bytes of a CDI name: a vendor, a class and a device, each as long as a file's name.
pub const CDI_NAME_BYTES_MAX: usize = 3 * 255;
/// Bytes of a share's ID: a UUID has 36.
pub const SHARE_ID_BYTES_MAX: usize = 64;
/// Devices in one message of a device plugin; `RESOURCE_DEVICES_MAX` bounds the used ones. A message of `PLUGIN_ANSWER_BYTES_MAX` has no
/// room for more with an ID of 16 bytes and a health each, and a message with empty entries must not cost more memory than a full one.
pub const LISTED_DEVICES_MAX: usize = 160 << 10;
/// Interval between two lists of a device plugin: of the lists in between only the newest is used, so that a plugin with flapping
/// devices costs at most twenty lists per second.
pub const LIST_PACE: Duration = Duration::from_millis(50);
/// Entries of each list in a device plugin's Allocate response: enough for all device nodes and libraries of a node.
pub const ALLOCATION_ENTRIES_MAX: usize = 1024;
/// Bytes of a variable's value from a device plugin: Linux accepts 128 KiB of a `NAME=VALUE` (`MAX_ARG_STRLEN`), and plugins store
/// lists of devices and JSON there.
pub const ALLOCATION_ENV_BYTES_MAX: usize = (128 << 10) - ENV_NAME_BYTES_MAX - 2;
/// Keys and values of a container's annotations together (Kubernetes).
pub const ALLOCATION_ANNOTATIONS_BYTES_MAX: usize = 256 << 10;
/// Bytes of a device plugin's options.
pub const DEVICE_OPTIONS_DEADLINE: Duration = Duration::from_secs(10);
/// Bytes of a request to register a device plugin: three names.
pub const REGISTER_BYTES_MAX: usize = 64 << 10;
/// Concurrent resources of device plugins: each has a task, a connection and a list.
pub const PLUGIN_RESOURCES_MAX: usize = 256;
/// Device plugins that are dialled concurrently; others wait, one for each resource.
pub const REGISTRATIONS_AT_ONCE: usize = 16;
/// Age after which a device plugin's stream does not count as flapping: when it ends, the first reconnect is immediate.
pub const DEVICE_STREAM_STEADY: Duration = Duration::from_secs(10);
/// Time without a list after which a device plugin is logged.
pub const FIRST_LIST_WAIT: Duration = Duration::from_secs(30);
/// Default and maximum validity of a plugin's health report.
pub const HEALTH_TIMEOUT: Duration = Duration::from_secs(30);
pub const HEALTH_TIMEOUT_MAX: Duration = Duration::from_secs(24 * 3600);
/// Bytes of a message about a device's health, as a kubelet truncates it.
pub const HEALTH_MESSAGE_BYTES_MAX: usize = 1024;
/// Delay from the end of a health stream to the next, as in a kubelet.
pub const HEALTH_RESTART: Duration = Duration::from_secs(5);
/// Interval of repeating the health list to a kubelet, well before it counts as outdated, and the minimum interval.
pub const HEALTH_RESEND: Duration = Duration::from_secs(10);
pub const HEALTH_PACE: Duration = Duration::from_millis(100);
/// Claims in one call of a kubelet: more than one pod has of a driver.
pub const BRIDGE_CLAIMS_MAX: usize = 2 * POD_CLAIMS_MAX;
/// Claims of one call that are processed concurrently.
pub const BRIDGE_CLAIMS_AT_ONCE: usize = 16;
/// Concurrent connections to one socket in the kubelet's directories (a kubelet has one), and calls in flight on each: a pod has one.
pub const BRIDGE_CONNECTIONS_MAX: usize = 32;
pub const BRIDGE_STREAMS_MAX: u32 = 512;
/// Concurrent streams of one driver's health: a kubelet has one.
pub const BRIDGE_HEALTH_STREAMS_MAX: usize = 8;
/// Stored names of drivers that are offered to a kubelet: the maximum of drivers.
pub const BRIDGE_DRIVERS_MAX: usize = DRIVER_FILES_MAX + PLUGIN_SOCKETS_MAX;
/// Time that a kubelet's call waits for a loading driver: less than half of its 45 s.
pub const BRIDGE_DRIVER_WAIT: Duration = Duration::from_secs(10);
/// Time after the start in which an unknown driver counts as loading.
pub const BRIDGE_SETTLE: Duration = Duration::from_secs(10);
/// Interval of checking the sockets in the kubelet's directories, which costs two `stat` each; failures back off from it, doubled up to
/// the second.
pub const BRIDGE_LOOK_PERIOD: Duration = Duration::from_secs(1);
pub const BRIDGE_RETRY_MAX: Duration = Duration::from_secs(30);
/// Time that a removed driver is still offered: a file that is replaced is gone for a moment.
pub const BRIDGE_GONE_GRACE: Duration = Duration::from_secs(5);
/// The same after the kubelet unprepared its last claim: twice a kubelet's retry interval, so that the kubelet notices.
pub const BRIDGE_HELD_GRACE: Duration = Duration::from_secs(180);
/// The same for a driver that was offered before the start: compiling a driver may take three minutes.
pub const BRIDGE_REMEMBERED_GRACE: Duration = Duration::from_secs(300);
/// Deadline of calls in flight when the daemon stops.
pub const DRAIN: Duration = Duration::from_secs(20);
/// Bytes of a Unix socket's path (`sun_path` without its terminating zero).
pub const SOCKET_PATH_BYTES_MAX: usize = 107;
/// Bytes of a message on the node API.
pub const NODE_API_MESSAGE_BYTES_MAX: usize = 16 << 20;
/// Queue of the checkpoint's writer; further requests wait for a slot.
pub const CHECKPOINT_QUEUE: usize = 1024;
/// Changes of one commit: bounds its latency.
pub const CHECKPOINT_BATCH_MAX: usize = 256;
/// Duration after which a commit is reported as slow: a healthy disk syncs in milliseconds, a busy one within a second.
pub const CHECKPOINT_SLOW: Duration = Duration::from_secs(5);
/// Backoff of testing whether the disk accepts writes again; doubled up to the second.
pub const CHECKPOINT_PROBE_MIN: Duration = Duration::from_secs(1);
pub const CHECKPOINT_PROBE_MAX: Duration = Duration::from_secs(30);
/// Devices of one resource that a plugin lists: far more than the pods of a node can use; further ones are dropped.
pub const RESOURCE_DEVICES_MAX: usize = 10_000;
/// Bytes of a device's id, which is in the checkpoint and in every response: the longest in use have about 100.
pub const DEVICE_ID_BYTES_MAX: usize = 512;
/// The highest NUMA node that Linux can have (`MAX_NUMNODES`).
pub const NUMA_NODE_ID_MAX: u32 = 1023;
/// NUMA nodes for hints, one hint for each set of them; a kubelet's topology manager supports no more.
pub const HINT_NUMA_NODES_MAX: usize = 8;
/// Time that a kubelet keeps a resource without a plugin.
pub const RESOURCE_GRACE: Duration = Duration::from_secs(300);
/// Deadline of a registration with a kubelet: it dials the plugin for 10 s, and calls it for its options meanwhile.
pub const REGISTER_DEADLINE: Duration = Duration::from_secs(20);
/// Backoff of registrations with a kubelet; doubled up to the second. A socket exists a moment before it accepts.
pub const REGISTER_RETRY_MIN: Duration = Duration::from_millis(20);
pub const REGISTER_RETRY_MAX: Duration = Duration::from_secs(120);
/// Time without a successful registration with a kubelet after which it is reported. A kubelet restarts in less.
pub const KUBELET_AWAY: Duration = Duration::from_secs(30);
/// A kubelet that registered a device plugin opens its list at once; one that does not within this time has lost the plugin.
pub const LIST_WAIT: Duration = Duration::from_secs(10);
/// Delay from the end of a kubelet's last list to a new registration; doubled up to `REGISTER_RETRY_MAX` while lists end early.
pub const LIST_LOST: Duration = Duration::from_secs(1);
/// Age after which the end of a list does not count as a failure.
pub const LIST_STEADY: Duration = Duration::from_secs(60);
/// Concurrent lists of one resource: a kubelet has one, or two while it registers again.
pub const LISTS_AT_ONCE: usize = 16;
/// Containers in one Allocate of a kubelet, which sends one.
pub const ALLOCATE_CONTAINERS_MAX: usize = 64;
/// Time after an Allocate in which later containers of the same pod may reuse its devices; a kubelet admits a pod as a whole.
pub const ADMISSION: Duration = Duration::from_secs(60);
/// Interval of reading which devices pods use, with a jitter of a quarter.
pub const IN_USE_PERIOD: Duration = Duration::from_secs(30);
/// Deadline of that read, and the deadline while another call waits for it.
pub const IN_USE_DEADLINE: Duration = Duration::from_secs(10);
pub const IN_USE_DEADLINE_SHORT: Duration = Duration::from_secs(2);
/// Devices that no pod uses any more are released after this time, and after at least two reads.
pub const UNUSED: Duration = Duration::from_secs(60);
pub const UNUSED_LOOKS: u32 = 2;
/// Devices that no pod used yet are released after this time: a kubelet does not list those of init containers.
pub const UNSEEN: Duration = Duration::from_secs(300);
/// Time without a successful read after which it is reported.
pub const IN_USE_UNKNOWN: Duration = Duration::from_secs(180);
/// Time that an Allocate waits for the release of devices of an earlier one.
pub const GIVE_UP_WAIT: Duration = Duration::from_secs(15);
/// Bytes of the stored list of devices: a hundred thousand devices.
pub const BRIDGE_MEMORY_BYTES_MAX: usize = 16 << 20;
/// Interval between two writes of it, and the retry delay.
pub const BRIDGE_MEMORY_PERIOD: Duration = Duration::from_secs(1);
pub const BRIDGE_MEMORY_RETRY: Duration = Duration::from_secs(30);
/// A kubelet's deadline of PreStartContainer.
pub const PRE_START: Duration = Duration::from_secs(30);
/// Interval between two reports of changed resources: health may flap a thousand times per second.
pub const DEVICE_CHANGES_PERIOD: Duration = Duration::from_secs(1);
/// Calls per second on the pod-resources socket, and the burst, as in a kubelet.
pub const POD_RESOURCES_PER_SECOND: u32 = 100;
pub const POD_RESOURCES_BURST: u32 = 10;
/// Bytes of a response there: the bound of Kubernetes' own client library.
pub const POD_RESOURCES_MESSAGE_BYTES_MAX: usize = 16 << 20;
/// Requests per second to the API server, and the burst: thousands of nodes share it. The third is the number of tokens that requests
/// without a waiting pod leave.
pub const API_PER_SECOND: u32 = 25;
pub const API_BURST: u32 = 50;
pub const API_URGENT_RESERVE: u32 = 5;
/// Requests to the API server in flight, separately for those that a pod waits for and for the others.
pub const API_IN_FLIGHT_MAX: usize = 8;
/// Time that a request waits for the rate limit: less than a kubelet waits for a prepare.
pub const API_TURN_WAIT: Duration = Duration::from_secs(20);
/// Deadline of connecting to the API server, and of a whole request.
pub const API_CONNECT: Duration = Duration::from_secs(5);
pub const API_REQUEST: Duration = Duration::from_secs(10);
/// Bytes of an object: etcd takes 1.5 MiB in a denser form.
pub const API_OBJECT_BYTES_MAX: usize = 4 << 20;
/// Bytes of a page of a list: a node has some hundred pods and slices.
pub const API_PAGE_BYTES_MAX: usize = 16 << 20;
/// Bytes of an API server's message that are passed on.
pub const API_WORDS_BYTES_MAX: usize = 512;
/// Causes of a refusal that are kept.
pub const API_CAUSES_MAX: usize = 16;
/// Backoff of failed requests that are retried; doubled up to the second.
pub const API_RETRY_MIN: Duration = Duration::from_millis(500);
pub const API_RETRY_MAX: Duration = Duration::from_secs(30);
/// Maximum of an API server's `Retry-After`.
pub const API_RETRY_AFTER_MAX: Duration = Duration::from_secs(60);
/// Time after which an unreachable API server is reported: during an update it is replaced within seconds.
pub const API_AWAY_NOTICE: Duration = Duration::from_secs(5);
/// Interval of checking whether it is back, without other requests.
pub const API_PROBE_PERIOD: Duration = Duration::from_secs(15);
/// Interval of reading its served versions: a cluster is upgraded while the daemon runs.
pub const API_VERSIONS_PERIOD: Duration = Duration::from_secs(600);
/// Interval of reading tokens and certificates again (client-go does so every minute), and the minimum interval after a refusal.
pub const API_CREDENTIALS_PERIOD: Duration = Duration::from_secs(60);
pub const API_CREDENTIALS_REST: Duration = Duration::from_secs(2);
/// Time without an event after which a watch is dead: bookmarks arrive every minute.
pub const WATCH_SILENCE: Duration = Duration::from_secs(150);
/// Age after which a watch does not count as flapping.
pub const WATCH_STEADY: Duration = Duration::from_secs(10);
/// Concurrently watched claims: each is a separate connection, and thousands of nodes share the API server.
pub const FOLLOWED_CLAIMS_MAX: usize = 32;
/// Cached claims, watched or not: more than a node's pods use.
pub const KNOWN_CLAIMS_MAX: usize = 256;
/// Time that an unused claim is watched and cached: a kubelet retries a pod within two minutes.
pub const CLAIM_FOLLOW_IDLE: Duration = Duration::from_secs(300);
/// Concurrent connections to the admin socket, and to its address: further ones wait.
pub const ADMIN_CONNECTIONS_MAX: usize = 16;
/// Headers of a request there, and their bytes with the request line (the minimum of hyper).
pub const ADMIN_HEADERS_MAX: usize = 64;
pub const ADMIN_HEADERS_BYTES_MAX: usize = 8 << 10;
/// Deadline of a request's headers, and of a whole connection: a response has some hundred kB.
pub const ADMIN_HEADERS_WALL: Duration = Duration::from_secs(5);
pub const ADMIN_CONNECTION_WALL: Duration = Duration::from_secs(15);
/// Delay after a failed `accept`: no file descriptor is left, and an immediate retry would busy-loop.
pub const ADMIN_ACCEPT_PAUSE: Duration = Duration::from_millis(250);
/// Deadline of each part of the daemon in a liveness check: as long as a commit may take before it is reported.
pub const LIVE_DEADLINE: Duration = Duration::from_secs(5);
/// Minimum interval of liveness checks, whatever the number of requests.
pub const LIVE_LOOK_PERIOD: Duration = Duration::from_secs(1);
/// Sockets of drivers that are checked concurrently: there may be a thousand.
pub const LIVE_PATHS_AT_ONCE: usize = 32;

/// Maximum of a config's rate and burst of requests to the API server.
pub const API_PER_SECOND_MAX: u32 = 1000;
pub const API_BURST_MAX: u32 = 2000;

// Several instances on one root.
/// Instances in the order file: an update has two at a time, and a dropped one counts as new.
pub const INSTANCES_MAX: usize = 32;
/// Bytes of a message between instances.
pub const HANDOVER_WORD_BYTES_MAX: u64 = 4096;
/// Deadline of a message that is due at once.
pub const HANDOVER_WORD: Duration = Duration::from_secs(5);
/// Deadline of the previous instance to finish its calls and close the checkpoint: three drains, and the close.
pub const HANDOVER_RELEASE: Duration = Duration::from_secs(75);
/// Time that the previous instance keeps its kubelet sockets for the one that took over.
pub const HANDOVER_SOCKETS: Duration = Duration::from_secs(60);
/// Interval of checking whether the kubelet registered them.
pub const KUBELET_LOOK: Duration = Duration::from_millis(50);
/// Time that the new instance waits for the kubelet to register its drivers before it sends `serving`.
pub const HANDOVER_REGISTERED: Duration = Duration::from_secs(15);
/// Instances that stand by concurrently; the oldest of more connect again.
pub const HANDOVER_STANDBY_MAX: usize = 16;
/// Interval of checking whether the lock is free.
pub const HANDOVER_RETRY_MIN: Duration = Duration::from_millis(20);
pub const HANDOVER_RETRY_MAX: Duration = Duration::from_secs(2);
/// Delay before an older instance replaces one that ended: a newer one that restarts takes precedence.
pub const HANDOVER_PATIENCE: Duration = Duration::from_secs(1);
/// Time that a start waits for an unresponsive owner of the lock.
pub const HANDOVER_SILENT: Duration = Duration::from_secs(90);
