//! The memory that a claim takes in the daemon, as it is after a restart: its record, its pod's record, and what the table knows of them.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use nodedock_core::records::table::ClaimTable;
use nodedock_model::{ClaimRecord, PodRecord};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// Counts what is allocated, as an allocator takes it: with a header, in steps of 16 bytes.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);

fn taken(layout: Layout) -> usize {
    (layout.size() + 8).next_multiple_of(16).max(32)
}

// SAFETY: every call is passed on as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        NOW.fetch_add(taken(layout), Ordering::Relaxed);
        // SAFETY: the caller's layout.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        NOW.fetch_sub(taken(layout), Ordering::Relaxed);
        // SAFETY: the caller's pointer, which `alloc` returned for this layout.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const CLAIMS: usize = 1000;
const DRIVER: &str = "mock-gpu.nodedock.dev";

fn uid(kind: &str, n: usize) -> String {
    format!("{kind}{n:07}-b5ab-5ba0-9213-c8c430283d2d")
}

/// The claim of one device, as a WebAssembly driver prepares it. `users`: the pods, and the hold of a kubelet.
fn claim(n: usize, pods: Value, kubelet: Value) -> Value {
    let (claim, gpu) = (uid("c", n), format!("gpu-{n}"));
    let id = json!({"namespace": "default", "name": format!("claim-{n}"), "uid": claim});
    let identity = format!("GPU-{n:08}-bde6-4a34-2428-f331879c4d17");
    let mount = json!({
        "hostPath": format!("/run/cdi/nodedock-metadata-0a1b2c3d/{DRIVER}/{claim}_one.json"),
        "containerPath": format!("/var/run/kubernetes.io/dra-device-attributes/resourceclaims/claim-{n}/one/{DRIVER}-metadata.json"),
        "options": ["ro", "bind"],
    });
    let attributes = format!(
        r#"{{"driverVersion":{{"version":"1.4.2"}},"index":{{"int":1}},"model":{{"string":"Mock-100"}},"partition":{{"bool":false}},"uuid":{{"string":"{identity}"}}}}"#
    );
    let device = json!({
        "requests": ["one"], "pool": "gpus", "device": gpu, "attributes": attributes,
        "access": {"edits": {"env": [format!("MOCK_GPU={identity}"), "MOCK_GPU_SHARING=Exclusive"], "mounts": [mount]}},
    });
    let part = json!({
        "prepared": {"devices": [device], "memo": "7b".repeat(70), "metadata_generation": 1},
        "by": {"kind": "wasm", "version": "0.1.0", "digest": format!("sha256:{}", "5".repeat(64))},
        "kubelet": kubelet.is_object(),
    });
    let entry = |what: &str, cause: &str| json!({"at_ms": 1, "what": what, "cause": cause, "duration_us": 9});
    json!({
        "id": id, "state": "prepared", "boot_id": uid("b", 1), "pods": pods, "kubelet": kubelet,
        "allocation": {"devices": [{"request": "one", "driver": DRIVER, "pool": "gpus", "device": gpu}]},
        "drivers": {DRIVER: part},
        "holds": [{"key": format!("{DRIVER}/gpus/{gpu}")}, {"key": format!("mock-gpu:{identity}"), "driver": DRIVER}],
        "timeline": [entry("preparing", "prepare pod default/one"), entry("prepared by driver", DRIVER), entry("prepared", "")],
    })
}

fn of_kubelet(n: usize) -> (Value, Option<Value>) {
    let consumer = json!({"resource": "pods", "name": format!("pod-{n}"), "uid": uid("p", n)});
    let hold = json!({"since_ms": 1, "consumers": [consumer]});
    (claim(n, json!({}), hold), None)
}

fn of_pod(n: usize) -> (Value, Option<Value>) {
    let pod = json!({"namespace": "default", "name": format!("pod-{n}"), "uid": uid("p", n)});
    let claim = claim(n, json!({uid("p", n): pod}), Value::Null);
    let used = json!([{"pod_claim_name": "gpu"}]);
    let container = json!({"name": "main", "claims": used});
    let record = json!({"pod": pod, "claims": {"gpu": claim["id"]}, "containers": [container]});
    (claim, Some(record))
}

fn read<R: DeserializeOwned>(text: &str) -> R {
    serde_json::from_str(text).expect("a record")
}

/// Bytes that each claim takes in the table.
fn bytes_of(record: impl Fn(usize) -> (Value, Option<Value>)) -> usize {
    let texts: Vec<_> = (0..CLAIMS)
        .map(&record)
        .map(|(claim, pod)| (claim.to_string(), pod.map(|pod| pod.to_string())))
        .collect();
    let before = NOW.load(Ordering::Relaxed);
    let claims: Vec<ClaimRecord> = texts.iter().map(|(claim, _)| read(claim)).collect();
    let pods: Vec<PodRecord> = texts
        .iter()
        .filter_map(|(_, pod)| pod.as_deref().map(read))
        .collect();
    let table = ClaimTable::new(claims, pods);
    let bytes = (NOW.load(Ordering::Relaxed) - before) / CLAIMS;
    assert_eq!(table.claims().count(), CLAIMS);
    bytes
}

/// One test, since all tests of a process share its memory.
#[test]
fn claim_needs_bounded_memory() {
    const BOUND: usize = 8 << 10;
    for (what, bytes) in [
        ("a kubelet's claim", bytes_of(of_kubelet)),
        ("a claim and its pod", bytes_of(of_pod)),
    ] {
        eprintln!("{what}: {bytes} bytes");
        assert!(bytes <= BOUND, "{what}: {bytes} bytes");
    }
}
