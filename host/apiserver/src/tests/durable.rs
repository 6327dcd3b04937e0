//! Writes are stored before they are answered, and survive the server.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde_json::{Value, json};

use super::client::{CLAIMS, Disk, Lines, claim, get, names, send};
use crate::{Loaded, OpenError, Options, Server};

async fn open(disk: &Arc<Disk>) -> Server {
    Server::open(Options::default(), Arc::clone(disk) as _, disk.load())
        .await
        .unwrap()
}

#[tokio::test]
async fn failed_store_returns_500_without_change() {
    let disk = Arc::new(Disk::default());
    let server = open(&disk).await;
    let before = get(&server, CLAIMS).await.version();
    let mut watch = Lines::open(
        &server,
        &format!("{CLAIMS}?watch=true&resourceVersion={before}"),
    )
    .await;
    disk.fails.store(true, Ordering::Relaxed);
    let refused = send(&server, "POST", CLAIMS, &claim("a")).await;
    assert_eq!(
        (refused.code, &refused.body["reason"]),
        (500, &json!("InternalError"))
    );
    assert_eq!(
        refused.message(),
        "Internal error occurred: cannot store 1 changes of objects: the disk is full"
    );
    let list = get(&server, CLAIMS).await;
    assert_eq!((names(&list.body), list.version()), (vec![], before));
    disk.fails.store(false, Ordering::Relaxed);
    assert_eq!(send(&server, "POST", CLAIMS, &claim("b")).await.code, 201);
    assert_eq!(
        watch.next_name().await,
        ("ADDED".to_owned(), "b".to_owned())
    );
}

#[tokio::test]
async fn cancelled_write_is_invisible_until_stored() {
    let disk = Arc::new(Disk::default());
    let server = open(&disk).await;
    let gate = disk.gate.lock().await;
    let mut write = Box::pin(send(&server, "POST", CLAIMS, &BODY));
    assert!(futures::poll!(&mut write).is_pending());
    assert_eq!(names(&get(&server, CLAIMS).await.body), Vec::<&str>::new());
    drop(write);
    // Another write waits for the first.
    let mut ticks = server.ticks();
    let second = tokio::spawn({
        let server = server.clone();
        async move { send(&server, "POST", CLAIMS, &claim("b")).await.code }
    });
    drop(gate);
    assert_eq!(second.await.unwrap(), 201);
    ticks.changed().await.unwrap();
    assert_eq!(names(&get(&server, CLAIMS).await.body), ["a", "b"]);
}

static BODY: std::sync::LazyLock<Value> = std::sync::LazyLock::new(|| claim("a"));

#[tokio::test]
async fn restart_preserves_objects_and_versions() {
    let disk = Arc::new(Disk::default());
    let server = open(&disk).await;
    let kept = send(&server, "POST", CLAIMS, &claim("kept")).await;
    let old = send(&server, "POST", CLAIMS, &claim("gone"))
        .await
        .version();
    send(&server, "DELETE", &format!("{CLAIMS}/gone"), &Value::Null).await;
    let last = get(&server, CLAIMS).await;
    drop(server);

    let server = open(&disk).await;
    let list = get(&server, CLAIMS).await;
    assert_eq!(list.body, last.body);
    assert_eq!(
        get(&server, &format!("{CLAIMS}/kept")).await.body,
        kept.body
    );
    // The deleted object was the newest: its versions are not given again.
    let next = send(&server, "POST", CLAIMS, &claim("next"))
        .await
        .version();
    assert!(next.parse::<u64>().unwrap() > last.version().parse().unwrap());

    let mut late = Lines::open(
        &server,
        &format!("{CLAIMS}?watch=true&resourceVersion={old}"),
    )
    .await;
    let event = late.next().await.unwrap();
    assert_eq!(
        (&event["type"], &event["object"]["code"]),
        (&json!("ERROR"), &json!(410))
    );
    assert_eq!(event["object"]["reason"], "Expired");
    assert_eq!(late.next().await, None);
    let path = format!("{CLAIMS}?watch=true&resourceVersion={}", last.version());
    assert_eq!(
        Lines::open(&server, &path).await.next_name().await.1,
        "next"
    );
}

#[tokio::test]
async fn default_namespace_retains_its_uid() {
    let disk = Arc::new(Disk::default());
    let uid = get(&open(&disk).await, "/api/v1/namespaces/default")
        .await
        .body["metadata"]["uid"]
        .clone();
    let again = get(&open(&disk).await, "/api/v1/namespaces/default")
        .await
        .body;
    assert_eq!(
        (&again["metadata"]["uid"], &again["status"]["phase"]),
        (&uid, &json!("Active"))
    );
    assert_eq!(disk.changes.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn invalid_stored_object_error_identifies_it() {
    let metadata = json!({ "name": "a", "resourceVersion": "7" });
    for (object, why) in [
        (
            json!({ "kind": "Secret", "apiVersion": "v1", "metadata": metadata }),
            "is of a kind that this server does not have",
        ),
        (
            json!({ "kind": "Pod", "apiVersion": "v1", "metadata": { "name": "a" } }),
            "has no resource version",
        ),
        (
            json!({ "kind": "Pod", "apiVersion": "v1", "metadata": { "resourceVersion": "7" } }),
            "has no name",
        ),
    ] {
        let loaded = Loaded {
            objects: vec![object],
            revision: 0,
        };
        let error = Server::open(Options::default(), Arc::new(crate::Memory), loaded)
            .await
            .unwrap_err();
        assert!(
            matches!(&error, OpenError::Object { number: 0, why: found, .. } if *found == why),
            "{error}"
        );
    }
}
