//! Every bound, with its reason. A request or an answer beyond one is refused as a whole.

use std::time::Duration;

/// Pools of one driver: an inventory is held in memory and compared at each discovery.
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
/// Devices of a ResourceSlice; the second where one of them has taints, takes from counters or has a list (`resource.k8s.io/v1`).
pub const SLICE_DEVICES_MAX: usize = 128;
pub const SLICE_HEAVY_DEVICES_MAX: usize = 64;
/// Bytes of a slice's devices as JSON: an API server stores objects of at most 1.5 MiB.
pub const SLICE_BYTES_MAX: usize = 1 << 20;
/// Bytes of the part of a slice's name that we choose: an API server cuts off what is longer, and appends five letters.
pub const SLICE_PREFIX_BYTES_MAX: usize = 58;
/// Slices of this node that are looked at: many times those of a node full of drivers.
pub const SLICES_MAX: usize = 16 * 1024;
/// From the first sign that slices are to be written to the look at what: changes come in bursts.
pub const SLICE_SETTLE: Duration = Duration::from_millis(100);
/// Between two writings of a pool, however fast its devices change.
pub const SLICE_PERIOD: Duration = Duration::from_secs(1);
/// Between tries to write a pool that the API server refused or did not take; doubled up to the second.
pub const SLICE_RETRY_MIN: Duration = Duration::from_secs(1);
pub const SLICE_RETRY_MAX: Duration = Duration::from_secs(120);
/// Between repairs of what others changed, from the second on; doubled up to the second. A pool that nobody changed for the third is
/// repaired at once again.
pub const SLICE_REPAIR_MIN: Duration = Duration::from_secs(1);
pub const SLICE_REPAIR_MAX: Duration = Duration::from_secs(30);
pub const SLICE_CALM: Duration = Duration::from_secs(300);
/// Repairs of a pool without such a calm after which somebody else is taken to write it as well: a kubelet that starts anew is one.
pub const SLICE_REPAIRS_TOLERATED: u32 = 5;
/// From the moment that a driver's file is gone to the withdrawal of its slices: files are replaced by removing and copying.
pub const SLICE_WITHDRAW_GRACE: Duration = Duration::from_secs(10);
/// A device keeps the taint of an unhealthy one for so long after it was last said to be that: flapping must not cost a write each.
pub const SLICE_TAINT_HOLD: Duration = Duration::from_secs(30);
/// Values of a capacity's request policy (`resource.k8s.io/v1`).
pub const POLICY_VALUES_MAX: usize = 10;
/// Identity strings of a device, and bytes of each.
pub const IDENTITIES_MAX: usize = 16;
pub const IDENTITY_BYTES_MAX: usize = 253;
/// NUMA nodes of a device: more than any machine has.
pub const NUMA_NODES_MAX: usize = 64;
/// Annotations and details of one value; a key is a qualified name, a value a line.
pub const LABELS_MAX: usize = 16;
pub const LABEL_KEY_BYTES_MAX: usize = 253;
pub const LABEL_VALUE_BYTES_MAX: usize = 1024;
/// Bytes of a problem's code and message: they go into Events and terminals.
pub const PROBLEM_CODE_BYTES_MAX: usize = 63;
pub const PROBLEM_MESSAGE_BYTES_MAX: usize = 1024;
/// Versions of one driver whose files are kept for the claims that they prepared: more is a loop of replacements.
pub const KEPT_VERSIONS_MAX: usize = 16;
/// Tries in vain after which the code that prepared a claim is asked to give it up, also where the serving version only wants time.
pub const PREDECESSOR_PATIENCE: u32 = 2;
/// Between looks for kept files that nobody needs, where nothing else led to one.
pub const KEPT_SWEEP: Duration = Duration::from_secs(60);
/// Bytes of a quantity: the longest in use have fewer than 20.
pub const QUANTITY_BYTES_MAX: usize = 64;
/// Bytes of a driver's summary.
pub const SUMMARY_BYTES_MAX: usize = 1024;
/// Values below `/sys` that one driver changes for a claim, and bytes of them with their paths: each write makes all of a claim's
/// durable anew.
pub const VALUES_PER_CLAIM_MAX: usize = 256;
pub const VALUES_BYTES_PER_CLAIM_MAX: usize = 256 << 10;
/// A write below `/sys` may take so long: making virtual functions takes seconds.
pub const SYSFS_WRITE_WALL: Duration = Duration::from_secs(10);
/// Globs of one list of a driver's requests, and bytes of each.
pub const GRANT_ENTRIES_MAX: usize = 64;
pub const GRANT_ENTRY_BYTES_MAX: usize = 512;
/// Kernel subsystems that a driver names.
pub const EVENT_SUBSYSTEMS_MAX: usize = 32;
/// Seconds between discoveries: often enough to notice, seldom enough not to burn a core.
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
/// A memo: kept with the claim in the checkpoint.
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
/// Claims whose status waits to be written: many times the claims of a node.
pub const STATUSES_WAITING_MAX: usize = 1024;
/// Tries to change an object that others change as well, one after the other.
pub const KUBE_CONFLICTS_MAX: u32 = 5;
/// Between tries of what nobody waits for while the API server is away; doubled up to the second.
pub const KUBE_RETRY_MIN: Duration = Duration::from_secs(1);
pub const KUBE_RETRY_MAX: Duration = Duration::from_secs(60);
/// What is forbidden is tried again after so long: somebody has to change a role first.
pub const KUBE_FORBIDDEN_PAUSE: Duration = Duration::from_secs(300);
/// Events that wait or may be told again.
pub const EVENTS_MAX: usize = 512;
/// For how long the same told again is the same event, and for how long an event is worth writing.
pub const EVENT_SERIES: Duration = Duration::from_secs(600);
/// Between two counts of one event.
pub const EVENT_COUNT_PACE: Duration = Duration::from_secs(30);
/// Events of one object and of all at once, and the time in which one more may be written: refusals come in the steps in which a kubelet
/// tries again, for each pod of the node.
pub const OBJECT_EVENTS_BURST: u32 = 10;
pub const OBJECT_EVENTS_EVERY: Duration = Duration::from_secs(30);
pub const EVENTS_BURST: u32 = 50;
pub const EVENTS_EVERY: Duration = Duration::from_secs(2);
/// Pods of a refused claim that are told of it.
pub const EVENT_PODS_MAX: usize = 8;
/// Reason and message of an event (`events.k8s.io/v1`, which is what the core API stores), and what its name has of its object's.
pub const EVENT_REASON_BYTES_MAX: usize = 128;
pub const EVENT_MESSAGE_BYTES_MAX: usize = 1024;
pub const EVENT_NAME_PREFIX_BYTES_MAX: usize = 200;
/// The Node object is read so often, and where it cannot be, from the second time to the third.
pub const NODE_READ_PERIOD: Duration = Duration::from_secs(600);
pub const NODE_READ_MIN: Duration = Duration::from_secs(1);
pub const NODE_READ_MAX: Duration = Duration::from_secs(60);
/// Pods of a page of the node's list, and of the whole: a kubelet has 110 as a rule.
pub const NODE_PODS_PAGE: usize = 250;
pub const NODE_PODS_MAX: usize = 10_000;
/// Between looks whether held claims are still needed: usually, while one seems not to be, and at least.
pub const RECONCILE_PERIOD: Duration = Duration::from_secs(180);
pub const RECONCILE_PERIOD_PENDING: Duration = Duration::from_secs(60);
pub const RECONCILE_PERIOD_MIN: Duration = Duration::from_secs(15);
/// A claim that nobody seems to need is given up after so long, and so many looks: a kubelet comes to it itself within a minute or two.
pub const RECONCILE_DELAY: Duration = Duration::from_secs(300);
pub const RECONCILE_LOOKS_MIN: u32 = 3;
/// Claims and pods that are asked for in one round: more than the claims of a node.
pub const RECONCILE_ASKS_MAX: usize = 512;

/// Results of an allocation, its configs and its consumers (`resource.k8s.io/v1`).
pub const ALLOCATED_DEVICES_MAX: usize = 32;
pub const CONFIGS_MAX: usize = 64;
pub const RESERVED_FOR_MAX: usize = 256;
/// Reading a claim for a kubelet, which gives a prepare 45 s in all: then what is known of the claim counts, or the kubelet comes again.
pub const CLAIM_SOURCE_WAIT: Duration = Duration::from_secs(10);
/// Opaque parameters (`resource.k8s.io/v1`).
pub const PARAMETERS_BYTES_MAX: usize = 10 << 10;
/// Claims of a pod and its containers: far above what a pod can use, far below what would hurt.
pub const POD_CLAIMS_MAX: usize = 128;
pub const POD_CONTAINERS_MAX: usize = 256;
/// Extended resources of a container, and devices that it may have of one: more than any node has.
pub const CONTAINER_RESOURCES_MAX: usize = 64;
pub const RESOURCE_COUNT_MAX: u32 = 4096;
/// NUMA nodes that Linux can number (`MAX_NUMNODES`).
pub const NUMA_NODES_OF_LINUX: u32 = 1024;
/// Claims that a container names, counted by request: a pod's claims have no more requests that it could name.
pub const CONTAINER_CLAIMS_MAX: usize = 1024;
/// Entries of a claim's or a driver's history.
pub const TIMELINE_MAX: usize = 32;

/// A driver's file. Rust drivers have 20 to 200 kB, Python ones 18 MB.
pub const DRIVER_FILE_BYTES_MAX: u64 = 64 << 20;
/// Drivers' files in memory at once while they are loaded, which is one after the other: a dozen of Python fit, or three of the largest.
pub const LOADED_FILES_BYTES_MAX: u64 = 256 << 20;
/// And while they are only judged, which takes a second for the largest.
pub const JUDGED_FILES_BYTES_MAX: u64 = 128 << 20;
/// What a driver's file may hold. Compilers of other languages make one with 38 modules, 14,000 functions, the longest of 430 kB, and
/// 400 kB of types, imports, exports and the like, which are held in memory for as long as the driver is loaded.
pub const DRIVER_MODULES_MAX: usize = 256;
pub const DRIVER_FUNCTIONS_MAX: usize = 100_000;
pub const DRIVER_FUNCTION_BYTES_MAX: usize = 2 << 20;
pub const DRIVER_DECLARATION_BYTES_MAX: usize = 4 << 20;
/// Names of what a driver imports and exports, as they are told to people: real ones have 2 kB.
pub const DRIVER_REPORT_BYTES_MAX: usize = 256 << 10;
/// What compiling a driver may take. A Python driver of 18 MB takes 5 s and some 450 MB; addresses are counted, of which there are more.
pub const COMPILE_MEMORY: u64 = 1536 << 20;
pub const COMPILE_CPU: Duration = Duration::from_secs(120);
/// More than the CPU: a compiler gives way to everything else.
pub const COMPILE_WALL: Duration = Duration::from_secs(180);
/// Compiled code: two to three times its source.
pub const COMPILED_BYTES_MAX: u64 = 256 << 20;
/// Compiled drivers that are kept, with those of a folder full of drivers and of their predecessors; fifty of Python fit.
pub const CACHE_FILES_MAX: usize = 2 * DRIVER_FILES_MAX;
pub const CACHE_BYTES_MAX: u64 = 2 << 30;
/// Grant and config files: written by people.
pub const SIDE_FILE_BYTES_MAX: u64 = 256 << 10;
/// A signature beside a driver: the longest in use, a bundle with an entry of a log, have some 10 kB.
pub const SIGNATURE_FILE_BYTES_MAX: u64 = 64 << 10;
/// A public key as PEM has 200 bytes; with words before it a page.
pub const KEY_FILE_BYTES_MAX: u64 = 16 << 10;
/// Keys whose signatures count, globs of names of each, drivers with pins and digests of each: each key is tried for each file.
pub const TRUST_KEYS_MAX: usize = 64;
pub const TRUST_NAMES_MAX: usize = 64;
pub const TRUST_PINS_MAX: usize = DRIVER_FILES_MAX;
pub const TRUST_DIGESTS_MAX: usize = 64;
/// Files in the drivers folder that are looked at; what is beyond is reported.
pub const DRIVER_FILES_MAX: usize = 512;
/// A claims file or a command's input file.
pub const MANIFEST_BYTES_MAX: u64 = 4 << 20;

/// Wall clock of a call that prepares or unprepares, and of one that looks.
pub const CALL_WALL: Duration = Duration::from_secs(10);
pub const LOOK_WALL: Duration = Duration::from_secs(5);
/// How long a call that only looks waits for its place, beside its own time.
pub const PLACE_WAIT: Duration = Duration::from_secs(5);
/// CPU of a call.
pub const CALL_CPU: Duration = Duration::from_secs(2);
/// Epoch tick: the longest time that a driver keeps a thread from other work.
pub const EPOCH_TICK: Duration = Duration::from_millis(10);
/// Memory of a call over all linear memories, and what a grant may raise it to.
pub const CALL_MEMORY: usize = 64 << 20;
pub const CALL_MEMORY_MAX: usize = 512 << 20;
pub const CALL_WALL_MAX: Duration = Duration::from_secs(40);
pub const CALL_CPU_MAX: Duration = Duration::from_secs(20);
/// Core instances, memories and tables of a call. Python components have some ten instances.
pub const CALL_INSTANCES: usize = 64;
pub const CALL_MEMORIES: usize = 16;
pub const CALL_TABLES: usize = 64;
/// Entries over all tables of a call: a driver's functions that are called by reference.
pub const CALL_TABLE_ELEMENTS: usize = 100_000;
/// Bytes that one call may lift from a guest: 4,096 devices of 4 KiB, as the host holds them; and what a grant may raise it to.
pub const HOSTCALL_BYTES: usize = 16 << 20;
pub const HOSTCALL_BYTES_MAX: usize = 64 << 20;
/// Component-model handles of a store.
pub const HANDLES_MAX: usize = 256;
/// Calls of one driver at once; more wait. A grant may raise it to half of all places.
pub const CALLS_PER_DRIVER: usize = 16;
pub const CALLS_PER_DRIVER_MAX: usize = 32;
/// Calls of all WASM drivers at once, counted by linear memory: each reserves some GiB of addresses, and small machines have but
/// 512 of them.
pub const CALLS_MAX: usize = 64;
/// Memory that all calls under way may reserve together, each with its limit. With it a driver of the usual limit has its
/// `CALLS_PER_DRIVER` alone, and two drivers leave something for a third.
pub const CALLS_MEMORY_MAX: usize = 2 << 30;
/// CPU that a call may use on the threads that serve everybody; what is longer goes on in the slow lane. Small drivers take a
/// hundredth of it.
pub const FAST_LANE_CPU: Duration = Duration::from_millis(5);
/// Wall clock after which a call is slow though it computes nothing: others want its place.
pub const LONG_CALL: Duration = Duration::from_secs(1);
/// A function of a driver that was slow is called in the slow lane from the start for so long.
pub const SLOW_FOR: Duration = Duration::from_secs(60);
/// Calls and memory of drivers that are slow or fail: of one of them, and of all together. The rest is for those that work.
pub const SLOW_CALLS_PER_DRIVER: usize = 4;
pub const SLOW_CALLS_MAX: usize = 16;
pub const SLOW_CALLS_MEMORY_MAX: usize = 1 << 30;
/// Threads of the slow lane: half the cores, so that the other half is free for fresh calls, and no more than a few.
pub const SLOW_THREADS_MAX: usize = 4;
/// Their nice value: whoever wakes up on the serving threads comes first, and on a busy node a slow driver still comes to an end.
pub const SLOW_THREADS_NICE: i32 = 5;
/// Failures in a row after which a driver is left alone: one or two may be bad luck or one bad claim.
pub const QUARANTINE_FAILURES: u32 = 5;
/// For how long: doubled from the first to the second while probes fail. Long enough that a driver that spins costs next to
/// nothing, short enough that one that is well again is not missed for long.
pub const QUARANTINE_MIN: Duration = Duration::from_secs(5);
pub const QUARANTINE_MAX: Duration = Duration::from_secs(300);
/// When to come again while a probe is under way: most calls have ended by then.
pub const QUARANTINE_PROBE_WAIT: Duration = Duration::from_secs(1);
/// Threads of one driver that read below `/sys` or hang in it.
pub const SYSFS_THREADS_PER_DRIVER: usize = 8;
/// A JSON schema that a driver gives.
pub const SCHEMA_BYTES_MAX: usize = 256 << 10;
/// One sysfs read (sysfs files have at most a page, `config` spaces 4 KiB; binary attributes may be larger).
pub const SYSFS_READ_BYTES_MAX: usize = 64 << 10;
/// Entries that `read-dir` or a glob answers.
pub const SYSFS_ENTRIES_MAX: usize = 4096;
/// Bytes and operations of all host calls of one driver call: a driver that walks the whole of `/sys` is at fault.
pub const HOST_BYTES_PER_CALL: usize = 16 << 20;
pub const HOST_OPERATIONS_PER_CALL: usize = 100_000;
/// What a grant may raise them to.
pub const HOST_BYTES_PER_CALL_MAX: usize = 128 << 20;
pub const HOST_OPERATIONS_PER_CALL_MAX: usize = 1_000_000;
/// A look at the node that takes longer hangs in the kernel.
pub const HOST_LOOK_WALL: Duration = Duration::from_secs(2);
/// Values that one call may write below `/sys`: a driver that wants more is at fault.
pub const SYSFS_WRITES_PER_CALL: usize = 256;
/// A driver's log: bytes of a line, lines and bytes a second, and how much may come at once.
pub const LOG_LINE_BYTES_MAX: usize = 4096;
pub const LOG_LINES_PER_SECOND: u32 = 50;
pub const LOG_BYTES_PER_SECOND: u32 = 64 << 10;
/// What a grant may raise them to: a log that a person can still read.
pub const LOG_LINES_PER_SECOND_MAX: u32 = 1000;
pub const LOG_BYTES_PER_SECOND_MAX: u32 = 1 << 20;

/// What a kubelet gives a driver for a prepare or an unprepare: half of its 90 s between tries.
pub const CLAIM_CALL_DEADLINE: Duration = Duration::from_secs(45);
/// A prepare waits so long for the holder of a device to give it up.
pub const EXCLUSIVE_WAIT: Duration = Duration::from_secs(5);
/// Beyond its deadline a driver's face is waited for so long: it ends its calls itself, and looks at files afterwards.
pub const CALL_MARGIN: Duration = Duration::from_secs(5);
/// Between tries to prepare a claim that its driver refused for now, from the second retry on; doubled up to the second. The first
/// is short for a person who asks again, the second is near the steps in which a kubelet comes again.
pub const PREPARE_RETRY_MIN: Duration = Duration::from_millis(250);
pub const PREPARE_RETRY_MAX: Duration = Duration::from_secs(60);
/// What is left of such a delay is waited out within a request if it is no longer: the caller hardly notices it.
pub const PREPARE_RETRY_PATIENCE: Duration = Duration::from_millis(500);
/// A driver may ask not to be asked for so long at most: a number that is wrong must not keep a claim for days.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(3600);
/// Refusals that are remembered, by claim and driver: many times the pods of a node, in about a MiB. The oldest is forgotten first.
pub const REFUSALS_MAX: usize = 4096;
/// Released claims that are remembered, the newest: years of an operator's work by hand.
pub const RELEASED_MAX: usize = 256;
/// From the start to the end of a release that was interrupted, where not every driver of the claim serves: those that are there are
/// loaded by then.
pub const RELEASE_GRACE: Duration = Duration::from_secs(15);
/// Between tries to give up a claim that its driver keeps; doubled up to the second.
pub const UNPREPARE_RETRY_MIN: Duration = Duration::from_secs(1);
pub const UNPREPARE_RETRY_MAX: Duration = Duration::from_secs(60);
/// Time from a kernel event to a discovery: events come in bursts.
pub const EVENT_DEBOUNCE: Duration = Duration::from_millis(100);
/// Time from a file's last change to its loading, unless it was closed or renamed into place.
pub const FILE_SETTLE: Duration = Duration::from_millis(200);
/// The folder is listed anew so often, whatever the watch says.
pub const RELIST_PERIOD: Duration = Duration::from_secs(30);
/// The CDI folders are looked through so often, whatever the watch says: what failed is tried again, and what nobody tells is found.
pub const CDI_SWEEP_PERIOD: Duration = Duration::from_secs(60);
/// From a claim's trouble with its CDI files to the next try; doubled up to the period above.
pub const CDI_RETRY_MIN: Duration = Duration::from_secs(1);
/// Whether the CDI folder is the one that is watched is looked at so often, by one `stat`.
pub const CDI_FOLDER_LOOK: Duration = Duration::from_millis(500);
/// Folders of CDI specs that runtimes read: two are usual.
pub const CDI_FOLDERS_MAX: usize = 16;
/// Claims whose files are made right together: bounds the time for which each of them is held.
pub const CDI_CLAIMS_AT_ONCE: usize = 64;
/// Entries of the folder of registration sockets that are looked at, and how deep: far above what a node's plugins need.
pub const REGISTRY_ENTRIES_MAX: usize = 10_000;
pub const REGISTRY_DEPTH_MAX: usize = 8;
/// Registration sockets at once: each has a worker.
pub const PLUGIN_SOCKETS_MAX: usize = 512;
/// What a kubelet gives a plugin for the steps of its registration.
pub const PLUGIN_DIAL: Duration = Duration::from_secs(10);
pub const PLUGIN_INFO: Duration = Duration::from_secs(1);
pub const PLUGIN_NOTIFY: Duration = Duration::from_secs(5);
/// From a registration that failed to the next try: doubled from the first to the second, as a kubelet does.
pub const PLUGIN_RETRY_MIN: Duration = Duration::from_millis(500);
pub const PLUGIN_RETRY_MAX: Duration = Duration::from_secs(120);
/// A plugin's answer of who it is, and the services that it lists: real ones have 100 bytes and four.
pub const PLUGIN_INFO_BYTES_MAX: usize = 64 << 10;
pub const PLUGIN_SERVICES_MAX: usize = 64;
/// From a lost connection to the next try: a plugin that restarts is back within seconds, and a try costs one system call.
pub const RECONNECT_MIN: Duration = Duration::from_millis(20);
pub const RECONNECT_MAX: Duration = Duration::from_secs(2);
/// A call waits so long for a lost connection to come back: a plugin that is replaced in place takes about a second.
pub const RECONNECT_WAIT: Duration = Duration::from_secs(2);
/// A plugin's answer to a call; grpc-go's bound for messages.
pub const PLUGIN_ANSWER_BYTES_MAX: usize = 4 << 20;
/// Headers of a plugin's answer: an error's text travels in them, and a longer one would end the call without any.
pub const PLUGIN_HEADERS_BYTES_MAX: u32 = 256 << 10;
/// Devices that a plugin names for a claim (it may name one for each request and share), and CDI names of a device.
pub const PLUGIN_DEVICES_MAX: usize = 256;
pub const PLUGIN_CDI_NAMES_MAX: usize = 64;
/// Bytes of a CDI name: a vendor, a class and a device, each as long as a file's name.
pub const CDI_NAME_BYTES_MAX: usize = 3 * 255;
/// Bytes of a share's ID: a UUID has 36.
pub const SHARE_ID_BYTES_MAX: usize = 64;
/// Devices in one message of a device plugin; how many are used is for `RESOURCE_DEVICES_MAX`. A message of
/// `PLUGIN_ANSWER_BYTES_MAX` has no room for more with an ID of 16 bytes and a health each, and an emptier message may not cost more
/// memory than a full one.
pub const LISTED_DEVICES_MAX: usize = 160 << 10;
/// From a device plugin's list to the next look at its stream: of what came between only the newest counts, so that a plugin whose
/// devices flap costs no more than twenty lists a second.
pub const LIST_PACE: Duration = Duration::from_millis(50);
/// Entries of each list that a device plugin answers to Allocate: a node's worth of device nodes and libraries.
pub const ALLOCATION_ENTRIES_MAX: usize = 1024;
/// Bytes of a variable's value from a device plugin: Linux takes 128 KiB of a `NAME=VALUE` (`MAX_ARG_STRLEN`), and plugins put
/// lists of devices and JSON there.
pub const ALLOCATION_ENV_BYTES_MAX: usize = (128 << 10) - ENV_NAME_BYTES_MAX - 2;
/// Keys and values of a container's annotations together (Kubernetes).
pub const ALLOCATION_ANNOTATIONS_BYTES_MAX: usize = 256 << 10;
/// A device plugin's answer to what it wants of its callers.
pub const DEVICE_OPTIONS_DEADLINE: Duration = Duration::from_secs(10);
/// A request to register a device plugin: three names.
pub const REGISTER_BYTES_MAX: usize = 64 << 10;
/// Resources of device plugins at once: each has a task, a connection and a list.
pub const PLUGIN_RESOURCES_MAX: usize = 256;
/// Device plugins that are dialled and asked at once; others wait for their turn, one for each resource.
pub const REGISTRATIONS_AT_ONCE: usize = 16;
/// A device plugin's stream of this age is no flapping one: when it ends, the first try to get it back is made at once again.
pub const DEVICE_STREAM_STEADY: Duration = Duration::from_secs(10);
/// A device plugin that says nothing of its devices for so long is named in the log.
pub const FIRST_LIST_WAIT: Duration = Duration::from_secs(30);
/// For how long a plugin's word on a device's health counts, unless it says otherwise, and what it may say at most.
pub const HEALTH_TIMEOUT: Duration = Duration::from_secs(30);
pub const HEALTH_TIMEOUT_MAX: Duration = Duration::from_secs(24 * 3600);
/// Bytes of a message about a device's health, as a kubelet cuts it.
pub const HEALTH_MESSAGE_BYTES_MAX: usize = 1024;
/// From the end of a health stream to the next, as in a kubelet.
pub const HEALTH_RESTART: Duration = Duration::from_secs(5);
/// A list of health is told a kubelet again so often, well before it takes it for outdated, and no sooner after one than this.
pub const HEALTH_RESEND: Duration = Duration::from_secs(10);
pub const HEALTH_PACE: Duration = Duration::from_millis(100);
/// Claims in one call of a kubelet: all that one pod has of a driver, which are fewer.
pub const BRIDGE_CLAIMS_MAX: usize = 2 * POD_CLAIMS_MAX;
/// Claims of one call that are worked on at once.
pub const BRIDGE_CLAIMS_AT_ONCE: usize = 16;
/// Connections to one socket in the kubelet's folders at once (a kubelet has one), and calls under way on each: a pod has one.
pub const BRIDGE_CONNECTIONS_MAX: usize = 32;
pub const BRIDGE_STREAMS_MAX: u32 = 512;
/// Streams of one driver's health at once: a kubelet has one.
pub const BRIDGE_HEALTH_STREAMS_MAX: usize = 8;
/// Drivers that are offered to a kubelet, as their names are kept: all that there can be.
pub const BRIDGE_DRIVERS_MAX: usize = DRIVER_FILES_MAX + PLUGIN_SOCKETS_MAX;
/// A kubelet's call waits so long for a driver that still loads: less than half of its 45 s.
pub const BRIDGE_DRIVER_WAIT: Duration = Duration::from_secs(10);
/// After the start a driver of which nothing is known yet is taken for one that loads.
pub const BRIDGE_SETTLE: Duration = Duration::from_secs(10);
/// Between looks whether the sockets in the kubelet's folders are there, which cost two `stat` each; what fails is tried again as
/// often, doubled up to the second.
pub const BRIDGE_LOOK_PERIOD: Duration = Duration::from_secs(1);
pub const BRIDGE_RETRY_MAX: Duration = Duration::from_secs(30);
/// For how long a driver is offered that is gone: a file that is replaced is gone for a moment.
pub const BRIDGE_GONE_GRACE: Duration = Duration::from_secs(5);
/// And from when the kubelet holds nothing of it: twice the time after which a kubelet tries a pod again, that it may learn so.
pub const BRIDGE_HELD_GRACE: Duration = Duration::from_secs(180);
/// And one that was offered before our start: compiling a driver may take three minutes.
pub const BRIDGE_REMEMBERED_GRACE: Duration = Duration::from_secs(300);
/// Time for calls in flight when the daemon stops.
pub const DRAIN: Duration = Duration::from_secs(20);
/// Bytes of a Unix socket's path (`sun_path` less its terminating zero).
pub const SOCKET_PATH_BYTES_MAX: usize = 107;
/// Bytes of a message on the node API.
pub const NODE_API_MESSAGE_BYTES_MAX: usize = 16 << 20;
/// Requests that wait for the checkpoint's writer; more wait for a place.
pub const CHECKPOINT_QUEUE: usize = 1024;
/// Changes of one commit: bounds its latency.
pub const CHECKPOINT_BATCH_MAX: usize = 256;
/// A commit that takes longer is told of: a disk that is well syncs in milliseconds, a busy one within a second.
pub const CHECKPOINT_SLOW: Duration = Duration::from_secs(5);
/// Between tries whether the disk takes writes again; doubled up to the second.
pub const CHECKPOINT_PROBE_MIN: Duration = Duration::from_secs(1);
pub const CHECKPOINT_PROBE_MAX: Duration = Duration::from_secs(30);
/// Devices of one resource that a plugin lists: far more than the pods of a node can hold, and what is beyond is dropped.
pub const RESOURCE_DEVICES_MAX: usize = 10_000;
/// Bytes of a device's id, which goes into the checkpoint and into every answer: the longest in use have about 100.
pub const DEVICE_ID_BYTES_MAX: usize = 512;
/// The highest NUMA node that Linux can have (`MAX_NUMNODES`).
pub const NUMA_NODE_ID_MAX: u32 = 1023;
/// NUMA nodes over which hints are computed, one for each set of them; a kubelet's topology manager takes no more.
pub const HINT_NUMA_NODES_MAX: usize = 8;
/// How long a kubelet keeps a resource whose plugin has left.
pub const RESOURCE_GRACE: Duration = Duration::from_secs(300);
/// What a kubelet gets to answer to a registration: it dials the plugin for 10 s, and asks it for its options meanwhile.
pub const REGISTER_DEADLINE: Duration = Duration::from_secs(20);
/// Between tries to register with a kubelet; doubled up to the second. A socket is there a moment before it accepts.
pub const REGISTER_RETRY_MIN: Duration = Duration::from_millis(20);
pub const REGISTER_RETRY_MAX: Duration = Duration::from_secs(120);
/// No kubelet takes registrations for so long: it is said. A kubelet restarts in less.
pub const KUBELET_AWAY: Duration = Duration::from_secs(30);
/// A kubelet that registered a device plugin asks for its list at once; one that does not within this time has lost it.
pub const LIST_WAIT: Duration = Duration::from_secs(10);
/// From the end of a kubelet's last list to a new registration; doubled up to `REGISTER_RETRY_MAX` while lists do not last.
pub const LIST_LOST: Duration = Duration::from_secs(1);
/// A list that lasted for so long was no failure when it ends.
pub const LIST_STEADY: Duration = Duration::from_secs(60);
/// Lists of one resource that are followed at once: a kubelet has one, or two while it registers anew.
pub const LISTS_AT_ONCE: usize = 16;
/// Containers in one Allocate of a kubelet, which sends one.
pub const ALLOCATE_CONTAINERS_MAX: usize = 64;
/// For so long after an Allocate its devices may serve later containers of the same pod, which a kubelet admits as a whole.
pub const ADMISSION: Duration = Duration::from_secs(60);
/// Between looks at which devices pods have; each is taken up to a quarter earlier.
pub const IN_USE_PERIOD: Duration = Duration::from_secs(30);
/// What a kubelet gets to answer which devices pods have, and while another call waits for it.
pub const IN_USE_DEADLINE: Duration = Duration::from_secs(10);
pub const IN_USE_DEADLINE_SHORT: Duration = Duration::from_secs(2);
/// Devices that no pod has any more are given up after this time, and after two looks at least.
pub const UNUSED: Duration = Duration::from_secs(60);
pub const UNUSED_LOOKS: u32 = 2;
/// Devices that were in no pod yet are given up after this time: a kubelet does not tell those of init containers.
pub const UNSEEN: Duration = Duration::from_secs(300);
/// Nobody tells which devices pods have for so long: it is said.
pub const IN_USE_UNKNOWN: Duration = Duration::from_secs(180);
/// An Allocate waits so long until devices of an earlier one are given up.
pub const GIVE_UP_WAIT: Duration = Duration::from_secs(15);
/// Bytes of the list of devices that is kept over a restart: a hundred thousand devices.
pub const BRIDGE_MEMORY_BYTES_MAX: usize = 16 << 20;
/// Between two writes of it, and from one that failed to the next.
pub const BRIDGE_MEMORY_PERIOD: Duration = Duration::from_secs(1);
pub const BRIDGE_MEMORY_RETRY: Duration = Duration::from_secs(30);
/// What a kubelet gives a plugin before a container starts.
pub const PRE_START: Duration = Duration::from_secs(30);
/// Between two tellings of changed resources: health may flap a thousand times a second.
pub const DEVICE_CHANGES_PERIOD: Duration = Duration::from_secs(1);
/// Calls a second on the pod-resources socket, and how many may come at once, as a kubelet takes them.
pub const POD_RESOURCES_PER_SECOND: u32 = 100;
pub const POD_RESOURCES_BURST: u32 = 10;
/// Bytes of an answer there: what the clients of Kubernetes' own library take.
pub const POD_RESOURCES_MESSAGE_BYTES_MAX: usize = 16 << 20;
/// Requests a second to the API server, and how many may come at once: thousands of nodes share it. Those that a pod waits for may
/// take the last tokens, of which the others leave so many.
pub const API_PER_SECOND: u32 = 25;
pub const API_BURST: u32 = 50;
pub const API_URGENT_RESERVE: u32 = 5;
/// Requests to the API server under way, of those that a pod waits for and of the others each.
pub const API_IN_FLIGHT_MAX: usize = 8;
/// A request waits so long for its turn: less than a kubelet waits for a prepare.
pub const API_TURN_WAIT: Duration = Duration::from_secs(20);
/// Making a connection to the API server, and a whole request with its answer.
pub const API_CONNECT: Duration = Duration::from_secs(5);
pub const API_REQUEST: Duration = Duration::from_secs(10);
/// Between requests of an idle connection and its end, and between probes of TCP whether the other side is there.
pub const API_IDLE: Duration = Duration::from_secs(90);
pub const API_KEEPALIVE: Duration = Duration::from_secs(30);
/// Bytes of an object: etcd takes 1.5 MiB in a denser form.
pub const API_OBJECT_BYTES_MAX: usize = 4 << 20;
/// Objects of a page of a list and bytes of it, and objects of a whole list: a node has some hundred pods and slices.
pub const API_PAGE_ITEMS: usize = 250;
pub const API_PAGE_BYTES_MAX: usize = 16 << 20;
pub const API_LIST_ITEMS_MAX: usize = 10_000;
/// Bytes of what an API server says in words, as it is told on.
pub const API_WORDS_BYTES_MAX: usize = 512;
/// Causes of a refusal that are kept.
pub const API_CAUSES_MAX: usize = 16;
/// From a failed request to the next try, where a try follows; doubled up to the second.
pub const API_RETRY_MIN: Duration = Duration::from_millis(500);
pub const API_RETRY_MAX: Duration = Duration::from_secs(30);
/// An API server may ask to be left alone for so long at most.
pub const API_RETRY_AFTER_MAX: Duration = Duration::from_secs(60);
/// An API server that cannot be reached for so long is told of: it is replaced within seconds during an update.
pub const API_AWAY_NOTICE: Duration = Duration::from_secs(5);
/// Between looks whether it is back, if nobody asks for anything.
pub const API_PROBE_PERIOD: Duration = Duration::from_secs(15);
/// Which versions it serves is asked anew so often: a cluster is upgraded under us.
pub const API_VERSIONS_PERIOD: Duration = Duration::from_secs(600);
/// Tokens and certificates are looked at again so often (client-go does so every minute), and after a refusal no more often than this.
pub const API_CREDENTIALS_PERIOD: Duration = Duration::from_secs(60);
pub const API_CREDENTIALS_REST: Duration = Duration::from_secs(2);
/// A kubeconfig, a token, a certificate or a key.
pub const API_CREDENTIALS_BYTES_MAX: u64 = 1 << 20;
/// How long a watch is asked to last; API servers choose 5 to 10 minutes themselves.
pub const WATCH_WALL: Duration = Duration::from_secs(290);
/// A watch without a word for so long is dead: bookmarks come every minute.
pub const WATCH_SILENCE: Duration = Duration::from_secs(150);
/// A watch of this age is no flapping one.
pub const WATCH_STEADY: Duration = Duration::from_secs(10);
/// Claims that are watched at once: each is a connection of its own, and thousands of nodes share the API server.
pub const FOLLOWED_CLAIMS_MAX: usize = 32;
/// Claims of which the last word is kept, watched or not: more than a node's pods use.
pub const KNOWN_CLAIMS_MAX: usize = 256;
/// A claim that nobody holds or asked for is watched and known for so long: a kubelet tries a pod again
/// within two minutes.
pub const CLAIM_FOLLOW_IDLE: Duration = Duration::from_secs(300);
/// Connections to the admin socket, and to its address, at once: more wait.
pub const ADMIN_CONNECTIONS_MAX: usize = 16;
/// Headers of a request there, and their bytes with the request's line (the least that hyper takes).
pub const ADMIN_HEADERS_MAX: usize = 64;
pub const ADMIN_HEADERS_BYTES_MAX: usize = 8 << 10;
/// Time for a request's headers to come, and for a whole connection: an answer has some hundred kB.
pub const ADMIN_HEADERS_WALL: Duration = Duration::from_secs(5);
pub const ADMIN_CONNECTION_WALL: Duration = Duration::from_secs(15);
/// After an `accept` that failed: there are no file descriptors, and trying again at once would burn a core.
pub const ADMIN_ACCEPT_PAUSE: Duration = Duration::from_millis(250);
/// What every part of the daemon has to answer within to count as alive: as long as a commit may take before it is told of.
pub const LIVE_DEADLINE: Duration = Duration::from_secs(5);
/// Between two looks whether it lives, however many ask.
pub const LIVE_LOOK_PERIOD: Duration = Duration::from_secs(1);
/// Paths of drivers that are asked at once: there may be a thousand.
pub const LIVE_PATHS_AT_ONCE: usize = 32;

/// The most that a config may allow of requests to the API server in a second, and at once after a pause.
pub const API_PER_SECOND_MAX: u32 = 1000;
pub const API_BURST_MAX: u32 = 2000;

// Several instances on one root.
/// Instances whose order is remembered: an update has two at a time, and one that is forgotten counts as new.
pub const INSTANCES_MAX: usize = 32;
/// Bytes of a word between two of them.
pub const HANDOVER_WORD_BYTES_MAX: u64 = 4096;
/// Time for a word that is due at once.
pub const HANDOVER_WORD: Duration = Duration::from_secs(5);
/// Time for the instance before to finish its calls and close the checkpoint: three drains, and the close.
pub const HANDOVER_RELEASE: Duration = Duration::from_secs(75);
/// How long the instance before keeps its sockets of the kubelet for the one that took over.
pub const HANDOVER_SOCKETS: Duration = Duration::from_secs(60);
/// Between two looks whether the kubelet knows them.
pub const KUBELET_LOOK: Duration = Duration::from_millis(50);
/// How long the drivers of the instance that took over are awaited at the kubelet before it says that it serves.
pub const HANDOVER_REGISTERED: Duration = Duration::from_secs(15);
/// Instances that stand by at once; the oldest of more ask anew.
pub const HANDOVER_STANDBY_MAX: usize = 16;
/// Between two looks whether the place is free.
pub const HANDOVER_RETRY_MIN: Duration = Duration::from_millis(20);
pub const HANDOVER_RETRY_MAX: Duration = Duration::from_secs(2);
/// What an older instance waits before it takes the place of one that ended: a newer one that starts again comes first.
pub const HANDOVER_PATIENCE: Duration = Duration::from_secs(1);
/// How long somebody may hold the place without answering before a start gives up.
pub const HANDOVER_SILENT: Duration = Duration::from_secs(90);
