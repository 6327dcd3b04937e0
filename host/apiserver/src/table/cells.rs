//! The columns of each kind, and the cells of an object.

use std::collections::BTreeSet;

use jiff::Timestamp;
use serde_json::{Value, json};

use super::age::since;

const NONE: &str = "<none>";
const UNKNOWN: &str = "<unknown>";

/// A column; one of the second rank is shown with `-o wide` alone.
pub(super) struct Column {
    name: &'static str,
    is_wide: bool,
    description: &'static str,
}

impl Column {
    pub(super) fn definition(&self) -> Value {
        json!({
            "name": self.name, "type": "string", "format": if self.name == "Name" { "name" } else { "" },
            "description": self.description, "priority": i32::from(self.is_wide),
        })
    }
}

const fn column(name: &'static str, description: &'static str) -> Column {
    Column {
        name,
        is_wide: false,
        description,
    }
}

const fn wide(name: &'static str, description: &'static str) -> Column {
    Column {
        name,
        is_wide: true,
        description,
    }
}

const NAME: Column = column("Name", "Name of the object, unique in its namespace.");
const AGE: Column = column("Age", "Time since the object was created.");

static PODS: [Column; 9] = [
    NAME,
    column("Ready", "Containers that are ready, of all."),
    column("Status", "State of the pod, or why it is not running."),
    column(
        "Restarts",
        "How often containers were restarted, and when one was last.",
    ),
    AGE,
    wide("IP", "First IP address of the pod."),
    wide("Node", "Node that the pod is assigned to."),
    wide("Nominated Node", "Node on which room is made for the pod."),
    wide(
        "Readiness Gates",
        "Conditions for readiness that are met, of all.",
    ),
];
static NODES: [Column; 10] = [
    NAME,
    column("Status", "Whether the node is ready and takes pods."),
    column("Roles", "Roles of the node, from its labels."),
    AGE,
    column("Version", "Version of the kubelet."),
    wide("Internal-IP", "Address inside the cluster."),
    wide("External-IP", "Address outside of the cluster."),
    wide("OS-Image", "Operating system."),
    wide("Kernel-Version", "Version of the kernel."),
    wide("Container-Runtime", "Version of the container runtime."),
];
static EVENTS: [Column; 10] = [
    column("Last Seen", "Time since the event happened last."),
    column("Type", "Normal or Warning."),
    column("Reason", "Why the event was made, in one word."),
    column("Object", "Object that the event is about."),
    wide("Subobject", "Part of the object that the event is about."),
    wide("Source", "Component that reported the event."),
    column("Message", "Description of the event."),
    wide("First Seen", "Time since the event happened first."),
    wide("Count", "How often the event happened."),
    wide("Name", "Name of the event."),
];
static NAMESPACES: [Column; 3] = [NAME, column("Status", "Phase of the namespace."), AGE];
static CLAIMS: [Column; 3] = [
    NAME,
    column(
        "State",
        "Whether the claim is allocated, reserved or deleted.",
    ),
    AGE,
];
static SLICES: [Column; 5] = [
    NAME,
    column("Node", "Node that the devices belong to, if it is one."),
    column("Driver", "Driver that publishes the devices."),
    column("Pool", "Pool that the devices belong to."),
    AGE,
];
static TAINT_RULES: [Column; 6] = [
    NAME,
    column("Key", "Key of the taint."),
    column("Value", "Value of the taint."),
    column("Effect", "Effect of the taint."),
    column("TimeAdded", "Time since the taint was added."),
    AGE,
];
static OTHERS: [Column; 2] = [NAME, AGE];

pub(super) fn columns(kind: &str) -> &'static [Column] {
    match kind {
        "Pod" => &PODS,
        "Node" => &NODES,
        "Event" => &EVENTS,
        "Namespace" => &NAMESPACES,
        "ResourceClaim" => &CLAIMS,
        "ResourceSlice" => &SLICES,
        "DeviceTaintRule" => &TAINT_RULES,
        _ => &OTHERS,
    }
}

/// Returns the cells of an object, one for each of the [`columns`] of its kind.
pub(super) fn of(kind: &str, object: &Value, now: Timestamp) -> Vec<Value> {
    let metadata = &object["metadata"];
    let (name, age) = (
        text(metadata, "name"),
        since(&metadata["creationTimestamp"], now),
    );
    let (spec, status) = (&object["spec"], &object["status"]);
    match kind {
        "Pod" => pod(object, name, age, now),
        "Node" => node(object, name, age),
        "Event" => event(object, name, now),
        "Namespace" => vec![name.into(), text(status, "phase").into(), age.into()],
        "ResourceClaim" => vec![name.into(), claim_state(object).into(), age.into()],
        "ResourceSlice" => {
            let pool = text(&spec["pool"], "name");
            vec![
                name.into(),
                text(spec, "nodeName").into(),
                text(spec, "driver").into(),
                pool.into(),
                age.into(),
            ]
        }
        "DeviceTaintRule" => {
            let (taint, added) = (&spec["taint"], &spec["taint"]["timeAdded"]);
            let added = if added.is_null() {
                String::new()
            } else {
                since(added, now)
            };
            let [key, value, effect] =
                ["key", "value", "effect"].map(|field| text(taint, field).into());
            vec![name.into(), key, value, effect, added.into(), age.into()]
        }
        _ => vec![name.into(), age.into()],
    }
}

fn text<'a>(object: &'a Value, key: &str) -> &'a str {
    object[key].as_str().unwrap_or_default()
}

/// The text of a field, or what is shown in its place.
fn text_or<'a>(object: &'a Value, key: &str, missing: &'a str) -> &'a str {
    Some(text(object, key))
        .filter(|text| !text.is_empty())
        .unwrap_or(missing)
}

fn list<'a>(object: &'a Value, key: &str) -> &'a [Value] {
    object[key]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default()
}

/// Returns the state of a claim as kubectl prints it: `pending`, `allocated,reserved`, `deleted,allocated`.
pub fn claim_state(claim: &Value) -> String {
    let status = &claim["status"];
    let (is_deleted, is_allocated) = (
        !claim["metadata"]["deletionTimestamp"].is_null(),
        !status["allocation"].is_null(),
    );
    let states = [
        ("deleted", is_deleted),
        ("pending", !is_deleted && !is_allocated),
        ("allocated", is_allocated),
        (
            "reserved",
            is_allocated && !list(status, "reservedFor").is_empty(),
        ),
    ];
    states
        .into_iter()
        .filter(|(_, holds)| *holds)
        .map(|(name, _)| name)
        .collect::<Vec<_>>()
        .join(",")
}

fn condition<'a>(status: &'a Value, kind: &str) -> Option<&'a Value> {
    list(status, "conditions")
        .iter()
        .find(|condition| condition["type"] == kind)
}

fn node(node: &Value, name: &str, age: String) -> Vec<Value> {
    let (status, info) = (&node["status"], &node["status"]["nodeInfo"]);
    let ready = match condition(status, "Ready").map(|condition| text(condition, "status")) {
        Some("True") => "Ready",
        Some(_) => "NotReady",
        None => UNKNOWN_STATUS,
    };
    let cordoned = if node["spec"]["unschedulable"] == true {
        ",SchedulingDisabled"
    } else {
        ""
    };
    let roles: BTreeSet<&str> = node["metadata"]["labels"]
        .as_object()
        .into_iter()
        .flatten()
        .filter_map(role)
        .collect();
    let roles = roles.into_iter().collect::<Vec<_>>().join(",");
    let roles = if roles.is_empty() { NONE } else { &roles };
    let kernel = match text(info, "architecture") {
        "" => text_or(info, "kernelVersion", UNKNOWN).to_owned(),
        architecture => format!(
            "{} ({architecture})",
            text_or(info, "kernelVersion", UNKNOWN)
        ),
    };
    vec![
        name.into(),
        format!("{ready}{cordoned}").into(),
        roles.into(),
        age.into(),
        text(info, "kubeletVersion").into(),
        address_of(status, "InternalIP").into(),
        address_of(status, "ExternalIP").into(),
        text_or(info, "osImage", UNKNOWN).into(),
        kernel.into(),
        text_or(info, "containerRuntimeVersion", UNKNOWN).into(),
    ]
}

fn address_of<'a>(status: &'a Value, kind: &str) -> &'a str {
    let found = list(status, "addresses")
        .iter()
        .find(|address| address["type"] == kind);
    found.map_or(NONE, |address| text(address, "address"))
}

const UNKNOWN_STATUS: &str = "Unknown";

fn role<'a>((key, value): (&'a String, &'a Value)) -> Option<&'a str> {
    let role = match key.strip_prefix("node-role.kubernetes.io/") {
        Some(role) => role,
        None => value.as_str().filter(|_| key == "kubernetes.io/role")?,
    };
    Some(role).filter(|role| !role.is_empty())
}

fn event(event: &Value, name: &str, now: Timestamp) -> Vec<Value> {
    let first = since(
        match &event["firstTimestamp"] {
            Value::Null => &event["eventTime"],
            time => time,
        },
        now,
    );
    let last = if event["lastTimestamp"].is_null() {
        first.clone()
    } else {
        since(&event["lastTimestamp"], now)
    };
    let (series, about) = (&event["series"], &event["involvedObject"]);
    let (last, count) = match series {
        // An event of the new kind that happened once has no count.
        Value::Null => (last, event["count"].as_i64().unwrap_or_default().max(1)),
        series => (
            since(&series["lastObservedTime"], now),
            series["count"].as_i64().unwrap_or_default(),
        ),
    };
    let kind = text(about, "kind").to_lowercase();
    let object = match text(about, "name") {
        "" => kind,
        name => format!("{kind}/{name}"),
    };
    let component = text_or(
        &event["source"],
        "component",
        text(event, "reportingComponent"),
    );
    let source = match text_or(&event["source"], "host", text(event, "reportingInstance")) {
        "" => component.to_owned(),
        instance => format!("{component}, {instance}"),
    };
    vec![
        last.into(),
        text(event, "type").into(),
        text(event, "reason").into(),
        object.into(),
        text(about, "fieldPath").into(),
        source.into(),
        text(event, "message").trim().into(),
        first.into(),
        count.into(),
        name.into(),
    ]
}

fn pod(pod: &Value, name: &str, age: String, now: Timestamp) -> Vec<Value> {
    let (spec, status) = (&pod["spec"], &pod["status"]);
    let containers = list(status, "containerStatuses");
    let ready = containers
        .iter()
        .filter(|container| container["ready"] == true && !container["state"]["running"].is_null());
    let ready = ready.count();
    let restarts: i64 = containers
        .iter()
        .map(|container| container["restartCount"].as_i64().unwrap_or_default())
        .sum();
    let last_end = containers
        .iter()
        .filter_map(|container| container["lastState"]["terminated"]["finishedAt"].as_str())
        .max();
    let restarts = match last_end {
        Some(time) if restarts != 0 => format!("{restarts} ({} ago)", since(&json!(time), now)),
        _ => restarts.to_string(),
    };
    let address = list(status, "podIPs")
        .first()
        .map_or("", |address| text(address, "ip"));
    vec![
        name.into(),
        format!("{ready}/{}", list(spec, "containers").len()).into(),
        pod_status(pod, ready).into(),
        restarts.into(),
        age.into(),
        if address.is_empty() {
            NONE.into()
        } else {
            address.into()
        },
        text_or(spec, "nodeName", NONE).into(),
        text_or(status, "nominatedNodeName", NONE).into(),
        readiness_gates(pod).into(),
    ]
}

/// The state of a pod, or why it is not running; the progress of init containers is not shown.
fn pod_status(pod: &Value, ready: usize) -> String {
    let status = &pod["status"];
    let phase = text(status, "phase");
    if !pod["metadata"]["deletionTimestamp"].is_null() && !matches!(phase, "Succeeded" | "Failed") {
        return match text(status, "reason") {
            "NodeLost" => UNKNOWN_STATUS.to_owned(),
            _ => "Terminating".to_owned(),
        };
    }
    let gated =
        condition(status, "PodScheduled").is_some_and(|found| found["reason"] == "SchedulingGated");
    let mut reason = match gated {
        true => "SchedulingGated".to_owned(),
        false => text_or(status, "reason", phase).to_owned(),
    };
    let mut failure = None;
    for container in list(status, "containerStatuses").iter().rev() {
        let (waiting, terminated) = (
            &container["state"]["waiting"],
            &container["state"]["terminated"],
        );
        if !text(waiting, "reason").is_empty() {
            text(waiting, "reason").clone_into(&mut reason);
        } else if !terminated.is_null() {
            reason = ended(terminated);
            if terminated["exitCode"] != 0 {
                failure = Some(reason.clone());
            }
        }
    }
    let is_ready =
        condition(status, "Ready").is_some_and(|condition| condition["status"] == "True");
    match (reason.as_str(), ready > 0) {
        ("Completed", true) if is_ready => "Running".to_owned(),
        ("Completed", runs) => failure.unwrap_or(if runs { "NotReady".to_owned() } else { reason }),
        _ => reason,
    }
}

/// Returns the reason for which a container ended.
fn ended(terminated: &Value) -> String {
    let [signal, exit_code] =
        ["signal", "exitCode"].map(|key| terminated[key].as_i64().unwrap_or_default());
    match text(terminated, "reason") {
        "" if signal != 0 => format!("Signal:{signal}"),
        "" => format!("ExitCode:{exit_code}"),
        reason => reason.to_owned(),
    }
}

fn readiness_gates(pod: &Value) -> String {
    let gates = list(&pod["spec"], "readinessGates");
    let met = gates.iter().filter(|gate| {
        condition(&pod["status"], text(gate, "conditionType"))
            .is_some_and(|found| found["status"] == "True")
    });
    match gates.len() {
        0 => NONE.to_owned(),
        all => format!("{}/{all}", met.count()),
    }
}
