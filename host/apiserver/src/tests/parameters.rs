//! Opaque parameters of new objects, which their drivers check.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::FutureExt as _;
use serde_json::{Value, json};

use super::client::{CLAIMS, claim, get, send};
use crate::{InvalidParameters, Loaded, Memory, Options, Server};

const CLASSES: &str = "/apis/resource.k8s.io/v1/deviceclasses";
const TEMPLATES: &str = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates";

/// A server whose driver refuses every port beyond 9, and the number of its checks.
async fn server() -> (Server, Arc<AtomicUsize>) {
    let checks = Arc::<AtomicUsize>::default();
    let counted = checks.clone();
    let options = Options {
        parameters: Some(Arc::new(move |of| {
            counted.fetch_add(1, Ordering::Relaxed);
            let parameters: Value = serde_json::from_str(&of.parameters).unwrap();
            let is_bad = of.driver == "d.dev" && parameters["ports"][0].as_u64() > Some(9);
            async move {
                is_bad.then(|| InvalidParameters {
                    path: "/ports/0".to_owned(),
                    why: "/ports/0: 10 is too large".to_owned(),
                })
            }
            .boxed()
        })),
        ..Options::default()
    };
    let opened = Server::open(options, Arc::new(Memory), Loaded::default()).await;
    (opened.unwrap(), checks)
}

fn config(driver: &str, port: u64) -> Value {
    json!([{ "opaque": { "driver": driver, "parameters": { "ports": [port] } } }])
}

fn claim_with(name: &str, config: Value) -> Value {
    let mut claim = claim(name);
    claim["spec"]["devices"]["config"] = config;
    claim
}

#[tokio::test]
async fn invalid_parameters_are_refused_with_field() {
    let (server, _) = server().await;
    let refused = send(
        &server,
        "POST",
        CLAIMS,
        &claim_with("a", config("d.dev", 10)),
    )
    .await;
    assert_eq!(refused.code, 422, "{}", refused.text);
    let cause = &refused.body["details"]["causes"][0];
    assert_eq!(
        cause["field"],
        "spec.devices.config[0].opaque.parameters.ports[0]"
    );
    assert_eq!(cause["message"], "Invalid value: /ports/0: 10 is too large");
    assert_eq!(get(&server, CLAIMS).await.body["items"], json!([]));
    for (name, config) in [("b", config("d.dev", 9)), ("c", config("e.dev", 10))] {
        assert_eq!(
            send(&server, "POST", CLAIMS, &claim_with(name, config))
                .await
                .code,
            201
        );
    }

    let template = |port| {
        json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate", "metadata": { "name": "t" },
            "spec": { "spec": claim_with("t", config("d.dev", port))["spec"] }
        })
    };
    let refused = send(&server, "POST", TEMPLATES, &template(10)).await;
    assert_eq!(refused.code, 422, "{}", refused.text);
    assert!(
        refused
            .message()
            .contains("spec.spec.devices.config[0].opaque.parameters.ports[0]")
    );
    assert_eq!(
        send(&server, "POST", TEMPLATES, &template(1)).await.code,
        201
    );
}

#[tokio::test]
async fn changed_class_is_checked_again() {
    let (server, checks) = server().await;
    let class = |port, label: &str| {
        json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass",
            "metadata": { "name": "k", "labels": { "l": label } },
            "spec": { "config": config("d.dev", port) }
        })
    };
    assert_eq!(
        send(&server, "POST", CLASSES, &class(1, "a")).await.code,
        201
    );
    let path = format!("{CLASSES}/k");
    let patch = |object: Value| {
        let (server, path) = (server.clone(), path.clone());
        async move {
            let kind = "application/merge-patch+json";
            super::client::send_as(&server, "PATCH", &path, kind, &object).await
        }
    };
    let before = checks.load(Ordering::Relaxed);
    assert_eq!(patch(class(1, "b")).await.code, 200);
    assert_eq!(
        checks.load(Ordering::Relaxed),
        before,
        "nothing of it changed"
    );
    let refused = patch(class(10, "b")).await;
    assert_eq!(refused.code, 422, "{}", refused.text);
    assert!(
        refused
            .message()
            .contains("spec.config[0].opaque.parameters.ports[0]")
    );
    assert_eq!(patch(class(2, "b")).await.code, 200);
}

/// A driver is not asked about an object that is refused anyway.
#[tokio::test]
async fn invalid_object_asks_no_driver() {
    let (server, checks) = server().await;
    let mut bad = claim_with("a", config("d.dev", 10));
    bad["spec"]["devices"]["requests"][0]["name"] = json!("Not A Label");
    let refused = send(&server, "POST", CLAIMS, &bad).await;
    assert_eq!((refused.code, checks.load(Ordering::Relaxed)), (422, 0));
}
