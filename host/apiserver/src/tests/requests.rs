//! Creations, updates, patches, deletions, and the requests that are refused.

use std::sync::Arc;

use bytes::Bytes;
use serde_json::{Value, json};

use super::client::{
    CLAIMS, JSON, SLICES, ask, claim, get, get_as, names, send, send_as, server, slice,
};
use crate::{Cause, ObjectWrite};

#[tokio::test]
async fn stale_resource_version_is_refused() {
    let server = server().await;
    let made = send(&server, "POST", SLICES, &slice("a", "a.example.com"))
        .await
        .body;
    let path = format!("{SLICES}/a");
    let with = |label: &str| {
        let mut object = made.clone();
        object["metadata"]["labels"] = json!({ "by": label });
        object
    };
    let (first, second) = (with("first"), with("second"));
    let (first, second) = futures::future::join(
        send(&server, "PUT", &path, &first),
        send(&server, "PUT", &path, &second),
    )
    .await;
    assert_eq!((first.code, second.code), (200, 409));
    assert_eq!(
        second.message(),
        "Operation cannot be fulfilled on resourceslices.resource.k8s.io \"a\": the object has been modified; please apply your \
         changes to the latest version and try again"
    );
    assert_eq!(
        get(&server, &path).await.body["metadata"]["labels"]["by"],
        "first"
    );
}

#[tokio::test]
async fn label_selectors_filter_lists() {
    let server = server().await;
    for (name, labels) in [
        ("a", json!({ "tier": "gold" })),
        ("b", json!({ "tier": "free", "old": "" })),
        ("c", json!({})),
    ] {
        let mut claim = claim(name);
        claim["metadata"]["labels"] = labels;
        assert_eq!(send(&server, "POST", CLAIMS, &claim).await.code, 201);
    }
    for (selector, expected) in [
        ("tier", vec!["a", "b"]),
        ("!tier", vec!["c"]),
        ("tier%3Dgold", vec!["a"]),
        ("tier%21%3Dgold", vec!["b", "c"]),
        ("tier%20in%20(gold,free),!old", vec!["a"]),
        ("tier%20notin%20(gold)", vec!["b", "c"]),
    ] {
        let list = get(&server, &format!("{CLAIMS}?labelSelector={selector}"))
            .await
            .body;
        assert_eq!(names(&list), expected, "{selector}");
    }
    let refused = get(&server, &format!("{CLAIMS}?labelSelector=tier%20in%20gold")).await;
    assert_eq!(
        (refused.code, refused.message()),
        (
            400,
            "unable to parse requirement: found 'gold' expected: '('"
        )
    );
    let page = get(&server, &format!("{CLAIMS}?labelSelector=tier&limit=1"))
        .await
        .body;
    assert_eq!(
        (names(&page), &page["metadata"]["remainingItemCount"]),
        (vec!["a"], &Value::Null)
    );
    send(
        &server,
        "DELETE",
        &format!("{CLAIMS}?labelSelector=tier"),
        &Value::Null,
    )
    .await;
    assert_eq!(names(&get(&server, CLAIMS).await.body), ["c"]);
}

#[tokio::test]
async fn oversized_objects_and_bodies_are_refused() {
    let server = server().await;
    let filled = |bytes: usize| {
        let mut claim = claim("a");
        let parameters = json!({ "text": "x".repeat(bytes) });
        claim["metadata"]["annotations"] = json!({ "a": "x" });
        claim["spec"]["devices"]["config"] =
            json!([{ "opaque": { "driver": "a.example.com", "parameters": parameters } }]);
        claim
    };
    let event = |bytes: usize| {
        json!({
            "apiVersion": "v1", "kind": "Event", "metadata": { "name": "e", "namespace": "default" },
            "involvedObject": { "namespace": "default" }, "message": "x".repeat(bytes),
        })
    };
    let large = send(
        &server,
        "POST",
        "/api/v1/namespaces/default/events",
        &event(2 << 20),
    )
    .await;
    assert_eq!(large.body["message"], "etcdserver: request is too large");
    assert_eq!((large.code, &large.body["reason"]), (500, &Value::Null));
    let larger = send(&server, "POST", CLAIMS, &filled(3 << 20)).await;
    assert_eq!(
        (larger.code, larger.message()),
        (413, "Request entity too large: limit is 3145728")
    );
    assert_eq!(names(&get(&server, CLAIMS).await.body), Vec::<&str>::new());
}

#[tokio::test]
async fn unsupported_media_types_are_refused() {
    let server = server().await;
    let accepted =
        "the body of the request was in an unknown format - accepted media types include: ";
    for kind in ["application/vnd.kubernetes.protobuf", "text/plain"] {
        let refused = send_as(&server, "POST", CLAIMS, kind, &claim("a")).await;
        let types = format!("{accepted}{JSON}, application/yaml");
        assert_eq!((refused.code, refused.message()), (415, types.as_str()));
    }
    let refused = send_as(&server, "PATCH", &format!("{CLAIMS}/a"), JSON, &claim("a")).await;
    assert_eq!(
        refused.message(),
        format!(
            "{accepted}application/json-patch+json, application/merge-patch+json, application/strategic-merge-patch+json, \
             application/apply-patch+yaml"
        )
    );
    assert_eq!(get_as(&server, CLAIMS, "application/yaml").await.code, 406);
    let torn = ask(
        &server,
        "POST",
        CLAIMS,
        &[("content-type", JSON)],
        "{".into(),
    )
    .await;
    assert_eq!(
        (torn.code, &torn.body["reason"]),
        (400, &json!("BadRequest"))
    );
    for body in [
        json!([]),
        json!({ "metadata": 7 }),
        json!({ "metadata": { "name": "a" }, "spec": "x" }),
        json!("x"),
    ] {
        assert_eq!(
            send(&server, "POST", CLAIMS, &body).await.code,
            400,
            "{body}"
        );
        assert_eq!(
            send(&server, "PUT", &format!("{CLAIMS}/a"), &body)
                .await
                .code,
            400,
            "{body}"
        );
    }
}

#[tokio::test]
async fn dry_run_changes_nothing() {
    let server = server().await;
    let before = get(&server, CLAIMS).await.version();
    let dry = send(
        &server,
        "POST",
        &format!("{CLAIMS}?dryRun=All"),
        &claim("a"),
    )
    .await;
    assert_eq!(
        (dry.code, &dry.body["metadata"]["name"]),
        (201, &json!("a"))
    );
    assert_eq!(get(&server, CLAIMS).await.version(), before);
    assert_eq!(
        send(
            &server,
            "POST",
            &format!("{CLAIMS}?dryRun=Some"),
            &claim("a")
        )
        .await
        .code,
        400
    );
    send(&server, "POST", CLAIMS, &claim("a")).await;
    let options = json!({ "kind": "DeleteOptions", "apiVersion": "v1", "dryRun": ["All"] });
    assert_eq!(
        send(&server, "DELETE", &format!("{CLAIMS}/a"), &options)
            .await
            .code,
        200
    );
    assert_eq!(names(&get(&server, CLAIMS).await.body), ["a"]);
}

/// Sends the options as Go's typed client does, which has no options in the address. The numbers are those of the fields: 3 is
/// `orphanDependents`.
#[tokio::test]
async fn protobuf_delete_options_are_applied() {
    let server = server().await;
    send(&server, "POST", CLAIMS, &claim("a")).await;
    let options = |fields: &[u8]| {
        let head = b"k8s\0\x0a\x13\x0a\x02v1\x12\x0dDeleteOptions\x12";
        Bytes::from([&head[..], &[u8::try_from(fields.len()).unwrap()], fields].concat())
    };
    let path = format!("{CLAIMS}/a");
    let delete = async |fields: &[u8]| {
        let headers = [("content-type", crate::PROTOBUF)];
        ask(&server, "DELETE", &path, &headers, options(fields))
            .await
            .code
    };
    assert_eq!(delete(b"\x2a\x03All").await, 200);
    assert_eq!(delete(b"\x2a\x04Some").await, 400);
    assert_eq!(delete(b"\x12\x03\x0a\x01x").await, 409);
    assert_eq!(names(&get(&server, CLAIMS).await.body), ["a"]);
    let uid = get(&server, &path).await.body["metadata"]["uid"].clone();
    let owner = json!({ "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "name": "a", "uid": uid });
    let mut dependent = claim("b");
    dependent["metadata"]["ownerReferences"] = json!([owner]);
    send(&server, "POST", CLAIMS, &dependent).await;
    assert_eq!(delete(b"\x18\x01").await, 200);
    assert_eq!(names(&get(&server, CLAIMS).await.body), ["b"]);
    assert_eq!(delete(b"").await, 404);
}

#[tokio::test]
async fn write_check_refuses_deletions() {
    let server = server().await;
    for (name, driver) in [("a", "a.example.com"), ("b", "b.example.com")] {
        assert_eq!(
            send(&server, "POST", SLICES, &slice(name, driver))
                .await
                .code,
            201
        );
    }
    let others = server.with_check(Arc::new(|_, write| {
        let kept = matches!(write, ObjectWrite::Deleted(slice) if slice["spec"]["driver"] == "b.example.com");
        if kept { vec![Cause::forbidden("spec.driver", "it stays")] } else { Vec::new() }
    }));
    let refused = send(&others, "DELETE", &format!("{SLICES}/b"), &Value::Null).await;
    assert_eq!(
        (refused.code, refused.message()),
        (
            422,
            "ResourceSlice.resource.k8s.io \"b\" is invalid: spec.driver: Forbidden: it stays"
        )
    );
    // One that stays keeps all.
    assert_eq!(
        send(&others, "DELETE", SLICES, &Value::Null).await.code,
        422
    );
    assert_eq!(names(&get(&others, SLICES).await.body), ["a", "b"]);
    assert_eq!(
        send(&others, "DELETE", &format!("{SLICES}/a"), &Value::Null)
            .await
            .code,
        200
    );
    assert_eq!(
        send(&server, "DELETE", SLICES, &Value::Null).await.code,
        200
    );
    assert_eq!(names(&get(&server, SLICES).await.body), Vec::<&str>::new());
}

#[tokio::test]
async fn yaml_objects_are_created_and_applied() {
    let server = server().await;
    let path = format!("{CLAIMS}/a");
    let yaml = |count: &str| {
        format!(
            "# A claim.\napiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata:\n  name: a\nspec:\n  devices:\n    requests:\n\
             \x20   - name: gpu\n      exactly: {{deviceClassName: gpu.example.com, count: {count}}}\n"
        )
    };
    let send = async |method: &str, path: &str, kind: &str, body: String| {
        ask(
            &server,
            method,
            path,
            &[("content-type", kind)],
            body.into(),
        )
        .await
    };
    let apply = format!("{path}?fieldManager=one");
    let applied = send("PATCH", &apply, "application/apply-patch+yaml", yaml("2")).await;
    assert_eq!(applied.code, 201, "{}", applied.text);
    assert_eq!(
        applied.body["spec"]["devices"]["requests"][0]["exactly"]["count"],
        2
    );
    let labels = "---\nmetadata: {labels: {'a': \"1\"}}\n".to_owned();
    let applied = send(
        "PATCH",
        &format!("{path}?fieldManager=two"),
        "application/apply-patch+yaml",
        labels,
    )
    .await;
    assert_eq!(
        (applied.code, &applied.body["metadata"]["labels"]),
        (200, &json!({ "a": "1" }))
    );
    let created = send(
        "POST",
        CLAIMS,
        "application/yaml; charset=utf-8",
        yaml("1").replace("name: a", "name: b"),
    )
    .await;
    assert_eq!(created.code, 201, "{}", created.text);
    // As in files for kubectl, which reads YAML 1.1.
    let pod = "metadata: {name: p}\nspec:\n  containers: [{name: c, image: i}]\n  volumes: [{name: v, configMap: {name: m, defaultMode: 0644}}]\n";
    let created = send(
        "POST",
        "/api/v1/namespaces/default/pods",
        "application/yaml",
        pod.to_owned(),
    )
    .await;
    assert_eq!(
        (
            created.code,
            &created.body["spec"]["volumes"][0]["configMap"]["defaultMode"]
        ),
        (201, &json!(420))
    );
    let options = "preconditions: {uid: other}".to_owned();
    assert_eq!(
        send("DELETE", &path, "application/yaml", options)
            .await
            .code,
        409
    );

    let deep = format!("metadata: {}1{}", "{a: ".repeat(200), "}".repeat(200));
    let nested: String = (0..200)
        .map(|depth| format!("{}a:\n", " ".repeat(depth)))
        .collect();
    for wrong in [
        String::new(),
        "metadata: {name: a".to_owned(),
        "- a".to_owned(),
        "metadata:\n\tname: a".to_owned(),
        format!("{}---\n{}", yaml("2"), yaml("3")),
        "metadata: &m {name: a}\nspec: *m".to_owned(),
        "metadata: {name: a}\nmetadata: {name: a}".to_owned(),
        yaml("[1]"),
        "[".repeat(100_000),
        deep,
        nested,
    ] {
        let refused = send(
            "PATCH",
            &apply,
            "application/apply-patch+yaml",
            wrong.clone(),
        )
        .await;
        assert_eq!(
            (refused.code, &refused.body["reason"]),
            (400, &json!("BadRequest")),
            "{wrong}"
        );
    }
    let not_text = ask(
        &server,
        "POST",
        CLAIMS,
        &[("content-type", "application/yaml")],
        Bytes::from_static(b"a: \xff"),
    )
    .await;
    assert_eq!(not_text.code, 400);
    assert_eq!(
        get(&server, &path).await.body["spec"]["devices"]["requests"][0]["exactly"]["count"],
        2
    );
}

#[tokio::test]
async fn new_claim_has_defaults_and_name() {
    let server = server().await;
    let mut asked = claim("");
    asked["metadata"] =
        json!({ "generateName": "a-", "uid": "mine", "generation": 7, "labels": null });
    asked["status"] = json!({ "reservedFor": [{ "resource": "pods", "name": "p", "uid": "u" }] });
    let made = send(&server, "POST", CLAIMS, &asked).await.body;
    let name = made["metadata"]["name"].as_str().unwrap();
    assert!(
        name.starts_with("a-") && name.len() == "a-".len() + 5,
        "{name}"
    );
    assert_ne!(made["metadata"]["uid"], "mine");
    assert_eq!(
        (&made["metadata"]["namespace"], &made["status"]),
        (&json!("default"), &json!({}))
    );
    let exactly = &made["spec"]["devices"]["requests"][0]["exactly"];
    assert_eq!(
        (&exactly["allocationMode"], &exactly["count"]),
        (&json!("ExactCount"), &json!(1))
    );
    let mut elsewhere = claim("b");
    elsewhere["metadata"]["namespace"] = "other".into();
    let refused = send(&server, "POST", CLAIMS, &elsewhere).await;
    assert_eq!(
        (refused.code, refused.message()),
        (
            400,
            "the namespace of the object (other) does not match the namespace on the request (default)"
        )
    );
}

#[tokio::test]
async fn unknown_fields_warn_or_are_refused() {
    let server = server().await;
    let mut asked = claim("a");
    asked["spec"]["nosuch"] = json!(1);
    let strict = send(
        &server,
        "POST",
        &format!("{CLAIMS}?fieldValidation=Strict"),
        &asked,
    )
    .await;
    assert_eq!(strict.code, 400);
    assert!(
        strict.message().contains("unknown field \"spec.nosuch\""),
        "{}",
        strict.message()
    );
    let warned = send(&server, "POST", CLAIMS, &asked).await;
    assert_eq!(
        (warned.code, &warned.body["spec"]["nosuch"]),
        (201, &Value::Null)
    );
    assert_eq!(
        warned.headers["warning"],
        "299 - \"unknown field \\\"spec.nosuch\\\"\""
    );
    asked["metadata"]["name"] = "b".into();
    let ignored = send(
        &server,
        "POST",
        &format!("{CLAIMS}?fieldValidation=Ignore"),
        &asked,
    )
    .await;
    assert_eq!((ignored.code, ignored.headers.get("warning")), (201, None));
    assert_eq!(
        send(
            &server,
            "POST",
            &format!("{CLAIMS}?fieldValidation=Maybe"),
            &asked
        )
        .await
        .code,
        400
    );
}

#[tokio::test]
async fn patches_change_and_apply_creates() {
    let server = server().await;
    let path = format!("{CLAIMS}/a");
    let apply = async |query: &str, labels: Value| {
        let mut body = claim("a");
        body["metadata"]["labels"] = labels;
        send_as(
            &server,
            "PATCH",
            &format!("{path}?{query}"),
            "application/apply-patch+yaml",
            &body,
        )
        .await
    };
    assert_eq!(apply("", json!({})).await.code, 422);
    let made = apply("fieldManager=one", json!({ "a": "1" })).await;
    assert_eq!(
        (made.code, &made.body["metadata"]["labels"]),
        (201, &json!({ "a": "1" }))
    );
    assert_eq!(made.body["metadata"]["managedFields"][0]["manager"], "one");
    let again = apply("fieldManager=one", json!({ "a": "1" })).await;
    assert_eq!((again.code, again.version()), (200, made.version()));
    let conflict = apply("fieldManager=two", json!({ "a": "2" })).await;
    assert_eq!(
        (conflict.code, &conflict.body["reason"]),
        (409, &json!("Conflict"))
    );
    assert_eq!(
        conflict.body["details"]["causes"][0]["reason"],
        "FieldManagerConflict"
    );
    assert_eq!(
        apply("fieldManager=two&force=true", json!({ "a": "2" }))
            .await
            .body["metadata"]["labels"]["a"],
        "2"
    );
    for (kind, patch) in [
        (
            "json-patch",
            json!([{ "op": "add", "path": "/metadata/labels/b", "value": "3" }]),
        ),
        (
            "merge-patch",
            json!({ "metadata": { "labels": { "c": "4" } } }),
        ),
        (
            "strategic-merge-patch",
            json!({ "metadata": { "labels": { "d": "5" } } }),
        ),
    ] {
        let patched = send_as(
            &server,
            "PATCH",
            &path,
            &format!("application/{kind}+json"),
            &patch,
        )
        .await;
        assert_eq!(patched.code, 200, "{}", patched.text);
    }
    let labels = get(&server, &path).await.body["metadata"]["labels"].clone();
    assert_eq!(labels, json!({ "a": "2", "b": "3", "c": "4", "d": "5" }));
    let wrong = json!([{ "op": "test", "path": "/metadata/name", "value": "b" }]);
    assert_eq!(
        send_as(
            &server,
            "PATCH",
            &path,
            "application/json-patch+json",
            &wrong
        )
        .await
        .code,
        422
    );
    let renamed = json!({ "metadata": { "name": "b" } });
    assert_eq!(
        send_as(
            &server,
            "PATCH",
            &path,
            "application/merge-patch+json",
            &renamed
        )
        .await
        .code,
        400
    );
    let absent = send_as(
        &server,
        "PATCH",
        &format!("{CLAIMS}/b"),
        "application/merge-patch+json",
        &renamed,
    )
    .await;
    assert_eq!(absent.code, 404);
}

#[tokio::test]
async fn event_groups_share_one_list() {
    let server = server().await;
    let new = json!({
        "apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": { "name": "e", "namespace": "default" },
        "note": "hello", "type": "Normal", "regarding": { "kind": "Pod", "namespace": "default", "name": "p" },
        "eventTime": "2026-01-01T00:00:00.000000Z", "reportingController": "a.example.com/b", "reportingInstance": "n",
        "action": "Prepare", "reason": "Prepared",
    });
    let made = send(
        &server,
        "POST",
        "/apis/events.k8s.io/v1/namespaces/default/events",
        &new,
    )
    .await;
    assert_eq!(
        (made.code, &made.body["note"]),
        (201, &json!("hello")),
        "{}",
        made.text
    );
    let core = get(
        &server,
        "/api/v1/events?fieldSelector=involvedObject.name%3Dp,reason!%3DRefused",
    )
    .await
    .body;
    assert_eq!(
        (names(&core), &core["items"][0]["message"]),
        (vec!["e"], &json!("hello"))
    );
    let none = get(
        &server,
        "/api/v1/events?fieldSelector=involvedObject.name%3Dp,type%3DWarning",
    )
    .await
    .body;
    assert_eq!(names(&none), Vec::<&str>::new());
    for selector in ["spec.nodeName%3Dn", "type", "type%3Da%5Cb"] {
        let refused = get(&server, &format!("/api/v1/events?fieldSelector={selector}")).await;
        assert_eq!(refused.code, 400, "{selector}");
    }
}

#[tokio::test]
async fn unknown_methods_and_paths_are_refused() {
    let server = server().await;
    for (method, path, code) in [
        ("POST", "/api/v1/pods", 405),
        ("PUT", CLAIMS, 405),
        ("DELETE", &format!("{CLAIMS}/a/status"), 405),
        ("DELETE", "/apis/resource.k8s.io/v1/resourceclaims", 405),
        ("GET", &format!("{CLAIMS}/a/nothing"), 404),
        ("GET", &format!("{SLICES}/a/status"), 404),
        ("GET", "/api/v1/namespaces/default/nodes", 404),
        ("POST", "/version", 404),
    ] {
        assert_eq!(
            send(&server, method, path, &Value::Null).await.code,
            code,
            "{method} {path}"
        );
    }
}

#[tokio::test]
async fn only_status_subresource_changes_status() {
    let server = server().await;
    let node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "n" }, "status": { "phase": "Running" } });
    send(&server, "POST", "/api/v1/nodes", &node).await;
    let label = json!({ "metadata": { "labels": { "a": "b" } }, "status": { "phase": "Pending" } });
    let merge = "application/merge-patch+json";
    let patched = send_as(&server, "PATCH", "/api/v1/nodes/n", merge, &label)
        .await
        .body;
    assert_eq!(
        (
            &patched["metadata"]["labels"]["a"],
            &patched["status"]["phase"]
        ),
        (&json!("b"), &json!("Running"))
    );
    let status =
        json!({ "metadata": { "labels": { "a": "c" } }, "status": { "phase": "Pending" } });
    let patched = send_as(&server, "PATCH", "/api/v1/nodes/n/status", merge, &status)
        .await
        .body;
    assert_eq!(
        (
            &patched["metadata"]["labels"]["a"],
            &patched["status"]["phase"]
        ),
        (&json!("b"), &json!("Pending"))
    );
    assert_eq!(
        send_as(
            &server,
            "PATCH",
            "/api/v1/nodes/n/status",
            merge,
            &json!({ "status": null })
        )
        .await
        .body["status"],
        Value::Null
    );
}

#[tokio::test]
async fn deletions_mind_preconditions() {
    let server = server().await;
    let made = send(&server, "POST", CLAIMS, &claim("a")).await;
    let options = |key: &str, value: &str| json!({ "kind": "DeleteOptions", "apiVersion": "v1", "preconditions": { key: value } });
    let path = format!("{CLAIMS}/a");
    let refused = send(&server, "DELETE", &path, &options("uid", "other")).await;
    assert_eq!(
        (refused.code, &refused.body["details"]["kind"]),
        (409, &json!("ResourceClaim"))
    );
    assert_eq!(
        send(&server, "DELETE", &path, &options("resourceVersion", "1"))
            .await
            .code,
        409
    );
    assert_eq!(
        send(
            &server,
            "DELETE",
            &path,
            &options("resourceVersion", &made.version())
        )
        .await
        .code,
        200
    );
    assert_eq!(send(&server, "DELETE", &path, &Value::Null).await.code, 404);
}
