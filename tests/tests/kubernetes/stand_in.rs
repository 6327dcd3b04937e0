//! The stand-in of the API server in other tests, compared with the real one: the requests of a daemon have the same answers.

use std::collections::BTreeSet;

use http::Method;
use nodedock_stand_ins::api_server::ApiServer;
use nodedock_tests::cluster::NODE;
use serde_json::{Value, json};

use crate::api::{APPLY, Api, ApiResponse, JSON, MERGE};
use crate::scene::{SLICES, path};
use crate::server::server;

/// Parts of the answers that have to be equal, in addition to their code.
#[derive(Clone, Copy, PartialEq)]
enum Compared {
    /// Everything, but values that differ between any two servers.
    Everything,
    /// A real server adds fields of its own.
    Shape,
}

struct Case {
    what: &'static str,
    method: Method,
    path: String,
    kind: &'static str,
    body: Value,
    compared: Compared,
}

/// Versions and UIDs are those of one server; so is what it has for its own use.
const OF_A_SERVER: [&str; 5] = [
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "remainingItemCount",
    "lastTransitionTime",
];

/// The same without values that differ between any two servers.
fn plain(value: &Value) -> Value {
    match value {
        Value::Object(fields) => {
            let kept = fields.iter().filter(|(key, _)| *key != "managedFields");
            let plain_field = |(key, value): (&String, &Value)| {
                let is_own = OF_A_SERVER.contains(&key.as_str());
                (
                    key.clone(),
                    if is_own { json!("...") } else { plain(value) },
                )
            };
            kept.map(plain_field).collect()
        }
        Value::Array(items) => items.iter().map(plain).collect(),
        other => other.clone(),
    }
}

/// The paths of all fields, each with the type of its value.
fn shape(value: &Value, path: &str, all: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            fields
                .iter()
                .for_each(|(key, value)| shape(value, &format!("{path}.{key}"), all));
        }
        Value::Array(items) => items
            .iter()
            .for_each(|item| shape(item, &format!("{path}[]"), all)),
        Value::String(_) => drop(all.insert(format!("{path}: text"))),
        Value::Number(_) => drop(all.insert(format!("{path}: number"))),
        Value::Bool(_) => drop(all.insert(format!("{path}: yes or no"))),
        Value::Null => drop(all.insert(format!("{path}: null"))),
    }
}

/// A refusal of an invalid object: its causes by reason and field. Messages belong to one server, and a real one may list a cause twice.
fn refusal(status: &Value) -> Value {
    let mut refusal = plain(status);
    let causes = refusal["details"]["causes"].as_array();
    let causes: BTreeSet<_> = causes
        .expect("a refusal has causes")
        .iter()
        .map(|cause| (cause["reason"].to_string(), cause["field"].to_string()))
        .collect();
    refusal["details"]["causes"] = json!(causes);
    refusal["message"] = json!("...");
    refusal
}

/// Returns the differences between the answers.
fn differences(compared: Compared, real: &ApiResponse, stand_in: &ApiResponse) -> Vec<String> {
    let body = |answer: &ApiResponse| match answer.body["reason"] == "Invalid" {
        true => refusal(&answer.body),
        false => plain(&answer.body),
    };
    let (real_body, stand_in_body) = (body(real), body(stand_in));
    let mut all = Vec::new();
    differ(&json!(real.code), &json!(stand_in.code), "code", &mut all);
    if compared == Compared::Everything || real.code >= 300 {
        differ(&real_body, &stand_in_body, "", &mut all);
        return all;
    }
    let (mut more, mut less) = (BTreeSet::new(), BTreeSet::new());
    shape(&real_body, "", &mut more);
    shape(&stand_in_body, "", &mut less);
    all.extend(
        less.difference(&more)
            .map(|field| format!("only the stand-in has {field}")),
    );
    all
}

/// The smallest parts of two values that differ.
fn differ(real: &Value, stand_in: &Value, path: &str, all: &mut Vec<String>) {
    match (real, stand_in) {
        (Value::Object(one), Value::Object(other)) => {
            let keys: BTreeSet<_> = one.keys().chain(other.keys()).collect();
            keys.iter()
                .for_each(|key| differ(&real[key], &stand_in[key], &format!("{path}.{key}"), all));
        }
        (Value::Array(one), Value::Array(other)) if one.len() == other.len() => {
            one.iter()
                .zip(other)
                .for_each(|(one, other)| differ(one, other, &format!("{path}[]"), all));
        }
        _ if real == stand_in => {}
        _ => all.push(format!("{path}: {real}; the stand-in has {stand_in}")),
    }
}

fn slice(name: &str) -> Value {
    let attributes = json!({"model": {"string": "m"}, "index": {"int": 1}, "v": {"version": "1.2.3"}, "on": {"bool": true}});
    let device = json!({"name": "gpu-0", "attributes": attributes, "capacity": {"memory": {"value": "80Gi"}}});
    let taint = json!({
        "key": "example.com/unhealthy", "effect": "NoSchedule", "timeAdded": "2026-01-01T00:00:00Z",
    });
    let unhealthy = json!({"name": "gpu-1", "taints": [taint]});
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": {
            "driver": "gpu.example.com",
            "nodeName": NODE,
            "pool": {"name": "p", "generation": 1, "resourceSliceCount": 1},
            "devices": [device, unhealthy],
        },
    })
}

fn with(mut object: Value, pointer: &str, value: Value) -> Value {
    let (parent, field) = pointer.rsplit_once('/').expect("a pointer has a slash");
    object.pointer_mut(parent).expect("the parent is there")[field] = value;
    object
}

fn without(mut object: Value, parent: &str, field: &str) -> Value {
    let parent = object.pointer_mut(parent).and_then(Value::as_object_mut);
    parent.expect("the parent is there").remove(field);
    object
}

fn claim() -> Value {
    let request = json!({"name": "gpu", "exactly": {"deviceClassName": "gpu", "allocationMode": "ExactCount", "count": 1}});
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "claim"},
        "spec": {"devices": {"requests": [request]}},
    })
}

/// Returns an allocation as the scheduler writes it.
fn allocation(pod: &Value) -> Value {
    let result =
        json!({"request": "gpu", "driver": "gpu.example.com", "pool": "p", "device": "gpu-0"});
    let field = json!({"key": "metadata.name", "operator": "In", "values": [NODE]});
    json!({
        "allocation": {
            "devices": {"results": [result]},
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]},
        },
        "reservedFor": [{"resource": "pods", "name": "pod", "uid": pod}],
    })
}

/// A device's status as a daemon applies it.
fn applied(device: &str) -> Value {
    let condition = json!({
        "type": "Ready", "status": "True", "reason": "Fine", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    });
    let status = json!({
        "driver": "gpu.example.com", "pool": "p", "device": device, "conditions": [condition],
        "data": {"mtu": 9000},
        "networkData": {"interfaceName": "net1", "ips": ["192.0.2.5/24"]},
    });
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "claim"},
        "status": {"devices": [status]},
    })
}

fn event() -> Value {
    json!({
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": "event", "namespace": "stand-in"},
        "eventTime": "2026-01-01T00:00:00.000000Z",
        "reportingController": "nodedock.dev/nodedock",
        "reportingInstance": NODE,
        "action": "Prepare",
        "reason": "Refused",
        "note": "why",
        "type": "Warning",
        "regarding": {"apiVersion": "v1", "kind": "Pod", "name": "pod", "namespace": "stand-in"},
    })
}

/// Two servers with the same requests.
struct Both {
    real: Api,
    stand_in: Api,
    differences: Vec<String>,
}

impl Both {
    async fn send(&mut self, case: Case) -> [ApiResponse; 2] {
        let Case {
            what,
            method,
            path,
            kind,
            body,
            compared,
        } = case;
        self.each(what, method, &path, kind, [&body, &body], compared)
            .await
    }

    /// Bodies may differ in what names objects of one server.
    async fn each(
        &mut self,
        what: &str,
        method: Method,
        path: &str,
        kind: &str,
        bodies: [&Value; 2],
        compared: Compared,
    ) -> [ApiResponse; 2] {
        let [one, other] = bodies.map(|body| (!body.is_null()).then_some(body));
        let real = self.real.send(method.clone(), path, kind, one).await;
        let stand_in = self.stand_in.send(method.clone(), path, kind, other).await;
        self.note(
            what,
            &format!("{method} {path}"),
            compared,
            &real,
            &stand_in,
        );
        [real, stand_in]
    }

    /// Compares as [`Self::each`] does, for an answer whose message names UIDs or versions.
    async fn each_but_message(
        &mut self,
        what: &str,
        method: Method,
        path: &str,
        bodies: [&Value; 2],
    ) {
        let mut real = self
            .real
            .send(method.clone(), path, JSON, Some(bodies[0]))
            .await;
        let mut stand_in = self
            .stand_in
            .send(method, path, JSON, Some(bodies[1]))
            .await;
        for answer in [&mut real, &mut stand_in] {
            answer.body["message"] = Value::Null;
        }
        self.note(what, path, Compared::Everything, &real, &stand_in);
    }

    fn note(
        &mut self,
        what: &str,
        request: &str,
        compared: Compared,
        real: &ApiResponse,
        stand_in: &ApiResponse,
    ) {
        let found = differences(compared, real, stand_in);
        self.differences.extend(
            found
                .iter()
                .map(|found| format!("{what} ({request}): {found}")),
        );
    }

    async fn get(&mut self, what: &'static str, path: &str, compared: Compared) {
        let path = path.to_owned();
        self.send(Case {
            what,
            method: Method::GET,
            path,
            kind: JSON,
            body: Value::Null,
            compared,
        })
        .await;
    }

    async fn post(
        &mut self,
        what: &'static str,
        path: &str,
        body: Value,
        compared: Compared,
    ) -> [ApiResponse; 2] {
        let path = path.to_owned();
        self.send(Case {
            what,
            method: Method::POST,
            path,
            kind: JSON,
            body,
            compared,
        })
        .await
    }

    async fn patch(
        &mut self,
        what: &'static str,
        path: &str,
        kind: &'static str,
        body: Value,
        compared: Compared,
    ) {
        let path = path.to_owned();
        self.send(Case {
            what,
            method: Method::PATCH,
            path,
            kind,
            body,
            compared,
        })
        .await;
    }
}

/// Gives the pod's UIDs.
async fn nodes_and_pods(both: &mut Both) -> [Value; 2] {
    use Compared::Shape;
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}});
    both.post("a node", "/api/v1/nodes", node, Shape).await;
    both.get("a node", &format!("/api/v1/nodes/{NODE}"), Shape)
        .await;
    both.get("no node", "/api/v1/nodes/absent", Shape).await;
    let main = json!({"name": "main", "image": "registry.k8s.io/pause:3.10"});
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"},
        "spec": {"nodeName": NODE, "containers": [main]},
    });
    let pods = path("stand-in", "pods");
    let created = both.post("a pod", &pods, pod, Shape).await;
    both.get("a pod", &format!("{pods}/pod"), Shape).await;
    both.get("no pod", &format!("{pods}/absent"), Shape).await;
    let of_node = format!("/api/v1/pods?fieldSelector=spec.nodeName%3D{NODE}&limit=500");
    both.get("the pods of a node", &of_node, Shape).await;
    both.get(
        "pods by a field that there is not",
        "/api/v1/pods?fieldSelector=spec.nothing%3D1",
        Shape,
    )
    .await;
    created.map(|answer| answer.body["metadata"]["uid"].clone())
}

async fn claims(both: &mut Both, pods: [Value; 2]) {
    use Compared::{Everything, Shape};
    let claims = path("stand-in", "resourceclaims");
    let (one, status) = (format!("{claims}/claim"), format!("{claims}/claim/status"));
    let created = both.post("a claim", &claims, claim(), Shape).await;
    both.get("no claim", &format!("{claims}/absent"), Everything)
        .await;
    let apply = format!("{status}?fieldManager=nodedock%2Fgpu.example.com&force=true");
    both.patch(
        "a status before the allocation",
        &apply,
        APPLY,
        applied("gpu-0"),
        Everything,
    )
    .await;
    let allocated = |number: usize| {
        with(
            created[number].body.clone(),
            "/status",
            allocation(&pods[number]),
        )
    };
    let bodies = [&allocated(0), &allocated(1)];
    both.each(
        "an allocation",
        Method::PUT,
        &status,
        JSON,
        bodies,
        Everything,
    )
    .await;
    both.get("a claim", &one, Everything).await;
    both.get(
        "claims by name",
        &format!("{claims}?fieldSelector=metadata.name%3Dclaim&limit=500"),
        Shape,
    )
    .await;
    both.patch(
        "a device's status",
        &apply,
        APPLY,
        applied("gpu-0"),
        Everything,
    )
    .await;
    both.patch(
        "the same status",
        &apply,
        APPLY,
        applied("gpu-0"),
        Everything,
    )
    .await;
    both.patch(
        "a status of a device that the claim has not",
        &apply,
        APPLY,
        applied("gpu-9"),
        Everything,
    )
    .await;
    let elsewhere = with(applied("gpu-0"), "/metadata/uid", json!("another"));
    both.patch(
        "a status of a claim that was replaced",
        &apply,
        APPLY,
        elsewhere,
        Everything,
    )
    .await;
    let absent = apply.replace("/claim/", "/absent/");
    let of_absent = with(applied("gpu-0"), "/metadata/name", json!("absent"));
    both.patch(
        "a status of no claim",
        &absent,
        APPLY,
        of_absent,
        Everything,
    )
    .await;
    let none = with(applied("gpu-0"), "/status", json!({"devices": []}));
    both.patch("no status any more", &apply, APPLY, none, Everything)
        .await;
    let version = |answer: &ApiResponse| {
        answer.body["metadata"]["resourceVersion"]
            .as_str()
            .map(str::to_owned)
    };
    let versions = created
        .each_ref()
        .map(|answer| version(answer).expect("an object has a version"));
    let watched = format!("{claims}?fieldSelector=metadata.name%3Dclaim");
    let real = both.real.watch(&watched, &versions[0], 3).await;
    let stand_in = both.stand_in.watch(&watched, &versions[1], 3).await;
    let answer = |events: Vec<Value>| ApiResponse {
        code: 200,
        body: events.into(),
    };
    both.note(
        "a watch",
        &watched,
        Everything,
        &answer(real),
        &answer(stand_in),
    );
    both.each(
        "the end of a claim",
        Method::DELETE,
        &one,
        JSON,
        [&Value::Null; 2],
        Everything,
    )
    .await;
}

async fn slices(both: &mut Both) {
    use Compared::Everything;
    let one = format!("{SLICES}/stand-in");
    let created = both
        .post("a slice", SLICES, slice("stand-in"), Everything)
        .await;
    both.post(
        "a slice that is there",
        SLICES,
        slice("stand-in"),
        Everything,
    )
    .await;
    let driver = || "/spec/driver";
    let invalid = [
        ("no driver", without(slice("bad"), "/spec", "driver")),
        (
            "a driver that is no name",
            with(slice("bad"), driver(), json!("Not_A_Name")),
        ),
        ("no pool", without(slice("bad"), "/spec", "pool")),
        (
            "no slices in the pool",
            with(slice("bad"), "/spec/pool/resourceSliceCount", json!(0)),
        ),
        (
            "two places",
            with(slice("bad"), "/spec/allNodes", json!(true)),
        ),
        ("no place", without(slice("bad"), "/spec", "nodeName")),
        (
            "a device that is no name",
            with(slice("bad"), "/spec/devices/0/name", json!("GPU_0")),
        ),
        (
            "a device twice",
            with(slice("bad"), "/spec/devices/1/name", json!("gpu-0")),
        ),
        (
            "two values",
            with(
                slice("bad"),
                "/spec/devices/0/attributes/model/int",
                json!(1),
            ),
        ),
        (
            "no value",
            with(slice("bad"), "/spec/devices/0/attributes/model", json!({})),
        ),
        (
            "no quantity",
            with(
                slice("bad"),
                "/spec/devices/0/capacity/memory/value",
                json!("much"),
            ),
        ),
        (
            "no effect",
            with(
                slice("bad"),
                "/spec/devices/1/taints/0/effect",
                json!("Never"),
            ),
        ),
    ];
    for (what, body) in invalid {
        both.post(what, SLICES, body, Everything).await;
    }
    let of_node =
        format!("{SLICES}?fieldSelector=spec.nodeName%3D{NODE}%2Cspec.driver%3Dgpu.example.com");
    both.get("slices of a node and driver", &of_node, Compared::Shape)
        .await;
    both.get("no slice", &format!("{SLICES}/absent"), Everything)
        .await;
    let changed = created.clone().map(|answer| {
        let slice = with(answer.body, "/spec/pool/generation", json!(2));
        with(slice, "/spec/devices", json!([{"name": "gpu-7"}]))
    });
    let bodies = [&changed[0], &changed[1]];
    both.each(
        "a changed slice",
        Method::PUT,
        &one,
        JSON,
        bodies,
        Everything,
    )
    .await;
    both.each(
        "a change of an old version",
        Method::PUT,
        &one,
        JSON,
        bodies,
        Everything,
    )
    .await;
    for (field, value) in [
        ("nodeName", json!("node-9")),
        ("driver", json!("other.example.com")),
    ] {
        let moved = created.clone().map(|answer| {
            let slice = without(answer.body, "/metadata", "resourceVersion");
            with(slice, &format!("/spec/{field}"), value.clone())
        });
        let bodies = [&moved[0], &moved[1]];
        both.each(
            "a change of what stays",
            Method::PUT,
            &one,
            JSON,
            bodies,
            Everything,
        )
        .await;
    }
    let other = changed
        .clone()
        .map(|slice| with(slice, "/metadata/uid", json!("another")));
    both.each_but_message(
        "a change of another slice",
        Method::PUT,
        &one,
        [&other[0], &other[1]],
    )
    .await;
    let preconditions = |uid: &Value, version: &Value| json!({"preconditions": {"uid": uid, "resourceVersion": version}});
    let wrong_uid = created
        .clone()
        .map(|_| preconditions(&json!("another"), &Value::Null));
    let old = created.clone().map(|answer| {
        let metadata = &answer.body["metadata"];
        preconditions(&metadata["uid"], &metadata["resourceVersion"])
    });
    for (what, bodies) in [
        ("the end of another slice", wrong_uid),
        ("the end of an old version", old),
    ] {
        both.each_but_message(what, Method::DELETE, &one, [&bodies[0], &bodies[1]])
            .await;
    }
    both.each(
        "the end of a slice",
        Method::DELETE,
        &one,
        JSON,
        [&Value::Null; 2],
        Everything,
    )
    .await;
    both.each(
        "the end of no slice",
        Method::DELETE,
        &one,
        JSON,
        [&Value::Null; 2],
        Everything,
    )
    .await;
}

async fn events(both: &mut Both) {
    use Compared::Everything;
    let events = path("stand-in", "events");
    both.post("an event", &events, event(), Everything).await;
    both.post("an event that is there", &events, event(), Everything)
        .await;
    let again = with(event(), "/metadata/name", json!("again"));
    both.post(
        "an event without a time",
        &events,
        without(again.clone(), "", "eventTime"),
        Everything,
    )
    .await;
    let elsewhere = with(again, "/regarding/namespace", json!("elsewhere"));
    both.post(
        "an event about another namespace",
        &events,
        elsewhere,
        Everything,
    )
    .await;
    let series = json!({"series": {"count": 2, "lastObservedTime": "2026-01-01T00:00:01.000000Z"}});
    both.patch(
        "an event again",
        &format!("{events}/event"),
        MERGE,
        series.clone(),
        Everything,
    )
    .await;
    both.patch(
        "no event again",
        &format!("{events}/absent"),
        MERGE,
        series,
        Everything,
    )
    .await;
}

#[tokio::test]
async fn stand_in_answers_like_api_server() {
    let Some(server) = server().await else { return };
    let admin = std::fs::read_to_string(&server.admin).expect("the kubeconfig is there");
    let api_server = ApiServer::start().await;
    let dir = tempfile::tempdir().unwrap();
    let kubeconfig = std::fs::read_to_string(api_server.kubeconfig(dir.path())).unwrap();
    let mut both = Both {
        real: Api::of(&admin).await,
        stand_in: Api::of(&kubeconfig).await,
        differences: Vec::new(),
    };
    let namespace =
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "stand-in"}});
    both.post(
        "a namespace",
        "/api/v1/namespaces",
        namespace,
        Compared::Shape,
    )
    .await;
    let account = json!({"metadata": {"name": "default"}});
    both.real
        .post(&path("stand-in", "serviceaccounts"), &account)
        .await
        .done();
    both.get("the version", "/version", Compared::Shape).await;
    let pods = nodes_and_pods(&mut both).await;
    claims(&mut both, pods).await;
    slices(&mut both).await;
    events(&mut both).await;
    let differences = &both.differences;
    assert!(
        differences.is_empty(),
        "{} differ:\n{}",
        differences.len(),
        differences.join("\n")
    );
}
