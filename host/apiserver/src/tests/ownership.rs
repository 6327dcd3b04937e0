//! Owners and their dependents, namespaces and their objects, finalizers.

use serde_json::{Value, json};

use super::client::{CLAIMS, Lines, claim, get, names, send, send_as, server};
use crate::Server;

const PODS: &str = "/api/v1/namespaces/default/pods";
const NAMESPACES: &str = "/api/v1/namespaces";

fn pod(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name },
        "spec": { "containers": [{ "name": "main", "image": "pause:3.10" }] },
    })
}

fn owned(name: &str, owners: &[(&str, &Value)]) -> Value {
    let reference = |(name, uid): &(&str, &Value)| json!({ "apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid });
    let mut claim = claim(name);
    claim["metadata"]["ownerReferences"] = owners.iter().map(reference).collect();
    claim
}

async fn add_pod(server: &Server, name: &str) -> Value {
    let made = send(server, "POST", PODS, &pod(name)).await;
    assert_eq!(made.code, 201, "{}", made.text);
    made.body["metadata"]["uid"].clone()
}

async fn claims(server: &Server) -> Vec<String> {
    names(&get(server, CLAIMS).await.body)
        .into_iter()
        .map(str::to_owned)
        .collect()
}

#[tokio::test]
async fn dependents_outlive_all_but_last_owner() {
    let server = server().await;
    let (a, b) = (add_pod(&server, "a").await, add_pod(&server, "b").await);
    for claim in [
        owned("of-a", &[("a", &a)]),
        owned("of-both", &[("a", &a), ("b", &b)]),
        claim("of-none"),
    ] {
        assert_eq!(send(&server, "POST", CLAIMS, &claim).await.code, 201);
    }
    send(&server, "DELETE", &format!("{PODS}/a"), &Value::Null).await;
    assert_eq!(claims(&server).await, ["of-both", "of-none"]);
    send(&server, "DELETE", &format!("{PODS}/b"), &Value::Null).await;
    assert_eq!(claims(&server).await, ["of-none"]);
}

#[tokio::test]
async fn dependents_are_deleted_exactly_once() {
    let server = server().await;
    for number in 0..20 {
        let name = format!("p-{number}");
        let uid = add_pod(&server, &name).await;
        for claim in [format!("a-{number}"), format!("b-{number}")] {
            let made = send(&server, "POST", CLAIMS, &owned(&claim, &[(&name, &uid)])).await;
            assert_eq!(made.code, 201);
        }
    }
    send(&server, "POST", CLAIMS, &claim("of-none")).await;
    let before: u64 = get(&server, CLAIMS).await.version().parse().unwrap();
    assert_eq!(send(&server, "DELETE", PODS, &Value::Null).await.code, 200);
    assert_eq!(claims(&server).await, ["of-none"]);
    let after: u64 = get(&server, CLAIMS).await.version().parse().unwrap();
    assert_eq!(after - before, 60);
}

#[tokio::test]
async fn absent_owners_do_not_preserve_dependents() {
    let server = server().await;
    let made = send(
        &server,
        "POST",
        CLAIMS,
        &owned("late", &[("a", &json!("gone"))]),
    )
    .await;
    assert_eq!(made.code, 201);
    let mut foreign = owned("foreign", &[("a", &json!("elsewhere"))]);
    foreign["metadata"]["ownerReferences"][0]["kind"] = "Widget".into();
    foreign["metadata"]["ownerReferences"][0]["apiVersion"] = "example.com/v1".into();
    send(&server, "POST", CLAIMS, &foreign).await;
    assert_eq!(claims(&server).await, ["foreign"]);
}

#[tokio::test]
async fn orphans_stay_without_their_reference() {
    let server = server().await;
    let a = add_pod(&server, "a").await;
    send(&server, "POST", CLAIMS, &owned("of-a", &[("a", &a)])).await;
    let options =
        json!({ "kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Never" });
    assert_eq!(
        send(&server, "DELETE", &format!("{PODS}/a"), &options)
            .await
            .code,
        400
    );
    let options =
        json!({ "kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Orphan" });
    assert_eq!(
        send(&server, "DELETE", &format!("{PODS}/a"), &options)
            .await
            .code,
        200
    );
    let orphan = get(&server, &format!("{CLAIMS}/of-a")).await.body;
    assert_eq!(orphan["metadata"]["ownerReferences"], json!([]));
}

#[tokio::test]
async fn namespace_deletion_waits_for_finalizers() {
    let server = server().await;
    let absent = send(
        &server,
        "POST",
        &CLAIMS.replace("default", "team"),
        &claim("a"),
    )
    .await;
    assert_eq!(
        (absent.code, absent.message()),
        (404, "namespaces \"team\" not found")
    );
    let namespace =
        json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "team" } });
    let made = send(&server, "POST", NAMESPACES, &namespace).await;
    assert_eq!(
        made.body["metadata"]["labels"],
        json!({ "kubernetes.io/metadata.name": "team" })
    );
    let claims = CLAIMS.replace("default", "team");
    let mut kept = claim("kept");
    kept["metadata"]["finalizers"] = json!(["example.com/wait"]);
    for claim in [claim("a"), kept] {
        assert_eq!(send(&server, "POST", &claims, &claim).await.code, 201);
    }
    let mut watch = Lines::open(
        &server,
        &format!("{NAMESPACES}?watch=true&fieldSelector=metadata.name%3Dteam"),
    )
    .await;
    watch.next_name().await;
    let ending = send(
        &server,
        "DELETE",
        &format!("{NAMESPACES}/team"),
        &Value::Null,
    )
    .await
    .body;
    assert_eq!(ending["status"]["phase"], "Terminating");
    assert_eq!(names(&get(&server, &claims).await.body), ["kept"]);
    let late = send(&server, "POST", &claims, &claim("late")).await;
    assert_eq!(
        (late.code, &late.body["details"]["causes"][0]["reason"]),
        (403, &json!("NamespaceTerminating"))
    );
    let patch = json!({ "metadata": { "finalizers": null } });
    send_as(
        &server,
        "PATCH",
        &format!("{claims}/kept"),
        "application/merge-patch+json",
        &patch,
    )
    .await;
    assert_eq!(get(&server, &format!("{NAMESPACES}/team")).await.code, 404);
    assert_eq!(watch.next_name().await.0, "MODIFIED");
    assert_eq!(watch.next_name().await.0, "DELETED");
    let stays = send(
        &server,
        "DELETE",
        &format!("{NAMESPACES}/default"),
        &Value::Null,
    )
    .await;
    assert_eq!(
        (stays.code, stays.message()),
        (
            403,
            "namespaces \"default\" is forbidden: this namespace may not be deleted"
        )
    );
}
