//! Slices of native drivers that are gone, whose devices would be given to claims that no driver prepares.
//!
//! As a kubelet does, it deletes the slices with this node's name of a driver that has lost its last connection 30 s ago, and once, 30 s after
//! the daemon's start, those of all drivers without one. Slices of drivers that the daemon publishes have its label, and are left to it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{DeleteParams, ListParams, Preconditions};
use kube::{Api, ResourceExt};
use tokio::time::{Instant, sleep, sleep_until};

use crate::client::{ApiError, ErrorKind, KubeClient};
use crate::slices::has_our_label;
use nodedock_base::backoff::Backoff;
use nodedock_base::signal::Listener;
use nodedock_model::{DriverName, ObjectName};

/// Time that slices stay without a connection to their driver. That of a kubelet.
const WIPE_DELAY: Duration = Duration::from_secs(30);

/// Pause after a deletion that failed, doubled up to the second.
const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(60);

/// Schedule of the slices to be deleted.
struct Wipes {
    connected: BTreeSet<DriverName>,
    due: BTreeMap<DriverName, Instant>,
    /// Time for the drivers that are not connected and have no time of their own. None: done.
    of_start: Option<Instant>,
}

impl Wipes {
    fn new(connected: BTreeSet<DriverName>, now: Instant) -> Self {
        Self {
            connected,
            due: BTreeMap::new(),
            of_start: Some(now + WIPE_DELAY),
        }
    }

    fn see(&mut self, connected: BTreeSet<DriverName>, now: Instant) {
        for lost in self.connected.difference(&connected) {
            self.due.entry(lost.clone()).or_insert(now + WIPE_DELAY);
        }
        self.due.retain(|driver, _| !connected.contains(driver));
        self.connected = connected;
    }

    fn next(&self) -> Option<Instant> {
        self.due.values().copied().chain(self.of_start).min()
    }

    fn is_due(&self, driver: &DriverName, now: Instant) -> bool {
        let at = self.due.get(driver).copied().or(self.of_start);
        !self.connected.contains(driver) && at.is_some_and(|at| at <= now)
    }

    fn done(&mut self, now: Instant) {
        self.due.retain(|_, at| *at > now);
        self.of_start = self.of_start.filter(|at| *at > now);
    }
}

/// Deletes them, without end.
pub(super) async fn wipe(
    client: KubeClient,
    node: ObjectName,
    mut drivers: Listener,
    connected: impl Fn() -> BTreeSet<DriverName>,
) {
    let mut wipes = Wipes::new(connected(), Instant::now());
    let mut backoff = Backoff::new(RETRY_MIN, RETRY_MAX);
    loop {
        let due = async {
            match wipes.next() {
                Some(at) => sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            Ok(()) = drivers.changed() => wipes.see(connected(), Instant::now()),
            () = due => {
                let now = Instant::now();
                wipes.see(connected(), now);
                match delete(&client, &node, |driver| wipes.is_due(driver, now)).await {
                    Ok(()) => {
                        backoff.reset();
                        wipes.done(now);
                    }
                    Err(error) => {
                        tracing::warn!(%error, "slices of drivers that are gone are not deleted, retrying");
                        sleep(backoff.delay()).await;
                    }
                }
            }
        }
    }
}

async fn delete(
    client: &KubeClient,
    node: &ObjectName,
    is_due: impl Fn(&DriverName) -> bool,
) -> Result<(), ApiError> {
    let slices = Api::<ResourceSlice>::all(client.client());
    let of_node = ListParams::default().fields(&format!("spec.nodeName={node}"));
    for slice in slices.list(&of_node).await?.items {
        let driver = DriverName::new(&slice.spec.driver).ok();
        if has_our_label(&slice) || !driver.is_some_and(|driver| is_due(&driver)) {
            continue;
        }
        let same = Preconditions {
            uid: slice.uid(),
            ..Preconditions::default()
        };
        let deleted = slices
            .delete(
                &slice.name_any(),
                &DeleteParams::default().preconditions(same),
            )
            .await;
        match deleted.map_err(ApiError::from) {
            Ok(_) => {
                let driver = slice.spec.driver.as_str();
                tracing::info!(
                    driver,
                    slice = slice.name_any(),
                    "slice of a driver that is gone deleted"
                );
            }
            Err(error) if matches!(error.kind, ErrorKind::NotFound | ErrorKind::Conflict) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use nodedock_stand_ins::api_server::{ApiServer, Fault, When};
    use parking_lot::Mutex;
    use serde_json::json;
    use tokio::task::JoinHandle;

    use super::*;
    use crate::client::tests::over;
    use nodedock_base::changes::Changes;
    use nodedock_model::ChangedKind;

    const NODE: &str = "node-1";

    /// A daemon and its drivers. The clock is turned.
    struct Machine {
        server: Arc<ApiServer>,
        changes: Changes,
        connected: Arc<Mutex<BTreeSet<DriverName>>>,
        task: JoinHandle<()>,
    }

    impl Drop for Machine {
        fn drop(&mut self) {
            self.task.abort();
        }
    }

    impl Machine {
        async fn new(connected: &[&str]) -> Self {
            let server = Arc::new(ApiServer::start().await);
            for (name, node, driver, labels) in [
                ("a", NODE, "a.dev", json!({})),
                ("b", NODE, "b.dev", json!({})),
                ("b-elsewhere", "node-2", "b.dev", json!({})),
                (
                    "ours",
                    NODE,
                    "ours.dev",
                    json!({ "app.kubernetes.io/managed-by": "nodedock" }),
                ),
            ] {
                server.put(json!({
                    "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice",
                    "metadata": { "name": name, "labels": labels },
                    "spec": { "driver": driver, "nodeName": node, "devices": [],
                        "pool": { "name": node, "generation": 1, "resourceSliceCount": 1 } },
                }));
            }
            let connected = Arc::new(Mutex::new(drivers(connected)));
            let (changes, seen) = (Changes::default(), connected.clone());
            let node = ObjectName::new(NODE).unwrap();
            let work = wipe(
                over(&server),
                node,
                changes.signal_of(ChangedKind::Driver),
                move || seen.lock().clone(),
            );
            let task = tokio::spawn(work);
            Self {
                server,
                changes,
                connected,
                task,
            }
        }

        fn connect(&self, connected: &[&str]) {
            *self.connected.lock() = drivers(connected);
            self.changes.report(ChangedKind::Driver, "a.dev", "changed");
        }

        async fn after(&self, seconds: u64) -> Vec<String> {
            sleep(Duration::from_secs(seconds)).await;
            let slices = self.server.list("resourceslices");
            slices
                .iter()
                .map(|slice| slice["metadata"]["name"].as_str().unwrap().to_owned())
                .collect()
        }
    }

    fn drivers(names: &[&str]) -> BTreeSet<DriverName> {
        names
            .iter()
            .map(|name| DriverName::new(*name).unwrap())
            .collect()
    }

    #[tokio::test(start_paused = true)]
    async fn slices_expire_after_driver_disconnects() {
        let machine = Machine::new(&["a.dev", "b.dev"]).await;
        let all = ["a", "b", "b-elsewhere", "ours"];
        assert_eq!(machine.after(100).await, all);
        machine.connect(&["a.dev"]);
        assert_eq!(machine.after(29).await, all);
        assert_eq!(machine.after(2).await, ["a", "b-elsewhere", "ours"]);
        // One that returns in time keeps them, and the time begins again.
        machine.connect(&[]);
        assert_eq!(machine.after(29).await, ["a", "b-elsewhere", "ours"]);
        machine.connect(&["a.dev"]);
        machine.after(1).await;
        machine.connect(&[]);
        assert_eq!(machine.after(29).await, ["a", "b-elsewhere", "ours"]);
        assert_eq!(machine.after(2).await, ["b-elsewhere", "ours"]);
    }

    #[tokio::test(start_paused = true)]
    async fn absent_drivers_slices_are_deleted_once() {
        let machine = Machine::new(&[]).await;
        machine.connect(&["a.dev"]);
        machine.after(25).await;
        machine
            .server
            .fail_times(1, Fault::Status(500), When::any().verb("delete"));
        // It left too late for the start's time.
        machine.connect(&[]);
        assert_eq!(machine.after(10).await, ["a", "b-elsewhere", "ours"]);
        assert_eq!(machine.after(30).await, ["b-elsewhere", "ours"]);
    }
}
