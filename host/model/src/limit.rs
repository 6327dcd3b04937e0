//! Bounds that the contract, an API or an operator can see, each with its reason. A request or a result beyond one is refused as a whole.

use std::time::Duration;

/// Bytes of a DNS label and of a label's name and value, of a DNS subdomain, of a driver's name, and of the name of an attribute or capacity
/// after its domain (`resource.k8s.io/v1`).
pub const LABEL_BYTES_MAX: usize = 63;
pub const SUBDOMAIN_BYTES_MAX: usize = 253;
pub const DRIVER_NAME_BYTES_MAX: usize = 63;
pub const IDENTIFIER_BYTES_MAX: usize = 32;
/// Pools of one driver: an inventory is kept in memory and compared at each discovery.
pub const POOLS_MAX: usize = 64;
/// Readings of a device and of all devices of one driver: each is a series of metrics.
pub const DEVICE_READINGS_MAX: usize = 32;
pub const READINGS_MAX: usize = 4096;
pub const READING_NAME_BYTES_MAX: usize = 64;
/// Devices of one driver: 32 ResourceSlices of 128.
pub const DEVICES_MAX: usize = 4096;
/// Devices that a driver reports as left out: as many as it may offer. Bytes of a name and of a reason, and devices that the host keeps and
/// shows of one driver.
pub const LEFT_OUT_MAX: usize = 4096;
pub const LEFT_OUT_NAME_BYTES_MAX: usize = 253;
pub const LEFT_OUT_REASON_BYTES_MAX: usize = 1024;
pub const LEFT_OUT_SHOWN_MAX: usize = 256;
/// Attributes and capacities of a device together (`resource.k8s.io/v1`).
pub const ATTRIBUTES_MAX: usize = 32;
/// Values over all attributes of a device, lists counted by entry (`resource.k8s.io/v1`).
pub const ATTRIBUTE_VALUES_MAX: usize = 48;
/// Bytes of a text or version attribute (`resource.k8s.io/v1`).
pub const ATTRIBUTE_TEXT_MAX: usize = 64;
/// Taints of a device (`resource.k8s.io/v1`).
pub const TAINTS_MAX: usize = 16;
/// Binding conditions of a device, and binding failure conditions (`resource.k8s.io/v1`).
pub const BINDING_CONDITIONS_MAX: usize = 4;
/// Compatibility groups of a consumed counter set (`resource.k8s.io/v1`).
pub const COMPATIBILITY_GROUPS_MAX: usize = 2;
/// Resources of the node that one device takes of.
pub const NODE_ALLOCATABLE_MAX: usize = 8;
/// Counter sets that a device consumes (`resource.k8s.io/v1`).
pub const CONSUMED_SETS_MAX: usize = 2;
/// Counter sets of a pool and counters of a set (`resource.k8s.io/v1`).
pub const COUNTER_SETS_MAX: usize = 8;
pub const COUNTERS_MAX: usize = 32;
/// Devices of a ResourceSlice; the second if one of them has taints, consumes counters or has a list (`resource.k8s.io/v1`).
pub const SLICE_DEVICES_MAX: usize = 128;
pub const SLICE_HEAVY_DEVICES_MAX: usize = 64;
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
/// Bytes of a quantity: the longest in use have fewer than 20.
pub const QUANTITY_BYTES_MAX: usize = 64;
/// Bytes of a driver's version, which is shown in tables, and of its summary.
pub const DRIVER_VERSION_BYTES_MAX: usize = 64;
pub const SUMMARY_BYTES_MAX: usize = 1024;
/// Deadline of a write below `/sys`: creating virtual functions takes seconds.
pub const SYSFS_WRITE_WALL: Duration = Duration::from_secs(10);
/// Globs of one list of a driver's requested capabilities, and bytes of each.
pub const GRANT_ENTRIES_MAX: usize = 64;
pub const GRANT_ENTRY_BYTES_MAX: usize = 512;
/// Kernel subsystems that a driver names, and bytes of each.
pub const EVENT_SUBSYSTEMS_MAX: usize = 32;
pub const EVENT_SUBSYSTEM_BYTES_MAX: usize = 64;
/// Seconds between discoveries: the minimum limits the CPU time, the maximum the delay.
pub const DISCOVERY_PERIOD_MIN: Duration = Duration::from_secs(1);
pub const DISCOVERY_PERIOD_MAX: Duration = Duration::from_secs(3600);
pub const DISCOVERY_PERIOD: Duration = Duration::from_secs(60);

/// Entries of each list of edits: a whole NVSwitch baseboard has about 30 nodes.
pub const EDITS_MAX: usize = 64;
/// Bytes of an environment variable's value and of a mount option.
pub const ENV_VALUE_BYTES_MAX: usize = 4096;
pub const ENV_NAME_BYTES_MAX: usize = 256;
/// Bytes of a mount option or a file system's name, and of a class of service: a directory's name in resctrl.
pub const EDIT_WORD_BYTES_MAX: usize = 256;
pub const CLOS_ID_BYTES_MAX: usize = 255;
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
/// Backoff of background requests while the API server is unreachable; doubled up to the second.
pub const KUBE_RETRY_MIN: Duration = Duration::from_secs(1);
pub const KUBE_RETRY_MAX: Duration = Duration::from_secs(60);

/// Requests of a claim, and names of requests in a constraint or config; subrequests of a request; selectors of each of these and of a
/// class; bytes of an expression; constraints of a claim; configs of a claim or class (`resource.k8s.io/v1`).
pub const REQUESTS_MAX: usize = 32;
pub const SUBREQUESTS_MAX: usize = 8;
pub const SELECTORS_MAX: usize = 32;
pub const EXPRESSION_BYTES_MAX: usize = 10 << 10;
pub const CONSTRAINTS_MAX: usize = 32;
pub const CLAIM_CONFIGS_MAX: usize = 32;
/// Results of an allocation, its configs (of the claim and of its classes) and its consumers (`resource.k8s.io/v1`).
pub const ALLOCATED_DEVICES_MAX: usize = 32;
pub const CONFIGS_MAX: usize = 2 * CLAIM_CONFIGS_MAX;
pub const RESERVED_FOR_MAX: usize = 256;
/// Opaque parameters (`resource.k8s.io/v1`).
pub const PARAMETERS_BYTES_MAX: usize = 10 << 10;
/// Claims of a pod and its containers: far more than a pod can use, far less than would harm.
pub const POD_CLAIMS_MAX: usize = 128;
pub const POD_CONTAINERS_MAX: usize = 256;
/// Extended resources of a container: more than any node has.
pub const CONTAINER_RESOURCES_MAX: usize = 64;
/// Claims that a container names, counted by request: a pod's claims have no more requests.
pub const CONTAINER_CLAIMS_MAX: usize = 1024;
/// Entries of a claim's or a driver's history.
pub const TIMELINE_MAX: usize = 32;

/// Bytes of a driver's file. Rust drivers have 20 to 200 kB, Python ones 18 MB.
pub const DRIVER_FILE_BYTES_MAX: u64 = 64 << 20;
/// Grant and config files: written by people.
pub const SIDE_FILE_BYTES_MAX: u64 = 256 << 10;
/// A signature beside a driver: the longest in use, a bundle with an entry of a log, have some 10 kB.
pub const SIGNATURE_FILE_BYTES_MAX: u64 = 64 << 10;
/// Files in the drivers directory that are read; further ones are reported.
pub const DRIVER_FILES_MAX: usize = 512;
/// Driver images of the config: each is a volume of the daemon's pod, and two watched directories.
pub const DRIVER_IMAGES_MAX: usize = 64;
/// Bytes of a driver image's name, of which the names of a volume and of files are made.
pub const DRIVER_IMAGE_NAME_BYTES_MAX: usize = 56;

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
/// Time that a request waits for a driver that is being loaded: less than half of a kubelet's 45 s.
pub const DRIVER_WAIT: Duration = Duration::from_secs(10);
/// Time after a driver's source is gone in which it is expected back, as a file or a plugin that is replaced is: two thirds of a kubelet's
/// 45 s, which calls a driver that failed a prepare again only after a minute or more.
pub const DRIVER_RETURN: Duration = Duration::from_secs(30);
/// Delay from a kernel event to a discovery: events come in bursts.
pub const EVENT_DEBOUNCE: Duration = Duration::from_millis(100);
/// Delay from a file's last change to its load, unless the file was closed or renamed into place.
pub const FILE_SETTLE: Duration = Duration::from_millis(200);
/// Interval of listing the directory, in addition to the watch.
pub const RELIST_PERIOD: Duration = Duration::from_secs(30);
/// Directories of CDI specs that runtimes read: two are usual.
pub const CDI_DIRECTORIES_MAX: usize = 16;
/// Entries of the directory of registration sockets that are read, and the depth: far more than a node's plugins need.
pub const REGISTRY_ENTRIES_MAX: usize = 10_000;
pub const REGISTRY_DEPTH_MAX: usize = 8;
/// Concurrent registration sockets: each has a worker.
pub const PLUGIN_SOCKETS_MAX: usize = 512;
/// Bytes of a plugin's GetInfo response, and services in it: real ones have 100 bytes and four.
pub const PLUGIN_INFO_BYTES_MAX: usize = 64 << 10;
pub const PLUGIN_SERVICES_MAX: usize = 64;
/// Bytes of a plugin's response; grpc-go's bound for messages.
pub const PLUGIN_ANSWER_BYTES_MAX: usize = 4 << 20;
/// Devices in a plugin's result for a claim (one for each request and share), and CDI names of a device.
pub const PLUGIN_DEVICES_MAX: usize = 256;
pub const PLUGIN_CDI_NAMES_MAX: usize = 64;
/// Bytes of a CDI name: a vendor, a class and a device, each as long as a file's name.
pub const CDI_NAME_BYTES_MAX: usize = 3 * 255;
/// Bytes of a share's ID: a UUID has 36.
pub const SHARE_ID_BYTES_MAX: usize = 64;
/// Bytes of a device plugin's list: plugins that divide a device list an ID for each MiB of its memory, which were 23 MB on real nodes, and
/// a kubelet reads 16 MiB.
pub const PLUGIN_LIST_BYTES_MAX: usize = 64 << 20;
/// Devices in one list of a device plugin; `RESOURCE_DEVICES_MAX` bounds the used ones. Further entries are not decoded: in memory an empty
/// one has 36 times its bytes in the message.
pub const LISTED_DEVICES_MAX: usize = 1 << 20;
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
/// Bytes of a request to register a device plugin: three names.
pub const REGISTER_BYTES_MAX: usize = 64 << 10;
/// Concurrent resources of device plugins: each has a task, a connection and a list.
pub const PLUGIN_RESOURCES_MAX: usize = 256;
/// Default and maximum validity of a plugin's health report.
pub const HEALTH_TIMEOUT: Duration = Duration::from_secs(30);
pub const HEALTH_TIMEOUT_MAX: Duration = Duration::from_secs(24 * 3600);
/// Bytes of a message about a device's health, as a kubelet truncates it.
pub const HEALTH_MESSAGE_BYTES_MAX: usize = 1024;
/// Deadline of calls in flight when the daemon stops.
pub const DRAIN: Duration = Duration::from_secs(20);
/// Bytes of a Unix socket's path (`sun_path` without its terminating zero).
pub const SOCKET_PATH_BYTES_MAX: usize = 107;
/// Devices of one resource that a plugin lists, and that a container may have of it; further ones are dropped. Twice as many as
/// were seen on real nodes; they cost the daemon some 250 MiB while they are read.
pub const RESOURCE_DEVICES_MAX: usize = 256 << 10;
/// The same of a plugin that is a DRA driver: 79 ResourceSlices, which every scheduler reads.
pub const ADAPTED_DEVICES_MAX: usize = 10_000;
/// The highest NUMA node that Linux can have (`MAX_NUMNODES`).
pub const NUMA_NODE_ID_MAX: u32 = 1023;
/// Time that a kubelet keeps a resource without a plugin.
pub const RESOURCE_GRACE: Duration = Duration::from_secs(300);
/// Backoff of registrations with a kubelet; doubled up to the second. A socket exists a moment before it accepts.
pub const REGISTER_RETRY_MIN: Duration = Duration::from_millis(20);
pub const REGISTER_RETRY_MAX: Duration = Duration::from_secs(120);
/// Containers in one Allocate of a kubelet, which sends one.
pub const ALLOCATE_CONTAINERS_MAX: usize = 64;
/// A kubelet's deadline of PreStartContainer.
pub const PRE_START: Duration = Duration::from_secs(30);
/// Calls per second on the pod-resources socket, and the burst, as in a kubelet.
pub const POD_RESOURCES_PER_SECOND: u32 = 100;
pub const POD_RESOURCES_BURST: u32 = 10;
/// Bytes of a response there: the bound of Kubernetes' own client library.
pub const POD_RESOURCES_MESSAGE_BYTES_MAX: usize = 16 << 20;
/// Bytes of a message on the node API: a list of `RESOURCE_DEVICES_MAX` devices has 40 MB.
pub const NODE_API_MESSAGE_BYTES_MAX: usize = 64 << 20;
/// Requests per second to the API server, and the burst: thousands of nodes share it. The third is the number of tokens that requests
/// without a waiting pod leave.
pub const API_PER_SECOND: u32 = 25;
pub const API_BURST: u32 = 50;
pub const API_URGENT_RESERVE: u32 = 5;
/// Bytes of an API server's message that are passed on.
pub const API_WORDS_BYTES_MAX: usize = 512;

/// Statuses of claims that wait to be written, one of each claim and driver: many times the claims of a node.
pub const STATUSES_MAX: usize = 1024;

/// Maximum of a config's rate and burst of requests to the API server.
pub const API_PER_SECOND_MAX: u32 = 1000;
pub const API_BURST_MAX: u32 = 2000;
