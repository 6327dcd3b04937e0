//! Bounds on depth, size and number: objects that are refused, and objects that are deleted after a time.

use std::sync::Arc;

use serde_json::{Value, json};

use super::client::{CLAIMS, Lines, SLICES, claim, get, names, send, send_as, server, slice};
use crate::writes::STORED_BYTES_MAX;
use crate::{Loaded, Memory, Options, Server};

const EVENTS: &str = "/api/v1/namespaces/default/events";
const CLASSES: &str = "/apis/resource.k8s.io/v1/deviceclasses";
const MERGE: &str = "application/merge-patch+json";
const JSON_PATCH: &str = "application/json-patch+json";
const APPLY: &str = "application/apply-patch+yaml";
/// Levels of a claim around the parameters of its configuration.
const AROUND: usize = 6;

fn nested(levels: usize) -> Value {
    (0..levels).fold(json!("x"), |inner, _| json!({ "a": inner }))
}

fn configured(name: &str, parameters: &Value) -> Value {
    let mut claim = claim(name);
    let opaque = json!({ "driver": "a.example.com", "parameters": parameters });
    claim["spec"]["devices"]["config"] = json!([{ "opaque": opaque }]);
    claim
}

#[tokio::test]
async fn objects_over_100_levels_are_refused() {
    let server = server().await;
    let path = format!("{CLAIMS}/a");
    let made = send(
        &server,
        "POST",
        CLAIMS,
        &configured("a", &nested(100 - AROUND)),
    )
    .await;
    assert_eq!(made.code, 201, "{}", made.text);
    let deep = nested(101 - AROUND);
    let refused = send(&server, "POST", CLAIMS, &configured("b", &deep)).await;
    assert_eq!(
        (refused.code, refused.message()),
        (
            400,
            "ResourceClaim in version \"v1\" cannot be handled as a ResourceClaim: exceeded max depth of 100"
        )
    );
    let add =
        json!([{ "op": "add", "path": "/spec/devices/config/0/opaque/parameters", "value": deep }]);
    for (method, path, kind, body) in [
        (
            "PUT",
            path.clone(),
            "application/json",
            configured("a", &deep),
        ),
        ("PATCH", path.clone(), MERGE, configured("a", &deep)),
        (
            "PATCH",
            path.clone(),
            "application/strategic-merge-patch+json",
            configured("a", &deep),
        ),
        (
            "PATCH",
            format!("{path}?fieldManager=me"),
            APPLY,
            configured("a", &deep),
        ),
    ] {
        let refused = send_as(&server, method, &path, kind, &body).await;
        assert_eq!(refused.code, 400, "{kind}: {}", refused.text);
        assert!(
            refused.message().contains("max depth of 100"),
            "{}",
            refused.text
        );
    }
    let refused = send_as(&server, "PATCH", &path, JSON_PATCH, &add).await;
    assert_eq!(
        (refused.code, refused.message()),
        (422, "the patched document exceeds max depth of 100")
    );
    assert_eq!(get(&server, &path).await.body, made.body);
}

#[tokio::test]
async fn writes_with_null_elements_are_refused() {
    let server = server().await;
    let made = send(&server, "POST", CLAIMS, &claim("a")).await;
    let path = format!("{CLAIMS}/a");
    let why = "ResourceClaim in version \"v1\" cannot be handled as a ResourceClaim: json: cannot unmarshal null into Go struct field \
               ObjectMeta.metadata.";
    let mut bad = claim("a");
    bad["metadata"]["finalizers"] = json!([null]);
    let annotate =
        json!([{ "op": "add", "path": "/metadata/annotations", "value": { "x": null } }]);
    let finalize = json!({ "metadata": { "finalizers": [null] } });
    let new = CLAIMS.to_owned();
    for (method, path, kind, body, field) in [
        (
            "POST",
            new,
            "application/json",
            &bad,
            "finalizers of type string",
        ),
        (
            "PUT",
            path.clone(),
            "application/json",
            &bad,
            "finalizers of type string",
        ),
        (
            "PATCH",
            path.clone(),
            JSON_PATCH,
            &annotate,
            "annotations.x of type string",
        ),
        (
            "PATCH",
            path.clone(),
            MERGE,
            &finalize,
            "finalizers of type string",
        ),
        (
            "PATCH",
            format!("{path}?fieldManager=me"),
            APPLY,
            &bad,
            "finalizers of type string",
        ),
    ] {
        let refused = send_as(&server, method, &path, kind, body).await;
        assert_eq!(
            (refused.code, refused.message()),
            (400, format!("{why}{field}").as_str()),
            "{kind}"
        );
    }
    assert_eq!(get(&server, &path).await.body, made.body);
}

fn class(expressions: impl IntoIterator<Item = String>) -> Value {
    let selectors = expressions
        .into_iter()
        .map(|text| json!({ "cel": { "expression": text } }));
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": { "name": "c" },
        "spec": { "selectors": selectors.collect::<Value>() },
    })
}

#[tokio::test]
async fn new_expressions_are_compiled_on_write() {
    let server = server().await;
    let good = |driver: &str| format!("device.driver == \"{driver}\"");
    let made = send(&server, "POST", CLASSES, &class([good("a"), good("a")])).await;
    assert_eq!(made.code, 201, "{}", made.text);
    let path = format!("{CLASSES}/c");
    assert_eq!(
        send(&server, "PUT", &path, &class([good("a"), good("b")]))
            .await
            .code,
        200
    );
    let spec = class([good("b"), "device.nosuch".to_owned()])["spec"].clone();
    let refused = send_as(&server, "PATCH", &path, MERGE, &json!({ "spec": spec })).await;
    assert_eq!(
        (refused.code, &refused.body["reason"]),
        (422, &json!("Invalid"))
    );
    assert_eq!(
        refused.body["details"]["causes"][0]["field"],
        "spec.selectors[1].cel.expression"
    );
    let apply = format!("{path}?fieldManager=me&force=true");
    assert_eq!(
        send_as(&server, "PATCH", &apply, APPLY, &class([good("c")]))
            .await
            .code,
        200
    );
    let selectors = get(&server, &path).await.body["spec"]["selectors"].clone();
    assert_eq!(selectors, class([good("c")])["spec"]["selectors"]);
}

#[tokio::test]
async fn too_many_different_expressions_are_refused() {
    let server = server().await;
    let exact = |first: usize, count: usize| {
        let expressions = (first..first + count).map(|number| format!("{number} > 0"));
        json!({ "deviceClassName": "c", "selectors": class(expressions)["spec"]["selectors"] })
    };
    let with = |last: usize| {
        let mut claim = claim("a");
        let requests = (0..9).map(|number| {
            let count = if number == 8 { last } else { 32 };
            json!({ "name": format!("r-{number}"), "exactly": exact(number * 32, count) })
        });
        claim["spec"]["devices"]["requests"] = requests.collect();
        claim
    };
    let refused = send(&server, "POST", CLAIMS, &with(1)).await;
    assert_eq!(
        (refused.code, refused.message()),
        (
            422,
            "ResourceClaim.resource.k8s.io \"a\" is invalid: spec: Too many: 257: must have at most 256 different CEL expressions"
        )
    );
    let long = (0..27).map(|number| format!("{number} > 0 || \"{}\" == \"\"", "x".repeat(10_000)));
    let refused = send(&server, "POST", CLASSES, &class(long)).await;
    assert_eq!(
        (refused.code, refused.message()),
        (
            422,
            "DeviceClass.resource.k8s.io \"c\" is invalid: spec: Too many: 270476: different CEL expressions must have at most \
             262144 bytes together"
        )
    );
    assert_eq!(send(&server, "POST", CLAIMS, &with(0)).await.code, 201);
}

#[tokio::test]
async fn watch_gets_only_its_resource() {
    let server = server().await;
    let version: u64 = get(&server, CLAIMS).await.version().parse().unwrap();
    send(&server, "POST", CLAIMS, &claim("a")).await;
    send(&server, "POST", SLICES, &slice("s", "s.example.com")).await;
    send(&server, "DELETE", &format!("{CLAIMS}/a"), &Value::Null).await;
    let news = server.shared.lock().since(version + 1, "resourceclaims");
    let changes = news.changes.iter();
    let changes: Vec<_> = changes
        .map(|change| {
            (
                change.key.name.as_str(),
                change.revision,
                change.is_deletion,
            )
        })
        .collect();
    assert_eq!(
        (changes, news.revision, news.trimmed),
        (vec![("a", version + 3, true)], version + 3, 100)
    );
}

fn event(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Event", "metadata": { "name": name, "namespace": "default" },
        "involvedObject": { "namespace": "default" }, "message": "it happened",
    })
}

#[tokio::test]
async fn next_event_deletes_hour_old_events() {
    let loaded = |name: String, minutes: i64| {
        let mut event = event(&name);
        let made = jiff::Timestamp::now() - jiff::SignedDuration::from_mins(minutes);
        event["metadata"]["creationTimestamp"] =
            made.strftime("%Y-%m-%dT%H:%M:%SZ").to_string().into();
        event["metadata"]["resourceVersion"] = "7".into();
        event
    };
    let old = (0..101).map(|number| loaded(format!("old-{number:03}"), 61));
    let objects = old.chain([loaded("recent".to_owned(), 58)]).collect();
    let loaded = Loaded {
        objects,
        revision: 200,
    };
    let server = Server::open(Options::default(), Arc::new(Memory), loaded)
        .await
        .unwrap();
    let version = get(&server, EVENTS).await.version();
    let mut watch = Lines::open(
        &server,
        &format!("{EVENTS}?watch=true&resourceVersion={version}"),
    )
    .await;
    send(
        &server,
        "POST",
        &format!("{EVENTS}?dryRun=All"),
        &event("none"),
    )
    .await;
    assert_eq!(names(&get(&server, EVENTS).await.body).len(), 102);
    assert_eq!(send(&server, "POST", EVENTS, &event("a")).await.code, 201);
    assert_eq!(
        names(&get(&server, EVENTS).await.body),
        ["a", "old-100", "recent"]
    );
    assert_eq!(
        watch.next_name().await,
        ("ADDED".to_owned(), "a".to_owned())
    );
    assert_eq!(
        watch.next_name().await,
        ("DELETED".to_owned(), "old-000".to_owned())
    );
    assert_eq!(send(&server, "POST", EVENTS, &event("b")).await.code, 201);
    assert_eq!(
        names(&get(&server, EVENTS).await.body),
        ["a", "b", "recent"]
    );
}

#[tokio::test]
async fn full_store_allows_only_shrinking_writes() {
    let server = server().await;
    let bytes = || server.snapshot().bytes;
    let empty = bytes();
    let mut large = claim("a");
    large["metadata"]["annotations"] = json!({ "a": "x".repeat(1000) });
    assert_eq!(send(&server, "POST", CLAIMS, &large).await.code, 201);
    let path = format!("{CLAIMS}/a");
    let annotate = |text: String| json!({ "metadata": { "annotations": { "a": text } } });
    send_as(&server, "PATCH", &path, MERGE, &annotate("x".repeat(2000))).await;
    let held = bytes() - empty;
    assert!((2500..4000).contains(&held), "{held} bytes");

    server.change_unstored(|draft| draft.next.bytes += STORED_BYTES_MAX - empty - held);
    let full = "etcdserver: mvcc: database space exceeded";
    for refused in [
        send(&server, "POST", CLAIMS, &claim("b")).await,
        send_as(&server, "PATCH", &path, MERGE, &annotate("x".repeat(3000))).await,
    ] {
        assert_eq!((refused.code, refused.message()), (500, full));
    }
    assert_eq!(bytes(), STORED_BYTES_MAX);
    assert_eq!(
        send_as(&server, "PATCH", &path, MERGE, &annotate("x".to_owned()))
            .await
            .code,
        200
    );
    assert_eq!(send(&server, "DELETE", &path, &Value::Null).await.code, 200);
    assert_eq!(bytes(), STORED_BYTES_MAX - held);
    assert_eq!(send(&server, "POST", CLAIMS, &claim("b")).await.code, 201);
}
