//! A checkpoint of the release that the fixtures were first recorded with: `fixtures/README.md` says what is in it.

use nodedock_tests::{Daemon, Root};

use crate::commands::{assert_transcript, cdi_files};
use crate::scene::options;
use crate::{assert_frozen, fixture};

/// A root with the recorded checkpoint.
fn root() -> Root {
    let root = Root::new();
    std::fs::copy(fixture("checkpoint.db"), root.checkpoint())
        .expect("copy the recorded checkpoint");
    root
}

#[tokio::test]
async fn recorded_checkpoint_prints_as_recorded() {
    assert_transcript("checkpoint-read.txt", &root()).await;
}

#[tokio::test]
async fn recorded_checkpoint_is_served_as_recorded() {
    let daemon = Daemon::start_on(root(), options()).await;
    // The CDI directory is looked through after the start.
    daemon
        .until_conditions(&["cdi-device-missing", "checkpoint-records-unreadable"])
        .await;
    assert_transcript("checkpoint-served.txt", &daemon).await;
    assert_frozen("checkpoint-cdi.txt", &cdi_files(&daemon));
}
