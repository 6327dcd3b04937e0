//! Instances on one root, without a daemon.

use std::path::Path;
use std::sync::Arc;

use tokio::time::{Duration, Instant};

use super::message::{Message, Peer};
use super::serving::HandoverListener;
use super::shared_root::{Lease, SharedRoot};
use super::waiting;
use crate::app::handover::HANDOVER_SERVING;
use crate::app::handover::waiting::HANDOVER_SILENT;
use nodedock_base::descriptors::DESCRIPTORS_MAX;
use nodedock_base::listeners::Listeners;
use nodedock_base::paths::Paths;
use nodedock_model::Uid;

type Acquired = anyhow::Result<(Lease, Option<Peer>)>;

pub(super) fn root(directory: &Path, instance: &str) -> SharedRoot {
    let paths = Paths::below(directory);
    for file in [&paths.instance_lock, &paths.handover] {
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    }
    SharedRoot {
        paths,
        instance: Uid::new(instance).unwrap(),
    }
}

fn roots(directory: &Path) -> (Arc<SharedRoot>, Arc<SharedRoot>) {
    (root(directory, "old").into(), root(directory, "new").into())
}

/// An instance that serves.
async fn serving(root: &SharedRoot) -> (Lease, HandoverListener) {
    let (lease, _) = waiting::acquire(root, &Listeners::default(), |_| ())
        .await
        .unwrap();
    (lease, HandoverListener::open(root).await.unwrap())
}

fn acquiring(root: &Arc<SharedRoot>) -> tokio::task::JoinHandle<Acquired> {
    let root = root.clone();
    tokio::spawn(async move { waiting::acquire(&root, &Listeners::default(), |_| ()).await })
}

fn released() -> Message {
    Message::Released {
        instance: Uid::new("old").unwrap(),
    }
}

#[tokio::test]
async fn newer_instance_acquires_lease_after_release() {
    let directory = tempfile::tempdir().unwrap();
    let (old, new) = roots(directory.path());
    let (lease, mut requests) = serving(&old).await;
    let second = acquiring(&new);
    let mut successor = requests.newer_instance().await;
    assert_eq!(successor.instance.as_str(), "new");
    assert!(new.try_lock().unwrap().is_none() && !second.is_finished());
    drop((requests, lease));
    successor.connection.send(&released()).await.unwrap();
    let (_lease, previous) = second.await.unwrap().unwrap();
    let mut previous = previous.unwrap();
    assert_eq!(previous.instance.as_str(), "old");
    previous.connection.send(&Message::Serving).await.unwrap();
    let answer = successor.connection.receive(HANDOVER_SERVING).await;
    assert_eq!(answer.unwrap(), Some(Message::Serving));
}

#[tokio::test]
async fn handover_transfers_pending_connections() {
    let directory = tempfile::tempdir().unwrap();
    let (old, new) = roots(directory.path());
    let (lease, mut requests) = serving(&old).await;
    // More than go with one message.
    let paths: Vec<_> = (0..DESCRIPTORS_MAX + 1)
        .map(|n| directory.path().join(format!("{n}.sock")))
        .collect();
    let (of_old, of_new) = (Listeners::of_start("old"), Listeners::of_start("new"));
    for path in &paths {
        drop(of_old.open(path).await.unwrap());
    }
    let second = {
        let (new, of_new) = (new.clone(), of_new.clone());
        tokio::spawn(async move { waiting::acquire(&new, &of_new, |_| ()).await })
    };
    let mut successor = requests.newer_instance().await;
    let last = paths.last().unwrap();
    let _client = tokio::net::UnixStream::connect(last).await.unwrap();
    drop((requests, lease));
    successor
        .connection
        .give(&of_old, &released())
        .await
        .unwrap();
    let (_lease, previous) = second.await.unwrap().unwrap();
    assert_eq!(
        (previous.unwrap().instance.as_str(), &of_new.start()[..]),
        ("old", "old")
    );
    drop(of_old);
    for path in &paths {
        let opened = of_new.open(path).await.unwrap();
        assert!(opened.adopted);
        if path == last {
            opened.listener.accept().await.unwrap();
        }
    }
}

#[tokio::test]
async fn dying_instance_frees_the_lease() {
    let directory = tempfile::tempdir().unwrap();
    let (old, new) = roots(directory.path());
    let (lease, mut requests) = serving(&old).await;
    let second = acquiring(&new);
    let successor = requests.newer_instance().await;
    // Its end takes the connection and the lock together.
    drop((successor, requests, lease));
    assert!(second.await.unwrap().unwrap().1.is_none());
}

#[tokio::test]
async fn dead_successor_is_noticed() {
    let directory = tempfile::tempdir().unwrap();
    let (old, new) = roots(directory.path());
    let (_lease, mut requests) = serving(&old).await;
    for _ in 0..2 {
        let second = acquiring(&new);
        let mut successor = requests.newer_instance().await.connection;
        second.abort();
        assert!(second.await.is_err_and(|error| error.is_cancelled()));
        if successor.send(&released()).await.is_ok() {
            let answer = successor.receive(HANDOVER_SERVING).await;
            assert!(!matches!(answer, Ok(Some(_))), "{answer:?}");
        }
        successor.closed().await;
    }
}

#[tokio::test]
async fn duplicate_instance_uid_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (old, new) = roots(directory.path());
    let (_lease, mut requests) = serving(&old).await;
    let refused = tokio::select! {
        refused = acquiring(&old) => refused.unwrap().unwrap_err().to_string(),
        _ = requests.newer_instance() => panic!("it is no newer instance"),
    };
    assert!(
        refused.contains("serves as instance old") && refused.contains("--instance-uid"),
        "{refused}"
    );

    use tokio::io::AsyncWriteExt;
    let mut stranger = tokio::net::UnixStream::connect(&old.paths.handover)
        .await
        .unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let _second = acquiring(&new);
    assert_eq!(requests.newer_instance().await.instance.as_str(), "new");
}

#[tokio::test(start_paused = true)]
async fn start_fails_if_owner_is_silent() {
    let directory = tempfile::tempdir().unwrap();
    let (old, new) = roots(directory.path());
    let _lease = old.try_lock().unwrap().unwrap();
    let began = Instant::now();
    let error = waiting::acquire(&new, &Listeners::default(), |_| ())
        .await
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("instance.lock") && error.contains("handover.sock"),
        "{error}"
    );
    assert!(
        began.elapsed() < HANDOVER_SILENT + Duration::from_secs(5),
        "{:?}",
        began.elapsed()
    );
}
