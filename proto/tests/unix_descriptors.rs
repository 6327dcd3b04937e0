//! Accepting without file descriptors. By itself in a process, because the limit is one of processes.

use std::time::Duration;

use nodedock_proto::unix;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::StreamExt;

/// `UnixListenerStream` in its place makes tonic's accept loop run hot for as long as no file descriptor is left.
#[tokio::test(start_paused = true)]
async fn accepting_waits_for_file_descriptors() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.sock");
    let mut incoming = unix::incoming(UnixListener::bind(&path).unwrap());
    let client = UnixStream::connect(&path).await.unwrap();
    let before = getrlimit(Resource::Nofile);
    setrlimit(
        Resource::Nofile,
        Rlimit {
            current: Some(1),
            ..before
        },
    )
    .unwrap();
    // The clock advances by itself when every task is idle.
    let waited = tokio::time::timeout(Duration::from_secs(10), incoming.next()).await;
    setrlimit(Resource::Nofile, before).unwrap();
    assert!(waited.is_err());
    assert!(incoming.next().await.unwrap().is_ok());
    drop(client);
}
