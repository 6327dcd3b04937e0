//! Discovery by kubectl and clients before they request an object.

use serde_json::{Value, json};

use super::client::{get, get_as, send, send_as, server};
use crate::discovery::AGGREGATED;

fn field<'a>(list: &'a Value, key: &str) -> Vec<&'a str> {
    list.as_array()
        .unwrap()
        .iter()
        .map(|item| item[key].as_str().unwrap())
        .collect()
}

#[tokio::test]
async fn groups_and_resources_are_discovered() {
    let server = server().await;
    assert_eq!(get(&server, "/api").await.body["versions"], json!(["v1"]));
    let groups = get(&server, "/apis").await.body;
    assert_eq!(
        field(&groups["groups"], "name"),
        [
            "resource.k8s.io",
            "events.k8s.io",
            "authentication.k8s.io",
            "authorization.k8s.io"
        ]
    );
    let core = get(&server, "/api/v1").await.body;
    assert_eq!(
        field(&core["resources"], "name"),
        [
            "events",
            "namespaces",
            "namespaces/status",
            "nodes",
            "nodes/status",
            "pods",
            "pods/status"
        ]
    );
    assert_eq!(core["resources"][5]["shortNames"], json!(["po"]));
    let dra = get(&server, "/apis/resource.k8s.io/v1").await.body;
    assert_eq!(
        field(&dra["resources"], "name"),
        [
            "deviceclasses",
            "resourceclaims",
            "resourceclaims/status",
            "resourceclaimtemplates",
            "resourceslices"
        ]
    );
    for path in [
        "/apis/apps/v1",
        "/apis/resource.k8s.io/v1beta1",
        "/apis/resource.k8s.io/v1/devicetaintrules",
        "/nothing",
    ] {
        let absent = get(&server, path).await;
        assert_eq!(
            (absent.code, &absent.body["reason"]),
            (404, &json!("NotFound")),
            "{path}"
        );
    }
    assert_eq!(get(&server, "/version").await.body["minor"], "36");
    for path in ["/healthz", "/livez", "/readyz"] {
        assert_eq!(get(&server, path).await.text, "ok");
    }
}

#[tokio::test]
async fn discovery_is_aggregated_on_request() {
    let server = server().await;
    let accept = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList;profile=nopeer,application/json";
    let whole = get_as(&server, "/apis", accept).await;
    assert_eq!(whole.headers["content-type"], AGGREGATED);
    let dra = &whole.body["items"][0];
    assert_eq!(
        (&dra["metadata"]["name"], &dra["versions"][0]["version"]),
        (&json!("resource.k8s.io"), &json!("v1"))
    );
    let claims = &dra["versions"][0]["resources"][1];
    assert_eq!(
        (
            &claims["resource"],
            &claims["scope"],
            &claims["subresources"][0]["subresource"]
        ),
        (
            &json!("resourceclaims"),
            &json!("Namespaced"),
            &json!("status")
        )
    );
    let core = get_as(&server, "/api", accept).await.body;
    assert_eq!(
        core["items"][0]["versions"][0]["resources"][3]["shortNames"],
        json!(["po"])
    );
}

#[tokio::test]
async fn the_one_user_may_do_everything() {
    let server = server().await;
    let spec = json!({ "resourceAttributes": { "verb": "delete", "resource": "pods" } });
    let path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
    let review = send(&server, "POST", path, &json!({ "spec": spec })).await;
    assert_eq!(
        (review.code, &review.body["spec"], &review.body["status"]),
        (201, &spec, &json!({ "allowed": true }))
    );
    let encoded = send_as(&server, "POST", path, crate::PROTOBUF, &json!({})).await;
    assert_eq!(encoded.body["status"], json!({ "allowed": true }));
    assert_eq!(get(&server, path).await.code, 405);
    let path = "/apis/authentication.k8s.io/v1/selfsubjectreviews";
    let review = send(&server, "POST", path, &json!({})).await;
    assert_eq!(review.body["status"]["userInfo"]["username"], "local");
}

#[tokio::test]
async fn kubectl_gets_tables_and_openapi() {
    let server = server().await;
    let accept = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json";
    let table = get_as(&server, "/api/v1/namespaces", accept).await.body;
    assert_eq!(
        (&table["kind"], &table["rows"][0]["cells"][0]),
        (&json!("Table"), &json!("default"))
    );
    let one = get_as(&server, "/api/v1/namespaces/default", accept)
        .await
        .body;
    assert_eq!(one["rows"][0]["object"]["kind"], "PartialObjectMetadata");
    assert_eq!(
        get_as(&server, "/api/v1/namespaces?includeObject=All", accept)
            .await
            .code,
        400
    );
    let index = get(&server, "/openapi/v3").await.body;
    assert!(index["paths"]["apis/resource.k8s.io/v1"].is_object());
    assert_eq!(
        get(&server, "/openapi/v3/apis/resource.k8s.io/v1")
            .await
            .code,
        200
    );
    assert_eq!(get(&server, "/openapi/v3/apis/apps/v1").await.code, 404);
}
