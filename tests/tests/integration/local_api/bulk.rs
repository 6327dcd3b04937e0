//! Many claims of the local API at once: their deletions and releases share commits, and hold up no other claim.

use std::fmt::Write as _;

use futures::{StreamExt, stream};
use nodedock_kube::local_client::LocalClient;
use nodedock_tests::drivers::MOCK_GPU_FILE;
use nodedock_tests::{Daemon, Options};

use super::{CLASS, api, claim, create};

/// Claims that have a device each.
const CLAIMS: usize = 300;
const REQUEST: &str = "{deviceClassName: gpu}";

/// A machine with devices for all claims and one more.
async fn machine() -> (Daemon, LocalClient) {
    let daemon = Daemon::start_with(Options::default().flag("--local-api")).await;
    let devices = CLAIMS + 1;
    daemon.install_gpus(&format!("pools: [{{name: gpus, count: {devices}}}]\n"));
    daemon.until_serving(MOCK_GPU_FILE).await;
    let api = api(&daemon).await;
    while api.slices().await.unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
    let class = serde_saphyr::from_str(CLASS).unwrap();
    api.create(&class, "default").await.unwrap();
    (daemon, api)
}

async fn commits(daemon: &Daemon) -> f64 {
    let metrics = daemon.metrics().await;
    let durable = [("outcome", "durable")];
    metrics
        .value("nodedock_checkpoint_commits_total", &durable)
        .unwrap()
}

/// Each deletion waited for a commit, and each release for another two; every other request waited for all of them.
#[tokio::test]
async fn bulk_of_deletions_shares_commits() {
    let (daemon, api) = machine().await;
    let api = &api;
    let names = (0..CLAIMS).map(|number| format!("bulk-{number}"));
    let created = stream::iter(names.clone()).map(|name| {
        let object = claim(&name, REQUEST);
        async move {
            let object = serde_saphyr::from_str(&object).unwrap();
            api.create(&object, "default").await.unwrap();
            let allocated = api.until_allocated("default", &name).await;
            assert!(allocated.is_some(), "{name}");
        }
    });
    created.buffer_unordered(64).collect::<Vec<()>>().await;
    let mut all = String::new();
    for name in names {
        write!(all, "---\n{}", claim(&name, REQUEST)).unwrap();
    }
    let file = daemon.write("bulk.yaml", all);
    let before = commits(&daemon).await;
    let args = ["claim", "delete", "-f", file.to_str().unwrap()];
    let (deleted, devices) = tokio::join!(daemon.cli(&args), create(&daemon, "single", REQUEST));
    deleted.done();
    assert_eq!(devices.len(), 1);
    assert_eq!(api.claims(Some("default")).await.unwrap().len(), 1);
    let taken = commits(&daemon).await - before;
    // One by one there are two of them for each claim. Where a sync takes as long as a request, deletions find no commit under way to wait for; releases
    // always share theirs.
    assert!(taken < 1.5 * CLAIMS as f64, "{taken} commits");
}
