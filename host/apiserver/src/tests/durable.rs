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

/// The writes of claims `0` to `N`, each as far as it comes.
async fn writes(server: &Server, number: usize) -> Vec<tokio::task::JoinHandle<u16>> {
    let mut writes = Vec::new();
    for name in 0..number {
        let server = server.clone();
        let mut write = Box::pin(async move {
            let claim = claim(&name.to_string());
            send(&server, "POST", CLAIMS, &claim).await.code
        });
        assert!(futures::poll!(&mut write).is_pending());
        writes.push(tokio::spawn(write));
    }
    writes
}

#[tokio::test]
async fn writes_during_commit_share_next() {
    let disk = Arc::new(Disk::default());
    let server = open(&disk).await;
    disk.commits.lock().unwrap().clear();
    let gate = disk.gate.lock().await;
    let writes = writes(&server, 20).await;
    // Nothing is visible before it is stored, and what is decided counts for the next decision.
    assert_eq!(names(&get(&server, CLAIMS).await.body), Vec::<&str>::new());
    let again = tokio::spawn({
        let server = server.clone();
        async move { send(&server, "POST", CLAIMS, &claim("0")).await.code }
    });
    drop(gate);
    for write in writes {
        assert_eq!(write.await.unwrap(), 201);
    }
    assert_eq!(again.await.unwrap(), 409);
    assert_eq!(names(&get(&server, CLAIMS).await.body).len(), 20);
    assert_eq!(*disk.commits.lock().unwrap(), [1, 19]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commit_that_blocks_ends_turn() {
    let disk = Arc::new(Disk::default());
    let server = open(&disk).await;
    disk.commits.lock().unwrap().clear();
    let barrier = Arc::new(std::sync::Barrier::new(2));
    *disk.blocks.lock().unwrap() = Some(Arc::clone(&barrier));
    let first = tokio::spawn({
        let server = server.clone();
        async move { send(&server, "POST", CLAIMS, &claim("first")).await.code }
    });
    let begun = Arc::clone(&barrier);
    tokio::task::spawn_blocking(move || begun.wait())
        .await
        .unwrap();
    let writes = writes(&server, 20).await;
    barrier.wait();
    assert_eq!(first.await.unwrap(), 201);
    for write in writes {
        assert_eq!(write.await.unwrap(), 201);
    }
    assert_eq!(*disk.commits.lock().unwrap(), [1, 20]);
}

/// The deletions of a bulk waited for a commit each, and every other request behind all of them.
#[tokio::test]
async fn deletions_share_commits_in_order() {
    const NUMBER: usize = 500;
    let disk = Arc::new(Disk::default());
    let server = open(&disk).await;
    for name in 0..NUMBER {
        let claim = claim(&format!("{name:03}"));
        assert_eq!(send(&server, "POST", CLAIMS, &claim).await.code, 201);
    }
    let before = get(&server, CLAIMS).await.version();
    let watch = format!("{CLAIMS}?watch=true&resourceVersion={before}");
    let mut watch = Lines::open(&server, &watch).await;
    disk.commits.lock().unwrap().clear();
    let gate = disk.gate.lock().await;
    let mut deletions = Vec::new();
    for name in 0..NUMBER {
        let server = server.clone();
        let mut delete = Box::pin(async move {
            let path = format!("{CLAIMS}/{name:03}");
            send(&server, "DELETE", &path, &Value::Null).await.code
        });
        assert!(futures::poll!(&mut delete).is_pending());
        deletions.push(tokio::spawn(delete));
    }
    // A request of another client is decided behind the bulk, and waits for the same commits.
    let mut other = Box::pin(send(&server, "POST", CLAIMS, &BODY));
    assert!(futures::poll!(&mut other).is_pending());
    assert_eq!(names(&get(&server, CLAIMS).await.body).len(), NUMBER);
    drop(gate);
    assert_eq!(other.await.code, 201);
    assert_eq!(*disk.commits.lock().unwrap(), [1, NUMBER]);
    for deletion in deletions {
        assert_eq!(deletion.await.unwrap(), 200);
    }
    assert_eq!(names(&get(&server, CLAIMS).await.body), ["a"]);
    for name in 0..NUMBER {
        let expected = ("DELETED".to_owned(), format!("{name:03}"));
        assert_eq!(watch.next_name().await, expected);
    }
    let added = ("ADDED".to_owned(), "a".to_owned());
    assert_eq!(watch.next_name().await, added);
}

#[tokio::test]
async fn unstorable_write_fails_no_earlier_one() {
    let disk = Arc::new(Disk::default());
    let server = open(&disk).await;
    let gate = disk.gate.lock().await;
    let writes = writes(&server, 6).await;
    *disk.refused.lock().unwrap() = Some("3");
    drop(gate);
    let mut codes = Vec::new();
    for write in writes {
        codes.push(write.await.unwrap());
    }
    // Those behind it were decided on it.
    assert_eq!(codes, [201, 201, 201, 500, 500, 500]);
    assert_eq!(names(&get(&server, CLAIMS).await.body), ["0", "1", "2"]);
    assert_eq!(send(&server, "POST", CLAIMS, &claim("4")).await.code, 201);
    assert_eq!(send(&server, "POST", CLAIMS, &claim("3")).await.code, 500);
    drop(server);
    let server = open(&disk).await;
    let list = get(&server, CLAIMS).await;
    assert_eq!(names(&list.body), ["0", "1", "2", "4"]);
}

#[tokio::test]
async fn failed_commit_ends_later_writes() {
    let disk = Arc::new(Disk::default());
    let server = open(&disk).await;
    let gate = disk.gate.lock().await;
    let writes = writes(&server, 5).await;
    disk.fails.store(true, Ordering::Relaxed);
    drop(gate);
    for write in writes {
        assert_eq!(write.await.unwrap(), 500);
    }
    assert_eq!(names(&get(&server, CLAIMS).await.body), Vec::<&str>::new());
    disk.fails.store(false, Ordering::Relaxed);
    assert_eq!(send(&server, "POST", CLAIMS, &claim("0")).await.code, 201);
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
